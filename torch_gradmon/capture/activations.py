"""Hooks on the forward of modules: when a call is training, and what of it is measured."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import names as n
from ..guard import Guard
from ..inventory import Inventory
from ..metric import Metric
from ..modes import unseen
from ..statistics.moments import Column
from ..step import StepBuffer
from .attention import AttentionRecorder
from .compiled import Gate, Tap, is_compiled
from .hooks import Handles, Hook, ModuleHook, compiled_graphs
from .measuring import Measurer
from .module_values import ModuleValues
from .outputs import tensors_of
from .reference import ReferencePass

_OUTPUTS = (n.ACTIVATION, n.ACTIVATION_GRADIENT, n.ACTIVATION_DIFFERENCE)
_INPUTS = (n.INPUT, n.INPUT_GRADIENT)
_MARK = "torch_gradmon"
_GRADIENTS = (n.ACTIVATION_GRADIENT, n.INPUT_GRADIENT)
_INSIDE_COMPILE = "inside torch.compile only the statistics of outputs are measured, and no functions, gradients or inputs"
_NOT_SEEN = (
    "no hook on a module was called: a model that torch.compile had traced before the monitor came calls none; "
    "attach before the first call, or call torch.compiler.reset() and compile again"
)


class ActivationCapture:
    """Forward hooks on the modules that a metric matches; no other module has one.

    Evaluation passes (the root module in eval mode, or without gradients) and recomputation in activation checkpointing are no
    training activations.

    Args:
        measurer: does the work.
        guard: told of the time that it takes.

    Attributes:
        inverse_scale: gives what gradients have to be multiplied by.
        opening: told that the root is called, before anything else.
        part_called: told that a part is, while no step is open.
        was_trained: whether the model has had a training forward or a backward pass in this step.
    """

    def __init__(self, measurer: Measurer, guard: Guard) -> None:
        self._measurer, self._guard = measurer, guard
        self.values = ModuleValues(measurer)
        self.reference = ReferencePass(measurer.complaints)
        self.attention = AttentionRecorder(measurer.complaints, self.values, guard, self._is_in_forward)
        self.inverse_scale: Callable[[], Tensor | None] = lambda: None
        self.opening: Callable[[nn.Module], object] = lambda _: None
        self.was_trained = False
        self.part_called: Callable[[nn.Module], object] = lambda _: None
        self._before_root, self._after_root = Handles(), Handles()
        self._hooks: dict[tuple[str, str, int], torch.utils.hooks.RemovableHandle] = {}
        self._on_tensors = Handles()
        self._leaves: dict[tuple[str, str, int, int], weakref.ref[Tensor]] = {}
        self._round = 0
        self._reentrant = False
        self._gate = Gate()
        self._lock = threading.RLock()  # hooks may fire on several threads, and what they share has room for one
        self._taps: dict[tuple[str, str], Tap] = {}
        self._buffer: StepBuffer | None = None
        self._calls: Counter[tuple[str, str]] = Counter()
        self._probes: Sequence[Any] = ()
        self._task: tuple[int, bool] = (-1, False)
        self._compares = self._seen = self._due = self._forward_seen = self._has_compiled_parts = False
        self._is_open = True
        self._root_trains: bool | None = None
        self._version: int | None = None
        self._paused = False

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: Inventory) -> None:
        """Start a step with the metrics that are due in it."""
        self._buffer, self.was_trained = buffer, False
        self._round += 1
        self._reentrant = False
        self._calls.clear()
        self.values.begin(buffer, metrics, inventory.modules)
        self.attention.begin(buffer, metrics, inventory)
        self._compares = any(metric.source == n.ACTIVATION_DIFFERENCE for metric in metrics)
        self._due = any(metric.source in n.MODULE_SOURCES for metric in metrics)
        gradients = any(metric.source in _GRADIENTS for metric in metrics)
        self._probes = _accumulators(inventory) if gradients else ()
        if self._compares and not self.reference:
            buffer.absent[n.ACTIVATION_DIFFERENCE, ""] = "no reference module is set; see set_reference_module()"
        self.let_through(self._due)

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        buffer = self._buffer
        if buffer is None:
            return
        for (_, name), tap in self._taps.items():
            for path in tap.collect(buffer, n.ACTIVATION):
                self.values.adopt(n.ACTIVATION, name, path, tap.columns, _INSIDE_COMPILE)
                self._seen |= name != n.ROOT
            self._seen |= bool(tap.refused)
        hooked = any(name != n.ROOT for _, name, _ in self._hooks)  # the root's hooks are called whatever was traced
        if self._due and hooked and not self._seen and self.was_trained and self._others_compile():
            for source in n.MODULE_SOURCES:
                buffer.absent.setdefault((source, ""), _NOT_SEEN)
            self._measurer.complaints.add("compiled", f"activations are missing: {_NOT_SEEN}")
        self._on_tensors.remove()
        self._leaves = {}
        self.values.end()
        self.attention.compiled |= self.has_graphs
        self.attention.end()
        self._buffer, self._seen, self._probes, self.was_trained = None, False, (), False
        self._root_trains = None  # also where a forward was interrupted
        self.reference.forget()

    def forget_scaled(self, reason: str) -> None:
        """The gradients measured so far in this step were divided by a wrong scale, or by none: drop them."""
        if self._buffer is not None:
            self.values.forget(_GRADIENTS, reason)

    def _others_compile(self) -> bool:
        return compiled_graphs() > 0

    def let_through(self, is_open: bool) -> None:
        """Whether graphs with hooks of ours in them write values from now on. Does not synchronise."""
        self._is_open = is_open
        self._gate.set(is_open and not self._paused)

    @property
    def has_graphs(self) -> bool:
        """Whether any graph has a hook of ours in it."""
        return any(tap.is_traced for tap in self._taps.values())

    @property
    def paused(self) -> bool:
        """Whether nothing is measured for the moment."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._gate.set(self._is_open and not paused)

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, inventory: Inventory, metrics: Sequence[Metric], version: int, root_too: bool) -> None:
        """Hang hooks on the modules that any of ``metrics`` matches; once for each ``version`` of the plan.

        ``root_too``: on the root in any case, because modules log values of their own.
        """
        if version == self._version:
            return
        self._version = version
        wanted: dict[tuple[str, str, int], nn.Module] = {}
        for name, reference in inventory.modules.items():
            module = reference()
            if isinstance(module, torch.jit.ScriptModule):
                continue  # refuses hooks of Python
            for sources in (_OUTPUTS, _INPUTS):
                if module is not None and any(metric.source in sources and metric.matches(name) for metric in metrics):
                    wanted[sources[0], name, id(module)] = module
        for key in self._hooks.keys() - wanted.keys():
            self._hooks.pop(key).remove()
        needs_root = root_too or bool(wanted) or self._stays(metrics)
        if needs_root and not self._before_root:
            self._before_root.add(root.register_forward_pre_hook(self._began_hook(root), prepend=True, with_kwargs=True))
        new, taken = wanted.keys() - self._hooks.keys(), frozenset(inventory.modules)
        for (kind, name, number), module in wanted.items():
            if (kind, name, number) in new:
                views = [m for m in metrics if m.source == n.ACTIVATION and m.function is None and m.matches(name)]
                columns = frozenset[Column]().union(*(view.columns for view in views)) if kind in _OUTPUTS else frozenset()
                self._hooks[kind, name, number] = self._hang(kind, name, module, root, columns, taken)
        if needs_root and (new or not self._after_root):  # behind the hook on the root's own output
            self._after_root.remove()
            self._after_root.add(root.register_forward_hook(ModuleHook(self._root_ended), always_call=True))
        self._has_compiled_parts = self.attention.compiled = is_compiled(root)

    def _hang(
        self, kind: str, name: str, module: nn.Module, root: nn.Module, columns: frozenset[Column], taken: Container[str]
    ) -> torch.utils.hooks.RemovableHandle:
        tap = Tap(name, self._gate, root, self._measurer.built_in.eps, columns, taken)
        self._taps[kind, name] = tap
        if kind in _INPUTS:
            return module.register_forward_pre_hook(ModuleHook(self._called, name, tap=tap), with_kwargs=True)
        return module.register_forward_hook(ModuleHook(self._returned, name, tap=tap))

    def _began_hook(self, root: nn.Module) -> ModuleHook:
        tap = self._taps["", n.ROOT] = Tap(n.ROOT, self._gate, root, self._measurer.built_in.eps, frozenset(), ())
        return ModuleHook(self._root_began, tap=tap)

    def _stays(self, metrics: Iterable[Metric]) -> bool:
        """Whether the root needs hooks that are there before a step is known to be monitored."""
        return bool(self.reference) or any(metric.source in n.ATTENTION_SOURCES.values() for metric in metrics)

    @property
    def may_rest(self) -> bool:
        """Whether there are hooks that only monitored steps need, and the model is not compiled.

        A compiled model would be compiled again whenever a module's hooks change, so there they stay, which costs it nothing;
        and until a forward was seen nobody knows.
        """
        return bool(self._hooks) and self._forward_seen and not self._has_compiled_parts and not self.has_graphs

    def rest(self, metrics: Sequence[Metric]) -> None:
        """Take away the hooks that only monitored steps need."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks, self._taps, self._version = {}, {}, None
        if not self._stays(metrics):
            self._before_root.remove()
            self._after_root.remove()
        self._root_trains = None

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        self.rest(())
        self._before_root.remove()
        self._after_root.remove()
        self.attention.leave()

    # --- what hooks tell -------------------------------------------------------------------------------------------------------

    def _root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # first of all, since the reference has copies of the model's own hooks; so the step may have to be opened here
        self.opening(module)
        # a hook that was removed while the hooks before it ran is called once more, and not with kwargs
        if kwargs is None or torch._C._current_graph_task_id() != -1:
            return
        self._root_trains = module.training and torch.is_grad_enabled()
        self._forward_seen = True
        self.was_trained |= self._root_trains
        self._calls.clear()
        if self._buffer is None or self._paused or not self._root_trains:
            return
        start = time.perf_counter()
        if self._compares and self.reference:
            self._paused = True  # modules that the two share
            try:
                self.reference.run(module, self._is_compared, args, kwargs)
            finally:
                self._paused = False
        self.attention.enter()
        self._guard.account(time.perf_counter() - start)

    def _is_compared(self, name: str) -> bool:
        return self.values.wants(n.ACTIVATION_DIFFERENCE, name)

    def training_began(self) -> None:
        """The root's training forward began; its own hook here may have been hung too late to see it."""
        self._forward_seen = True
        if self._before_root:
            self._root_trains = True

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside recomputation, which happens while a backward pass runs."""
        return self._root_trains is not False and torch._C._current_graph_task_id() == -1

    def _is_in_forward(self) -> bool:
        """Whether the root's training forward is running, and not in a recomputation."""
        return self._root_trains is True and torch._C._current_graph_task_id() == -1 and not self._paused

    def _root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._root_trains = None
            self.attention.leave()
            self.reference.forget()

    def _called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update(kwargs or {})
        value = args[0] if len(args) == 1 and not kwargs else named
        self._take(name, module, value, n.INPUT, n.INPUT_GRADIENT)

    def _returned(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._take(name, module, output, n.ACTIVATION, n.ACTIVATION_GRADIENT)

    def _take(self, name: str, module: nn.Module, value: Any, source: str, gradient_source: str) -> None:
        with self._lock:
            self._take_alone(name, module, value, source, gradient_source)

    def _take_alone(self, name: str, module: nn.Module, value: Any, source: str, gradient_source: str) -> None:
        self._seen |= name != n.ROOT
        if self._buffer is None and not self._forward_seen:
            self.part_called(module)  # where a model is called by its parts, this may be the beginning of a step
        if self._buffer is None or self._paused:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._buffer.absent.setdefault((source, name), "inside a torch.func transform")
            return
        start, grad = time.perf_counter(), torch.is_grad_enabled()
        try:
            # inside a backward pass the forward is a recomputation; grad mode cannot tell, since checkpointing switches it
            recomputed = torch._C._current_graph_task_id() != -1
            trains = self._root_trains if self._root_trains is not None else module.training and grad
            if recomputed or trains:
                call = -1 if recomputed else self._calls[source, name]
                if not grad and not recomputed and any(p.requires_grad for p in module.parameters(recurse=False)):
                    self._reentrant = True
                self._calls[source, name] += not recomputed
                # without gradients this is the first pass of a re-entrant checkpoint, whose recomputation has them
                if grad and self.values.wants(gradient_source, name):
                    self._follow_gradients(gradient_source, name, value, call)
                if not recomputed:
                    torch._C._set_grad_enabled(False)  # the context manager costs as much as a small operation
                    with unseen():
                        self._measure(source, name, value, call)
        except Exception as error:
            self._measurer.complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
        finally:
            torch._C._set_grad_enabled(grad)
        self._guard.account(time.perf_counter() - start)

    def _measure(self, source: str, name: str, value: Any, call: int) -> None:
        if self.values.wants(source, name):
            self.values.measure(source, name, value, call)
        if source == n.ACTIVATION and self._compares and self.reference and self._is_compared(name):
            self.values.measure_pairs(name, value, call, self._other)

    def _other(self, path: str) -> Tensor | str:
        other = self.reference.take(path)
        return (self.reference.reason or "the reference module has no such output") if other is None else other

    def capture(self, name: str, output: Any) -> None:
        """Measure ``output``, a tensor or a container of tensors, under the name of its module."""
        if self._buffer is None or self._paused or not self.in_training or not self.values.wants(n.ACTIVATION, name):
            return
        try:
            with torch.no_grad(), unseen():
                self.values.measure(n.ACTIVATION, name, output, 0)
        except Exception as error:
            self._measurer.complaints.add(f"activation:{name}", f"the output of {name} could not be measured", error)

    # --- gradients -------------------------------------------------------------------------------------------------------------

    def _follow_gradients(self, source: str, name: str, value: Any, call: int) -> None:
        # never full backward hooks of modules: they put a node of their own into the graph
        recomputed = call < 0
        within = recomputed and self._accumulates()
        for path, tensor in tensors_of(value, name):
            # once for each tensor, which may go into several forwards, or into one and its recomputation
            if not tensor.requires_grad or self._follows(source, path, None if recomputed else call, tensor):
                continue
            hook = Hook(self._gradient_came, source, name, path, call, within)
            self._on_tensors.add(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            if tensor.grad_fn is None:
                self._leaves[source, path, call, id(tensor)] = weakref.ref(tensor)
            else:
                _marks(tensor).add((id(self), self._round, tensor.output_nr, source, path, call))

    def _follows(self, source: str, path: str, call: int | None, tensor: Tensor) -> bool:
        """Whether this tensor has a hook for this place already; None for any call."""
        if tensor.grad_fn is not None:  # a tensor that was saved for a recomputation may come back as another object
            node = (id(self), self._round, tensor.output_nr, source, path)
            return any(mark[:-1] == node and call in (None, mark[-1]) for mark in _marks(tensor))
        leaf = (source, path, id(tensor))
        return any(
            (of, at, number) == leaf and call in (None, when) and reference() is tensor
            for (of, at, when, number), reference in self._leaves.items()
        )

    def _gradient_came(self, source: str, name: str, path: str, call: int, within: bool, gradient: Tensor | None) -> None:
        """``within``: the pass that recomputed this ends in parameters, though the inner one need not."""
        if self._buffer is None or self._paused or gradient is None or not (within or self._accumulates()):
            return
        start = time.perf_counter()
        try:
            with self._lock, torch.no_grad(), unseen():
                self.values.measure(source, name, gradient, call, path, self.inverse_scale())
        except Exception as error:
            self._measurer.complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
        self._guard.account(time.perf_counter() - start)

    def _accumulates(self) -> bool:
        """Whether the running backward pass is one: ``autograd.grad``, as for a gradient penalty, ends in no parameter."""
        task = torch._C._current_graph_task_id()
        if self._task[0] != task:
            found = any(_is_executed(node) for node in self._probes)
            # parameters in a re-entrant checkpoint are no leaves of the outer graph, and nothing but backward() goes through one
            whole = self._reentrant and torch.autograd.Variable._execution_engine.is_checkpoint_valid()
            self._task = task, bool(self._probes) and (found or whole)
        return self._task[1]


def _marks(tensor: Tensor) -> set[tuple[Any, ...]]:
    """What is noted at the node of the graph that made ``tensor``, and goes with it."""
    metadata: dict[str, Any] = tensor.grad_fn.metadata  # type: ignore[assignment, union-attr]
    marks: set[tuple[Any, ...]] = metadata.setdefault(_MARK, set())
    return marks


def _accumulators(inventory: Inventory) -> list[Any]:
    """The graph nodes that accumulate into the model's parameters."""
    parameters = [parameter for reference in inventory.references if (parameter := reference()) is not None]
    return [torch.autograd.graph.get_gradient_edge(p).node for p in parameters if p.requires_grad]


def _is_executed(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what is asked for with autograd.grad is captured at this node, not accumulated
        return False
