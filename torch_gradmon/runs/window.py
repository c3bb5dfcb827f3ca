"""Some steps of a run, with values as matrices of steps by keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import validation as check
from ..core.keys import ATTENTION_SOURCES, TENSOR_SOURCES, Key
from ..core.moments import ALWAYS, VIEWS, WIDTH, Column
from ..core.records import SpikeEvent, StatsTable
from .index import RunIndex
from .packing import TableLayout
from .value_matrix import ValueMatrix, empty_matrix

#: Sources whose keys name a tensor, or an attention module and its heads.
LAYER_SOURCES = (*TENSOR_SOURCES, *ATTENTION_SOURCES.values())
#: Stands for all values that are of no layer.
_OTHERS = ""
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


class Window:
    """All values of some steps.

    Args:
        index: of the run.
        steps: some that it knows, ascending.

    Attributes:
        facts: by step what :meth:`torch_gradmon.runs.reader.RunReader.context` returns.
        spikes: likewise its spikes.
    """

    def __init__(self, index: RunIndex, steps: Sequence[int]) -> None:
        self.steps = tuple(steps)
        self._keys = list(index.keys)
        self._row = {step: row for row, step in enumerate(self.steps)}
        self.facts: dict[int, dict[str, Any]] = {}
        self.spikes: dict[int, tuple[SpikeEvent, ...]] = {}
        self._numbers: dict[int, dict[int, float]] = {}  # by step and number of the key
        self._packed: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}
        for step in self.steps:
            found = index.read(step)
            self.facts[step] = found.facts()
            self.spikes[step] = found.spikes()
            self._numbers[step] = found.values
            rows = index.rows(step)
            for source, (layout, data) in rows.items():
                if source not in LAYER_SOURCES:
                    continue
                if layout.same_as:
                    if layout.same_as not in rows:
                        continue
                    stored, data = rows[layout.same_as]
                    layout, data = stored.part(data, layout.names)
                self._packed.setdefault(source, {})[step] = layout, data

    def scalars(self, step: int) -> dict[Key, float]:
        """The stored values of one step."""
        return {self._keys[number]: value for number, value in self._numbers.get(step, {}).items()}

    def table(self, source: str, step: int) -> StatsTable | None:
        """The statistics of a source in one step, or None."""
        found = self._packed.get(source, {}).get(step)
        return None if found is None else found[0].table(found[1])

    def is_like(self, other: Window, source: str) -> bool:
        """Whether the stored statistics of ``source`` are equal byte for byte."""
        own, theirs = self._packed.get(source, {}), other._packed.get(source, {})
        return own == theirs and source not in self._grouped and source not in other._grouped

    @property
    def sources(self) -> list[str]:
        """The sources of tensors and attention heads with any value, in the order of :data:`LAYER_SOURCES`."""
        return [source for source in LAYER_SOURCES if source in self._packed or source in self._grouped]

    def sheet(self, source: str) -> ValueMatrix:
        """All metrics of a source, as ``RunReader.series`` returns them by key, and the numbers of elements."""
        statistics = self._statistics(source)
        return statistics.overlaid(self._scalars(source)) if source in self._grouped else statistics

    @cached_property
    def others(self) -> ValueMatrix:
        """Whole-model values and logged values."""
        return self._scalars(_OTHERS)

    @cached_property
    def _grouped(self) -> dict[str, dict[int, dict[int, float]]]:
        """The stored values of each source of layers, and all others: by step and number of the key."""
        group = [key.source if is_of_layer(key) else _OTHERS for key in self._keys]
        grouped: dict[str, dict[int, dict[int, float]]] = {}
        for step, values in self._numbers.items():
            for number, value in values.items():
                grouped.setdefault(group[number], {}).setdefault(step, {})[number] = value
        return grouped

    def _scalars(self, group: str) -> ValueMatrix:
        """The stored values of one group alone: the steps by the keys of all could be far more than these values."""
        by_step = self._grouped.get(group, {})
        numbers = sorted({number for values in by_step.values() for number in values})
        place = {number: column for column, number in enumerate(numbers)}
        values, there = empty_matrix(len(self.steps), len(numbers))
        for step, found in by_step.items():
            if found:
                at = torch.tensor([place[number] for number in found], device="cpu")
                values[self._row[step], at] = torch.tensor(list(found.values()), dtype=torch.float64, device="cpu")
                there[self._row[step], at] = True
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
