"""Read a run directory, of a run that has ended, is still running, or was killed: its steps, and their values as matrices."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import keys as n
from ..core import validation as check
from ..core.errors import display, nearest
from ..core.keys import ATTENTION_SOURCES, TENSOR_SOURCES, Key, format_key, parse_key
from ..core.moments import ALWAYS, VIEWS, WIDTH, Column, merge_by_group
from ..core.records import (
    ModelOrder,
    SpikeEvent,
    StatsTable,
    StepRecord,
    TrainedPart,
    before_schedule,
    model_text,
    trained_parts,
)
from ..step.plan import evaluate_view, value_in
from .format import TableLayout
from .index import RunIndex, opening
from .liveness import RunStatus, status_in

#: Rows read at a time, in bytes and in steps.
_AT_ONCE, _STEPS = 4 << 20, 200
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
    """Of ascending steps those from ``first`` to ``last``, both included; None for no bound. TypeError or ValueError for no step number."""
    for name, value in (("first", first), ("last", last)):
        if value is not None:
            check.step_number(name, value)
    return list(steps[bisect_left(steps, first or 0) : None if last is None else bisect_right(steps, last)])


class RunReader(RunIndex):
    """All that is stored of a run; what users see of it is :class:`torch_gradmon.Run`. Raises KeyError for a step that it does not have."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a run directory, got {display(path)}")
        self.path = Path(path)
        with opening(path) as directory:
            super().__init__(directory)

    @property
    def status(self) -> RunStatus:
        return status_in(self, self.path)

    @property
    def model_text(self) -> str:
        """The model in one line: its class, elements, dtypes, and the kinds of modules that it has most of."""
        meta = self.meta
        return model_text(meta.get("model", "unknown"), meta.get("parameters", {}), meta.get("kinds", {}))

    @property
    def trained_parts(self) -> list[TrainedPart]:
        """What trained when optimizers were attached last: each of their groups, frozen parameters, and those in no optimizer.

        Learning rates are those before a schedule.
        """
        meta = self.meta
        if "optimizers" not in meta:
            return []
        groups = [{**group, "settings": before_schedule(group["settings"])} for group in meta["optimizers"]]
        return list(trained_parts(meta.get("parameters", {}), groups, meta.get("frozen", ())))

    @property
    def sources(self) -> list[str]:
        there = {layout.source for layout in self.layouts()}
        return [source for source in TENSOR_SOURCES if source in there]

    def tensors(self, source: str) -> list[str]:
        return self.in_model_order(source, self._measured(source))

    def tensors_as_measured(self, source: str) -> list[str]:
        """The tensors in the order of measurement: outputs in the order of the calls."""
        return list(dict.fromkeys(name for names in sorted(self._measured(source), key=len, reverse=True) for name in names))

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``; see :class:`torch_gradmon.core.records.ModelOrder`."""
        return ModelOrder(self.meta.get("parameters", ()), self.meta.get("kinds", ())).sorted(source, measured)

    def _measured(self, source: str) -> list[tuple[str, ...]]:
        return [layout.names for layout in self.layouts() if layout.source == source]

    @property
    def scalars(self) -> list[Key]:
        """The keys of all values that are not built-in statistics of tensors: of the whole model, custom metrics, logged values."""
        return self.stored_keys()

    @property
    def events(self) -> list[SpikeEvent]:
        return [event for step in self.with_events() for event in self.read(step).events]

    def context(self, step: int) -> Mapping[str, Any]:
        """Learning rates, loss scale and tags of a step, and whether it was applied."""
        record = self._read(step)
        return {"time": record.time, "applied": record.applied, **record.context}

    def metrics(self, step: int) -> dict[str, float]:
        """All scalars of a step: whole-model values, custom metrics, logged values."""
        return {format_key(key): value for key, value in self._read(step).values.items()}

    def value(self, signal: str, step: int) -> float | None:
        """The value of a key in a step, or of a whole-model value by its name; None if there is none."""
        metrics, key = self.metrics(step), parse_key(signal)
        found = metrics.get(signal, metrics.get(f"{n.SUMMARY}/{signal}"))
        return value_in(self.table(key.source, step), key) if found is None and key.source in TENSOR_SOURCES else found

    def table(self, source: str, step: int) -> StatsTable | None:
        """The statistics of ``source`` in a step, or None if they were not measured."""
        self.check_step(step)
        found = self.rows(step, source).get(source)
        return None if found is None else found[0].table(found[1])

    def records(self, since: int | None = None, wanted: Callable[[Key], bool] | None = None) -> Iterator[StepRecord]:
        """The steps from ``since`` on, ascending, with values of the keys that are ``wanted``, and no statistics: see :meth:`stacks`."""
        chosen = None if wanted is None else set(filter(wanted, self._keys))
        for step in between(self.steps, since, None):
            yield self.read(step, chosen)

    def stacks(self, source: str, since: int | None = None, among: Iterable[int] | None = None) -> Iterator[StatsSeries]:
        """The statistics of ``source`` of the steps from ``since`` on that have them, or of ``among``, ascending, some hundred at once."""
        wanted = between(self.steps_with(source), since, None) if among is None else among
        stored = ((step, self.rows(step, source).get(source)) for step in wanted)
        parts = ((step, *found) for step, found in stored if found is not None)  # else rows of other sources alone
        for layout, alike in groupby(parts, key=itemgetter(1)):
            for first in alike:
                most = min(_STEPS, 1 + _AT_ONCE // max(len(first[2]), 1))
                steps, _, blobs = zip(first, *islice(alike, most - 1), strict=True)  # noqa: B031 (the rest of them)
                yield StatsSeries(steps, layout.names, layout.rows(blobs), layout.columns)

    def window(self, steps: Iterable[int]) -> Window:
        """All values of some steps, as matrices; steps that the run does not have are left out."""
        return Window(self, sorted(step for step in set(steps) if step in self))

    def present(self, steps: Iterable[int]) -> set[Key]:
        """The tensors with statistics in any of these steps, as keys without a metric, and the keys of other values; reads no step."""
        steps = list(steps)
        tensors = {Key(layout.source, name, "") for layout in self.layouts(steps) for name in layout.names}
        return tensors.union(self.stored_keys(steps))

    def check_step(self, step: int) -> None:
        if step not in self:
            raise KeyError(f"step {step} is not in the run; its {len(self.steps)} monitored steps are {self._span()}")

    def _read(self, step: int) -> StepRecord:
        self.check_step(step)
        return self.read(step)

    def rng_state(self, step: int) -> dict[str, torch.Tensor]:
        """The states of torch's random generators at the beginning of a step with a spike, by device, for ``torch.set_rng_state``; KeyError
        without a spike, or for one of NaN or Inf after eight others in a row.
        """
        self.check_step(step)
        states = {device: data for device, _, data in self._parts(step) if isinstance(device, str)}
        if not states:
            raise KeyError(
                f"no random state is kept of step {step}: only steps with a spike have one, of NaN or Inf the first 8 in a row"
            )
        return {device: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for device, state in states.items()}

    def series(self, key: str) -> dict[int, float]:
        """Value by step for one key; KeyError if it is none of :meth:`keys`."""
        wanted = parse_key(key)
        # a logged value may have a name that looks like a key
        found = self.stored(wanted) or self.stored(Key("", key, ""))
        if wanted.metric in VIEWS:  # a value stored in some steps may follow from statistics in others
            found = dict(sorted({**self._from_statistics(wanted), **found}.items()))
        if not found and key not in (known := self.keys()):
            raise KeyError(f"the run has no values for {key!r}{nearest(key, known)}")
        return found

    def _from_statistics(self, key: Key) -> dict[int, float]:
        found: dict[int, float] = {}
        if any(layout.source == key.source and key.name in layout.names for layout in self.layouts()):
            for stack in self.stacks(key.source):
                if key.name in stack.names and stack.has(key.metric):
                    there, values = evaluate_view(VIEWS[key.metric], stack.of((key.name,)).rows[:, 0])
                    found.update((step, value) for step, known, value in zip(stack.steps, there, values, strict=True) if known)
        return found

    def keys(self) -> list[str]:
        """Every key that :meth:`series` accepts: whole-model and logged values, then tensors in model order."""
        scalars, layouts = self.scalars, self.layouts()
        keys = [key for key in scalars if not is_of_layer(key)]
        for source in LAYER_SOURCES:
            own = [key for key in scalars if key.source == source and is_of_layer(key)]
            keys += self._keys_of(source, own, [layout for layout in layouts if layout.source == source])
        return list(dict.fromkeys(map(format_key, keys)))

    def _keys_of(self, source: str, own: Sequence[Key], layouts: Sequence[TableLayout]) -> Iterator[Key]:
        """The keys of one source; ``own`` are those of stored values."""
        metrics: dict[str, dict[str, None]] = {}
        for layout in layouts:
            views = dict.fromkeys(metric for metric, view in VIEWS.items() if view.columns <= layout.columns | ALWAYS)
            for name in layout.names:
                metrics.setdefault(name, {}).update(views)
        for key in own:
            metrics.setdefault(key.name, {})[key.metric] = None
        orders = [tuple(key.name for key in own), *(layout.names for layout in layouts)]
        return (Key(source, name, metric) for name in self.in_model_order(source, orders) for metric in metrics[name])

    def _span(self) -> str:
        steps = self.steps
        return f"{steps[0]} to {steps[-1]}" if steps else "none"

    def __repr__(self) -> str:
        damage = f", {len(found)} damaged part{'s' * (len(found) != 1)}" if (found := self.damage) else ""
        return f"Run({len(self.steps)} steps: {self._span()}, {len(self.events)} events{damage})"


# --- values of several steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatsSeries:
    """Like :class:`torch_gradmon.core.records.StatsTable`, for many steps with the same tensors and columns."""

    steps: tuple[int, ...]  # ascending
    names: tuple[str, ...]
    rows: Tensor  # float64 [steps, tensors, 8] on the host
    columns: frozenset[Column]  # which were measured

    def has(self, metric: str) -> bool:
        """Whether the measured columns suffice for a built-in metric."""
        return VIEWS[metric].columns <= self.columns | ALWAYS

    def values(self, metric: str) -> Tensor:
        """A built-in metric, float64 ``[steps, tensors]``; NaN if it was not measured or is undefined for a tensor."""
        if not self.has(metric):
            return torch.full(self.rows.shape[:2], torch.nan, dtype=torch.float64, device="cpu")
        view, flat = VIEWS[metric], self.rows.reshape(-1, WIDTH)
        return torch.where(view.defined(flat), view.compute(flat), torch.nan).reshape(self.rows.shape[:2])

    def of(self, names: tuple[str, ...]) -> StatsSeries:
        """Only these tensors, which must all be present."""
        if names == self.names:
            return self
        place = {name: number for number, name in enumerate(self.names)}
        return StatsSeries(self.steps, names, self.rows[:, [place[name] for name in names]], self.columns)

    def at(self, steps: Sequence[int]) -> StatsSeries:
        """Only these steps, which must all be present."""
        places = [bisect_left(self.steps, step) for step in steps]
        return StatsSeries(tuple(steps), self.names, self.rows[places], self.columns)

    def merged(self, names: tuple[str, ...], groups: list[int]) -> StatsSeries:
        """Sum tensors into the groups ``names``; ``groups`` has the group of each tensor. Exact, since rows are additive."""
        count = len(self.steps)
        offsets = len(names) * torch.arange(count, device="cpu").unsqueeze(1)
        index = torch.tensor(groups, dtype=torch.int64, device="cpu") + offsets
        rows = merge_by_group(self.rows.reshape(-1, WIDTH), index.flatten(), count * len(names))
        return StatsSeries(self.steps, names, rows.reshape(count, len(names), WIDTH), self.columns)


#: A matrix of steps by names may have so many cells, or so many for each value that is stored: a run of a few bytes can have one step with
#: thousands of tensors, and thousands of steps with another one.
_CELLS, _PER_VALUE = 1 << 22, 16


def most_cells(values: int) -> int:
    """How many cells a matrix of so many values may have."""
    return max(_CELLS, _PER_VALUE * values)


def fitting(values: Mapping[str, int], steps: int) -> tuple[str, ...]:
    """The columns of a matrix of so many steps, in the order of ``values``, which has how many values each has.

    These are all, unless nearly all cells were empty and there are more than :func:`most_cells`; then those with the most values.
    """
    most = most_cells(sum(values.values())) // max(steps, 1)
    if len(values) <= most:
        return tuple(values)
    kept = set(sorted(values, key=lambda name: -values[name])[:most])
    return tuple(name for name in values if name in kept)


@dataclass(frozen=True)
class ValueMatrix:
    keys: tuple[Key, ...]
    values: Tensor  # float64 [steps, keys]; NaN where absent
    there: Tensor  # bool [steps, keys]; which values are present. A present value may be NaN

    def columns(self, chosen: Sequence[int]) -> ValueMatrix:
        if tuple(chosen) == tuple(range(len(self.keys))):
            return self
        return ValueMatrix(tuple(self.keys[column] for column in chosen), self.values[:, chosen], self.there[:, chosen])

    def with_absent(self, keys: Sequence[Key]) -> ValueMatrix:
        """With empty columns for ``keys`` appended."""
        values, there = (
            torch.cat([known, empty], dim=1)
            for known, empty in zip((self.values, self.there), empty_matrix(len(self.values), len(keys)), strict=True)
        )
        return ValueMatrix((*self.keys, *keys), values, there)


def empty_matrix(*shape: int) -> tuple[Tensor, Tensor]:
    """Absent values of a shape: NaN, float64, and which of them are present: none."""
    return torch.full(shape, torch.nan, dtype=torch.float64, device="cpu"), torch.zeros(shape, dtype=torch.bool, device="cpu")


class Window:
    """All values of some steps that the index knows, ascending."""

    def __init__(self, index: RunIndex, steps: Sequence[int]) -> None:
        self.steps = tuple(steps)
        self._keys = index.stored_keys(self.steps)
        self._row = {step: row for row, step in enumerate(self.steps)}
        self.records = {step: index.read(step) for step in self.steps}  # without statistics
        self._packed: dict[str, dict[int, tuple[TableLayout, bytes]]] = {}
        for step in self.steps:
            for source, packed in index.rows(step).items():
                if source in LAYER_SOURCES:
                    self._packed.setdefault(source, {})[step] = packed

    def tables(self, step: int) -> dict[str, StatsTable]:
        packed = ((source, self._packed.get(source, {}).get(step)) for source in TENSOR_SOURCES)
        return {source: found[0].table(found[1]) for source, found in packed if found is not None}

    def is_like(self, other: Window, source: str) -> bool:
        """Whether the stored statistics of ``source`` are equal byte for byte."""
        own, theirs = self._packed.get(source, {}), other._packed.get(source, {})
        return own == theirs and source not in self._grouped and source not in other._grouped

    @property
    def sources(self) -> list[str]:
        """The sources of tensors and attention heads with any value, in the order of :data:`LAYER_SOURCES`."""
        return [source for source in LAYER_SOURCES if source in self._packed or source in self._grouped]

    @cached_property
    def others(self) -> ValueMatrix:
        return self.sheet(_OTHERS)

    @cached_property
    def _grouped(self) -> dict[str, list[tuple[int, Key, float]]]:
        """The stored values of each source of layers, and all others: row of the step, key, and value."""
        group = {key: key.source if is_of_layer(key) else _OTHERS for key in self._keys}
        grouped: dict[str, list[tuple[int, Key, float]]] = {}
        for row, record in enumerate(self.records.values()):
            for key, value in record.values.items():
                grouped.setdefault(group[key], []).append((row, key, value))
        return grouped

    def sheet(self, source: str) -> ValueMatrix:
        """All metrics of a source, as ``RunReader.series`` returns them by key, and the numbers of elements.

        Only what it has is in the matrix: the steps by the keys of all could be far more than these values.
        """
        groups: dict[TableLayout, list[tuple[int, bytes]]] = {}
        for step, (layout, data) in sorted(self._packed.get(source, {}).items()):
            groups.setdefault(layout, []).append((self._row[step], data))
        names = {name: at for at, name in enumerate(dict.fromkeys(name for layout in groups for name in layout.names))}
        measured = frozenset(column for layout in groups for column in layout.columns) | ALWAYS
        metrics = (*(metric for metric, view in VIEWS.items() if view.columns <= measured), COUNT) if groups else ()
        statistics, cells = _keys(source, tuple(names), metrics), self._grouped.get(source, [])
        of_cells = {key for _, key, _ in cells}
        stored = [key for key in self._keys if key in of_cells]
        place = {key: column for column, key in enumerate(dict.fromkeys((*statistics, *stored)))}
        values, there = empty_matrix(len(self.steps), len(place))
        for layout, of_steps in groups.items():
            shape = len(self.steps), len(metrics), len(names)
            found, known = (each[:, : len(statistics)].view(shape) for each in (values, there))
            at = torch.tensor([row for row, _ in of_steps], device="cpu").unsqueeze(1)
            columns = torch.tensor([names[name] for name in layout.names], dtype=torch.int64, device="cpu")
            # column by column, since views read columns
            rows = layout.rows([data for _, data in of_steps]).reshape(-1, WIDTH).t().contiguous().t()
            for number, metric in enumerate(metrics[:-1]):
                view = VIEWS[metric]
                if view.columns <= layout.columns | ALWAYS:
                    defined = view.defined(rows)
                    found[at, number, columns] = torch.where(defined, view.compute(rows), torch.nan).reshape(len(of_steps), -1)
                    known[at, number, columns] = defined.reshape(len(of_steps), -1)
            found[at, -1, columns] = rows[:, Column.COUNT].reshape(len(of_steps), -1)
            known[at, -1, columns] = True
        at_cells = [row for row, _, _ in cells], [place[key] for _, key, _ in cells]
        values[at_cells] = torch.tensor([value for _, _, value in cells], dtype=torch.float64, device="cpu")
        there[at_cells] = True
        return ValueMatrix(tuple(place), values, there)


@lru_cache(maxsize=256)
def _keys(source: str, names: tuple[str, ...], metrics: tuple[str, ...]) -> tuple[Key, ...]:
    return tuple(Key(source, name, metric) for metric in metrics for name in names)


def is_of_layer(key: Key) -> bool:
    """Whether it is a metric of a tensor or an attention head, not of the whole model."""
    return key.source in LAYER_SOURCES and bool(key.name)
