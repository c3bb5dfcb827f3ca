"""Outputs of modules in training forwards, measured where they arise and merged over calls and micro-batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..guard import Guard
from ..inventory import Inventory
from ..metric import Metric
from ..modes import unseen
from ..names import ACTIVATION, Key
from ..plan import evaluate_view
from ..record import Table
from ..statistics.moments import VIEWS, Column
from ..statistics.reading import refusal
from ..step import StepBuffer
from .hooks import Handles, ModuleHook
from .measuring import Measurer, untouched_rng

_DEPTH = 4  # of nested containers that are looked into


@dataclasses.dataclass(frozen=True)
class _Matched:
    columns: frozenset[Column]
    views: tuple[Metric, ...]
    functions: tuple[Metric, ...]

    def __bool__(self) -> bool:
        return bool(self.views or self.functions)


class ActivationCapture:
    """Forward hooks on the modules that a metric matches; no other module has one, and nothing is cloned or kept.

    Evaluation passes (the root module in eval mode, or without gradients) and recomputation in activation checkpointing are no
    training activations.
    """

    def __init__(self, measurer: Measurer, guard: Guard) -> None:
        self._measurer, self._guard = measurer, guard
        self._handles = Handles()
        self._buffer: StepBuffer | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._known: dict[str, _Matched] = {}
        self._owner: dict[str, str] = {}
        self._root_trains: bool | None = None
        self._installed: tuple[int, bool] | None = None
        self.paused = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...]) -> None:
        """Start a step with the metrics that are due in it."""
        self._buffer = buffer
        if metrics != self._metrics:
            self._metrics, self._known = metrics, {}

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        self._buffer = None

    def install(self, root: nn.Module, inventory: Inventory, metrics: Sequence[Metric], version: int, root_too: bool) -> None:
        """Hang hooks on the modules that any of ``metrics`` matches; once for each ``version`` of the plan.

        ``root_too``: on the root in any case, because modules log values of their own.
        """
        if (version, bool(metrics)) == self._installed:
            return
        self.remove()
        self._installed = version, bool(metrics)
        wanted = [
            (name, module)
            for name, reference in inventory.modules.items()
            if (module := reference()) is not None and any(metric.matches(name) for metric in metrics)
        ]
        if not wanted and not root_too:
            return
        self._handles.add(root.register_forward_pre_hook(ModuleHook(self._root_began)))
        for name, module in wanted:
            self._handles.add(module.register_forward_hook(ModuleHook(self._module_returned, name)))
        self._handles.add(root.register_forward_hook(ModuleHook(self._root_ended), always_call=True))

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        self._handles.remove()
        self._root_trains, self._installed = None, None

    def _root_began(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._root_trains = module.training and torch.is_grad_enabled()

    def training_began(self) -> None:
        """The root's training forward began; its own hook here may have been hung too late to see it."""
        if self._handles:
            self._root_trains = True

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside recomputation, which happens while a backward pass runs."""
        return self._root_trains is not False and torch._C._current_graph_task_id() == -1

    def _root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._root_trains = None

    def _module_returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # inside a backward pass the forward is a recomputation; grad mode cannot tell, since checkpointing switches it
        if self._buffer is None or self.paused or torch._C._current_graph_task_id() != -1:
            return
        trains = self._root_trains if self._root_trains is not None else module.training and torch.is_grad_enabled()
        if trains:
            start = time.perf_counter()
            self.capture(name, output)
            self._guard.account(time.perf_counter() - start)

    def capture(self, name: str, output: Any) -> None:
        """Measure ``output``, a tensor or a container of tensors, under the name of its module."""
        if self._buffer is None or self.paused or not self.in_training:
            return
        matched = self._match(name)
        if not matched:
            return
        try:
            with torch.no_grad(), unseen():
                found = False
                for path, tensor in _tensors(output, name):
                    self._owner[path] = name
                    found |= self._measure(path, matched, tensor)
                if not found and (ACTIVATION, name) not in self._buffer.absent:
                    self._buffer.absent[ACTIVATION, name] = (
                        f"its output, a {type(output).__name__}, holds no tensor of real numbers"
                    )
        except Exception as error:
            self._measurer.complaints.add(f"activation:{name}", f"the output of {name} could not be measured", error)

    def _measure(self, path: str, matched: _Matched, tensor: Tensor) -> bool:
        assert self._buffer is not None
        reason = refusal(tensor)
        if reason is None and not (tensor.is_floating_point() or tensor.is_complex()):
            reason = f"an output of dtype {tensor.dtype}, which is no activation"
        if reason is not None:
            self._buffer.absent[ACTIVATION, path] = reason
            return False
        tensor = tensor.detach()
        if matched.views:
            self._buffer.merge_rows(
                ACTIVATION, [path], self._measurer.built_in.measure([tensor], matched.columns), matched.columns
            )
        if matched.functions:
            with untouched_rng():
                self._measurer.functions(self._buffer, ACTIVATION, path, matched.functions, [tensor], merging=True)
        return True

    def _match(self, name: str) -> _Matched:
        found = self._known.get(name)
        if found is None:
            metrics = [metric for metric in self._metrics if metric.matches(name)]
            views = tuple(metric for metric in metrics if metric.function is None)
            columns = frozenset().union(*(metric.columns for metric in views)) if views else frozenset()
            found = _Matched(columns, views, tuple(metric for metric in metrics if metric.function is not None))
            self._known[name] = found
        return found

    def evaluator(self) -> Callable[[Table], dict[Key, float]]:
        """A function that gives the built-in values of a table of this step's activations, also when the next step has begun."""
        known, owner = self._known, dict(self._owner)

        def evaluate(table: Table) -> dict[Key, float]:
            values = {}
            for name, row in zip(table.names, torch.split(table.rows, 1), strict=True):
                for metric in known[owner.get(name, name)].views:
                    there, value = evaluate_view(VIEWS[metric.name], row)
                    if there[0]:
                        values[Key(ACTIVATION, name, metric.name)] = value[0]
            return values

        return evaluate


def _tensors(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Each tensor inside ``value`` with its path: ``name[0]`` for sequences, ``name.key`` for mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _DEPTH:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from _tensors(item, f"{path}.{key}", depth + 1)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                yield from _tensors(item, f"{path}[{index}]", depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from _tensors(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)
