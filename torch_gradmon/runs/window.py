"""Several steps of a run at once: values as matrices of steps by keys, where one step after the other would take too long."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import validation as check
from ..core.keys import ATTENTION_SOURCES, TENSOR_SOURCES, Key
from ..core.moments import ALWAYS, VIEWS, WIDTH, Column
from .scan import TableLayout, stored_keys
from .step_index import StepIndex
from .writer import unpack_steps

#: Sources whose keys name a tensor, or a module of attention and its heads.
LAYER_SOURCES = (*TENSOR_SOURCES, *ATTENTION_SOURCES.values())
#: Beside the built-ins of a tensor: the number of its elements.
COUNT = "count"


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Many operations on some megabytes: threads would hardly gain anything, and where others use the cores lose tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def between(steps: Sequence[int], first: int | None, last: int | None) -> list[int]:
    """Those from ``first`` to ``last``; None for no bound.

    Raises:
        ValueError: a bound is not the number of a step.
    """
    for name, value in (("first", first), ("last", last)):
        if value is not None:
            check.step_number(name, value)
    return [step for step in steps if (first is None or step >= first) and (last is None or step <= last)]


@dataclass(frozen=True)
class ValueMatrix:
    """Values of some steps.

    Attributes:
        keys: what each column is.
        values: float64 ``[steps, keys]``; NaN where there is none.
        there: which of them there are, booleans: a value that is there may be NaN.
    """

    keys: tuple[Key, ...]
    values: Tensor
    there: Tensor

    def columns(self, chosen: Sequence[int]) -> ValueMatrix:
        """The columns of these numbers."""
        if tuple(chosen) == tuple(range(len(self.keys))):
            return self
        return ValueMatrix(tuple(self.keys[column] for column in chosen), self.values[:, chosen], self.there[:, chosen])

    def with_absent(self, keys: Sequence[Key]) -> ValueMatrix:
        """The same with columns behind it of which there is nothing."""
        if not keys:
            return self
        count = len(keys)
        return ValueMatrix((*self.keys, *keys), _padded(self.values, count, torch.nan), _padded(self.there, count, False))

    def overlaid(self, other: ValueMatrix) -> ValueMatrix:
        """Its values, and where ``other`` has one, that instead; keys that only ``other`` has come behind."""
        place = {key: column for column, key in enumerate(dict.fromkeys((*self.keys, *other.keys)))}
        new = len(place) - len(self.keys)
        values, there = _padded(self.values, new, torch.nan), _padded(self.there, new, False)
        columns = torch.tensor([place[key] for key in other.keys], dtype=torch.int64, device="cpu")
        values[:, columns] = torch.where(other.there, other.values, values[:, columns])
        there[:, columns] |= other.there
        return ValueMatrix(tuple(place), values, there)


class WindowReader:
    """Reads windows of what an index knows of.

    Args:
        db: the file.
        index: its steps.
        names_of: the names of the tensors that a layout has.
    """

    def __init__(self, db: sqlite3.Connection, index: StepIndex, names_of: Callable[[bytes], tuple[str, ...]]) -> None:
        self._db, self._index, self._names_of = db, index, names_of
        self._layouts: dict[int, tuple[str, TableLayout]] = {}

    def keys(self) -> dict[int, Key]:
        """The keys of the values that are stored as such, by their numbers."""
        return stored_keys(self._db)

    def read(self, steps: Iterable[int]) -> Window:
        """See :meth:`torch_gradmon.analysis.run.Run.window`."""
        of_segment: dict[int, list[int]] = {}
        for step in sorted(self._index.segment_of.keys() & set(steps)):
            of_segment.setdefault(self._index.segment_of[step], []).append(step)
        found = Window(sorted(step for some in of_segment.values() for step in some), self.keys())
        for segment, some in of_segment.items():
            where = f"WHERE segment = {segment} AND step IN ({', '.join(map(str, some))})"
            found.take_facts(self._db.execute(f"SELECT step, time, applied, context, events FROM steps {where}").fetchall())
            found.take_scalars(self._db.execute(f"SELECT step, key, value FROM scalars {where}").fetchall())
            rows = self._db.execute(f"SELECT step, layout, data FROM rows {where}").fetchall()
            found.take_rows([(step, *self._layout(number), data) for step, number, data in rows])
        return found

    def _layout(self, number: int) -> tuple[str, TableLayout]:
        if number not in self._layouts:
            query = "SELECT source, tensors, columns, counts, same_as FROM layouts WHERE id = ?"
            source, tensors, mask, counts, same_as = self._db.execute(query, (number,)).fetchone()
            layout = TableLayout(self._names_of(tensors), frozenset(c for c in Column if mask >> c & 1), counts, same_as)
            self._layouts[number] = source, layout
        return self._layouts[number]


class Window:
    """What a run knows of some steps.

    Args:
        steps: ascending.
        keys: of the values that are stored as such, by their numbers.

    Attributes:
        facts: by step what :meth:`torch_gradmon.analysis.run.Run.context` has, and the events as they are stored.
    """

    def __init__(self, steps: Sequence[int], keys: Mapping[int, Key]) -> None:
        self.steps = tuple(steps)
        self.facts: dict[int, dict[str, Any]] = {}
        self._keys = keys
        self._row = {step: row for row, step in enumerate(self.steps)}
        self._scalars: list[tuple[int, int, float | str]] = []
        self._packed: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}

    def take_facts(self, rows: Iterable[tuple[int, float, int, str, str]]) -> None:
        """Step, time, whether it was applied, context and events, as they are stored."""
        for step, time, applied, context, events in rows:
            self.facts[step] = {"time": time, "applied": bool(applied), **json.loads(context), "events": events}

    def take_scalars(self, rows: Iterable[tuple[int, int, float | str]]) -> None:
        """Step, number of the key, and value, as they are stored."""
        self._scalars += rows

    def take_rows(self, rows: Iterable[tuple[int, str, TableLayout, bytes]]) -> None:
        """Step, source, layout and packed statistics, as they are stored; all those of a step at once."""
        found: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}
        for step, source, layout, data in rows:
            found.setdefault(source, {})[step] = (layout, data)
        for source, of_steps in found.items():
            known = self._packed.setdefault(source, {})
            for step, (layout, data) in of_steps.items():
                known[step] = _part_of(*found[layout.same_as][step], layout.names) if layout.same_as else (layout, data)

    def is_like(self, other: Window, source: str) -> bool:
        """Whether all that is stored of the tensors of ``source`` is the same byte for byte, as in runs that do the same."""
        own, theirs = self._packed.get(source, {}), other._packed.get(source, {})
        return own == theirs and not self._own(source) and not other._own(source)

    @property
    def sources(self) -> list[str]:
        """The sources of tensors, and of heads of attention, of which anything is known, in the order of :data:`LAYER_SOURCES`."""
        custom = {key.source for key in self._scalar_sheet.keys if is_of_layer(key)}
        return [source for source in LAYER_SOURCES if source in self._packed or source in custom]

    def sheet(self, source: str) -> ValueMatrix:
        """All metrics of a source, built-in and other ones; key by key what ``Run.series`` has, and the numbers of elements."""
        own, statistics = self._own(source), self._statistics(source)
        return statistics.overlaid(self._scalar_sheet.columns(own)) if own else statistics

    def _own(self, source: str) -> list[int]:
        return [column for column, key in enumerate(self._scalar_sheet.keys) if key.source == source and is_of_layer(key)]

    @cached_property
    def others(self) -> ValueMatrix:
        """What is of no layer: values of the whole model, and what was logged by hand."""
        return self._scalar_sheet.columns([c for c, key in enumerate(self._scalar_sheet.keys) if not is_of_layer(key)])

    @cached_property
    def _scalar_sheet(self) -> ValueMatrix:
        numbers = sorted({key for _, key, _ in self._scalars})
        place = {key: column for column, key in enumerate(numbers)}
        values, there = self._empty(len(numbers))
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
        values, there = self._empty(len(metrics) + bool(groups), len(names))
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

    def _empty(self, *columns: int) -> tuple[Tensor, Tensor]:
        shape = (len(self.steps), *columns)
        return (
            torch.full(shape, torch.nan, dtype=torch.float64, device="cpu"),
            torch.zeros(shape, dtype=torch.bool, device="cpu"),
        )


@lru_cache(maxsize=256)
def _keys(source: str, names: tuple[str, ...], metrics: tuple[str, ...]) -> tuple[Key, ...]:
    return tuple(Key(source, name, metric) for metric in metrics for name in names)


def is_of_layer(key: Key) -> bool:
    """Whether it is a metric of a tensor, or of a head of attention, and not of the whole model."""
    return key.source in LAYER_SOURCES and bool(key.name)


def _unpacked(layout: TableLayout, blobs: Sequence[bytes]) -> Tensor:
    """The rows of several steps, one after the other; columns stand together, since that is how views read them."""
    rows = unpack_steps(b"".join(blobs), len(blobs), len(layout.names), layout.columns, layout.counts)
    return rows.reshape(-1, WIDTH).t().contiguous().t()


def _part_of(layout: TableLayout, data: bytes, names: Sequence[str]) -> tuple[TableLayout, bytes]:
    """Of these tensors only."""
    kept = set(names)
    if kept.issuperset(layout.names):
        return layout, data
    rows = [row for row, name in enumerate(layout.names) if name in kept]
    width = len(data) // len(layout.names)
    counts = b"".join(layout.counts[8 * row : 8 * row + 8] for row in rows)
    part = layout._replace(names=tuple(layout.names[row] for row in rows), counts=counts)
    return part, b"".join(data[width * row : width * (row + 1)] for row in rows)


def _padded(values: Tensor, columns: int, fill: float) -> Tensor:
    return torch.cat([values, values.new_full((len(values), columns), fill)], dim=1)
