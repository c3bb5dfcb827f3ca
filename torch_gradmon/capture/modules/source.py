"""Inputs and outputs of a model's modules in training, and their gradients.

:class:`ForwardHooks` observe calls, :class:`PassTracker` knows which are training, :class:`ModuleCalls` measures them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, MutableSet, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.fence import Fence
from ...core.records import Metric
from ...core.torch_modes import TELLS_EXPORT, ending, is_in_backward, outside_dispatch_modes, running_calls
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..attention.source import AttentionRecorder
from ..coordinate_check.source import CoordinateCheck
from ..hooks import compiled_graphs
from ..measurer import Measurer
from ..reference.loop_run import LoopRun
from ..reference.source import ReferencePass
from .calls import ModuleCalls, OutputDifferences
from .compiled import SHARES_GRAPH
from .forward_hooks import OLD_RELEASE, ForwardHooks
from .pass_tracker import PassTracker
from .values import ModuleValues

# --- forward scope ---


class ForwardScope:
    """Runs the reference before the model, then enables the coordinate check and the recording of attention.

    Args:
        measurer: measures.
        fence: counts the time.
        passes: paused while the reference runs.
        values: measures activations.
    """

    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker, values: ModuleValues) -> None:
        self._fence, self._passes = fence, passes
        self.reference = ReferencePass(measurer.complaints)
        self.attention = AttentionRecorder(measurer.complaints, values, fence, passes.in_forward)
        self._differences = OutputDifferences(self.reference, values, passes)
        self.calls = ModuleCalls(measurer, fence, passes, self._differences, values)
        self.check = CoordinateCheck(measurer, fence, passes, self.reference)
        self._loop_run = LoopRun(passes, fence)

    def begin_step(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex, by_hand: bool) -> None:
        """Start a step with the metrics due in it."""
        self.calls.begin(buffer, metrics, inventory)
        self.attention.begin(buffer, metrics, inventory)
        self.check.begin(buffer, metrics, inventory)
        if by_hand and self._needs_reference and (module := self.reference.module) is not None:
            parts = self.reference.parts().items()
            self._loop_run.begin(module, {n: p for n, p in parts if self.check.wants(n) or self._differences.wants(n)})

    def end_step(self, has_compiled_parts: bool, has_graphs: bool) -> None:
        """End the step; its values can still be evaluated."""
        self.calls.end()
        self._loop_run.end()
        self.attention.end(has_graphs)
        self.check.end(has_compiled_parts or has_graphs)
        self.reference.forget()

    @property
    def _needs_reference(self) -> bool:
        return bool(self.reference) and (self._differences.due or self.check.due)

    def start(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a training forward of ``root`` with these arguments."""
        start = time.perf_counter()
        if self._needs_reference:
            self._run_reference(root, args, kwargs)
        self.attention.enter()
        self._fence.add_time(time.perf_counter() - start)

    def _run_reference(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (ran := self._loop_run.take()) is not None:
            self.reference.adopt(ran.outputs)
            self.check.behind(root, ran.run)
            return
        with self.check.beside(root) as note, self._passes.pause():  # the two may share modules
            self.reference.run(root, self._differences.wants, args, kwargs, note)

    def leave(self) -> None:
        """End the forward. Idempotent."""
        self.attention.leave()
        self.check.leave()


# --- Inputs and outputs of a model's modules in training, and their gradients ---


_ROOT_MISSED = "it was asked for after the step had begun, with the call of the model"
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
_LOST = "the forward or backward pass of this step was interrupted, as by an exception"
_GRADIENTS = (n.ACTIVATION_GRADIENT, n.INPUT_GRADIENT)
_OF_PASSES = (*n.MODULE_SOURCES, *n.RCC_SOURCES, *n.ATTENTION_SOURCES.values())


class ModuleSource:
    """Forward hooks on the modules that a metric matches; no other module has one.

    Evaluation passes (the root module in eval mode, or without gradients in a step that the loop has not begun explicitly) and
    recomputation in activation checkpointing are not training.

    Args:
        measurer: measures.
        fence: counts the time.

    Attributes:
        was_trained: the model has had a training forward or a backward pass in this step.
        hooks: those on modules.
    """

    _last_called: ClassVar[object] = None  # the sign of the source whose root was called last, in any thread

    def __init__(self, measurer: Measurer, fence: Fence) -> None:
        self._handled = id(sys.exc_info()[1])  # the exception that the script handled when it called the root
        self._sign = ModuleSource._last_called = object()
        self._measurer, self._passes = measurer, PassTracker()
        self.values = ModuleValues(measurer)
        self._scope = ForwardScope(measurer, fence, self._passes, self.values)
        self._calls, self.reference, self.attention = self._scope.calls, self._scope.reference, self._scope.attention
        self.hooks = ForwardHooks(self, self._calls, measurer.built_in.eps)
        self._opening: Callable[[nn.Module], object] = lambda _: None
        self.was_trained = False
        self._buffer: StepBuffer | None = None
        self._due = False
        self._awaited: MutableSet[int] = set()
        self._has_forward = self._has_backward = False  # of this step, which was not interrupted
        self._lost: tuple[str, ...] = ()  # sources of which a pass in this step had values that were dropped

    def connect(
        self,
        inverse_scale: Callable[[], Tensor | None],
        opening: Callable[[nn.Module], object] = lambda _: None,
        part_called: Callable[[nn.Module], object] = lambda _: None,
        awaited: MutableSet[int] | None = None,
    ) -> None:
        """Connect with the loop.

        Args:
            inverse_scale: returns the factor for gradients.
            opening: called with the root when it is called, before anything else.
            part_called: called with a part of the model that runs while no step is open.
            awaited: backward passes that have reached a parameter, until they end.
        """
        self._opening, self._awaited = opening, set() if awaited is None else awaited
        self._calls.connect(inverse_scale, part_called)

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex, by_hand: bool) -> None:
        """Start a step with the metrics due in it; ``by_hand``: the loop has begun it explicitly."""
        if self._awaited:
            self._drop_interrupted(calls=0)
        self._buffer, self.was_trained, self._lost = buffer, False, ()
        self._has_forward = self._has_backward = False
        self._passes.use_training_mode(by_hand)
        self._scope.begin_step(buffer, metrics, inventory, by_hand)
        self._due = any(metric.source in n.MODULE_SOURCES for metric in metrics)
        self.set_recording(self._due)

    def step_began(self, in_eval: bool) -> None:
        """A step began; ``in_eval``: by a call in evaluation mode, which :meth:`step_confirmed` may confirm as training."""
        self._passes.begin_step(in_eval)

    def count_eval(self) -> None:
        """Count calls in evaluation mode as training from now on in this step."""
        self._passes.count_eval()

    def root_inputs_missed(self) -> None:
        """The step began in a call of the root, for which the hook on its inputs was installed too late."""
        assert self._buffer is not None
        self._calls.miss_root()
        self._buffer.absent.update(((source, n.ROOT), _ROOT_MISSED) for source in (n.INPUT, n.INPUT_GRADIENT))

    def step_confirmed(self) -> None:
        """A backward pass or an optimizer step follows the call that began the step."""
        self._passes.confirm()

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        if self._buffer is None:
            return
        if self._awaited or self._passes.root_trains is not None or self._calls.gradients.awaited:
            self._drop_interrupted(calls=0)
        self._collect(self._buffer)
        self._scope.end_step(self.hooks.has_compiled_parts, self.hooks.graphs.has_graphs)
        for source in self._lost:
            self._explain_lost(self._buffer, source)
        self.hooks.explain(self._buffer.absent)
        self._buffer, self.was_trained = None, False
        self._passes.forget_forward()  # also if a forward was interrupted

    def set_aside(self) -> None:
        """The values so far are about to be set aside: store them in the buffer."""
        if self._buffer is not None:
            self.hooks.collect(self._buffer, self.values)
            self.values.flush()
            for source in self._lost:
                self._explain_lost(self._buffer, source)
            self._has_forward = self._has_backward = False

    def _collect(self, buffer: StepBuffer) -> None:
        """Collect what compiled graphs have written, or warn that no graph contains a hook."""
        self.hooks.collect(buffer, self.values)
        seen = self.hooks.graphs.has_parts or self._calls.seen
        if not (self._due and self.was_trained):
            return
        if self.hooks.graphs.has_graphs:
            buffer.absent.setdefault((n.ACTIVATION, ""), _NOT_IN_GRAPH)
        if self.hooks.on_parts and not seen and compiled_graphs() > 0:
            reason = _NOT_SEEN if TELLS_EXPORT else OLD_RELEASE
            for source in n.MODULE_SOURCES:
                buffer.absent.setdefault((source, ""), reason)
            self._measurer.complaints.add("compiled", f"activations are missing: {reason}")
        elif silent := self.hooks.silent(self._calls.places):
            buffer.absent.update(((source, name), OLD_RELEASE) for source in n.MODULE_SOURCES for name in silent)
            self._measurer.complaints.add("compiled", f"some activations are missing: {OLD_RELEASE}")

    @property
    def awaits_check(self) -> bool:
        """Whether the coordinate check is due but has seen no forward, although it could."""
        return self._scope.check.awaits_forward and not self.hooks.has_compiled_parts

    def drop_scaled(self, reason: str) -> None:
        """Drop the gradients measured so far in this step, because their scale was wrong or missing."""
        self._calls.drop_scaled(reason)

    def capture(self, name: str, output: Any) -> None:
        """Measure ``output``, a tensor or a container of tensors, under the name of its module."""
        self._has_forward |= self._passes.root_trains is None
        self._calls.capture(name, output)

    def set_recording(self, is_open: bool) -> None:
        """Whether compiled graphs with our hooks write values from now on. Does not synchronise."""
        if not (is_open or self._passes.is_open or self._passes.missed):
            return  # as in most steps
        self._passes.set_open(is_open)
        self.hooks.graphs.gate.set(is_open and not self._passes.paused)

    @property
    def paused(self) -> bool:
        """Whether nothing is measured at the moment."""
        return self._passes.paused

    def pause(self, is_paused: bool) -> None:
        """Measure nothing, or go on."""
        if self._awaited:
            if is_paused:
                self._drop_interrupted(calls=0)
            elif not is_in_backward():
                self._awaited.clear()  # what was interrupted meanwhile has measured nothing
        self._passes.set_paused(is_paused)
        self.hooks.graphs.gate.set(self._passes.is_open and not is_paused)

    def backward_ended(self) -> None:
        """A backward pass has ended in this step."""
        self.was_trained = True
        if torch._C._current_autograd_node() is not None:  # a nested one
            return
        if self._awaited or self._calls.gradients.awaited:  # an earlier one, through the same forward
            self._drop(_OF_PASSES if self._awaited else _GRADIENTS, is_alone=False)
            self._forget_awaited()
        self._has_backward = True

    # --- passes that were interrupted ------------------------------------------------------------------------------------------

    def _drop_interrupted(self, calls: int) -> None:
        """Passes have begun whose ends were not reported. Drop what those measured that were interrupted, and are not running.

        ``calls``: of the root are known to run.
        """
        root, gradients = self.hooks.root, self._calls.gradients
        if (trains := self._passes.root_trains) is not None and (root is None or running_calls(root) <= calls):
            self._leave_root()  # by what is no Exception, so that no hook has seen the end
            if trains:
                self._drop(_OF_PASSES, is_alone=not self._has_forward)
        if not (self._awaited or gradients.awaited) or is_in_backward():
            return
        if self._awaited:
            self._drop(_OF_PASSES, is_alone=not self._has_backward)
        else:
            self._drop(_GRADIENTS, is_alone=not gradients.has_ended)
        self._forget_awaited()

    def _forget_awaited(self) -> None:
        self._awaited.clear()
        self._calls.gradients.awaited.clear()

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
                self._calls.forward_began()
                self._calls.seen = self._scope.check.seen = self._has_forward = False
            else:
                self.values.flush()
            for source in sources:
                buffer.clear(source)

    def _explain_lost(self, buffer: StepBuffer, source: str) -> None:
        """Say why values of ``source`` are absent, if passes of this step that were interrupted are the reason."""
        if buffer.refused.get(source) is _MIXED:
            buffer.refuse_all(source, _MIXED)
        elif not self._has_forward or (source in _GRADIENTS and not self._calls.gradients.has_ended):
            buffer.absent.setdefault((source, ""), _LOST)

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, root_too: bool) -> None:
        """Install hooks on modules that any of ``metrics`` matches, once per ``version`` of the plan.

        ``root_too``: on the root in any case, because modules log values themselves.
        """
        if self.hooks.install(root, inventory, metrics, version, root_too or _stays(self.reference, metrics)):
            self.attention.set_compiled(self.hooks.has_compiled_parts)

    @property
    def has_removable_hooks(self) -> bool:
        """Whether hooks may be removed on unmonitored steps; unknown before the first forward, since the model may be compiled."""
        return self._passes.forward_seen and self.hooks.has_removable_hooks

    def uninstall(self, metrics: Sequence[Metric]) -> None:
        """Remove the hooks that only monitored steps need."""
        self.hooks.uninstall(_stays(self.reference, metrics))
        self._passes.forget_forward()

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        self.hooks.uninstall(stays_on_root=False)
        self._passes.forget_forward()
        self._scope.leave()

    # --- the root --------------------------------------------------------------------------------------------------------------

    def root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The root is called; ``kwargs`` is None after its hook was removed."""
        if self._awaited or self._passes.root_trains is not None or self._calls.gradients.awaited:
            self._drop_interrupted(calls=1)
        # before the reference runs, since it has copies of the model's own hooks; so the step may have to be opened here
        self._opening(module)
        # a hook that is removed while earlier hooks run is called once more, without kwargs; if the opening of an unmonitored
        # step has removed it, no hook would see the end of this forward
        if kwargs is None or not self.hooks.on_root or torch._C._current_graph_task_id() != -1:
            return
        if not self._passes.forward_seen and self.hooks.install_in_compiled():
            self.attention.set_compiled(True)
        trains = self._passes.root_began(module)
        self.was_trained |= trains
        self._handled, ModuleSource._last_called = id(sys.exc_info()[1]), self._sign
        self._has_forward |= len(self._calls.places) > 0  # of parts that were called directly
        self._calls.forward_began()
        if self._buffer is None or self._passes.paused or not trains:
            return
        self._scope.start(module, args, kwargs)

    def root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The root has returned or raised."""
        trains = self._passes.root_trains is True and not self._passes.paused
        if torch._C._current_graph_task_id() != -1:  # a recomputation
            return
        self._leave_root()
        if trains and id(sys.exc_info()[1]) != self._handled:
            self._drop(_OF_PASSES, is_alone=not self._has_forward)
        else:
            self._has_forward |= trains

    def _leave_root(self) -> None:
        self._passes.root_ended()
        self._scope.leave()
        self.reference.forget()

    def ending(self) -> str:
        """The exception that ends the training now, as text; empty without one."""
        return ending(self._handled, is_last=ModuleSource._last_called is self._sign)

    def training_began(self) -> None:
        """The root's training forward began; its own hook may have been installed too late to see it."""
        self._handled, ModuleSource._last_called = id(sys.exc_info()[1]), self._sign
        self._passes.training_began(end_is_seen=self.hooks.on_root)

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside a recomputation, which happens while a backward pass runs."""
        return self._passes.in_training


def _stays(reference: ReferencePass, metrics: Iterable[Metric]) -> bool:
    """Whether the root needs hooks before a step is known to be monitored."""
    return bool(reference) or any(metric.source in n.ATTENTION_SOURCES.values() for metric in metrics)
