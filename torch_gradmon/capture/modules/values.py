"""Values of modules' inputs, outputs and their gradients, merged over calls and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.metric import Metric
from ...core.moments import Column
from ...statistics.tensor_access import is_plain, refusal
from ...step.buffer import StepBuffer
from ..measurer import Measurer
from ..metric_functions import unscaled, untouched_rng
from .device_rows import DeviceRows
from .host_rows import HostRows
from .lookup import MetricLookup, RequestedMetrics
from .structure import rest_of, tensors_of
from .unit_metrics import DeadUnitTracker


class _Item(NamedTuple):
    """A tensor, its metrics, and the path of its values; ``plain`` is that path without the number of the call."""

    asked: RequestedMetrics
    name: str
    plain: str
    path: str
    tensor: Tensor
    other: Tensor | None = None


class ModuleValues:
    """Measures what the metrics of modules request, one step after the other. Tensors are not kept; small ones are copied.

    Args:
        measurer: measures.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._lookup = MetricLookup()
        #: Returns a function that computes the built-in values of this step's tables, see :meth:`MetricLookup.evaluator`.
        self.evaluator = self._lookup.evaluator
        self._units = DeadUnitTracker()
        self._rows = HostRows(measurer.built_in)
        self._device_rows: DeviceRows | None = None

    def begin(
        self, buffer: StepBuffer, metrics: tuple[Metric, ...], modules: Mapping[str, Callable[[], nn.Module | None]]
    ) -> None:
        """Start a step with the metrics due in it; ``modules`` by name."""
        self._buffer = buffer
        self._rows.begin(buffer)
        self._device_rows = None  # an interrupt at the end of the last step may have left some
        self._units.clear()
        self._lookup.begin(metrics, modules)

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        if self._buffer is not None:
            self.flush()
            self._units.end_step(self._buffer)
        self._buffer = None

    def discard(self) -> None:
        """Drop what was measured in this step and is not stored yet. Allocates nothing large, since memory may have run out."""
        assert self._buffer is not None
        self._rows.begin(self._buffer)
        self._device_rows = None
        self._units.discard()

    def forget(self, sources: tuple[str, ...], reason: str) -> None:
        """Drop what was measured of ``sources`` in this step, for ``reason``."""
        assert self._buffer is not None
        self.flush()
        for source in sources:
            self._buffer.clear(source)
            self._buffer.absent[source, ""] = reason

    def adopt(self, name: str, path: str, columns: frozenset[Column]) -> None:
        """The row of ``path``, a tensor in the output of module ``name``, was written by a graph, with these columns only."""
        self._lookup.owner[n.ACTIVATION, path] = name, False
        self._lookup.traced[n.ACTIVATION, path] = columns

    def wants_views(self, name: str) -> bool:
        """Whether views of the statistics of this module's output are requested in this step, of all its calls together."""
        asked = self._lookup.requested(n.ACTIVATION, name) if name in self._lookup.modules else ()
        return any(each.views and not each.split for each in asked)

    def wants(self, source: str, name: str) -> bool:
        """Whether anything is requested of this source of this module in this step."""
        return bool(self._lookup.requested(source, name))

    def measure(
        self, source: str, name: str, value: Any, call: int, path: str | None = None, inverse_scale: Tensor | None = None
    ) -> None:
        """Measure ``value``, a tensor or a container of tensors, that the module took or returned in its ``call``-th call, if anything is
        requested of it.

        Args:
            source, name: determine the metrics.
            value: measured under ``path``, by default the name.
            call: negative if unknown.
            inverse_scale: factor to apply first.
        """
        assert self._buffer is not None
        asked = self._lookup.requested(source, name)
        if not asked:
            return
        if (
            path is None
            and inverse_scale is None
            and isinstance(value, Tensor)
            and self._measured_quickly(asked, source, name, value)
        ):
            return
        items = list(self._items(source, name, value, call, path))
        if not items and (source, name) not in self._buffer.absent:
            what = "output" if source == n.ACTIVATION else "value"
            reason = f"its {what}, a {type(value).__name__}, holds no tensor of real numbers"
            self._buffer.absent[source, name] = reason
        self.measure_items(source, items, inverse_scale)

    def measure_pairs(self, name: str, value: Any, call: int, other_of: Callable[[str], Tensor | str]) -> None:
        """Measure the difference of each tensor in ``value`` to ``other_of(path)``, or store the reason that it returns."""
        assert self._buffer is not None
        source, items = n.ACTIVATION_DIFFERENCE, []
        found: dict[str, Tensor | str] = {}
        for item in self._items(source, name, value, call):
            if item.plain not in found:  # fetched once, even for two keys
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
        """Measure tensors that are not a module's output, each under its own name."""
        items: list[_Item] = []
        for name, tensor in tensors.items():
            of = name.rpartition(".")[0]
            items += self._items(n.ACTIVATION, of + rest_of(name, of, self._lookup.modules), tensor, 0)
        self.measure_items(n.ACTIVATION, items)

    def _items(self, source: str, name: str, value: Any, call: int, path: str | None = None) -> Iterator[_Item]:
        """The measurable tensors inside, once per key."""
        assert self._buffer is not None
        asked = self._lookup.requested(source, name)
        for plain, tensor in tensors_of(value, path or name) if asked else ():
            reason = refusal(tensor)
            if reason is None and not (tensor.is_floating_point() or tensor.is_complex()):
                reason = f"a tensor of dtype {tensor.dtype}, which is not an activation"
            if reason is not None:
                self._buffer.absent[source, plain] = reason
                continue
            for each in asked:
                if each.split and call < 0:
                    self._buffer.absent[source, name] = "in a recomputation the number of the call is unknown"
                    continue
                rest = rest_of(plain, name, self._lookup.modules)
                place = f"{name}@{call}{rest}" if each.split else name + rest
                self._lookup.owner[source, place] = name, each.split
                yield _Item(each, name, plain, place, tensor.detach())

    def measure_items(self, source: str, items: Sequence[_Item], inverse_scale: Tensor | None = None) -> None:
        """Measure the items, batched by device; ``inverse_scale`` is applied to gradients first."""
        assert self._buffer is not None
        groups: dict[torch.device, list[_Item]] = {}
        for item in items:
            if not item.asked.views:
                continue
            columns, tensor = item.asked.columns, item.tensor
            is_kept = item.other is None and (
                self._rows.measure(source, item.path, columns, tensor, inverse_scale)
                or self._measured_together(source, item, inverse_scale)
            )
            if not is_kept:
                groups.setdefault(item.tensor.device, []).append(item)
        for device, members in groups.items():
            columns = members[0].asked.columns.union(*(item.asked.columns for item in members[1:]))
            scale = None if inverse_scale is None else inverse_scale.to(device)
            others = [item.other for item in members if item.other is not None] or None
            rows = self._measurer.built_in.measure([item.tensor for item in members], columns, scale, others)
            paths = [item.path for item in members]
            if self._rows:  # keeps the order of the calls
                self._rows.append(source, paths, columns, rows)
            else:
                self._buffer.merge_rows(source, paths, rows, columns)
        for item in items:
            if item.asked.others:
                self._measure_others(source, item, inverse_scale)

    def _measured_together(self, source: str, item: _Item, inverse_scale: Tensor | None) -> bool:
        """Whether the tensor is on an accelerator, not too large, and will be measured with others."""
        if item.tensor.is_cpu:
            return False
        if self._device_rows is None:
            assert self._buffer is not None
            self._device_rows = DeviceRows(self._measurer.built_in, self._buffer, self._measurer.complaints)
        return self._device_rows.measure(source, item.path, item.asked.columns, item.tensor, inverse_scale)

    def flush(self) -> None:
        """Store in the buffer what was measured so far."""
        self._rows.flush()
        if self._device_rows is not None:
            self._device_rows.flush()

    def _measured_quickly(self, asked: tuple[RequestedMetrics, ...], source: str, name: str, tensor: Tensor) -> bool:
        """A fast path with few calls for the usual case: one tensor, and only views of its statistics.

        Between two large matrix products a Python call costs ten times as much as elsewhere.
        """
        if len(asked) != 1 or asked[0].split or asked[0].others or not is_plain(tensor):
            return False
        self._lookup.owner[source, name] = name, False
        return self._rows.measure(source, name, asked[0].columns, tensor)

    def _measure_others(self, source: str, item: _Item, inverse_scale: Tensor | None) -> None:
        """Measure what is not a view of the statistics."""
        assert self._buffer is not None
        for metric, reason in item.asked.reasons.items():
            self._buffer.absent[source, f"{item.path}/{metric}"] = reason
        if item.asked.dead:
            module = self._lookup.modules.get(item.name)
            self._units.see(item.path, module, item.tensor, self._measurer.built_in.eps)
        functions = item.asked.functions
        if item.tensor.numel() == 0 and (own := [metric for metric in functions if metric.built_in]):
            functions = tuple(metric for metric in functions if not metric.built_in)
            for left_out in own:
                self._buffer.absent.setdefault((source, f"{item.path}/{left_out.name}"), "it has no elements")
        if functions:
            tensor = item.tensor if inverse_scale is None else unscaled(item.tensor, inverse_scale)
            inputs = [tensor] if item.other is None else [tensor, item.other]
            with nullcontext() if all(metric.built_in for metric in functions) else untouched_rng():
                self._measurer.functions.run(self._buffer, source, item.path, functions, inputs, merging=True)
