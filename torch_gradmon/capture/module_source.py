"""Inputs and outputs of a model's modules in training, and their gradients.

:class:`ForwardHooks` observe calls, :class:`PassTracker` knows which are training, :class:`ModuleCalls` measures them, and
:class:`ModuleSource` is all of it, for one monitor.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import keys as n
from ..core.fence import Fence
from ..core.keys import canonical_names
from ..core.records import Metric
from ..core.torch_modes import TELLS_EXPORT, outside_dispatch_modes, will_run
from ..step.buffer import StepBuffer
from ..step.model_index import ModelIndex
from .compiled import SHARES_GRAPH, CompiledHooks, alike, in_graphs
from .hooks import (
    Handles,
    Hook,
    ModuleHook,
    PassTracker,
    compiled_graphs,
    is_compiled,
    takes_hooks,
    tensors_of,
    wrapped_by,
)
from .loss_graph import notes_of
from .measurer import Measurer
from .module_values import ModuleValues

if TYPE_CHECKING:  # imported where they are asked for
    from .attention import AttentionRecorder
    from .coordinate_check import CoordinateCheck
    from .reference import ReferencePass

_MARK = "torch_gradmon"
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_has_grad, _set_grad, _running_task = torch.is_grad_enabled, torch._C._set_grad_enabled, torch._C._current_graph_task_id
_interpreter = torch._C._functorch.peek_interpreter_stack


_GRADIENT_OF = {n.ACTIVATION: n.ACTIVATION_GRADIENT, n.INPUT: n.INPUT_GRADIENT}
_GRADIENTS = tuple(_GRADIENT_OF.values())


class ModuleCalls:
    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker, values: ModuleValues) -> None:
        self._complaints, self._fence, self._passes = measurer.complaints, fence, passes
        self._values = values
        self.reference: ReferencePass | None = None
        # backward passes that have reached one of the tensors, and have not ended: they are running, or were interrupted
        self.awaited: set[int] = set()
        self._handles, self._round = Handles(), 0
        self._leaves: dict[int, tuple[weakref.ref[Tensor], set[tuple[Any, ...]]]] = {}
        self._probes: Sequence[Any] = ()  # the graph nodes that accumulate the gradients of the model's parameters
        self._task: tuple[int, bool] = (-1, False)
        self._lock = threading.RLock()  # hooks may fire on several threads, and share buffers
        self._buffer: StepBuffer | None = None
        self.numbers: dict[tuple[str, str], int] = {}  # how often each was called in this forward
        # outputs are compared with the reference's in this step; gradients are due
        self.differences_due = self._gradients_due = False
        # in this step a module other than the root was called; the hook on the root's inputs came too late for the first call, so none
        # counts; a backward pass that accumulates gradients has reached a tensor, and ended; a forward without gradients was seen in
        # training, as in the first pass of a re-entrant checkpoint
        self.seen = self.misses_root = self.has_ended = self._is_reentrant = False

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        self._buffer, self.misses_root = buffer, False
        self.numbers.clear()
        self._values.begin(buffer, metrics, inventory.modules)
        sources = {metric.source for metric in metrics}
        self._gradients_due = not sources.isdisjoint(_GRADIENTS)
        self._round += 1
        self._is_reentrant = self.has_ended = False
        self.awaited.clear()
        parameters = [reference() for reference in inventory.references] if self._gradients_due else []
        trained = [parameter for parameter in parameters if parameter is not None and parameter.requires_grad]
        self._probes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in trained]
        self.differences_due = n.ACTIVATION_DIFFERENCE in sources
        if self.differences_due and not self.reference:
            buffer.absent[n.ACTIVATION_DIFFERENCE, ""] = "no reference module is set; see set_reference_module()"

    def end(self) -> None:
        self._handles.remove()
        self._leaves, self._probes = {}, ()
        self._values.end()
        missed, self._passes.missed = self._passes.missed, False
        if missed and self._buffer is not None:
            for source in n.MODULE_SOURCES:
                self._buffer.clear(source)
                reason = "a part of the model was called in training before the step had begun, so not all calls were measured"
                self._buffer.absent[source, ""] = reason
        self._buffer, self.seen = None, False

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if name == n.ROOT and self.misses_root:
            return
        value = args[0] if len(args) == 1 and not kwargs else dict(enumerate(args)) | (kwargs or {})
        self.returned(name, module, args, value, n.INPUT)

    # between two large matrix products a Python call costs ten times as much as elsewhere, so this method makes few
    def returned(self, name: str, module: nn.Module, args: tuple[Any, ...], value: Any, source: str = n.ACTIVATION) -> None:
        passes, values, place = self._passes, self._values, (source, name)
        # the lock may be entered twice, and a context that does nothing has two calls
        with self._lock, outside_dispatch_modes() if _function_modes() or _dispatch_modes() else self._lock:
            self.seen |= name != n.ROOT
            if passes.root_trains is None and (
                self._buffer is None or passes.is_tentative or passes.awaits_part or not (module.training or passes.counts_eval)
            ):
                self._part_called(module, value)  # this may begin a step of a model that is called by its parts
            if self._buffer is None or passes.is_paused or (passes.captures is not None and passes.captures()):
                return
            if _interpreter() is not None:
                self._buffer.absent.setdefault(place, "inside a torch.func transform")
                return
            start, grad = time.perf_counter(), _has_grad()
            try:
                # inside a backward pass the forward is a recomputation; grad mode does not show it, since checkpointing switches it
                recomputed = _running_task() != -1
                trains = passes.root_trains if passes.root_trains is not None else passes.trains(module)
                if recomputed or trains:
                    known = self.numbers.get(place, 0)
                    call = -1 if recomputed else known
                    # no gradients within a pass that has them: the first pass of a re-entrant checkpoint
                    if not grad and not recomputed and passes.builds_graph:
                        self._is_reentrant |= any(p.requires_grad for p in module.parameters(recurse=False))
                    self.numbers[place] = known + (not recomputed)
                    if grad and self._gradients_due and values.wants(_GRADIENT_OF[source], name):
                        self._follow(_GRADIENT_OF[source], name, value, call)
                    if not recomputed:
                        _set_grad(False)  # the context manager costs as much as a small operation
                        columns = values.asked.simple.get(place) if isinstance(value, Tensor) else None
                        rows = values.rows if columns is None or value.is_cpu else values.device_rows
                        if columns is None or not rows.measure(source, name, columns, value, None):
                            values.measure(source, name, value, call)
                        is_compared = source == n.ACTIVATION and self.differences_due and self.reference
                        if is_compared and values.wants(n.ACTIVATION_DIFFERENCE, name):
                            values.measure_pairs(name, value, call, self._of_reference)
            except Exception as error:
                self._complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
            finally:
                _set_grad(grad)
            self._fence.seconds += time.perf_counter() - start

    def _part_called(self, module: nn.Module, value: Any) -> None:
        if (self._buffer is None or self._passes.is_tentative) and self._passes.part_began():
            self._passes.links.part_called(module)
        elif self._buffer is not None and not (module.training or self._passes.counts_eval):
            self._passes.links.part_called(module)  # in evaluation mode, after a call in training mode that has opened the step
        try:
            self._passes.watch_part(module, value, missed=self._buffer is None)
        except Exception as error:
            self._complaints.add("part", f"a call of a {type(module).__name__} could not be followed", error)

    def _of_reference(self, path: str) -> Tensor | str:
        assert self.reference is not None
        if (other := self.reference.take(path)) is not None:
            return other
        if not self.reference.is_off and self._passes.root_trains is None:
            return "the reference module runs when the whole model is called, but here a part of it was called directly"
        return self.reference.reason or "the reference module has no such output"

    def _gradient_came(self, source: str, name: str, path: str, call: int, within: bool, gradient: Tensor | None) -> None:
        if self._buffer is None or self._passes.paused or gradient is None or not (within or self._accumulates()):
            return
        start = time.perf_counter()
        try:
            with self._lock, outside_dispatch_modes(), torch.no_grad():
                self._values.measure(source, name, gradient, call, path, self._passes.links.inverse_scale())
        except Exception as error:
            self._complaints.add(f"{source}:{name}", f"the {source} of {name} could not be measured", error)
        self._fence.seconds += time.perf_counter() - start

    def _follow(self, source: str, name: str, value: Any, call: int) -> None:
        """Hook the tensors in ``value`` that need a gradient. A negative ``call`` means a recomputation.

        Full backward hooks of modules are not used, since they add a node to the graph.
        """
        recomputed = call < 0
        # the pass that recomputes this ends in parameters, though the inner one need not
        within = recomputed and self._accumulates()
        tensors = list(tensors_of(value, name))
        for path, tensor in tensors:
            # once per tensor: it may be used in several forwards, or in one and its recomputation
            if not tensor.requires_grad or self._follows(source, path, None if recomputed else call, tensor):
                continue
            hook = Hook(self._gradient_came, source, name, path, call, within)
            self._handles.add(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            self._marks(tensor).add((id(self), self._round, tensor.output_nr, source, path, call))
        if self._buffer is not None and not any(tensor.requires_grad for _, tensor in tensors):
            reason = "it needs no gradient: nothing that it is computed from is trained"
            self._buffer.absent.setdefault((source, name), reason)

    def _follows(self, source: str, path: str, call: int | None, tensor: Tensor) -> bool:
        """Whether this tensor already has a hook for this place; None means any call."""
        place = (id(self), self._round, tensor.output_nr, source, path)
        return any(mark[:-1] == place and call in (None, mark[-1]) for mark in self._marks(tensor))

    def _marks(self, tensor: Tensor) -> set[tuple[Any, ...]]:
        if tensor.grad_fn is not None:  # they are freed with it; a tensor saved for a recomputation may return as another object
            return notes_of(tensor.grad_fn).setdefault(_MARK, set())  # type: ignore[no-any-return]
        if (known := self._leaves.get(id(tensor))) is None or known[0]() is not tensor:
            known = self._leaves[id(tensor)] = weakref.ref(tensor), set()
        return known[1]

    def _accumulates(self) -> bool:
        """Whether the running backward pass accumulates gradients: ``autograd.grad``, as for a gradient penalty, ends in no parameter."""
        task = torch._C._current_graph_task_id()
        if self._task[0] != task:
            found = any(will_run(node) for node in self._probes)
            # parameters in a re-entrant checkpoint are no leaves of the outer graph, and only backward() passes through one
            whole = self._is_reentrant and torch.autograd.Variable._execution_engine.is_checkpoint_valid()
            self._task = task, bool(self._probes) and (found or whole)
            if self._task[1]:
                self.awaited.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(Hook(self._pass_ended, task))
        return self._task[1]

    def _pass_ended(self, task: int) -> None:
        self.awaited.discard(task)
        self.has_ended = True

    def capture(self, name: str, output: Any) -> None:
        passes = self._passes
        if self._buffer is None or passes.paused or not passes.in_training or not self._values.wants(n.ACTIVATION, name):
            return
        try:
            with outside_dispatch_modes(), torch.no_grad():
                self._values.measure(n.ACTIVATION, name, output, 0)
        except Exception as error:
            self._complaints.add(f"activation:{name}", f"the output of {name} could not be measured", error)


_OUTPUTS = (n.ACTIVATION, n.ACTIVATION_GRADIENT, n.ACTIVATION_DIFFERENCE)
_INPUTS = (n.INPUT, n.INPUT_GRADIENT)
OLD_RELEASE = "inside torch.compile they need torch 2.7 or newer"
_Place = tuple[str, str]


class ForwardHooks:
    """The hooks on a model's modules. Only modules with a metric have one, and the root if needed. Both listeners are held weakly."""

    def __init__(self, of_root: ModuleSource, listener: ModuleCalls, eps: float) -> None:
        self._of_root, self._listener, self.graphs = of_root, listener, CompiledHooks(eps)
        self._before_root, self._after_root = Handles(), Handles()
        # with the module, since another one may take its name, and even its address
        self._hooks: dict[_Place, tuple[weakref.ref[nn.Module], Handles]] = {}
        self.on_root = self.on_root_inputs = False  # has hooks on it
        self.has_compiled_parts = False  # when hooks were installed
        self._fusible: list[tuple[weakref.ref[nn.Module], list[Handles]]] = []  # encoder layers, and the hooks in each
        self._left_out: list[str] = []  # names of modules that no metric applies to
        self._unhooked: list[str] = []  # names of modules that accept no hooks
        self._root: weakref.ref[nn.Module] | None = None
        self._asked: tuple[ModelIndex, Sequence[Metric], int, bool] | None = None

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, on_root: bool) -> None:
        """Install hooks where any of ``metrics`` matches, and ``on_root``, once per ``version`` of the plan."""
        if self._asked is not None and self._asked[2] == version:
            return
        self._asked = inventory, metrics, version, on_root
        wanted = _wanted(inventory, metrics)
        views = [metric for metric in metrics if metric.source == n.ACTIVATION and metric.function is None]
        # those of which a graph can compute any metric
        measured = {(kind, name) for kind, name in wanted if kind in _OUTPUTS and any(m.matches(name) for m in views)}
        wanted |= _in_same_graphs(root, inventory, wanted, measured)
        for place, (reference, handles) in list(self._hooks.items()):
            is_kept = place not in wanted and self.graphs.taps[place].is_traced  # removal would cause a recompilation
            if not is_kept and (place not in wanted or wanted[place] is not reference()):
                handles.remove()
                self.graphs.remove(*place)
                del self._hooks[place]
        needs_root = (on_root or bool(wanted)) and takes_hooks(root)
        if needs_root and not self.on_root:
            began = ModuleHook(self._of_root.root_began, tap=self.graphs.add("", n.ROOT, root, root))
            self._before_root.of_module(root.register_forward_pre_hook(began, prepend=True, with_kwargs=True))
            self.on_root = True
        new, taken = wanted.keys() - self._hooks.keys(), frozenset(inventory.modules)
        for place, module in wanted.items():
            if place in new:
                self._hooks[place] = weakref.ref(module), self._registered(*place, module, root, place[1] in taken)
        inside = in_graphs(root)
        compiled = {place for place, module in wanted.items() if id(module) in inside}
        self.graphs.request(metrics, measured, compiled, taken)
        if needs_root and (new or not self._after_root):  # after the hook on the root's own output
            self._after_root.remove()
            self._after_root.of_module(root.register_forward_hook(ModuleHook(self._of_root.root_ended), always_call=True))
        if not needs_root and not self.graphs.traced:
            self._leave_root()
        self.on_root_inputs = (_INPUTS[0], n.ROOT) in self._hooks
        self.has_compiled_parts = is_compiled(root)
        self._fusible = []
        for layer in (module for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer)):
            inside = {id(module) for module in layer.modules()}
            own = [handles for reference, handles in self._hooks.values() if id(reference()) in inside]
            self._fusible.append((weakref.ref(layer), own))
        there = _there(inventory)
        parts = {id(part) for module in there.values() for part in wrapped_by(module)}
        self._left_out = list(canonical_names(name for name, each in root.named_modules() if id(each) not in parts).values())
        self._unhooked = [name for name, module in there.items() if not takes_hooks(module)]
        self._root = weakref.ref(root)

    def install_in_compiled(self) -> None:
        """Parts may have been compiled since hooks were installed, and need more."""
        root, asked = self.root, self._asked
        if asked is not None and root is not None and is_compiled(root):
            self._asked = None
            self.install(root, *asked)

    def leave_fusible(self) -> None:
        """Take the hooks out of encoder layers that torch runs as one kernel in evaluation, unless any module in them has a hook: the
        kernel rounds otherwise. Until :meth:`return_to_fusible`.
        """
        for reference, hooks in self._fusible:
            layer = reference()
            if layer is None or layer.training:
                continue
            with outside_dispatch_modes():  # a mode sees a question to a parameter
                trains = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
            if trains:
                continue
            for handles in hooks:
                handles.set_aside()

    def return_to_fusible(self) -> None:
        for _, hooks in self._fusible:
            for handles in hooks:
                handles.restore()

    def _registered(self, kind: str, name: str, module: nn.Module, root: nn.Module, is_heard: bool) -> Handles:
        """``is_heard``: the listener hears of calls outside of graphs."""
        handles, is_input = Handles(), kind in _INPUTS
        heard = (self._listener.called if is_input else self._listener.returned) if is_heard else self.graphs.ignore
        hook = ModuleHook(heard, name, tap=self.graphs.add(kind, name, module, root))
        registered = module.register_forward_pre_hook(hook, with_kwargs=True) if is_input else module.register_forward_hook(hook)
        handles.of_module(registered)
        return handles

    def collect(self, buffer: StepBuffer, values: ModuleValues) -> None:
        if self._asked is not None:
            self.graphs.collect(buffer, values, self._asked[1])

    def explain(self, absent: dict[tuple[str, str], str]) -> None:
        if self._unhooked:
            reason = "a module of TorchScript (torch.jit), which calls no Python hooks"
            sources = (*n.MODULE_SOURCES, *n.RCC_SOURCES)
            absent.update(((source, name), reason) for source in sources for name in self._unhooked)
        for source in n.ATTENTION_SOURCES.values():
            if (source, "") in absent:  # the caller of a call that was not seen is unknown
                absent.update(((source, name), "exclude= (excluded_modules_regex=) leaves it out") for name in self._left_out)

    def silent(self, called: Container[_Place]) -> list[str]:
        """Names of modules in compiled parts whose hooks were not ``called``: to releases before 2.7 no graph has a hook of ours."""
        if TELLS_EXPORT or (root := self.root) is None:
            return []
        inside = in_graphs(root)
        hooked = ((place, module()) for place, (module, _) in self._hooks.items() if place not in called)
        return [name for (_, name), module in hooked if module is not None and id(module) in inside]

    @property
    def root(self) -> nn.Module | None:
        return None if self._root is None else self._root()

    def are_in_graphs(self) -> bool:
        """Whether a part of the model is compiled, or a graph contains a hook."""
        return self.has_compiled_parts or len(self.graphs.traced) > 0

    @property
    def on_parts(self) -> bool:
        """Whether modules other than the root have hooks; the root's are called even if the model was traced."""
        return any(name != n.ROOT for _, name in self._hooks)

    @property
    def has_hooks(self) -> bool:
        return self.on_root or self.on_parts

    @property
    def measures(self) -> bool:
        return len(self._hooks) > 0

    @property
    def has_removable_hooks(self) -> bool:
        """Whether some hooks are needed on monitored steps only, and the model is not compiled.

        A compiled model would be recompiled whenever a module's hooks change, so its hooks stay, which costs nothing.
        """
        return bool(self._hooks) and not self.has_compiled_parts and not self.graphs.traced

    def uninstall(self, stays_on_root: bool) -> None:
        """Remove the hooks that only monitored steps need; also those on the root, unless it must keep them."""
        for _, handles in self._hooks.values():
            handles.remove()
        self._hooks, self._fusible, self._asked = {}, [], None
        self.on_root_inputs = False
        self.graphs.clear()
        if not stays_on_root:
            self._leave_root()

    def _leave_root(self) -> None:
        self._before_root.remove()
        self._after_root.remove()
        self.on_root = False


