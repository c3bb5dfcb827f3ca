"""What detectors look at: the value of a signal in a step's record, the gradients of the last steps, and spikes as episodes."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, SPIKE_SCORE, SUMMARY, Key, format_key, parse_key
from ..core.moments import VIEWS, Column
from ..core.records import SpikeEvent, StatsTable, StepRecord
from ..step.plan import value_in, values_in
from .hampel import REMEMBERED

if TYPE_CHECKING:
    from .attribution import ParameterAttribution
    from .detector import Verdict

# --- episodes ---


def size(event: SpikeEvent) -> float:
    """How large a spike is: its factor above usual, infinite for NaN and Inf.

    If the usual value is unknown or not positive, the ratio of score to threshold is used.
    """
    if not math.isfinite(event.value):
        return math.inf
    if event.usual is not None and event.usual > 0:
        return event.value / event.usual
    return event.score / event.threshold if event.threshold > 0 else event.score


def by_size(events: Iterable[SpikeEvent]) -> list[int]:
    """The steps with a spike, largest spikes first."""
    return list(dict.fromkeys(event.step for event in sorted(events, key=size, reverse=True)))


@dataclass(frozen=True)
class Episode:
    """One spike, in one step or in consecutive ones."""

    steps: tuple[int, ...]  # ascending
    events: tuple[SpikeEvent, ...]  # of these steps, in order
    worst: SpikeEvent  # the largest event; the first of equally large ones

    @property
    def first(self) -> int:
        return self.steps[0]

    @property
    def last(self) -> int:
        return self.steps[-1]

    @property
    def of_worst(self) -> list[SpikeEvent]:
        return [event for event in self.events if event.step == self.worst.step]

    @property
    def when(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def __str__(self) -> str:
        row = "" if self.first == self.last else f"{self.when}, the largest in "
        return row + "; ".join(map(str, self.of_worst))


def episodes(events: Iterable[SpikeEvent], steps: Sequence[int]) -> list[Episode]:
    """The spikes of a run, ascending. Two belong together if none of ``steps``, ascending, lies between them; other events are ignored."""
    rows: list[list[SpikeEvent]] = []
    for event in sorted(events, key=lambda event: event.step):
        at, last = bisect_left(steps, event.step), rows[-1][-1].step if rows else None
        if at == len(steps) or steps[at] != event.step:
            continue
        if last is not None and (last == event.step or (at and steps[at - 1] == last)):
            rows[-1].append(event)
        else:
            rows.append([event])
    return [Episode(tuple(dict.fromkeys(each.step for each in row)), tuple(row), max(row, key=size)) for row in rows]


def largest(found: Sequence[Episode], most: int) -> list[Episode]:
    kept = sorted(range(len(found)), key=lambda place: (-size(found[place].worst), place))[:most]
    return [found[place] for place in sorted(kept)]


def counted(found: Sequence[Episode]) -> str:
    """The number of episodes: ``3 in 7 steps``, or only ``3`` if each has one step."""
    steps = sum(len(each.steps) for each in found)
    return str(len(found)) if steps == len(found) else f"{len(found)} in {steps} steps"


# --- the value of a signal in a step's record ---


def value_of(signal: str, record: StepRecord, whole: Mapping[str, float]) -> float | None:
    """The value of ``signal``, or None.

    ``signal`` names a whole-model value, a logged scalar, or a key. A key may ask for any built-in metric of a tensor whose statistics
    were measured, shown or not.
    """
    if (free := whole.get(signal)) is not None or (free := record.values.get(Key("", signal, ""))) is not None:
        return free
    key = parse_key(signal)
    if key.source == SUMMARY:
        return whole.get(key.metric, record.values.get(key))
    if key in record.values:
        return record.values[key]
    return value_in(record.tables.get(key.source), key)


class MatchingValues:
    """The values of all keys that match a pattern, looked up as in :func:`value_of`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._of_table: dict[str, tuple[StatsTable, list[tuple[str, list[int], list[str]]]]] = {}
        self._of_key: dict[Key, str | None] = {}

    def values(self, record: StepRecord, with_tables: bool = True) -> dict[str, float]:
        """Values by key; undefined ones are left out. ``with_tables=False`` skips the statistics of tensors."""
        found: dict[str, float] = {}
        for source, table in record.tables.items() if with_tables else ():
            for metric, rows, keys in self._plan(source, table):
                pairs = zip(keys, values_in(metric, table, rows), strict=True)
                found.update((key, value) for key, value in pairs if value is not None)
        # views of tables are found above
        for key, value in record.values_beside_views().by_key.items():
            if key.source == SPIKE_SCORE:
                continue
            if key not in self._of_key:
                text = format_key(key)
                self._of_key[key] = text if self._pattern.search(text) else None
            matched = self._of_key[key]
            if matched is not None:
                found[matched] = value
        return found

    def _plan(self, source: str, table: StatsTable) -> list[tuple[str, list[int], list[str]]]:
        """Metric, rows and keys of a table, cached while it has the same tensors and columns."""
        known = self._of_table.get(source)
        if known is not None and known[0].names == table.names and known[0].columns == table.columns:
            return known[1]
        plan = []
        for metric in VIEWS:
            if table.has(metric):
                keys = [format_key(Key(source, name, metric)) for name in table.names]
                rows = [row for row, key in enumerate(keys) if self._pattern.search(key)]
                if rows:
                    plan.append((metric, rows, [keys[row] for row in rows]))
        self._of_table[source] = table, plan
        return plan


