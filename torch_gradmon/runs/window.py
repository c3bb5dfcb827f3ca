"""Read some steps of a run at once, with values as matrices of steps by keys."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import validation as check
from ..core.keys import ATTENTION_SOURCES, TENSOR_SOURCES, Key
from ..core.moments import ALWAYS, VIEWS, WIDTH, Column
from ..core.records import StatsTable
from .layouts import Layouts, TableLayout
from .scan import stored_keys
from .step_index import StepIndex
from .value_matrix import ValueMatrix, empty_matrix

#: Sources whose keys name a tensor, or an attention module and its heads.
LAYER_SOURCES = (*TENSOR_SOURCES, *ATTENTION_SOURCES.values())
#: The number of elements, next to the built-in metrics of a tensor.
COUNT = "count"


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread: for many operations on a few megabytes threads gain little, and on busy cores they cost tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def between(steps: Sequence[int], first: int | None, last: int | None) -> list[int]:
    """The steps from ``first`` to ``last``, inclusive; None for no bound.

    Raises:
        TypeError, ValueError: a bound is not a step number.
    """
    for name, value in (("first", first), ("last", last)):
        if value is not None:
            check.step_number(name, value)
    return [step for step in steps if (first is None or step >= first) and (last is None or step <= last)]


class WindowReader:
    """Reads windows of steps that an index knows.

    Args:
        db: the file.
        index: its steps.
        layouts: of its statistics.
    """

    def __init__(self, db: sqlite3.Connection, index: StepIndex, layouts: Layouts) -> None:
        self._db, self._index, self._layouts = db, index, layouts

    def read(self, steps: Iterable[int]) -> Window:
        """See :meth:`torch_gradmon.runs.reader.RunReader.window`."""
        of_segment: dict[int, list[int]] = {}
        for step in sorted(self._index.segment_of.keys() & set(steps)):
            of_segment.setdefault(self._index.segment_of[step], []).append(step)
        found = Window(sorted(step for some in of_segment.values() for step in some), stored_keys(self._db))
        for segment, some in of_segment.items():
            where = f"WHERE segment = {segment} AND step IN ({', '.join(map(str, some))})"
            found.take_facts(self._db.execute(f"SELECT step, time, applied, context, events FROM steps {where}").fetchall())
            found.take_scalars(self._db.execute(f"SELECT step, key, value FROM scalars {where}").fetchall())
            rows = self._db.execute(f"SELECT step, layout, data FROM rows {where}").fetchall()
            found.take_rows([(step, *self._layouts.of(number), data) for step, number, data in rows])
        return found


class Window:
    """All values of some steps.

    Args:
        steps: ascending.
        keys: of stored values, by their ids.

    Attributes:
        facts: by step what :meth:`torch_gradmon.runs.reader.RunReader.context` returns, and the stored events.
    """

    def __init__(self, steps: Sequence[int], keys: Mapping[int, Key]) -> None:
        self.steps = tuple(steps)
        self.facts: dict[int, dict[str, Any]] = {}
        self._keys = keys
        self._row = {step: row for row, step in enumerate(self.steps)}
        self._scalars: list[tuple[int, int, float | str]] = []
        self._of_step: dict[int, dict[Key, float]] = {step: {} for step in self.steps}
        self._packed: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}

    def take_facts(self, rows: Iterable[tuple[int, float, int, str, str]]) -> None:
        """Add stored rows of step, time, whether it was applied, context and events."""
        for step, time, applied, context, events in rows:
            self.facts[step] = {"time": time, "applied": bool(applied), **json.loads(context), "events": events}

    def take_scalars(self, rows: Iterable[tuple[int, int, float | str]]) -> None:
        """Add stored rows of step, id of the key, and value."""
        for step, key, value in rows:
            self._scalars.append((step, key, value))
            self._of_step[step][self._keys[key]] = float(value)

    def take_rows(self, rows: Iterable[tuple[int, str, TableLayout, bytes]]) -> None:
        """Add stored rows of step, source, layout and packed statistics; all rows of a step at once."""
        found: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}
        for step, source, layout, data in rows:
            found.setdefault(source, {})[step] = (layout, data)
        for source, of_steps in found.items():
            known = self._packed.setdefault(source, {})
            for step, (layout, data) in of_steps.items():
                known[step] = _part_of(*found[layout.same_as][step], layout.names) if layout.same_as else (layout, data)

    def scalars(self, step: int) -> dict[Key, float]:
        """The stored values of one step."""
        return self._of_step.get(step, {})

    def table(self, source: str, step: int) -> StatsTable | None:
        """The statistics of a source in one step, or None."""
        found = self._packed.get(source, {}).get(step)
        return None if found is None else found[0].table(found[1])

    def is_like(self, other: Window, source: str) -> bool:
        """Whether the stored statistics of ``source`` are equal byte for byte."""
        own, theirs = self._packed.get(source, {}), other._packed.get(source, {})
        return own == theirs and not self._own(source) and not other._own(source)

    @property
    def sources(self) -> list[str]:
        """The sources of tensors and attention heads with any value, in the order of :data:`LAYER_SOURCES`."""
        custom = {key.source for key in self._scalar_sheet.keys if is_of_layer(key)}
        return [source for source in LAYER_SOURCES if source in self._packed or source in custom]

    def sheet(self, source: str) -> ValueMatrix:
        """All metrics of a source, as ``RunReader.series`` returns them by key, and the numbers of elements."""
        own, statistics = self._own(source), self._statistics(source)
        return statistics.overlaid(self._scalar_sheet.columns(own)) if own else statistics

    def _own(self, source: str) -> list[int]:
        return [column for column, key in enumerate(self._scalar_sheet.keys) if key.source == source and is_of_layer(key)]

    @cached_property
    def others(self) -> ValueMatrix:
        """Whole-model values and logged values."""
        return self._scalar_sheet.columns([c for c, key in enumerate(self._scalar_sheet.keys) if not is_of_layer(key)])

    @cached_property
    def _scalar_sheet(self) -> ValueMatrix:
        numbers = sorted({key for _, key, _ in self._scalars})
        place = {key: column for column, key in enumerate(numbers)}
        values, there = empty_matrix(len(self.steps), len(numbers))
        if self._scalars:
            steps, keys, found = zip(*self._scalars, strict=True)
            at = torch.tensor([[self._row[s] for s in steps], [place[k] for k in keys]], dtype=torch.int64, device="cpu")
            values[at[0], at[1]] = torch.tensor(list(map(float, found)), dtype=torch.float64, device="cpu")
            there[at[0], at[1]] = True
        return ValueMatrix(tuple(self._keys[number] for number in numbers), values, there)

    def _statistics(self, source: str) -> ValueMatrix:
        groups: dict[TableLayout, list[tuple[int, bytes]]] = {}
        for step, (layout, data) in sorted(self._packed.get(source, {}).items()):
            groups.setdefault(layout, []).append((self._row[step], data))
        names = {name: at for at, name in enumerate(dict.fromkeys(name for layout in groups for name in layout.names))}
        measured = frozenset(column for layout in groups for column in layout.columns) | ALWAYS
        metrics = [metric for metric, view in VIEWS.items() if view.columns <= measured] if groups else []
        values, there = empty_matrix(len(self.steps), len(metrics) + bool(groups), len(names))
        for layout, of_steps in groups.items():
            at = torch.tensor([row for row, _ in of_steps], device="cpu").unsqueeze(1)
            columns = torch.tensor([names[name] for name in layout.names], dtype=torch.int64, device="cpu")
            rows = _unpacked(layout, [data for _, data in of_steps])
            for number, metric in enumerate(metrics):
                view = VIEWS[metric]
                if view.columns <= layout.columns | ALWAYS:
                    defined = view.defined(rows)
                    found = torch.where(defined, view.compute(rows), torch.nan)
                    values[at, number, columns] = found.reshape(len(of_steps), -1)
                    there[at, number, columns] = defined.reshape(len(of_steps), -1)
            values[at, -1, columns] = rows[:, Column.COUNT].reshape(len(of_steps), -1)
            there[at, -1, columns] = True
        return ValueMatrix(_keys(source, tuple(names), (*metrics, COUNT)), values.flatten(1), there.flatten(1))


@lru_cache(maxsize=256)
def _keys(source: str, names: tuple[str, ...], metrics: tuple[str, ...]) -> tuple[Key, ...]:
    return tuple(Key(source, name, metric) for metric in metrics for name in names)


def is_of_layer(key: Key) -> bool:
    """Whether it is a metric of a tensor or an attention head, not of the whole model."""
    return key.source in LAYER_SOURCES and bool(key.name)


def _unpacked(layout: TableLayout, blobs: Sequence[bytes]) -> Tensor:
    """The rows of several steps, concatenated; stored column by column, since views read columns."""
    return layout.rows(blobs).reshape(-1, WIDTH).t().contiguous().t()


def _part_of(layout: TableLayout, data: bytes, names: Sequence[str]) -> tuple[TableLayout, bytes]:
    """Reduce packed statistics to the tensors ``names``."""
    kept = set(names)
    if kept.issuperset(layout.names):
        return layout, data
    rows = [row for row, name in enumerate(layout.names) if name in kept]
    width = len(data) // len(layout.names)
    counts = b"".join(layout.counts[8 * row : 8 * row + 8] for row in rows)
    part = layout._replace(names=tuple(layout.names[row] for row in rows), counts=counts)
    return part, b"".join(data[width * row : width * (row + 1)] for row in rows)
