"""Whole-model values of clipping: the norm after it, and how often it acts."""

from __future__ import annotations

from collections.abc import MutableMapping

from ..core import keys as n
from ..core.records import StatsTable, brings_others
from .clip_window import WINDOW, ClipWindow
from .gradient_summary import norm_of
from .reasons import not_applied
from .summary_keys import StepFacts
from .update_summary import differ, rows_of

_KEYS = ("grad_norm_clipped", "clipped_share")


class ClipSummary:
    """Compares the gradients before and after clipping over the last steps.

    Attributes:
        window: these steps.
    """

    def __init__(self) -> None:
        self.window = ClipWindow()

    def add(self, before: StatsTable, after: StatsTable, facts: StepFacts) -> None:
        """Add a step whose gradients were all used."""
        edited = facts.edited or differ(before, after, facts.rounding if facts.rounds else 0.0)
        # a removed gradient is not clipped
        self.window.add(edited, norm_of(rows_of(before, set(after.names))), norm_of(after), facts.rounding)

    def values(
        self, before: StatsTable | None, after: StatsTable | None, facts: StepFacts, absent: MutableMapping[str, str]
    ) -> dict[str, float]:
        """The values of a step by name; ``absent`` gets a reason for each missing one."""
        used_all = facts.used >= set(() if before is None else before.names)
        if after is None and facts.used and used_all:
            reason = facts.refused.get(n.GRADIENT, "all gradients were gone when the optimizers stepped")
        elif after is None and not len(self.window):
            reason = (
                "the gradients that the optimizer uses were not measured: attach the optimizer, or call monitor.monitor_gradients() "
                "after you clip"
            )
            reason = facts.refused.get(n.GRADIENT, reason)
        elif not self.window.has_edits:
            reason = _nothing_clipped(len(self.window))
            if after is not None and facts.attached and facts.used >= facts.trainable and brings_others(before, after):
                absent["clipped_share"] = reason
                return {"grad_norm_clipped": norm_of(rows_of(after, facts.trainable))}
        elif after is None or not used_all:
            reason = not_applied(facts.context) if facts.is_interrupted else "not every attached optimizer stepped"
        else:
            share, factor = self.window.share()
            if share is not None:
                return {"grad_norm_clipped": norm_of(after), "clipped_share": share}
            absent["clipped_share"] = (
                f"gradients are multiplied by {factor:.4g} after backward, whatever their norm, which is no clip"
            )
            return {"grad_norm_clipped": norm_of(after)}
        absent.update(dict.fromkeys(_KEYS, reason))
        return {}


def _nothing_clipped(steps: int) -> str:
    """Why there is nothing to show of a clip after this many steps whose gradients were seen before and after it."""
    if not steps:
        return "no step so far had gradients that were seen before a clip and after it"
    return f"nothing clipped in {f'the last {WINDOW}' if steps >= WINDOW else steps} step{'s' * (steps > 1)}"