# --- gradients of the last steps ---

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
        self.source = GRADIENT
        #: of the step that was added last, the gradients that became NaN or infinite after the backward pass
        self.spoiled: tuple[str, ...] = ()

    def add(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        """Add the gradients among ``tables``. A repeated step, as after a rollback, replaces all later ones."""
        if GRADIENT_BEFORE_CLIP in tables and self.source == GRADIENT:
            self.source = GRADIENT_BEFORE_CLIP
            self._steps.clear()
        if self._steps and self._steps[-1].step >= step:
            self.rewind(step)
        before, after, self.spoiled = tables.get(GRADIENT_BEFORE_CLIP), tables.get(GRADIENT), ()
        if after is not None and after.totals[Column.NONFINITE] and before is not None and not before.totals[Column.NONFINITE]:
            counts = after.rows[:, Column.NONFINITE].tolist()
            self.spoiled = tuple(name for name, count in zip(after.names, counts, strict=True) if count)
        if (table := tables.get(self.source)) is not None and Column.SQUARE_SUM in table.columns:
            self._steps.append(_Known(step, table, self.spoiled))

    def rewind(self, step: int) -> None:
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()

    def backfill(self, step: int, tables: Mapping[str, StatsTable]) -> None:
        table = tables.get(self.source)
        if table is not None and table.has("norm") and self.table(step) is None:
            steps = sorted([*self._steps, _Known(step, table)], key=lambda known: known.step)
            self._steps = deque(steps, maxlen=REMEMBERED)

    def table(self, step: int) -> StatsTable | None:
        return next((known.table for known in self._steps if known.step == step), None)

    def suspects(self, step: int) -> list[ParameterAttribution]:
        """The parameters in order of suspicion, see :func:`torch_gradmon.spikes.attribution.ranked`; empty if ``step`` is unknown."""
        known = [each for each in self._steps if each.step <= step]
        if not known or known[-1].step != step:
            return []
        from .attribution import ranked  # most trainings have no spike

        table, spoiled_after = known[-1].table, known[-1].spoiled
        norms, spoiled = (torch.stack(rows) for rows in zip(*(_aligned(each.table, table) for each in known), strict=True))
        found = ranked([each.step for each in known], table.names, norms, spoiled, is_part=table.is_part)
        if not spoiled_after:
            return found
        marked = [replace(each, is_spoiled_after=each.name in spoiled_after) for each in found]
        return sorted(marked, key=lambda each: not each.is_spoiled_after)


class SuspectHistory:
    """The gradients of the last steps, and the suspects of the steps with the largest spikes."""

    def __init__(self) -> None:
        self.gradients = GradientNormHistory()
        self.suspects: dict[int, list[ParameterAttribution]] = {}  # by step, in order of suspicion
        self._sizes: dict[int, float] = {}

    def at_spike(self, step: int, spike_size: float) -> list[ParameterAttribution]:
        """The suspects of a step with a spike, which are kept."""
        if step not in self.suspects:
            self.suspects[step] = self.gradients.suspects(step)
        self._sizes[step] = max(spike_size, self._sizes.get(step, 0.0))
        found = self.suspects[step]
        while len(self.suspects) > _SPIKES:
            smallest = min(self.suspects, key=self._sizes.__getitem__)
            del self.suspects[smallest], self._sizes[smallest]
        return found

    def first(self, step: int, spikes: Mapping[str, Verdict]) -> str:
        """The most suspicious signal: for gradients by suspicion, for others, and before the step has ended, by score."""
        names = {signal: key.name for signal in spikes if (key := parse_key(signal)).source == self.gradients.source}
        order = {suspect.name: place for place, suspect in enumerate(self.gradients.suspects(step))} if names else {}
        return min(spikes, key=lambda signal: (order.get(names.get(signal, ""), math.inf), -(spikes[signal].score or 0.0)))

    def rewind(self, step: int) -> None:
        self.gradients.rewind(step)
        for known in [known for known in self.suspects if known >= step]:
            del self.suspects[known], self._sizes[known]


def _aligned(other: StatsTable, table: StatsTable) -> tuple[Tensor, Tensor]:
    """Norms in ``other`` of the parameters in ``table``, NaN where missing; and numbers of NaN and infinite elements."""
    rows = other.rows
    if other.names != table.names:
        place = {name: row for row, name in enumerate(other.names)}
        absent = torch.full((1, rows.shape[1]), torch.nan, dtype=torch.float64, device="cpu")
        rows = torch.cat([rows, absent])[[place.get(name, -1) for name in table.names]]
    return rows[:, Column.SQUARE_SUM].sqrt(), rows[:, Column.NONFINITE].nan_to_num(0.0)
