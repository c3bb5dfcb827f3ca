"""Mistakes of the training loop that the audit found, and differences between ranks that should be equal."""

from __future__ import annotations

from ....core.formatting import listed
from ....core.loop_mistakes import MISTAKES, NON_FINITE_INPUT, RANK_FAULTS, SETUP_MISTAKES, LoopFinding
from ....core.records import Severity
from ..findings import Finding
from ..history import History
from ..series import lower_median
from .units import saturated

#: What is at most this many times too large is as large as it should be; counts of tokens differ from batch to batch.
_ABOUT = 2.0
#: Modules that are named.
_NAMED = 3
_KNOWN = {**MISTAKES, **RANK_FAULTS, **SETUP_MISTAKES}


def check_loop(history: History) -> list[Finding]:
    """One finding for each mistake."""
    return [_finding(fact, history) for fact in history.facts if fact.rule in _KNOWN and not _is_mended(fact, history)]


def _is_mended(fact: LoopFinding, history: History) -> bool:
    """Whether the loop divides the gradients of a summed loss after backward, where the fact is about the loss that went backward."""
    if fact.rule != "loss-scale":
        return False
    times = fact.evidence.get("times the gradient of the mean", 1.0) * lower_median(history.edit.scales.values() or [1.0])
    return bool(history.edit.scales) and 1 / _ABOUT < times < _ABOUT


def _only_frozen(history: History) -> list[str]:
    """The modules of an optimizer that has parameters, and none that requires a gradient."""
    owned: dict[int, list[str]] = {}
    for place, group in enumerate(history.groups):
        owned.setdefault(group.get("number", place), []).extend(group.get("parameters", ()))
    found = next((names for names in owned.values() if names and history.frozen.issuperset(names)), [])
    return [*dict.fromkeys(name.rpartition(".")[0] or name for name in found)]


def _finding(fact: LoopFinding, history: History) -> Finding:
    mistake = _KNOWN[fact.rule]
    severity: Severity = history.concern if mistake.matters_if_stuck else mistake.severity
    cause, advice = mistake.cause, history.advice.remedies.get(fact.rule, mistake.advice)
    if fact.rule == "not-in-optimizer" and fact.evidence.get("old parameters in the optimizer"):
        severity = "error"  # certain: these parameters are no longer part of the model
        cause = f"{cause}; it has others, which are no part of the model any more"
        advice = (
            "Make the optimizer after the last change of the model, or call optimizer.add_param_group() with the new parameters"
        )
    elif fact.rule == "not-in-optimizer" and (frozen := _only_frozen(history)):
        cause = f"{cause}; instead an optimizer has only frozen ones, of {listed(frozen, _NAMED)}"
        advice = "Make that optimizer of the parameters that are to train; a copy that follows them belongs in none"
    if fact.rule == NON_FINITE_INPUT and not any(r.applied for r in history.records if r.step in (fact.first, fact.last)):
        severity = "info"  # it has changed no parameter
    if fact.rule == "targets-out-of-range" and saturated(history):
        severity = "warning"  # it is not their noise alone that lies there
    return Finding(
        rule=fact.rule,
        severity=severity,
        where=fact.where[0] if fact.where else "",
        steps=(fact.first, fact.last),
        evidence={"times seen": float(fact.count), **fact.evidence},
        cause=f"{cause}.",
        advice=f"{advice}.",
        weight=mistake.weight,
    )
