"""The gradients of the last steps, and who is suspected of the largest spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, parse_key
from ..core.moments import Column
from ..core.records import StatsTable, spoiled_between
from .suspects import REMEMBERED, ParameterAttribution, ranked
from .verdicts import Verdict

#: Steps with a spike whose suspects are kept: those with the largest spikes.
_SPIKES = 100


class _Known(NamedTuple):
    step: int
    table: StatsTable
    spoiled: tuple[str, ...] = ()  # the gradients that became NaN or infinite after the backward pass


class GradientNormHistory:
    """The statistics of the gradients of the last steps.

    Gradients before clipping are used if there are any, since a clip makes a step that stands out like all others. From then on steps
    without them are ignored, so that clipped norms are never compared with unclipped ones. NaN and Inf count at either stage.
    """

    def __init__(self) -> None:
        self._steps: deque[_Known] = deque(maxlen=REMEMBERED)
        self._unclipped = False
        #: of the step that was added last, the gradients that became NaN or infinite after the backward pass
        self.spoiled: tuple[str, ...] = ()

    def add(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        """Add the gradients among ``tables``. A repeated step, as after a rollback, replaces all later ones."""
        before = tables.get(GRADIENT_BEFORE_CLIP)
        if before is not None and not self._unclipped:
            self._unclipped = True
            self._steps.clear()
        table = before if self._unclipped else tables.get(GRADIENT)
        self.rewind(step)
        self.spoiled = spoiled_between(tables)
        if table is not None and Column.SQUARE_SUM in table.columns:
            self._steps.append(_Known(step, table, self.spoiled))

    def rewind(self, step: int) -> None:
        """Discard ``step`` and later steps."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()

    def backfill(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        """Add an earlier step, unless it is known."""
        table = tables.get(self.source)
        if table is None or Column.SQUARE_SUM not in table.columns or self.table(step) is not None:
            return
        steps = sorted([*self._steps, _Known(step, table)], key=lambda known: known.step)
        self._steps = deque(steps[-REMEMBERED:], maxlen=REMEMBERED)

    def table(self, step: int) -> StatsTable | None:
        """The statistics of one step, or None."""
        return next((known.table for known in self._steps if known.step == step), None)

    @property
    def source(self) -> str:
        """The source of the gradients."""
        return GRADIENT_BEFORE_CLIP if self._unclipped else GRADIENT

    def suspects(self, step: int) -> list[ParameterAttribution]:
        """The parameters in order of suspicion, see :func:`ranked`; empty if ``step`` is unknown."""
        known = [each for each in self._steps if each.step <= step]
        if not known or known[-1].step != step:
            return []
        table, numbers, spoiled_after = known[-1].table, [each.step for each in known], set(known[-1].spoiled)
        norms, spoiled = (torch.stack(rows) for rows in zip(*(_aligned(each.table, table) for each in known), strict=True))
        found = ranked(numbers, table.names, norms, spoiled, is_part=table.is_part)
        if not spoiled_after:
            return found
        marked = [replace(each, is_spoiled_after=each.name in spoiled_after) for each in found]
        return sorted(marked, key=lambda each: not each.is_spoiled_after)


class SuspectHistory:
    """The gradients of the last steps, and the suspects of the steps with the largest spikes.

    Attributes:
        gradients: of the last steps.
        suspects: by step, the parameters in order of suspicion.
    """

    def __init__(self) -> None:
        self.gradients = GradientNormHistory()
        self.suspects: dict[int, list[ParameterAttribution]] = {}
        self._sizes: dict[int, float] = {}

    def at_spike(self, step: int, spike_size: float) -> list[ParameterAttribution]:
        """The suspects of a step with a spike, which are kept."""
        if step not in self.suspects:
            self.suspects[step] = self.gradients.suspects(step)
        self._sizes[step] = max(spike_size, self._sizes.get(step, 0.0))
        found = self.suspects[step]
        while len(self.suspects) > _SPIKES:
            smallest = min(self.suspects, key=lambda known: self._sizes[known])
            del self.suspects[smallest], self._sizes[smallest]
        return found

    def first(self, step: int, spikes: Mapping[str, Verdict]) -> str:
        """The most suspicious signal: for gradients by suspicion, for others, and before the step has ended, by score."""
        names = {signal: key.name for signal in spikes if (key := parse_key(signal)).source == self.gradients.source}
        order = {suspect.name: place for place, suspect in enumerate(self.gradients.suspects(step))} if names else {}
        return min(spikes, key=lambda signal: (order.get(names.get(signal, ""), math.inf), -(spikes[signal].score or 0.0)))

    def rewind(self, step: int) -> None:
        """Discard ``step`` and later steps."""
        self.gradients.rewind(step)
        self.suspects = {known: found for known, found in self.suspects.items() if known < step}
        self._sizes = {known: spike_size for known, spike_size in self._sizes.items() if known < step}


def _aligned(other: StatsTable, table: StatsTable) -> tuple[Tensor, Tensor]:
    """Norms in ``other`` of the parameters in ``table``, NaN where missing; and numbers of NaN and infinite elements."""
    rows = other.rows
    if other.names != table.names:
        place = {name: row for row, name in enumerate(other.names)}
        absent = torch.full((1, rows.shape[1]), torch.nan, dtype=torch.float64, device="cpu")
        rows = torch.cat([rows, absent])[[place.get(name, -1) for name in table.names]]
    return rows[:, Column.SQUARE_SUM].sqrt(), rows[:, Column.NONFINITE].nan_to_num(0.0)
