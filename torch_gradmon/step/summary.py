"""Whole-model values for the dashboard: a few keys in one section, ``gradmon/``, from the statistics of all layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import keys as n
from ..core.metric import ASKED_LATE
from ..core.records import StatsTable, are_others, brings_others
from .clip_summary import ClipSummary
from .gradient_summary import DISTRIBUTION, gradient_values, norm_of
from .micro_batches import MicroBatchStats
from .reasons import CLIP_SEEN, SET_BY_HAND, not_applied
from .summary_choice import SummaryChoice
from .summary_keys import CHEAP, OF_GRADIENTS, UPDATE_EVERY, UPDATE_KEYS, StepFacts
from .update_summary import rows_of, update_values

#: For so many steps whose gradients stayed in their tensors it is known what the loop did to them.
_REMEMBERED = 8


class Summary:
    """Computes the whole-model values of a step.

    Args:
        choice: which are shown or needed.

    Attributes:
        not_applied: the number of steps that were not applied.
        interrupted: the number of those that the loop left by an error.
        nonfinite: the number of steps whose gradients held NaN or Inf.
    """

    def __init__(self, choice: SummaryChoice) -> None:
        self.choice = choice
        self.not_applied = self.interrupted = self.nonfinite = 0
        self._batches: MicroBatchStats | None = None
        self._clips = ClipSummary()
        self._sets_others = False
        self._plain: deque[tuple[StatsTable, StatsTable, float]] = deque(maxlen=_REMEMBERED)

    def add_batches(self, batches: MicroBatchStats) -> None:
        """Show values of the gradients of micro-batches."""
        self._batches = batches
        self.choice.add_batches()

    def of_one_step(self) -> Summary:
        """An independent summary of gradients for one unmonitored step."""
        found = Summary(SummaryChoice(name for name in CHEAP if name.startswith("grad_")))
        found._clips.window.extend(self._clips.window)
        return found

    def count_rejected(self, steps: int, interrupted: int = 0) -> None:
        """Count ``steps`` unmeasured steps that were not applied: by a GradScaler, or since the loop left ``interrupted`` of them by an
        error.
        """
        self.not_applied += steps
        self.interrupted += interrupted
        self.nonfinite += steps - interrupted

    def sets_others(self, tables: Mapping[str, StatsTable], rounding: float, is_assigned: bool, is_dropped: bool) -> bool:
        """Whether the gradients that the loop has put in the place of those of the backward passes are its own, see :func:`are_others`.

        Args:
            tables: statistics by source.
            rounding: relative rounding of the gradients in between.
            is_assigned: the optimizer used other tensors than the backward passes had left.
            is_dropped: the gradients of an earlier backward pass were dropped, so that those of the last one are perhaps only a part of
                what the loop has put into the same tensors.
        """
        before, after = tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.GRADIENT)
        if before is None or after is None:
            return (is_assigned or is_dropped) and self._sets_others
        if not (is_assigned or is_dropped):
            self._plain.append((before, after, rounding))
            return False
        found = are_others(before, after, rounding, self._sets_others)
        if found and not is_assigned and any(are_others(*plain) for plain in self._plain):
            return False  # the loop writes to its gradients so where it drops none, as one that adds noise
        self._sets_others = found
        return found

    def compute(
        self,
        facts: StepFacts,
        tables: Mapping[str, StatsTable],
        base: StatsTable | None,
        absent: dict[str, str],
        batch_norms: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """The values of one step by name, including those that are not shown.

        Args:
            facts: of the step.
            tables: statistics by source, of all parameters or not at all.
            base: statistics of the updated parameters before the update.
            absent: gets a reason for each missing key.
            batch_norms: of the gradients of micro-batches, by rank.
        """
        values: dict[str, float] = {}
        self.not_applied += not facts.applied
        self.interrupted += facts.is_interrupted
        values["steps_not_applied"] = float(self.not_applied)
        self._gradients(values, tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.GRADIENT), facts, absent)
        self.nonfinite += facts.nonfinite or facts.refusal
        if self._batches is not None:
            values |= self._batches.compute(batch_norms or {}, values.get("grad_norm"), facts.ranks, absent)
        if (table := tables.get(n.PARAMETER)) is not None:
            values["param_norm"] = norm_of(rows_of(table, facts.trainable))
        else:
            reason = "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()"
            absent["param_norm"] = facts.refused.get(n.PARAMETER, reason)
        if facts.step % self.choice.update_every:  # a user's metric may have measured updates of some layers
            absent.update(dict.fromkeys(UPDATE_KEYS, f"updates are measured on every {UPDATE_EVERY}th step"))
        elif not facts.applied:
            absent.update(dict.fromkeys(UPDATE_KEYS, not_applied(facts.context)))
        elif (update := tables.get(n.UPDATE)) is None or base is None:
            reason = "no attached optimizer changed a parameter"
            absent.update(dict.fromkeys(UPDATE_KEYS, facts.refused.get(n.UPDATE, reason)))
        else:
            values |= update_values(rows_of(update, facts.trainable), rows_of(base, facts.trainable), facts.matrices, absent)
        return values

    def _gradients(
        self,
        values: dict[str, float],
        before: StatsTable | None,
        after: StatsTable | None,
        facts: StepFacts,
        absent: dict[str, str],
    ) -> None:
        if before is None or (after is not None and brings_others(before, after)):
            advice = SET_BY_HAND if facts.attached and after is not None else CLIP_SEEN
            if before is None and after is None and facts.used:
                advice = "no parameter had a gradient when the optimizers stepped"
            reason = f"the gradients before clipping were not seen: no backward pass ran through the parameters' hooks; {advice}"
            reason = facts.refused.get(n.GRADIENT_BEFORE_CLIP, reason)
            absent.update(dict.fromkeys(OF_GRADIENTS, reason))
        else:
            values |= gradient_values(before, self.choice.wanted)
            norm = values["grad_norm"]
            absent.update(
                {name: ASKED_LATE for name, view in {**DISTRIBUTION, "grad_max": "max"}.items() if not before.has(view)}
            )
            if before.has("max") and "grad_max" not in values:
                absent.update(dict.fromkeys(("grad_max", "grad_sparsity"), "no gradient has a finite element"))
            if "grad_top_share" not in values:
                absent["grad_top_share"] = f"the gradient norm is {norm}"
            if facts.applied and after is not None and facts.used >= set(before.names):
                self._clips.add(before, after, facts)
        values |= self._clips.values(before, after, facts, absent)

    def state_dict(self) -> dict[str, Any]:
        """Counters and the clipping window, as plain numbers."""
        batches = {} if self._batches is None else {"batches": self._batches.state_dict()}
        counts = {"not_applied": self.not_applied, "interrupted": self.interrupted, "nonfinite": self.nonfinite}
        return {**counts, "clips": self._clips.window.state(), **batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.not_applied, self.nonfinite = int(state["not_applied"]), int(state.get("nonfinite", 0))
        self.interrupted = int(state.get("interrupted", 0))
        self._clips.window.load(state["clips"])
        if self._batches is not None and "batches" in state:
            self._batches.load_state_dict(state["batches"])
