"""What detectors look at, the value of a signal in a step's record, and what they find, spikes as episodes."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.keys import SPIKE_SCORE, SUMMARY, Key, format_key, parse_key
from ..core.moments import VIEWS
from ..core.records import SpikeEvent, StatsTable, StepRecord
from ..step.plan import value_in, values_in

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
    kept = sorted(found, key=lambda each: -size(each.worst))[:most]
    return sorted(kept, key=lambda each: each.first)


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
