"""All rules over one history."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...analysis.run import load_run
from .findings import Diagnosis, Finding, Unseen
from .history import History
from .rules.attention import attending
from .rules.clipping import clips
from .rules.depth import depth
from .rules.learning_rate import rates
from .rules.loop import loop
from .rules.loss import losses
from .rules.nonfinite import nonfinite
from .rules.precision import precision
from .rules.spikes import spikes
from .rules.units import units
from .rules.unused_parameters import reach
from .rules.weights import weights

Rule = Callable[[History], list[Finding]]


#: By theme; a theme may have several slugs.
RULES: dict[str, Rule] = {
    "loop": loop,
    "non-finite": nonfinite,
    "depth": depth,
    "reach": reach,
    "precision": precision,
    "units": units,
    "clipping": clips,
    "rates": rates,
    "attention": attending,
    "weights": weights,
    "loss": losses,
    "spikes": spikes,
}

#: What comes after the first NaN follows from it, and says nothing to the other rules.
_OF_ALL = {loop, nonfinite}


def diagnosed(history: History) -> Diagnosis:
    """What all rules find. A rule that fails is named among those that saw nothing: a diagnosis never fails for one."""
    if not history.records:
        return Diagnosis.of(loop(history), None, {})
    findings: list[Finding] = []
    unseen: dict[str, str] = {}
    sound = history.sound()
    for name, rule in RULES.items():
        try:
            findings += rule(history if rule in _OF_ALL else sound)
        except Unseen as reason:
            unseen[name] = str(reason)
        except Exception as error:  # a defect of ours
            unseen[name] = f"the rule failed: {type(error).__name__}: {error}"
    return Diagnosis.of(findings, history.span, unseen)


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """What is wrong with the run in the directory ``path``, which may have ended, go on, or have been killed.

    At most some hundred steps of a long run are looked at: both ends, those around spikes, and an even choice between.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of ours.
    """
    return diagnosed(History.of_run(load_run(path)))
