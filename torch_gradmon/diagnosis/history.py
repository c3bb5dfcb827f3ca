"""What rules look at: the records of a run, thinned where there are many, as series and as matrices."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import names as n
from ..names import Key, parse_key
from ..record import Event, StepRecord
from ..run import Run
from ..statistics.moments import ALWAYS, VIEWS, Column

#: Of a long run so many steps are looked at: the first ones, the last ones, those around spikes, and an even choice between.
MOST = 400
_ENDS, _AROUND = 50, 3
_IS_LOSS = re.compile(r"(?:^|[/_.\s])loss$", re.IGNORECASE)


@dataclass(frozen=True)
class Series:
    """One value over the steps that have it.

    Attributes:
        steps: ascending.
        values: of these steps; some may not be finite.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def finite(self) -> Series:
        """Without the values that are NaN or infinite."""
        pairs = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    def since(self, step: int) -> Series:
        """From ``step`` on."""
        first = bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])

    def part(self, first: float, last: float) -> Series:
        """From one share of the series to another, such as ``part(0.75, 1)`` for its last quarter; at least one value, if it has any."""
        low = min(int(first * len(self)), max(len(self) - 1, 0))
        high = max(math.ceil(last * len(self)), low + 1)
        return Series(self.steps[low:high], self.values[low:high])

    @property
    def median(self) -> float:
        """The lower median of the finite values; NaN without any."""
        values = sorted(self.finite.values)
        return values[(len(values) - 1) // 2] if values else math.nan


@dataclass(frozen=True)
class Matrix:
    """A built-in metric of many tensors over steps.

    Attributes:
        steps: ascending.
        names: of the tensors, in model order.
        values: float64 ``[steps, tensors]``; NaN where a tensor has none, and where the value is NaN.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor

    def column(self, name: str) -> Series:
        """One tensor over the steps in which it has a value that is not NaN."""
        values = self.values[:, self.names.index(name)].tolist()
        pairs = [(step, value) for step, value in zip(self.steps, values, strict=True) if not math.isnan(value)]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    def part(self, first: float, last: float) -> Matrix:
        """Its steps from one share to another."""
        chosen = Series(self.steps, self.steps).part(first, last).steps
        rows = [row for row, step in enumerate(self.steps) if step in set(chosen)]
        return Matrix(chosen, self.names, self.values[rows])

    def medians(self) -> dict[str, float]:
        """By tensor the median over the steps in which it has a value, without those that have none."""
        found = torch.nanmedian(self.values, dim=0).values.tolist() if len(self.steps) else []
        return {name: value for name, value in zip(self.names, found, strict=bool(found)) if not math.isnan(value)}


class History:
    """The records of a run, ascending by step.

    Args:
        records: with the statistics that they had.
        events: what detectors found.
    """

    def __init__(self, records: Iterable[StepRecord], events: Iterable[Event] = ()) -> None:
        self.records = sorted(records, key=lambda record: record.step)
        self.events = list(events) or [event for record in self.records for event in record.events]
        self._matrices: dict[tuple[str, str], Matrix | None] = {}

    @classmethod
    def of_run(cls, run: Run, most: int = MOST) -> History:
        """Read a run directory, ``most`` steps of it."""
        events = run.events
        chosen = thinned(run.steps, {event.step for event in events}, most)
        return cls((_record(run, step) for step in chosen), events)

    @property
    def steps(self) -> list[int]:
        """The steps that are looked at."""
        return [record.step for record in self.records]

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last of them."""
        return (self.records[0].step, self.records[-1].step) if self.records else None

    def series(self, name: str) -> Series:
        """A whole-model value by its name, such as ``grad_norm``, or what was logged under that key; empty without any."""
        return self._of_keys(Key(n.SUMMARY, "", name), Key("", name, ""))

    def _of_keys(self, *keys: Key) -> Series:
        pairs = [(record.step, record.values[key]) for record in self.records for key in keys if key in record.values]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    @cached_property
    def loss(self) -> Series:
        """What was logged as ``loss``, ``train/loss`` or the like, the shortest such key; empty without any."""
        keys = {key for record in self.records for key in record.values if key.source == "" and _IS_LOSS.search(key.name)}
        return self._of_keys(min(keys, key=lambda key: (len(key.name), key.name))) if keys else Series((), ())

    def matrix(self, source: str, metric: str) -> Matrix | None:
        """A built-in metric of all tensors of a source, of the steps that have it; None without any."""
        if (source, metric) not in self._matrices:
            self._matrices[source, metric] = self._matrix(source, metric)
        return self._matrices[source, metric]

    def _matrix(self, source: str, metric: str) -> Matrix | None:
        view = VIEWS[metric]
        tables = [(record.step, record.tables[source]) for record in self.records if source in record.tables]
        tables = [(step, table) for step, table in tables if view.columns <= table.columns | ALWAYS and table.names]
        if not tables:
            return None
        names = list(dict.fromkeys(name for _, table in tables for name in table.names))
        place = {name: column for column, name in enumerate(names)}
        values = torch.full((len(tables), len(names)), math.nan, dtype=torch.float64, device="cpu")
        for row, (_, table) in enumerate(tables):
            found = torch.where(view.defined(table.rows), view.compute(table.rows), math.nan)
            values[row, [place[name] for name in table.names]] = found
        return Matrix(tuple(step for step, _ in tables), tuple(names), values)

    def sizes(self, source: str) -> dict[str, float]:
        """How many elements each tensor of a source has."""
        found: dict[str, float] = {}
        for record in reversed(self.records):
            table = record.tables.get(source)
            if table is not None:
                counts = zip(table.names, table.rows[:, Column.COUNT].tolist(), strict=True)
                found.update((name, count) for name, count in counts if name not in found)
        return found


def thinned(steps: Sequence[int], around: Iterable[int] = (), most: int = MOST) -> list[int]:
    """Some of ``steps``, ascending: both ends, those close to steps in ``around``, and evenly chosen ones up to ``most``."""
    if len(steps) <= most:
        return list(steps)
    ends = min(_ENDS, most // 8)
    chosen = {*steps[:ends], *steps[-ends:]}
    for step in around:
        at = bisect_left(steps, step)
        if len(chosen) + 2 * _AROUND + 1 > most * 3 // 4:
            break
        chosen.update(steps[max(at - _AROUND, 0) : at + _AROUND + 1])
    left = most - len(chosen)
    chosen.update(steps[round(number * (len(steps) - 1) / (left - 1))] for number in range(left))
    return sorted(chosen)


def _record(run: Run, step: int) -> StepRecord:
    context = dict(run.context(step))
    tables = {source: table for source in n.TENSOR_SOURCES if (table := run.table(source, step)) is not None}
    values = {parse_key(key): value for key, value in run.metrics(step).items()}
    return StepRecord(step, context.pop("time"), context.pop("applied"), values, tables, context)
