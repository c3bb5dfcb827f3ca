"""Whole-model values for the dashboard: a handful of keys in one section, ``gradmon/``, from the statistics of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import keys as n
from ..core.keys import Key
from ..core.metric import ASKED_LATE
from ..core.moments import ALL_COLUMNS, VIEWS, Column
from ..core.records import StatsTable
from .clip_window import WINDOW, ClipWindow
from .gradient_summary import DISTRIBUTION, gradient_values, norm_of
from .micro_batches import DOCUMENTATION as BATCHES
from .micro_batches import MicroBatchStats

#: What each key means; also the order in which they are shown.
DOCUMENTATION = {
    "grad_norm": "L2 norm of all gradients before clipping",
    "grad_norm_clipped": "L2 norm of the gradients that the optimizer uses; absent where nothing clips or edits them after backward",
    "clipped_share": "share of the last 100 steps in which clipping reduced the gradient norm; absent where the loop does not clip, "
    "or only scales gradients by one factor",
    "grad_max": "largest |x| of the finite gradient elements before clipping",
    "grad_nonfinite": "number of NaN and infinite gradient elements before clipping",
    "grad_top_share": "largest share of the squared gradient norm that one parameter holds",
    "param_norm": "L2 norm of all trainable parameters, before the update",
    "update_norm": "L2 norm of the change that the optimizer made",
    "update_ratio": "update_norm over the norm of the same parameters before the update",
    "update_ratio_p10": "10th percentile of the update ratio over parameters of two or more dimensions",
    "update_ratio_p90": "90th percentile of the update ratio over parameters of two or more dimensions",
    "spike_score": "how far grad_norm lies above normal, in robust standard deviations of its logarithm",
    "steps_not_applied": "steps so far that were not applied (infinite gradients under a GradScaler, or skipped after a spike)",
    "grad_mean": "mean of all gradient elements before clipping",
    "grad_std": "population standard deviation of all gradient elements before clipping",
    "grad_sparsity": "share of the finite gradient elements before clipping with |x| <= eps",
    "overhead_pct": "time spent in the monitor's own code, in percent of the time since the last monitored step",
}
#: Of what is asked for by other means than a preset; present where it is in use.
ON_REQUEST = {
    "steps_skipped": "steps so far that were skipped because of a spike",
    "clip_limit": "norm above which an adaptive clip of the total norm clips this step; absent in its warm-up",
    "clipped_parameters": "parameters whose gradients an adaptive clip has scaled down in this step",
}
STANDARD = tuple(k for k in DOCUMENTATION if k not in DISTRIBUTION)
CHEAP = tuple(k for k in STANDARD if not k.startswith(("param_", "update_")))
#: The update keys need a copy of the parameters, so they come with every tenth step.
UPDATE_EVERY = 10
_OF_GRADIENTS = ("grad_norm", "grad_max", "grad_nonfinite", "grad_top_share", "spike_score", *DISTRIBUTION)
_UPDATE_KEYS = tuple(k for k in DOCUMENTATION if k.startswith("update_"))


def key(name: str) -> Key:
    """The key of a whole-model value."""
    return Key(n.SUMMARY, "", name)


@dataclass
class StepFacts:
    """What is known of a step besides its values.

    Attributes:
        step: its number.
        applied: whether the optimizer applied it.
        updates_void: whether updates of zero were measured, because a fused optimizer found infinite gradients.
        edited: whether the gradients were changed between backward and the optimizer; None where only their values tell.
        rounding: by how much the gradients that the optimizer uses are rounded, relatively, where that is more than in float32.
        used: names of the parameters whose gradients an optimizer has used, or would have, had they been there.
        trainable: names of the trainable parameters.
        matrices: names of the parameters of two or more dimensions.
        groups: names of the parameters of each of the optimizers' groups.
        refused: a reason by source, where some of its tensors could not be measured.
        context: learning rates and the like, for the record.
        ranks: over how many the values of batches are merged.
        refusal: whether a GradScaler did not let the optimizer apply it.
        nonfinite: whether any gradient that was measured before clipping holds NaN or Inf.
    """

    step: int
    applied: bool
    edited: bool | None
    used: Set[str]
    trainable: Set[str]
    matrices: Set[str]
    groups: Sequence[tuple[str, frozenset[str]]] = ()
    updates_void: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    refusal: bool = False
    nonfinite: bool = False
    rounding: float = 0.0


class Summary:
    """Computes the whole-model values of a step.

    ``signals`` are values that a detector needs, shown or not.

    Args:
        keys: which of :data:`DOCUMENTATION`.
        all_columns: measure every statistic of the gradients, and of the rest on every tenth step, because a run directory
            wants them.
        of_layers: what values of layers are made of, see :attr:`Layers.needs`.
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
        self._clips = ClipWindow()

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of a preset's values: the script's, or one that stands in for it."""
        return self._keys if self._instead is None else self._instead

    @keys.setter
    def keys(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)

    def override_keys(self, keys: Iterable[str] | None) -> None:
        """Show ``keys`` in the place of those of the script's preset, until this is called with None."""
        self._instead = None if keys is None else tuple(keys)

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of all values that are asked for."""
        asked_for = (*self.keys, *(name for name in self.more if name not in self.keys))
        return asked_for if self.batches is None else (*asked_for, *BATCHES)

    @property
    def _wanted(self) -> set[str]:
        """What is shown, and what detectors need."""
        return self.signals.union(self.keys, self.more).intersection(DOCUMENTATION)

    @property
    def update_every(self) -> int:
        """The steps that measure updates: every one where a detector wants them."""
        return 1 if not self.signals.isdisjoint(_UPDATE_KEYS) else UPDATE_EVERY

    def of_one_step(self) -> Summary:
        """For a step beside the others: the values of gradients alone; what it is told changes nothing here."""
        found = Summary(name for name in CHEAP if name.startswith("grad_"))
        found._clips.extend(self._clips)
        return found

    def refused_unseen(self, steps: int) -> None:
        """So many steps that were not measured were refused by a GradScaler."""
        self.not_applied += steps
        self.nonfinite += steps

    def needs_of_gradients(self) -> dict[str, frozenset[Column]]:
        """The same for gradients, whether or not anybody wants values of them."""
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        views = ["max", *(view for name, view in DISTRIBUTION.items() if name in self._wanted)]
        return {
            n.GRADIENT_BEFORE_CLIP: ALL_COLUMNS if self.all_columns else square.union(*(VIEWS[view].columns for view in views)),
            # with sums besides squares a run directory sees that they are the same gradients, and stores them once
            n.GRADIENT: square | {Column.SUM} if self.all_columns else square,
        }

    def needs(self, step: int) -> dict[str, frozenset[Column]]:
        """The statistics that the next values are made of, by source, for all trainable parameters."""
        wanted, needs = self._wanted, dict(self._of_layers)
        square = frozenset({Column.COUNT, Column.SQUARE_SUM})
        if wanted or self.batches is not None:
            needs |= self.needs_of_gradients()
        if self.batches is not None:
            needs[n.GRADIENT_LOCAL] = square
        update_step = step % self.update_every == 0
        if "param_norm" in wanted:
            needs[n.PARAMETER] = square
        if update_step and not wanted.isdisjoint(_UPDATE_KEYS):
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
        """The values of one step by name, also those that are not among ``keys``.

        Args:
            facts: what is known of the step.
            tables: statistics by source, of all parameters or not at all.
            base: statistics of the updated parameters before the update.
            absent: receives a reason for each key that is not there.
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
            values["param_norm"] = norm_of(_of(table, facts.trainable))
        else:
            reason = "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()"
            absent["param_norm"] = facts.refused.get(n.PARAMETER, reason)
        if facts.step % self.update_every:  # what a metric of the user measured is of his layers, not of the whole model
            absent.update(dict.fromkeys(_UPDATE_KEYS, f"updates are measured on every {UPDATE_EVERY}th step"))
        elif not facts.applied:
            absent.update(dict.fromkeys(_UPDATE_KEYS, "the step was not applied"))
        elif (update := tables.get(n.UPDATE)) is None or base is None:
            reason = "no attached optimizer changed a parameter"
            absent.update(dict.fromkeys(_UPDATE_KEYS, facts.refused.get(n.UPDATE, reason)))
        else:
            self._updates(values, _of(update, facts.trainable), _of(base, facts.trainable), facts.matrices, absent)
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
            absent.update(dict.fromkeys(_OF_GRADIENTS, reason))
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
                edited = _differ(before, after) if facts.edited is None else facts.edited
                # a gradient that was taken away altogether is not clipped
                self._clips.add(edited, norm_of(_of(before, set(after.names))), norm_of(after), facts.rounding)
        if after is None and facts.used and facts.used >= set(() if before is None else before.names):
            reason = "all gradients were gone when the optimizers stepped"
            absent.update(dict.fromkeys(("grad_norm_clipped", "clipped_share"), reason))
        elif after is None and not self._clips.is_known:
            reason = (
                "the gradients that the optimizer uses were not measured: attach the optimizer, or call monitor.monitor_gradients() "
                "after you clip"
            )
            absent.update(dict.fromkeys(("grad_norm_clipped", "clipped_share"), facts.refused.get(n.GRADIENT, reason)))
        elif not self._clips.has_edits:
            absent.update(dict.fromkeys(("grad_norm_clipped", "clipped_share"), f"nothing clipped in the last {WINDOW} steps"))
        elif after is None or (before is not None and not facts.used >= set(before.names)):
            reason = "not every attached optimizer stepped"
            absent.update(dict.fromkeys(("grad_norm_clipped", "clipped_share"), reason))
        else:
            values["grad_norm_clipped"] = norm_of(after)
            share, factor = self._clips.share()
            if share is not None:
                values["clipped_share"] = share
            else:
                absent["clipped_share"] = (
                    f"gradients are multiplied by {factor:.4g} after backward, whatever their norm, which is no clip"
                )

    def _updates(
        self,
        values: dict[str, float],
        update: StatsTable,
        base: StatsTable,
        matrices: Set[str],
        absent: dict[str, str],
    ) -> None:
        values["update_norm"] = norm_of(update)
        if (norm := norm_of(base)) > 0:
            values["update_ratio"] = values["update_norm"] / norm
        else:
            absent["update_ratio"] = f"the norm of the updated parameters was {norm} before the update"
        pairs = [
            (row, other)
            for name, row, other in zip(
                update.names, update.rows[:, Column.SQUARE_SUM], base.rows[:, Column.SQUARE_SUM], strict=True
            )
            if name in matrices and other > 0
        ]
        if pairs:
            changed, there = (torch.stack(side) for side in zip(*pairs, strict=True))
            low, high = torch.quantile(
                (changed / there).sqrt(), torch.tensor([0.1, 0.9], dtype=torch.float64, device="cpu")
            ).tolist()
            values["update_ratio_p10"], values["update_ratio_p90"] = low, high
        else:
            reason = "no updated parameter of two or more dimensions has a norm above zero"
            absent.update({"update_ratio_p10": reason, "update_ratio_p90": reason})

    def state_dict(self) -> dict[str, Any]:
        """Counters and the clipping window, as plain numbers."""
        batches = {} if self.batches is None else {"batches": self.batches.state_dict()}
        counts = {"not_applied": self.not_applied, "nonfinite": self.nonfinite}
        return {**counts, "clips": self._clips.state(), **batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.not_applied, self.nonfinite = int(state["not_applied"]), int(state.get("nonfinite", 0))
        self._clips.load(state["clips"])
        if self.batches is not None and "batches" in state:
            self.batches.load_state_dict(state["batches"])


def _of(table: StatsTable, names: Set[str]) -> StatsTable:
    """The rows of ``table`` for ``names``."""
    if names >= set(table.names):
        return table
    kept = [row for row, name in enumerate(table.names) if name in names]
    return StatsTable(tuple(table.names[row] for row in kept), table.rows[kept], table.columns)


def _differ(before: StatsTable, after: StatsTable) -> bool:
    """Whether any statistic that both have differs by more than rounding."""
    place = {name: row for row, name in enumerate(before.names)}
    then, now = before.rows[[place[name] for name in after.names]], after.rows
    for column in (before.columns & after.columns) - {Column.NEAR_ZERO}:
        # a sum may cancel: by Cauchy and Schwarz this is the most that its terms can add up to
        scale = (then[:, Column.COUNT] * then[:, Column.SQUARE_SUM]).sqrt() if column is Column.SUM else then[:, column].abs()
        same = (now[:, column] - then[:, column]).abs() <= 1e-6 * scale
        same |= (now[:, column] == then[:, column]) | (now[:, column].isnan() & then[:, column].isnan())
        if not bool(same.all()):
            return True
    return False
