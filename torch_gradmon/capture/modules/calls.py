"""Calls of modules in training: measure inputs and outputs in hooks, and gradients when they arrive."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.fence import Fence
from ...core.records import Metric
from ...core.torch_modes import outside_dispatch_modes
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..hooks import Handles, Hook
from ..measurer import Measurer
from ..reference.source import ReferencePass
from .pass_tracker import PassTracker
from .structure import tensors_of
from .values import ModuleValues

# --- Gradients of modules' inputs and outputs: hooks on tensors, and which backward passes count ---


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


# --- Calls of modules in training: measure inputs and outputs in hooks, and gradients when they arrive ---


_GRADIENTS = (n.ACTIVATION_GRADIENT, n.INPUT_GRADIENT)
_NEEDS_NONE = "it needs no gradient: nothing that it is computed from is trained"
_BY_PARTS = "the reference module runs when the whole model is called, but here a part of it was called directly"
_MISSED = "a part of the model was called in training before the step had begun, so not all calls were measured"


class OutputDifferences:
    """Compares outputs of modules with those of the reference.

    Args:
        reference: has the outputs to compare with.
        values: measures the tensors.
        passes: knows whether the whole model runs.

    Attributes:
        due: whether differences are due in this step.
    """

    def __init__(self, reference: ReferencePass, values: ModuleValues, passes: PassTracker) -> None:
        self._reference, self._values, self._passes = reference, values, passes
        self.due = False

    def begin(self, buffer: StepBuffer, due: bool) -> None:
        """Start a step in which differences may be ``due``."""
        self.due = due
        if due and not self._reference:
            buffer.absent[n.ACTIVATION_DIFFERENCE, ""] = "no reference module is set; see set_reference_module()"

    def wants(self, name: str) -> bool:
        """Whether a difference of this module's output to the reference's is requested in this step."""
        return self._values.wants(n.ACTIVATION_DIFFERENCE, name)

    def measure(self, name: str, value: Any, call: int) -> None:
        """Measure the differences of the outputs of this call, if any are requested."""
        if self._reference and self._values.wants(n.ACTIVATION_DIFFERENCE, name):
            self._values.measure_pairs(name, value, call, self._other)

    def _other(self, path: str) -> Tensor | str:
        if (other := self._reference.take(path)) is not None:
            return other
        if not self._reference.is_off and self._passes.root_trains is None:
            return _BY_PARTS
        return self._reference.reason or "the reference module has no such output"


class ModuleCalls:
    """Measures the calls of each step.

    Args:
        measurer: receives failures.
        fence: counts the time.
        passes: knows which calls are training.
        differences: compares outputs with the reference's.
        values: measures the tensors.

    Attributes:
        gradients: those of inputs and outputs.
        seen: whether a module other than the root was called in this step.
        misses_root: the hook on the root's inputs came too late for the first call in this step, so no call counts.
    """

    def __init__(
        self, measurer: Measurer, fence: Fence, passes: PassTracker, differences: OutputDifferences, values: ModuleValues
    ) -> None:
        self._complaints, self._fence, self._passes = measurer.complaints, fence, passes
        self._differences, self._values = differences, values
        self.gradients = TensorGradientHooks(self._gradient_came)
        self._on_part: Callable[[nn.Module], object] = lambda _: None
        self._lock = threading.RLock()  # hooks may fire on several threads, and share buffers
        self._buffer: StepBuffer | None = None
        self._numbers: Counter[tuple[str, str]] = Counter()
        self.seen = self.misses_root = False

    @property
    def places(self) -> Set[tuple[str, str]]:
        """The sources and names of the modules that were called in the last forward."""
        return self._numbers.keys()

    def connect(self, inverse_scale: Callable[[], Tensor | None], part_called: Callable[[nn.Module], object]) -> None:
        """See :meth:`ModuleSource.connect`."""
        self.gradients.connect(inverse_scale)
        self._on_part = part_called

    def miss_root(self) -> None:
        """Ignore the root's inputs in this step, because the hook on them came too late."""
        self.misses_root = True

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Start a step with the metrics due in it."""
        self._buffer, self.misses_root = buffer, False
        self._numbers.clear()
        self._values.begin(buffer, metrics, inventory.modules)
        sources = {metric.source for metric in metrics}
        self.gradients.begin(None if sources.isdisjoint(_GRADIENTS) else inventory)
        self._differences.begin(buffer, n.ACTIVATION_DIFFERENCE in sources)

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        self.gradients.end()
        self._values.end()
        if self._passes.take_missed() and self._buffer is not None:
            for source in n.MODULE_SOURCES:
                self._buffer.clear(source)
                self._buffer.absent[source, ""] = _MISSED
        self._buffer, self.seen = None, False

    def forward_began(self) -> None:
        """Restart the numbers of calls, because the root is called."""
        self._numbers.clear()

    def drop_scaled(self, reason: str) -> None:
        """Drop the gradients measured so far in this step, because their scale was wrong or missing."""
        if self._buffer is not None:
            self._values.forget(_GRADIENTS, reason)

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Measure a module's inputs."""
        if name == n.ROOT and self.misses_root:
            return
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update(kwargs or {})
        value = args[0] if len(args) == 1 and not kwargs else named
        self._take(name, module, value, n.INPUT, n.INPUT_GRADIENT)

    def returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Measure a module's outputs."""
        self._take(name, module, output, n.ACTIVATION, n.ACTIVATION_GRADIENT)

    def _take(self, name: str, module: nn.Module, value: Any, source: str, gradient_source: str) -> None:
        with self._lock, outside_dispatch_modes():
            self._take_locked(name, module, value, source, gradient_source)

    # between two large matrix products a Python call costs ten times as much as elsewhere, so this method makes few
    def _take_locked(self, name: str, module: nn.Module, value: Any, source: str, gradient_source: str) -> None:
        passes = self._passes
        self.seen |= name != n.ROOT
        awaits = self._buffer is None or passes.is_tentative or passes.awaits_part or not (module.training or passes.counts_eval)
        if awaits and passes.root_trains is None:
            self._part_called(module, value)  # this may begin a step of a model that is called by its parts
        if self._buffer is None or passes.paused:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._buffer.absent.setdefault((source, name), "inside a torch.func transform")
            return
        start, grad = time.perf_counter(), torch.is_grad_enabled()
        try:
            # inside a backward pass the forward is a recomputation; grad mode does not show it, since checkpointing switches it
            recomputed = torch._C._current_graph_task_id() != -1
            trains = passes.root_trains if passes.root_trains is not None else passes.trains(module)
            if recomputed or trains:
                call = -1 if recomputed else self._numbers[source, name]
                # no gradients within a pass that has them: the first pass of a re-entrant checkpoint
                if not grad and not recomputed and passes.builds_graph and _is_trained(module):
                    self.gradients.note_reentrant()
                self._numbers[source, name] += not recomputed
                wanted = grad and self._values.wants(gradient_source, name)
                if wanted and not self.gradients.follow(gradient_source, name, value, call):
                    self._buffer.absent.setdefault((gradient_source, name), _NEEDS_NONE)
                if not recomputed:
                    torch._C._set_grad_enabled(False)  # the context manager costs as much as a small operation
                    self._measure(source, name, value, call)
        except Exception as error:
            self._complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
        finally:
            torch._C._set_grad_enabled(grad)
        self._fence.add_time(time.perf_counter() - start)

    def _part_called(self, module: nn.Module, value: Any) -> None:
        if (self._buffer is None or self._passes.is_tentative) and self._passes.part_began():
            self._on_part(module)
        elif self._buffer is not None and not (module.training or self._passes.counts_eval):
            self._on_part(module)  # in evaluation mode, after a call in training mode that has opened the step
        try:
            self._passes.watch_part(module, value, missed=self._buffer is None)
        except Exception as error:
            self._complaints.add("part", f"a call of a {type(module).__name__} could not be followed", error)

    def _measure(self, source: str, name: str, value: Any, call: int) -> None:
        self._values.measure(source, name, value, call)
        if source == n.ACTIVATION and self._differences.due:
            self._differences.measure(name, value, call)

    def _gradient_came(self, source: str, name: str, path: str, call: int, within: bool, gradient: Tensor | None) -> None:
        if self._buffer is None or self._passes.paused or gradient is None or not (within or self.gradients.accumulates()):
            return
        start = time.perf_counter()
        try:
            with self._lock, outside_dispatch_modes(), torch.no_grad():
                self._values.measure(source, name, gradient, call, path, self.gradients.inverse_scale())
        except Exception as error:
            self._complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
        self._fence.add_time(time.perf_counter() - start)

    def capture(self, name: str, output: Any) -> None:
        """Measure ``output``, a tensor or a container of tensors, under the name of its module."""
        passes = self._passes
        if self._buffer is None or passes.paused or not passes.in_training or not self._values.wants(n.ACTIVATION, name):
            return
        try:
            with outside_dispatch_modes(), torch.no_grad():
                self._values.measure(n.ACTIVATION, name, output, 0)
        except Exception as error:
            self._complaints.add(f"activation:{name}", f"the output of {name} could not be measured", error)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))
