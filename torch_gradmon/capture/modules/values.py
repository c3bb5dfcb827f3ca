"""What modules take, return and get back as gradients: measured where it arises, merged over calls and micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.keys import Key
from ...core.metric import Metric
from ...core.moments import ALL_COLUMNS, VIEWS, Column
from ...core.records import StatsTable
from ...statistics.tensor_access import is_plain, refusal
from ...step.buffer import StepBuffer
from ...step.plan import evaluate_view
from ..measurer import Measurer, unscaled, untouched_rng
from .small_tensors import SmallTensorBatch
from .structure import rest_of, tensors_of
from .unit_metrics import DEAD, WINDOW, DeadUnits


@dataclass(frozen=True)
class RequestedMetrics:
    """What is asked of the tensors of one module from one source.

    Attributes:
        columns: the statistics that the views need.
        views: built-ins that are views of them.
        functions: metrics with a function.
        dead: the share of dead units is asked for.
        split: each call of a forward has keys of its own.
        reasons: why a metric does not apply to this module, by name.
    """

    columns: frozenset[Column]
    views: tuple[Metric, ...]
    functions: tuple[Metric, ...]
    dead: bool
    split: bool
    reasons: Mapping[str, str]

    @property
    def others(self) -> bool:
        """Whether anything is asked for besides views."""
        return bool(self.functions or self.dead or self.reasons)


class _Item(NamedTuple):
    """A tensor, what is asked of it, and the path that its values go to; ``plain`` is that path without the number of the call."""

    asked: RequestedMetrics
    name: str
    plain: str
    path: str
    tensor: Tensor
    other: Tensor | None = None


class ModuleValues:
    """Measures for one step after the other what the metrics of modules ask for. Nothing is cloned or kept.

    Args:
        measurer: does the work.

    Attributes:
        traced: source and path of rows that a compiled graph wrote, and which columns; those without a count were not called.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._modules: Mapping[str, weakref.ref[nn.Module]] = {}
        self._asked: dict[tuple[str, str], tuple[RequestedMetrics, ...]] = {}
        self._owner: dict[tuple[str, str], tuple[str, bool]] = {}
        self._dead: dict[str, DeadUnits] = {}
        self._seen_units: set[str] = set()
        # in the order in which they came: numbers of one row, rows that are a tensor already, None for a row that waits in the staging
        self._rows: list[tuple[str, list[str], frozenset[Column], list[float] | Tensor | None]] = []
        self._staging: SmallTensorBatch[frozenset[Column]] = SmallTensorBatch()
        self.traced: dict[tuple[str, str], frozenset[Column]] = {}

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], modules: Mapping[str, weakref.ref[nn.Module]]) -> None:
        """Start a step with the metrics that are due in it; ``modules`` by name."""
        self._buffer = buffer
        self._rows = []  # what is there was left behind by an interrupt while a step ended
        self._staging.drain()
        self._seen_units.clear()
        if metrics != self._metrics or modules is not self._modules:
            self._metrics, self._modules, self._asked = metrics, modules, {}

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        if self._buffer is not None:
            self._measure_staged()
            for path in self._seen_units:
                units = self._dead[path]
                share = units.end_step()
                if share is not None:
                    self._buffer.put_value(Key(n.ACTIVATION, path, "dead"), share)
                else:
                    reason = f"it takes {WINDOW} monitored steps, and {units.steps} were seen"
                    self._buffer.absent[n.ACTIVATION, f"{path}/dead"] = reason
        self._buffer = None
        self._seen_units.clear()

    def forget(self, sources: tuple[str, ...], reason: str) -> None:
        """Drop what was measured of ``sources`` in this step, for this reason."""
        assert self._buffer is not None
        self._measure_staged()
        for source in sources:
            self._buffer.clear(source)
            self._buffer.absent[source, ""] = reason

    def adopt(self, source: str, name: str, path: str, columns: frozenset[Column], why: str) -> None:
        """Rows of ``path`` came from elsewhere, these columns only; ``why`` the rest of what is asked of the module is absent."""
        assert self._buffer is not None
        self._owner[source, path] = name, False
        self.traced[source, path] = columns
        for other in n.MODULE_SOURCES:
            for asked in self._asked_of(other, name):
                there = other == source and not asked.split
                views = [view for view in asked.views if not (there and view.columns <= columns)]
                for metric in [*(m.name for m in (*views, *asked.functions)), *(["dead"] if asked.dead else [])]:
                    self._buffer.absent[other, f"{name}/{metric}"] = why

    def wants(self, source: str, name: str) -> bool:
        """Whether anything is asked of this source of this module in this step."""
        return bool(self._asked_of(source, name))

    def measure(
        self, source: str, name: str, value: Any, call: int, path: str | None = None, inverse_scale: Tensor | None = None
    ) -> None:
        """Measure ``value``, a tensor or a container of tensors, that the module took or returned in its ``call``-th call.

        Args:
            source, name: what to look up the metrics by.
            value: goes under ``path``, by default the name.
            call: negative where it is not known.
            inverse_scale: what to multiply by first.
        """
        assert self._buffer is not None
        if path is None and inverse_scale is None and isinstance(value, Tensor) and self._measured_quickly(source, name, value):
            return
        items = list(self._items(source, name, value, call, path))
        if not items and (source, name) not in self._buffer.absent:
            what = "output" if source == n.ACTIVATION else "value"
            reason = f"its {what}, a {type(value).__name__}, holds no tensor of real numbers"
            self._buffer.absent[source, name] = reason
        self.measure_items(source, items, inverse_scale)

    def measure_pairs(self, name: str, value: Any, call: int, other_of: Callable[[str], Tensor | str]) -> None:
        """Measure the difference of each tensor in ``value`` to what ``other_of`` has for its path, or the reason why not."""
        assert self._buffer is not None
        source, items = n.ACTIVATION_DIFFERENCE, []
        found: dict[str, Tensor | str] = {}
        for item in self._items(source, name, value, call):
            if item.plain not in found:  # taken once, also where two keys are made of it
                found[item.plain] = other_of(item.plain)
            other = found[item.plain]
            if not isinstance(other, str) and other.shape != item.tensor.shape:
                other = f"it has another shape in the reference module, {tuple(other.shape)}"
            if isinstance(other, str):
                self._buffer.absent[source, item.path] = other
            else:
                items.append(item._replace(other=other.to(item.tensor.device)))
        self.measure_items(source, items)

    def named(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure tensors that are no module's output, each under a name of its own."""
        items: list[_Item] = []
        for name, tensor in tensors.items():
            of = name.rpartition(".")[0]
            items += self._items(n.ACTIVATION, of + rest_of(name, of, self._modules), tensor, 0)
        self.measure_items(n.ACTIVATION, items)

    def _items(self, source: str, name: str, value: Any, call: int, path: str | None = None) -> Iterator[_Item]:
        """The measurable tensors inside, once for each key that they have values under."""
        assert self._buffer is not None
        asked = self._asked_of(source, name)
        for plain, tensor in tensors_of(value, path or name) if asked else ():
            reason = refusal(tensor)
            if reason is None and not (tensor.is_floating_point() or tensor.is_complex()):
                reason = f"a tensor of dtype {tensor.dtype}, which is no activation"
            if reason is not None:
                self._buffer.absent[source, plain] = reason
                continue
            for each in asked:
                if each.split and call < 0:
                    self._buffer.absent[source, name] = "in a recomputation it is not known which call this is"
                    continue
                rest = rest_of(plain, name, self._modules)
                place = f"{name}@{call}{rest}" if each.split else name + rest
                self._owner[source, place] = name, each.split
                yield _Item(each, name, plain, place, tensor.detach())

    def measure_items(self, source: str, items: Sequence[_Item], inverse_scale: Tensor | None = None) -> None:
        """Measure them, those of one device together; ``inverse_scale`` is what gradients are multiplied by first."""
        assert self._buffer is not None
        groups: dict[torch.device, list[_Item]] = {}
        for item in items:
            if not item.asked.views:
                continue
            if item.other is not None or not self._put_aside(source, item.path, item.asked.columns, item.tensor, inverse_scale):
                groups.setdefault(item.tensor.device, []).append(item)
        for device, members in groups.items():
            columns = members[0].asked.columns.union(*(item.asked.columns for item in members[1:]))
            scale = None if inverse_scale is None else inverse_scale.to(device)
            others = [item.other for item in members if item.other is not None] or None
            rows = self._measurer.built_in.measure([item.tensor for item in members], columns, scale, others)
            paths = [item.path for item in members]
            if self._rows:  # which came before, and are before them in the order of the calls
                self._rows.append((source, paths, columns, rows))
            else:
                self._buffer.merge_rows(source, paths, rows, columns)
        for item in items:
            if item.asked.others:
                self._measure_others(source, item, inverse_scale)

    def _measured_quickly(self, source: str, name: str, tensor: Tensor) -> bool:
        """The usual case, in few calls, for between two large matrix products each of them costs ten times what it does else:
        one tensor, of which nothing but views of its statistics is asked.
        """
        asked = self._asked_of(source, name)
        if len(asked) != 1 or asked[0].split or asked[0].others or not is_plain(tensor):
            return False
        self._owner[source, name] = name, False
        return self._put_aside(source, name, asked[0].columns, tensor)

    def _put_aside(
        self, source: str, path: str, columns: frozenset[Column], tensor: Tensor, inverse_scale: Tensor | None = None
    ) -> bool:
        """Measure a CPU tensor into plain numbers, or let a small one wait; False where neither can be done."""
        if inverse_scale is not None and not inverse_scale.is_cpu:
            return False
        row = self._measurer.built_in.row_of(tensor, columns, inverse_scale)
        if row is not None:
            self._rows.append((source, [path], columns, row))
            return True
        if not self._staging.takes(tensor):
            return False
        if not self._staging.has_room(tensor):
            self._measure_staged()
        self._staging.put(columns, tensor, inverse_scale)
        self._rows.append((source, [path], columns, None))
        return True

    def _measure_staged(self) -> None:
        """What was measured on the host, and the small tensors that wait, all at once."""
        assert self._buffer is not None
        measured, self._rows = self._rows, []
        if not measured:
            return
        waited: Iterator[list[float]] = iter(())
        together = frozenset[Column]()
        if waiting := self._staging.drain():
            together = together.union(*{of for of, _ in waiting})
            waited = iter(self._measurer.built_in.measure([tensor for _, tensor in waiting], together).tolist())
        single = [row for *_, row in measured if not isinstance(row, Tensor)]
        rows = [next(waited) if row is None else row for row in single]
        table = iter(torch.tensor(rows, dtype=torch.float64, device="cpu").unsqueeze(1))
        for source, paths, columns, own in measured:
            found = own if isinstance(own, Tensor) else next(table)
            self._buffer.merge_rows(source, paths, found, together if own is None else columns)

    def _measure_others(self, source: str, item: _Item, inverse_scale: Tensor | None) -> None:
        """What is no view of the statistics."""
        assert self._buffer is not None
        for metric, reason in item.asked.reasons.items():
            self._buffer.absent[source, f"{item.path}/{metric}"] = reason
        if item.asked.dead:
            units = self._dead.get(item.path)
            if units is None:
                module = self._modules.get(item.name)
                units = self._dead[item.path] = DeadUnits(None if module is None else module())
            units.see(item.tensor, self._measurer.built_in.eps)
            self._seen_units.add(item.path)
        functions = item.asked.functions
        if item.tensor.numel() == 0 and (own := [metric for metric in functions if metric.built_in]):
            functions = tuple(metric for metric in functions if not metric.built_in)
            for left_out in own:
                self._buffer.absent.setdefault((source, f"{item.path}/{left_out.name}"), "it has no elements")
        if functions:
            tensor = item.tensor if inverse_scale is None else unscaled(item.tensor, inverse_scale)
            inputs = [tensor] if item.other is None else [tensor, item.other]
            with untouched_rng():
                self._measurer.functions(self._buffer, source, item.path, functions, inputs, merging=True)

    # --- what is asked for -----------------------------------------------------------------------------------------------------

    def _asked_of(self, source: str, name: str) -> tuple[RequestedMetrics, ...]:
        found = self._asked.get((source, name))
        if found is None:
            metrics = [metric for metric in self._metrics if metric.source == source and metric.matches(name)]
            reference = self._modules.get(name)
            module = None if reference is None else reference()
            halves = [(split, [m for m in metrics if m.split_calls == split]) for split in (False, True)]
            found = tuple(_asked(some, module, split) for split, some in halves if some)
            self._asked[source, name] = found
        return found

    def evaluator(self) -> Callable[[dict[str, StatsTable]], dict[Key, float]]:
        """A function that gives the built-in values of this step's tables, also when the next step has begun.

        It drops rows of modules that were not called.
        """
        asked, owner, traced = self._asked, dict(self._owner), dict(self.traced)

        def evaluate(tables: dict[str, StatsTable]) -> dict[Key, float]:
            values: dict[Key, float] = {}
            for source in n.MODULE_SOURCES:
                if source in tables:
                    table = tables[source] = _called(source, tables[source], traced)
                    places: dict[str, list[int]] = {}
                    for place, path in enumerate(table.names):
                        # where only other ranks have called it, its path tells whose it is
                        name, split = owner.get((source, path)) or (n.owner_of(path, self._modules), "@" in path)
                        columns = traced.get((source, path), ALL_COLUMNS)
                        for each in asked.get((source, name)) or self._asked_of(source, name):
                            for metric in each.views if each.split == split else ():
                                if not metric.columns <= columns:
                                    continue
                                places.setdefault(metric.name, []).append(place)
                    values.update(_evaluated(source, table, places))
            return values

        return evaluate


def _called(source: str, table: StatsTable, traced: Container[tuple[str, str]]) -> StatsTable:
    if not traced:
        return table
    counts = table.rows[:, Column.COUNT].tolist()
    kept = [p for p, name in enumerate(table.names) if counts[p] or (source, name) not in traced]
    return replace(table, names=tuple(table.names[p] for p in kept), rows=table.rows[kept])


def _evaluated(source: str, table: StatsTable, places: Mapping[str, Sequence[int]]) -> Iterator[tuple[Key, float]]:
    for metric, wanted in places.items():
        rows = table.rows if len(wanted) == len(table.names) else table.rows[list(wanted)]
        for place, there, value in zip(wanted, *evaluate_view(VIEWS[metric], rows), strict=True):
            if there:
                yield Key(source, table.names[place], metric), value


def _asked(metrics: Iterable[Metric], module: nn.Module | None, split: bool) -> RequestedMetrics:
    views: list[Metric] = []
    functions: list[Metric] = []
    reasons: dict[str, str] = {}
    dead = False
    for metric in metrics:
        function: Any = metric.function
        if function is None:
            views.append(metric)
        elif function is DEAD:
            dead = True
        elif hasattr(function, "bind"):
            bound = function.bind(module)
            if isinstance(bound, str):
                reasons[metric.name] = bound
            else:
                functions.append(replace(metric, function=bound))
        else:
            functions.append(metric)
    columns = frozenset().union(*(metric.columns for metric in views)) if views else frozenset()
    return RequestedMetrics(columns, tuple(views), tuple(functions), dead, split, reasons)
