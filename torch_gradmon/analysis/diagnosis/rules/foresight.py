"""Signs of a divergence that came before the loss showed it."""

from __future__ import annotations

from ....core.loop_findings import LoopFinding
from ..findings import Finding
from ..history import History
from ..series import Series

RULE = "about-to-diverge"
#: Steps without a sign after which it counts as over, unless the loss has risen since.
_OVER = 100
#: The loss has risen where its last twentieth lies a quarter above its lowest tenth.
_ABOVE = 1.25


def check_foresight(history: History) -> list[Finding]:
    """By the signs that the plugin has seen."""
    return [found for fact in history.facts if fact.rule == RULE for found in _finding(history, fact)]


def _finding(history: History, fact: LoopFinding) -> list[Finding]:
    lies_ahead = history.records[-1].step - fact.last <= _OVER
    loss = history.loss.finite
    has_come = history.learning.is_worse or history.learning.state == "rises" or loss.part(0.95, 1).median > _ABOVE * _best(loss)
    leads = fact.where[0] if fact.where else ""
    others = f", then {', '.join(fact.where[1:4])}" if len(fact.where) > 1 else ""
    when = "has risen since" if has_come else "is still normal" if lies_ahead else "has stayed normal since"
    what = f"the loss {when}" if len(loss) else "no loss is logged"
    return history.finding(
        RULE,
        leads,
        {"signs": float(fact.count), **fact.evidence},
        f"Weights or outputs have grown as they had not before, {leads} first{others}; {what}.",
        "Lower the learning rate by half, clip gradients to their usual norm, or look at what has changed in the data.",
        75.0,
        severity="warning" if lies_ahead or has_come else "info",
        steps=(fact.first, fact.last),
    )


def _best(loss: Series) -> float:
    """The lowest median of a tenth of the run."""
    return min(loss.part(tenth / 10, (tenth + 1) / 10).median for tenth in range(10))
