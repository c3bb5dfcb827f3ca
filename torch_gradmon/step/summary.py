"""Whole-model values for the dashboard: a few keys in one section, ``gradmon/``, from the statistics of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core import keys as n
from ..core.metric import ASKED_LATE
from ..core.moments import ALL_COLUMNS, VIEWS, Column
from ..core.records import StatsTable
from .clip_summary import ClipSummary
from .gradient_summary import DISTRIBUTION, gradient_values, norm_of
from .micro_batches import DOCUMENTATION as BATCHES
from .micro_batches import MicroBatchStats
from .summary_keys import CHEAP, DOCUMENTATION, OF_GRADIENTS, UPDATE_EVERY, UPDATE_KEYS, StepFacts
from .update_summary import rows_of, update_values


class Summary:
    """Computes the whole-model values of a step.

    ``signals`` are values that a detector needs, shown or not.

    Args:
        keys: names in :data:`DOCUMENTATION`.
        all_columns: measure every statistic of the gradients, and of the rest on every tenth step, for a run directory.
        of_layers: the needs of per-layer values, see :attr:`LayerSelection.needs`.
    """

    def __init__(
        self, keys: Iterable[str] = (), all_columns: bool = False, of_layers: Mapping[str, frozenset[Column]] | None = None
    ) -> None:
        self._keys = tuple(keys)
        self._instead: tuple[str, ...] | None = None
        self.more: tuple[str, ...] = ()
        self.signals: set[str] = set()
        self.all_columns = all_columns
        self._of_layers = dict(of_layers or {})
        self.not_applied = 0
        self.nonfinite = 0  # steps whose gradients held NaN or Inf
        self.batches: MicroBatchStats | None = None
        self._clips = ClipSummary()

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of a preset's values: the script's, or those of an override."""
        return self._keys if self._instead is None else self._instead

    @keys.setter
    def keys(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)

    def override_keys(self, keys: Iterable[str] | None) -> None:
        """Override the names of the script's preset with ``keys``; None restores them."""
        self._instead = None if keys is None else tuple(keys)

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of all requested values."""
        asked_for = (*self.keys, *(name for name in self.more if name not in self.keys))
        return asked_for if self.batches is None else (*asked_for, *BATCHES)

    @property
    def _wanted(self) -> set[str]:
        """The names of shown values and those that detectors need."""
        return self.signals.union(self.keys, self.more).intersection(DOCUMENTATION)

    @property
    def update_every(self) -> int:
        """The interval of steps that measure updates: 1 if a detector needs them."""
        return 1 if not self.signals.isdisjoint(UPDATE_KEYS) else UPDATE_EVERY

    def of_one_step(self) -> Summary:
        """An independent summary of gradients for one unmonitored step."""
        found = Summary(name for name in CHEAP if name.startswith("grad_"))
        found._clips.window.extend(self._clips.window)
        return found

    def count_rejected(self, steps: int) -> None:
        """Count ``steps`` unmeasured steps that a GradScaler did not apply."""
        self.not_applied += steps
        self.nonfinite += steps

    def needs_of_gradients(self) -> dict[str, frozenset[Column]]:
        """The statistics of gradients that all values need, by source."""
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        views = ["max", *(view for name, view in DISTRIBUTION.items() if name in self._wanted)]
        return {
            n.GRADIENT_BEFORE_CLIP: ALL_COLUMNS if self.all_columns else square.union(*(VIEWS[view].columns for view in views)),
            # sums and squares show a run directory that gradients are unchanged, so it stores them once
            n.GRADIENT: square | {Column.SUM} if self.all_columns else square,
        }

    def needs(self, step: int) -> dict[str, frozenset[Column]]:
        """The statistics that the next values need, by source, for all trainable parameters."""
        wanted, needs = self._wanted, dict(self._of_layers)
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        if wanted or self.batches is not None:
            needs |= self.needs_of_gradients()
        if self.batches is not None:
            needs[n.GRADIENT_LOCAL] = square
        update_step = step % self.update_every == 0
        if "param_norm" in wanted:
            needs[n.PARAMETER] = square
        if update_step and not wanted.isdisjoint(UPDATE_KEYS):
            needs[n.UPDATE] = square
        if self.all_columns:
            stored = (n.PARAMETER, n.UPDATE, n.GRADIENT_BEFORE_CLIP) if update_step else (n.GRADIENT_BEFORE_CLIP,)
            needs.update({source: ALL_COLUMNS for source in stored if source in needs})
        return needs

    def compute(
        self,
        facts: StepFacts,
        tables: Mapping[str, StatsTable],
        base: StatsTable | None,
        absent: dict[str, str],
        batch_norms: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """The values of one step by name, including those not among ``keys``.

        Args:
            facts: of the step.
            tables: statistics by source, of all parameters or not at all.
            base: statistics of the updated parameters before the update.
            absent: gets a reason for each missing key.
            batch_norms: of the gradients of micro-batches, by rank.
        """
        values: dict[str, float] = {}
        self.not_applied += not facts.applied
        values["steps_not_applied"] = float(self.not_applied)
        self._gradients(values, tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.GRADIENT), facts, absent)
        self.nonfinite += facts.nonfinite or facts.refusal
        if self.batches is not None:
            values |= self.batches.compute(batch_norms or {}, values.get("grad_norm"), facts.ranks, absent)
        if (table := tables.get(n.PARAMETER)) is not None:
            values["param_norm"] = norm_of(rows_of(table, facts.trainable))
        else:
            reason = "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()"
            absent["param_norm"] = facts.refused.get(n.PARAMETER, reason)
        if facts.step % self.update_every:  # a user's metric may have measured updates of some layers
            absent.update(dict.fromkeys(UPDATE_KEYS, f"updates are measured on every {UPDATE_EVERY}th step"))
        elif not facts.applied:
            absent.update(dict.fromkeys(UPDATE_KEYS, "the step was not applied"))
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
        if before is None or (after is not None and not set(after.names) <= set(before.names)):
            reason = (
                "the gradients before clipping were not seen: no backward pass ran through the parameters' hooks; "
                "clip with monitor.clip_grad_norm_ or call monitor.monitor_gradients(before_clip=True) before you clip"
            )
            reason = facts.refused.get(n.GRADIENT_BEFORE_CLIP, reason)
            absent.update(dict.fromkeys(OF_GRADIENTS, reason))
        else:
            values |= gradient_values(before, self._wanted)
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
        batches = {} if self.batches is None else {"batches": self.batches.state_dict()}
        counts = {"not_applied": self.not_applied, "nonfinite": self.nonfinite}
        return {**counts, "clips": self._clips.window.state(), **batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.not_applied, self.nonfinite = int(state["not_applied"]), int(state.get("nonfinite", 0))
        self._clips.window.load(state["clips"])
        if self.batches is not None and "batches" in state:
            self.batches.load_state_dict(state["batches"])