def _wanted(inventory: ModelIndex, metrics: Sequence[Metric]) -> dict[_Place, nn.Module]:
    return {
        (sources[0], name): module
        for name, module in _there(inventory).items()
        for sources in (_OUTPUTS, _INPUTS)
        if takes_hooks(module) and any(metric.source in sources and metric.matches(name) for metric in metrics)
    }


def _there(inventory: ModelIndex) -> dict[str, nn.Module]:
    return {name: module for name, reference in inventory.modules.items() if (module := reference()) is not None}


def _in_same_graphs(
    root: nn.Module, inventory: ModelIndex, wanted: Mapping[_Place, nn.Module], measured: set[_Place]
) -> dict[_Place, nn.Module]:
    """The modules that need hooks only because those at the same place of other blocks have them: else the blocks would not share a graph,
    and one with hooks might run the graph of one without. Adds to ``measured`` what their graph computes, too.
    """
    names: dict[int, str] = {}
    found: dict[_Place, nn.Module] = {}
    for members in alike(root):
        names = names or {
            **{id(module): name for name, module in root.named_modules()},  # also those that are excluded
            **{id(module): name for name, module in _there(inventory).items()},
        }
        for kind in (_OUTPUTS[0], _INPUTS[0]):
            places = {(kind, names[id(module)]): module for module in members if takes_hooks(module)}
            if not places.keys().isdisjoint(wanted):
                found.update((place, module) for place, module in places.items() if place not in wanted)
            if not places.keys().isdisjoint(measured):
                measured.update(places)
    return found


