"""What the modules of a model take and return in training, and the gradients of that: the rooms where it is seen, wired together.

:class:`ForwardHooks` tell of calls, :class:`PassTracker` know which are training, :class:`ModuleCalls` measure them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.fence import Fence
from ...core.metric import Metric
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..attention.source import AttentionRecorder
from ..coordinate_check.source import CoordinateCheck
from ..hooks import compiled_graphs
from ..measurer import Measurer
from ..reference.loop_run import LoopRun
from ..reference.source import ReferencePass
from .calls import ModuleCalls
from .forward_hooks import ForwardHooks
from .pass_tracker import PassTracker
from .values import ModuleValues

_INSIDE_COMPILE = "inside torch.compile only the statistics of outputs are measured, and no functions, gradients or inputs"
_SCRIPTED = "a module of TorchScript (torch.jit), which calls no hooks of Python"
_ROOT_MISSED = "it was asked for after the step had begun, with the call of the model"
_LEFT_OUT = "left out by excluded_modules_regex"
_NOT_SEEN = (
    "no hook on a module was called: none of these modules ran, or torch.compile had traced the model before the monitor came, and calls "
    "no hooks; then attach before the first call, or call torch.compiler.reset() and compile again"
)


class ModuleSource:
    """Forward hooks on the modules that a metric matches; no other module has one.

    Evaluation passes (the root module in eval mode, or, in a step that was not begun by hand, without gradients) and recomputation in
    activation checkpointing are no training activations.

    Args:
        measurer: does the work.
        guard: told of the time that it takes.

    Attributes:
        opening: told that the root is called, before anything else.
        was_trained: whether the model has had a training forward or a backward pass in this step.
    """

    def __init__(self, measurer: Measurer, guard: Fence) -> None:
        self._measurer, self._guard = measurer, guard
        self._passes = PassTracker()
        self.values = ModuleValues(measurer)
        self.reference = ReferencePass(measurer.complaints)
        self.attention = AttentionRecorder(measurer.complaints, self.values, guard, self._passes.in_forward)
        self._calls = ModuleCalls(measurer, guard, self._passes, self.reference, self.values)
        self.check = CoordinateCheck(measurer, guard, self._passes, self.reference)
        self._loop_run = LoopRun(self._passes, guard)
        self._hooks = ForwardHooks(self, self._calls, measurer.built_in.eps)
        self.opening: Callable[[nn.Module], object] = lambda _: None
        self.was_trained = False
        self._buffer: StepBuffer | None = None
        self._due = False

    @property
    def inverse_scale(self) -> Callable[[], Tensor | None]:
        """Gives what gradients have to be multiplied by."""
        return self._calls.inverse_scale

    @inverse_scale.setter
    def inverse_scale(self, inverse_scale: Callable[[], Tensor | None]) -> None:
        self._calls.inverse_scale = inverse_scale

    @property
    def part_called(self) -> Callable[[nn.Module], object]:
        """Told that a part of the model is called, while no step is open."""
        return self._calls.part_called

    @part_called.setter
    def part_called(self, part_called: Callable[[nn.Module], object]) -> None:
        self._calls.part_called = part_called

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex, by_hand: bool) -> None:
        """Start a step with the metrics that are due in it; ``by_hand``: the loop has begun it."""
        self._buffer, self.was_trained, self._passes.by_hand = buffer, False, by_hand
        self._calls.begin(buffer, metrics, inventory)
        self.attention.begin(buffer, metrics, inventory)
        self.check.begin(buffer, metrics, inventory)
        if by_hand and self._runs_beside and (module := self.reference.module) is not None:
            wanted = {n: p for n, p in self.reference.parts().items() if self.check.wants(n) or self._calls.is_compared(n)}
            self._loop_run.begin(module, wanted)
        self._due = any(metric.source in n.MODULE_SOURCES for metric in metrics)
        self.let_through(self._due)

    def step_began(self, in_eval: bool) -> None:
        """A step began; ``in_eval``: by a call in evaluation mode, and whether that was training :meth:`step_confirmed` tells."""
        self._passes.counts_eval = self._passes.is_tentative = in_eval

    def count_eval(self) -> None:
        """Calls in evaluation mode are training from now on in this step."""
        self._passes.counts_eval = True

    @property
    def on_root_inputs(self) -> bool:
        """Whether a hook is on what the root takes."""
        return self._hooks.on_root_inputs

    def root_inputs_missed(self) -> None:
        """The step began in a call of the root, which the hook on its inputs has come too late for."""
        assert self._buffer is not None
        self._calls.misses_root = True
        self._buffer.absent.update(((source, n.ROOT), _ROOT_MISSED) for source in (n.INPUT, n.INPUT_GRADIENT))

    def step_confirmed(self) -> None:
        """A backward pass or an optimizer follows the call that began the step."""
        self._passes.is_tentative = False

    def end(self) -> None:
        """End the step; its values can still be evaluated."""
        if self._buffer is None:
            return
        self._collect(self._buffer)
        self._calls.end()
        self._loop_run.end()
        self.attention.compiled |= self.has_graphs
        self.attention.end()
        self.check.compiled = self._hooks.has_compiled_parts or self.has_graphs
        self.check.end()
        if self._hooks.unhooked:
            sources = (*n.MODULE_SOURCES, *n.RCC_SOURCES)
            self._buffer.absent.update(((source, name), _SCRIPTED) for source in sources for name in self._hooks.unhooked)
        for source in n.ATTENTION_SOURCES.values():
            if (source, "") in self._buffer.absent:  # by whom a call was made that was not seen, nobody knows
                self._buffer.absent.update(((source, name), _LEFT_OUT) for name in self._hooks.left_out)
        self._buffer, self.was_trained = None, False
        self._passes.root_trains = None  # also where a forward was interrupted
        self.reference.forget()

    def _collect(self, buffer: StepBuffer) -> None:
        """Take what compiled graphs have written, or say that no hook is in any."""
        seen = self._calls.seen
        for (_, name), tap in self._hooks.taps.items():
            for path in tap.collect(buffer, n.ACTIVATION):
                self.values.adopt(n.ACTIVATION, name, path, tap.columns, _INSIDE_COMPILE)
                seen |= name != n.ROOT
            seen |= bool(tap.refused)
        if self._due and self._hooks.on_parts and not seen and self.was_trained and compiled_graphs() > 0:
            for source in n.MODULE_SOURCES:
                buffer.absent.setdefault((source, ""), _NOT_SEEN)
            self._measurer.complaints.add("compiled", f"activations are missing: {_NOT_SEEN}")

    @property
    def awaits_check(self) -> bool:
        """Whether the coordinate check is due and has seen no forward, though it could."""
        return self.check.awaits_forward and not self._hooks.has_compiled_parts

    def forget_scaled(self, reason: str) -> None:
        """The gradients measured so far in this step were divided by a wrong scale, or by none: drop them."""
        self._calls.forget_scaled(reason)

    def capture(self, name: str, output: Any) -> None:
        """Measure ``output``, a tensor or a container of tensors, under the name of its module."""
        self._calls.capture(name, output)

    def let_through(self, is_open: bool) -> None:
        """Whether graphs with hooks of ours in them write values from now on. Does not synchronise."""
        if not (is_open or self._passes.is_open or self._passes.missed):
            return  # as in most steps
        self._passes.is_open = is_open
        self._passes.missed &= is_open  # by a step that is not monitored
        self._hooks.gate.set(is_open and not self.paused)

    @property
    def has_graphs(self) -> bool:
        """Whether any graph has a hook of ours in it."""
        return self._hooks.has_graphs

    @property
    def paused(self) -> bool:
        """Whether nothing is measured for the moment."""
        return self._passes.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._passes.paused = paused
        self._hooks.gate.set(self._passes.is_open and not paused)

    # --- hooks -----------------------------------------------------------------------------------------------------------------

    def install(self, root: nn.Module, inventory: ModelIndex, metrics: Sequence[Metric], version: int, root_too: bool) -> None:
        """Hang hooks on the modules that any of ``metrics`` matches; once for each ``version`` of the plan.

        ``root_too``: on the root in any case, because modules log values of their own.
        """
        if self._hooks.install(root, inventory, metrics, version, root_too or self._stays(metrics)):
            self.attention.compiled = self._hooks.has_compiled_parts

    def _stays(self, metrics: Iterable[Metric]) -> bool:
        """Whether the root needs hooks that are there before a step is known to be monitored."""
        return bool(self.reference) or any(metric.source in n.ATTENTION_SOURCES.values() for metric in metrics)

    @property
    def hangs(self) -> bool:
        """Whether any hook is on a module."""
        return self._hooks.on_root or self._hooks.on_parts

    @property
    def has_hooks_on_parts(self) -> bool:
        """Whether any module, the root among them, has hooks for what it takes or returns."""
        return self._hooks.has_hooks_on_parts

    @property
    def may_rest(self) -> bool:
        """Whether hooks may go while steps are not monitored; until a forward was seen nobody knows, since it may be compiled."""
        return self._passes.forward_seen and self._hooks.may_rest

    def rest(self, metrics: Sequence[Metric]) -> None:
        """Take away the hooks that only monitored steps need."""
        self._hooks.rest(self._stays(metrics))
        self._passes.root_trains = None

    def remove(self) -> None:
        """Take all hooks away; calling it again does nothing."""
        self._hooks.rest(stays_on_root=False)
        self._passes.root_trains = None
        self.attention.leave()
        self.check.leave()

    # --- the root --------------------------------------------------------------------------------------------------------------

    def root_began(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """The root is called; ``kwargs`` is None after its hook was removed."""
        # first of all, since the reference has copies of the model's own hooks; so the step may have to be opened here
        self.opening(module)
        # a hook that was removed while the hooks before it ran is called once more, and not with kwargs; where the opening of a
        # step that is not monitored has removed it, nothing would tell of the end of this forward
        if kwargs is None or not self._hooks.on_root or torch._C._current_graph_task_id() != -1:
            return
        trains = self._passes.root_began(module)
        self.was_trained |= trains
        self._calls.forward_began()
        if self._buffer is None or self.paused or not trains:
            return
        start = time.perf_counter()
        if self._runs_beside:
            self._run_reference(module, args, kwargs)
        self.attention.enter()
        self._guard.account(time.perf_counter() - start)

    @property
    def _runs_beside(self) -> bool:
        """Whether the reference is to run beside the model in this step."""
        return bool(self.reference) and (self._calls.compares or self.check.due)

    def _run_reference(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (ran := self._loop_run.take()) is not None:
            self.reference.adopt(ran.outputs)
            self.check.behind(module, ran.run)
            return
        with self.check.beside(module) as note:
            self._passes.paused = True  # modules that the two share
            try:
                self.reference.run(module, self._calls.is_compared, args, kwargs, note)
            finally:
                self._passes.paused = False

    def root_ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The root has returned or raised."""
        if self._passes.root_ended():
            self.attention.leave()
            self.check.leave()
            self.reference.forget()

    def training_began(self) -> None:
        """The root's training forward began; its own hook here may have been hung too late to see it."""
        self._passes.training_began(end_is_seen=self._hooks.on_root)

    @property
    def in_training(self) -> bool:
        """False inside an evaluation pass and inside recomputation, which happens while a backward pass runs."""
        return self._passes.in_training
