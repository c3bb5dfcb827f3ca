"""Gradients of modules' inputs and outputs: hooks on tensors, and which backward passes count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...step.model_index import ModelIndex
from ..hooks import Handles, Hook
from .structure import tensors_of

_MARK = "torch_gradmon"


class TensorGradientHooks:
    """Hooks on the tensors of one step whose gradients are due.

    Full backward hooks of modules are not used, since they add a node to the graph.

    Args:
        came: a method that gets each gradient: source, name and path, number of the call, ``within``, and the gradient. ``within``: the
            pass that recomputed this ends in parameters, though the inner one need not.

    Attributes:
        inverse_scale: returns the factor for gradients.
        awaited: backward passes that have reached one of the tensors, and have not ended: they are running, or were interrupted.
        has_ended: a backward pass that accumulates gradients has reached one of the tensors in this step, and ended.
    """

    def __init__(self, came: Callable[[str, str, str, int, bool, Tensor | None], None]) -> None:
        self._came = came
        self.inverse_scale: Callable[[], Tensor | None] = lambda: None
        self._is_reentrant = False
        self._handles = Handles()
        self._leaves: dict[tuple[str, str, int, int], weakref.ref[Tensor]] = {}
        self._round = 0
        self._probes: Sequence[Any] = ()
        self._task: tuple[int, bool] = (-1, False)
        self.awaited: set[int] = set()
        self.has_ended = False

    def connect(self, inverse_scale: Callable[[], Tensor | None]) -> None:
        """Use this factor for gradients from now on."""
        self.inverse_scale = inverse_scale

    def note_reentrant(self) -> None:
        """A forward without gradients was seen in training, as in the first pass of a re-entrant checkpoint."""
        self._is_reentrant = True

    def begin(self, inventory: ModelIndex | None) -> None:
        """Start a step; without ``inventory`` no gradients are due in it."""
        self._round += 1
        self._is_reentrant = self.has_ended = False
        self.awaited.clear()
        self._probes = () if inventory is None else _accumulators(inventory)

    def end(self) -> None:
        """Remove all hooks."""
        self._handles.remove()
        self._leaves, self._probes = {}, ()

    def follow(self, source: str, name: str, value: Any, call: int) -> bool:
        """Hook the tensors in ``value``. Returns whether any needs a gradient. A negative ``call`` means a recomputation."""
        recomputed = call < 0
        within = recomputed and self.accumulates()
        tensors = list(tensors_of(value, name))
        for path, tensor in tensors:
            # once per tensor: it may be used in several forwards, or in one and its recomputation
            if not tensor.requires_grad or self._follows(source, path, None if recomputed else call, tensor):
                continue
            hook = Hook(self._came, source, name, path, call, within)
            self._handles.add(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            if tensor.grad_fn is None:
                self._leaves[source, path, call, id(tensor)] = weakref.ref(tensor)
            else:
                _marks(tensor).add((id(self), self._round, tensor.output_nr, source, path, call))
        return any(tensor.requires_grad for _, tensor in tensors)

    def _follows(self, source: str, path: str, call: int | None, tensor: Tensor) -> bool:
        """Whether this tensor already has a hook for this place; None means any call."""
        if tensor.grad_fn is not None:  # a tensor saved for a recomputation may return as another object
            node = (id(self), self._round, tensor.output_nr, source, path)
            return any(mark[:-1] == node and call in (None, mark[-1]) for mark in _marks(tensor))
        leaf = (source, path, id(tensor))
        return any(
            (of, at, number) == leaf and call in (None, when) and reference() is tensor
            for (of, at, when, number), reference in self._leaves.items()
        )

    def accumulates(self) -> bool:
        """Whether the running backward pass accumulates gradients: ``autograd.grad``, as for a gradient penalty, ends in no parameter."""
        task = torch._C._current_graph_task_id()
        if self._task[0] != task:
            found = any(_is_executed(node) for node in self._probes)
            # parameters in a re-entrant checkpoint are no leaves of the outer graph, and only backward() passes through one
            whole = self._is_reentrant and torch.autograd.Variable._execution_engine.is_checkpoint_valid()
            self._task = task, bool(self._probes) and (found or whole)
            if self._task[1]:
                self.awaited.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(Hook(self._ended, task))
        return self._task[1]

    def _ended(self, task: int) -> None:
        self.awaited.discard(task)
        self.has_ended = True


def _marks(tensor: Tensor) -> set[tuple[Any, ...]]:
    """The marks at the graph node that made ``tensor``; they are freed with it."""
    metadata: dict[str, Any] = tensor.grad_fn.metadata  # type: ignore[assignment, union-attr]
    marks: set[tuple[Any, ...]] = metadata.setdefault(_MARK, set())
    return marks


def _accumulators(inventory: ModelIndex) -> list[Any]:
    """The graph nodes that accumulate the gradients of the model's parameters."""
    parameters = [parameter for reference in inventory.references if (parameter := reference()) is not None]
    return [torch.autograd.graph.get_gradient_edge(p).node for p in parameters if p.requires_grad]


def _is_executed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad captures at this node instead of accumulating
        return False