_NOT_IN_GRAPH = (
    "it was not called in a training forward that hooks can see, or torch.compile had traced it before the metric was added, or "
    f"{SHARES_GRAPH}"
)
_NOT_SEEN = (
    "no hook on a module was called: none of these modules ran, or torch.compile traced the model before the monitor was attached, and "
    "calls no hooks; then attach before the first call, or call torch.compiler.reset() and compile again; or "
    f"{SHARES_GRAPH}"
)
_MIXED = (
    "one of the step's forward or backward passes was interrupted, as by an exception, and its values cannot be told from those of "
    "the others"
)
_OF_PASSES = (*n.MODULE_SOURCES, *n.RCC_SOURCES, *n.ATTENTION_SOURCES.values())


class ModuleSource:
    """Forward hooks on the modules that a metric matches; no other module has one.

    Evaluation passes (the root module in eval mode, or without gradients in a step that the loop has not begun explicitly) and
    recomputation in activation checkpointing are not training.
    """

    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker) -> None:
        self._measurer, self._fence, self.passes = measurer, fence, passes
        self.values = ModuleValues(measurer)
        self._calls = ModuleCalls(measurer, fence, self.passes, self.values)
        # what few programs ask for
        self._attention: AttentionRecorder | None = None
        self._check: CoordinateCheck | None = None
        self.reference: ReferencePass | None = None
        self.hooks = ForwardHooks(self, self._calls, measurer.statistics.eps)
        self.was_trained = False  # the model has had a training forward or a backward pass in this step
        self._step: tuple[StepBuffer, tuple[Metric, ...], ModelIndex] | None = None
        self._buffer: StepBuffer | None = None  # None also while nothing is asked of modules
        self._due = False
        self._has_forward = self._has_backward = False  # of this step, which was not interrupted
        self._lost: tuple[str, ...] = ()  # sources of which a pass in this step had values that were dropped

    # --- what few programs ask for ---------------------------------------------------------------------------------------------

    def _prepare(self, metrics: Iterable[Metric]) -> None:
        sources = {metric.source for metric in metrics}
        if self._attention is None and not sources.isdisjoint(n.ATTENTION_SOURCES.values()):
            self._add_attention()
        if self._check is None and not sources.isdisjoint(n.RCC_SOURCES):
            from .coordinate_check import CoordinateCheck

            self._check = CoordinateCheck(self._measurer, self._fence, self.passes, self.needed_reference())

    def _add_attention(self) -> AttentionRecorder:
        from .attention import AttentionRecorder

        self._attention = AttentionRecorder(self.values, self._fence, self.passes.in_forward, self.hooks.are_in_graphs)
        return self._attention

    def needed_reference(self) -> ReferencePass:
        from .reference import ReferencePass

        if self.reference is None:
            self.reference = self._calls.reference = ReferencePass(self.passes, self._fence)
        return self.reference

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex) -> None:
        """Where nothing is due and no module has a hook, no more is called in this step."""
        self._step, self._buffer, self.was_trained = (buffer, metrics, inventory), None, False
        passes = self.passes
        if metrics or passes.links.awaited or self.hooks.on_root or passes.is_open or passes.missed or self.hooks.graphs.traced:
            self._begin_measuring()

    def _begin_measuring(self) -> None:
        assert self._step is not None
        if self.passes.links.awaited:
            self._drop_interrupted(calls=0)
        buffer, metrics, inventory = self._step
        self._buffer, self._lost = buffer, ()
        self._has_forward = self._has_backward = False
        self._calls.begin(buffer, metrics, inventory)
        self._prepare(metrics)
        for part in (self._attention, self._check):
            if part is not None:
                part.begin(buffer, metrics, inventory)
        if self.passes.by_hand and (reference := self._due_reference) is not None:
            is_checked = self._check.wants if self._check is not None else lambda _: False
            reference.follow_loop(lambda name: is_checked(name) or self.values.wants(n.ACTIVATION_DIFFERENCE, name))
        self._due = any(metric.source in n.MODULE_SOURCES for metric in metrics)
        self.set_recording(self._due)

    def root_inputs_missed(self) -> None:
        """The step began in a call of the root, for which the hook on its inputs was installed too late."""
        if self._buffer is not None:
            self._calls.misses_root = True
            reason = "it was asked for after the step had begun, with the call of the model"
            self._buffer.absent.update(((source, n.ROOT), reason) for source in (n.INPUT, n.INPUT_GRADIENT))

    def end(self) -> None:
        if self._step is None:
            return
        self._step = None
        if self.passes.links.awaited or self.passes.root_trains is not None or self._calls.awaited:
            self._drop_interrupted(calls=0)
        self.was_trained, was_trained = False, self.was_trained
        if (buffer := self._buffer) is None:
            return
        self._collect(buffer, was_trained)
        self._calls.end()
        if self._attention is not None:
            self._attention.end()
        if self._check is not None:
            self._check.end(self.hooks.are_in_graphs())
        if self.reference is not None:
            self.reference.end()
        self._explain_lost(buffer)
        self.hooks.explain(buffer.absent)
        self._buffer = None
        self.passes.root_trains = None  # also if a forward was interrupted

    def set_aside(self) -> None:
        """The values so far are about to be set aside: store them in the buffer."""
        if self._buffer is not None:
            self.hooks.collect(self._buffer, self.values)
            self.values.flush()
            self._explain_lost(self._buffer)
            self._has_forward = self._has_backward = False

    def _collect(self, buffer: StepBuffer, was_trained: bool) -> None:
        """Collect what compiled graphs have written, or warn that no graph contains a hook."""
        self.hooks.collect(buffer, self.values)
        seen = self._calls.seen or any(tap.name != n.ROOT for tap in self.hooks.graphs.traced)
        if not (self._due and was_trained):
            return
        if self.hooks.graphs.traced:
            buffer.absent.setdefault((n.ACTIVATION, ""), _NOT_IN_GRAPH)
        if self.hooks.on_parts and not seen and compiled_graphs() > 0:
            reason = _NOT_SEEN if TELLS_EXPORT else OLD_RELEASE
            for source in n.MODULE_SOURCES:
                buffer.absent.setdefault((source, ""), reason)
            self._measurer.complaints.add("compiled", f"activations are missing: {reason}")
        elif silent := self.hooks.silent(self._calls.numbers):
            buffer.absent.update(((source, name), OLD_RELEASE) for source in n.MODULE_SOURCES for name in silent)
            self._measurer.complaints.add("compiled", f"some activations are missing: {OLD_RELEASE}")

    @property
    def awaits_check(self) -> bool:
        """Whether the coordinate check is due but has seen no forward, although it could."""
        return self._check is not None and self._check.awaits_forward and not self.hooks.has_compiled_parts

    def drop_scaled(self, reason: str) -> None:
        """Drop the gradients of this step, because their scale is unknown."""
        if self._buffer is not None:
            self.values.flush()
            for source in _GRADIENTS:
                self._buffer.clear(source)
                self._buffer.absent[source, ""] = reason

    def report_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        attention = self._attention or self._add_attention()
        if self._step is not None and self._buffer is None:
            self._begin_measuring()
        elif self._step is not None and attention.buffer is None:
            attention.begin(*self._step)
        attention.report(name, named, arguments)

    def capture(self, name: str, output: Any) -> None:
        self._has_forward |= self.passes.root_trains is None
        self._calls.capture(name, output)

    def set_recording(self, is_open: bool) -> None:
        """Whether compiled graphs with our hooks write values from now on. Does not synchronise."""
        if not (is_open or self.passes.is_open or self.passes.missed):
            return  # as in most steps
        self.passes.is_open = is_open
        self.passes.missed &= is_open  # an unmonitored step misses nothing
        self.hooks.graphs.open(is_open and not self.passes.paused)

    def pause(self, is_paused: bool) -> None:
        if self.passes.links.awaited:
            if is_paused:
                self._drop_interrupted(calls=0)
            elif not _is_in_backward():
                self.passes.links.awaited.clear()  # what was interrupted meanwhile has measured nothing
        self.hooks.graphs.open(self.passes.is_open and not is_paused)

    def backward_ended(self) -> None:
        self.was_trained = True
        if torch._C._current_autograd_node() is not None:  # a nested one
            return
        if self.passes.links.awaited or self._calls.awaited:  # an earlier one, through the same forward
            self._drop(_OF_PASSES if self.passes.links.awaited else _GRADIENTS, is_alone=False)
            self._forget_awaited()
        self._has_backward = True

    # --- passes that were interrupted ------------------------------------------------------------------------------------------

    def _drop_interrupted(self, calls: int) -> None:
        """Passes have begun whose ends were not reported. Drop what those measured that were interrupted, and are not among the ``calls``
        of the root that are known to run.
        """
        root, call = self.hooks.root, nn.Module._call_impl.__code__
        if (trains := self.passes.root_trains) is not None and (root is None or _running(call, root) <= calls):
            self._leave_root()  # by what is no Exception, so that no hook has seen the end
            if trains:
                self._drop(_OF_PASSES, is_alone=not self._has_forward)
        if not (self.passes.links.awaited or self._calls.awaited) or _is_in_backward():
            return
        if self.passes.links.awaited:
            self._drop(_OF_PASSES, is_alone=not self._has_backward)
        else:
            self._drop(_GRADIENTS, is_alone=not self._calls.has_ended)
        self._forget_awaited()

    def _forget_awaited(self) -> None:
        self.passes.links.awaited.clear()
        self._calls.awaited.clear()

    def _drop(self, sources: tuple[str, ...], is_alone: bool) -> None:
        """Drop what an interrupted pass gave of ``sources``; where it is not ``is_alone`` in the step, all of them."""
        if (buffer := self._buffer) is None:
            return
        self._lost = max(self._lost, sources, key=len)
        if not is_alone:
            for source in sources:
                buffer.refused[source] = _MIXED
            return
        with outside_dispatch_modes():
            if sources is _OF_PASSES:
                self.hooks.graphs.discard()
                self.values.discard()
                self._calls.numbers.clear()
                self._calls.seen = self._has_forward = False
                if self._check is not None:
                    self._check.seen = False
            else:
                self.values.flush()
            for source in sources:
                buffer.clear(source)

    def _explain_lost(self, buffer: StepBuffer) -> None:
        """Say why values are absent, if passes of this step that were interrupted are the reason."""
        for source in self._lost:
            if buffer.refused.get(source) is _MIXED:
                buffer.refuse_all(source, _MIXED)
            elif not self._has_forward or (source in _GRADIENTS and not self._calls.has_ended):
                reason = "the forward or backward pass of this step was interrupted, as by an exception"
                buffer.absent.setdefault((source, ""), reason)

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, root_too: bool) -> None:
        """``root_too``: on the root in any case, because modules log values themselves."""
        self._prepare(metrics)
        self.hooks.install(root, inventory, metrics, version, root_too or _stays(self.reference, metrics))

    @property
    def has_removable_hooks(self) -> bool:
        """Whether hooks may be removed on unmonitored steps; unknown before the first forward, since the model may be compiled."""
        return self.passes.forward_seen and self.hooks.has_removable_hooks

    def uninstall(self, metrics: Sequence[Metric]) -> None:
        self.hooks.uninstall(_stays(self.reference, metrics))
        self.passes.root_trains = None

    def remove(self) -> None:
        self.hooks.uninstall(stays_on_root=False)
        self._leave_forward()

    # --- the root --------------------------------------------------------------------------------------------------------------

    def root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The root is called; ``kwargs`` is None after its hook was removed."""
        if self.passes.links.awaited or self.passes.root_trains is not None or self._calls.awaited:
            self._drop_interrupted(calls=1)
        # before the reference runs, since it has copies of the model's own hooks; so the step may have to be opened here
        self.passes.links.root_called(module)
        # a hook that is removed while earlier hooks run is called once more, without kwargs; if the opening of an unmonitored
        # step has removed it, no hook would see the end of this forward
        if kwargs is None or not self.hooks.on_root or torch._C._current_graph_task_id() != -1:
            return
        if not self.passes.forward_seen:
            self.hooks.install_in_compiled()
        self.hooks.leave_fusible()
        trains = self.passes.root_began(module)
        self.was_trained |= trains
        self._has_forward |= len(self._calls.numbers) > 0  # of parts that were called directly
        self._calls.numbers.clear()
        if self._buffer is None or self.passes.paused or not trains:
            return
        start = time.perf_counter()
        if (reference := self._due_reference) is not None:
            self._run_reference(reference, module, args, kwargs)
        if self._attention is not None:
            self._attention.enter()
        self._fence.seconds += time.perf_counter() - start

    @property
    def _due_reference(self) -> ReferencePass | None:
        is_needed = self._calls.differences_due or (self._check is not None and self._check.due)
        return self.reference if is_needed and self.reference else None

    def _run_reference(self, reference: ReferencePass, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check = self._check
        if (ran := reference.take_run()) is not None:
            if check is not None:
                check.behind(root, ran)
            return
        with nullcontext() if check is None else check.beside(root) as note, self.passes.pause():  # the two may share modules
            reference.run(root, partial(self.values.wants, n.ACTIVATION_DIFFERENCE), args, kwargs, note)

    def root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trains = self.passes.root_trains is True and not self.passes.paused
        if torch._C._current_graph_task_id() != -1:  # a recomputation
            return
        self._leave_root()
        if trains and id(sys.exc_info()[1]) != self.passes.handled:
            self._drop(_OF_PASSES, is_alone=not self._has_forward)
        else:
            self._has_forward |= trains

    def _leave_root(self) -> None:
        self.hooks.return_to_fusible()
        self.passes.builds_graph = True
        self._leave_forward()
        if self.reference is not None:
            self.reference.forget()

    def _leave_forward(self) -> None:
        self.passes.root_trains = None
        if self._attention is not None:
            self._attention.leave()
        if self._check is not None:
            self._check.leave()


def _stays(reference: ReferencePass | None, metrics: Iterable[Metric]) -> bool:
    """Whether the root needs hooks before a step is known to be monitored."""
    return bool(reference) or any(metric.source in n.ATTENTION_SOURCES.values() for metric in metrics)


# --- which calls are running ---


def _is_in_backward() -> bool:
    """Whether a backward pass is running, in any thread. Slow, unless it is in this one."""
    return torch._C._current_graph_task_id() != -1 or _running(torch.autograd.graph._engine_run_backward.__code__) > 0


def _running(code: CodeType, of: object = None) -> int:
    """How many calls of a function, or of that method of an object, are running in all threads. Slow."""
    calls = 0
    for last in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(last):
            if frame.f_code is code:
                values = frame.f_locals
                calls += of is None or values.get("self") is of
                if isinstance(values, dict):
                    values.clear()  # the snapshot would keep all values alive until the frame ends
    return calls
