"""Signs of a divergence that came before the loss showed it."""

from __future__ import annotations

from ....core.loop_mistakes import ABOUT_TO_DIVERGE, DIVERGENCE_ADVICE, LoopFinding
from ..findings import Finding
from ..history import History
from ..learning import spread
from ..series import Series

#: Steps without a sign after which it counts as over, unless the loss has risen since.
_OVER = 100
#: Losses that show what is normal.
_FEWEST = 20


def check_foresight(history: History) -> list[Finding]:
    """By the signs that the plugin has seen."""
    return [found for fact in history.facts if fact.rule == ABOUT_TO_DIVERGE for found in _finding(history, fact)]


def _finding(history: History, fact: LoopFinding) -> list[Finding]:
    lies_ahead = history.records[-1].step - fact.last <= _OVER
    loss = history.loss.finite
    has_come = _has_risen(loss, fact.first)
    leads = fact.where[0] if fact.where else ""
    others = f", then {', '.join(fact.where[1:4])}" if len(fact.where) > 1 else ""
    when = "has risen since" if has_come else "is still normal" if lies_ahead else "has stayed normal since"
    what = f"the loss {when}" if len(loss) else "no loss is logged"
    return history.finding(
        ABOUT_TO_DIVERGE,
        leads,
        {"signs": float(fact.count), **fact.evidence},
        f"Weights or outputs have grown as they had not before, {leads} first{others}; {what}.",
        f"{DIVERGENCE_ADVICE}.",
        75.0,
        severity="warning" if lies_ahead or has_come else "info",
        steps=(fact.first, fact.last),
    )


def _has_risen(loss: Series, first: int) -> bool:
    """Whether its last twentieth lies above what was normal before the first sign: the median and six deviations."""
    before = Series.of(pair for pair in zip(loss.steps, loss.values, strict=True) if pair[0] < first)
    if len(before) < _FEWEST:
        return False
    normal = before.part(1 - _FEWEST / len(before), 1)
    return loss.part(0.95, 1).median > normal.median + 6 * spread(normal)
