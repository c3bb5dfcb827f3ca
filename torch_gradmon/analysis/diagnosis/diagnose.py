"""All rules applied to one history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .findings import Diagnosis, Finding, NotMeasured
from .history import History
from .rules import unused_parameters
from .rules.depth import check_attention, check_clipping, check_depth, check_spikes
from .rules.loss import check_learning_rate, check_loop, check_loss, check_skipped, check_units
from .rules.nonfinite import check_certain, check_nonfinite, check_precision

Rule = Callable[[History], list[Finding]]


#: By theme; a theme may have several slugs.
RULES: dict[str, Rule] = {
    "loop": check_loop,
    "non-finite": check_nonfinite,
    "certain": check_certain,
    "depth": check_depth,
    "reach": unused_parameters.check_unused_parameters,
    "frozen": unused_parameters.check_frozen,
    "precision": check_precision,
    "units": check_units,
    "clipping": check_clipping,
    "rates": check_learning_rate,
    "attention": check_attention,
    "weights": unused_parameters.check_weights,
    "bounds": unused_parameters.check_bounds,
    "latent": unused_parameters.check_latent,
    "foresight": unused_parameters.check_foresight,
    "loss": check_loss,
    "spikes": check_spikes,
    "skipped": check_skipped,
}

#: Rules for the whole run. The others see only the part before the first NaN, because the rest follows from it.
_OF_WHOLE_RUN = {check_loop, check_nonfinite, check_skipped}


def diagnose_history(history: History) -> Diagnosis:
    """The findings of all rules. A rule that fails is listed among those that could not judge: a diagnosis never fails."""
    if not history.records:
        why = {"everything": f"the training ended in its first step, with {history.raised}"} if history.raised else {}
        return Diagnosis.of(check_loop(history), None, why)
    findings: list[Finding] = []
    unseen: dict[str, str] = {}
    finite = history.before_nonfinite()
    for name, rule in RULES.items():
        try:
            findings += rule(history if rule in _OF_WHOLE_RUN else finite)
        except NotMeasured as reason:
            unseen[name] = str(reason)
        except Exception as error:  # a bug in the rule
            unseen[name] = f"the rule failed: {type(error).__name__}: {error}"
    if unknown := history.beginning_unknown:
        unseen["beginning"] = unknown
    told = [replace(finding, advice=history.advice.in_terms(finding.advice)) for finding in findings]
    return Diagnosis.of(told, history.span, unseen)
