"""Consecutive idle steps in which hooks do no more than count."""

from __future__ import annotations

from collections.abc import Set
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.fence import Fence
from ...core.torch_modes import capture_check
from ..machine.step_machine import StepState

_has_grad, _running_task = torch.is_grad_enabled, torch._C._current_graph_task_id
_interpreter, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
#: The longest time without a look at requests from other processes, in seconds.
LONGEST = 1.0


class IdleWatchers(Protocol):
    """The plugins."""

    @property
    def watching(self) -> Set[int]:
        """The ids of those that have to see idle steps, as they are at any time."""

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call a method of each."""


class IdleSteps(Protocol):
    """Has the open step, or the last one."""

    def pass_idle(self, step: int) -> None:
        """The steps up to ``step`` were idle, or are."""


class IdleTags(Protocol):
    """Facts about steps, from the loop."""

    current: dict[str, Any]

    def clear(self) -> None:
        """Forget it."""


class IdleStretch:
    """Steps after an idle one that are certain to be idle as well, in a loop whose habits are known.

    Each event that such a step does not have ends the stretch before the event is handled: from there on the loop is followed as if it
    had always been. The last idle step before a monitored one is never part of a stretch, so that hooks are there in time. Nothing here
    is guarded by the fence: there is nothing that could fail.

    Args:
        state: of the step machine.
        steps: gets to know of them when the loop is followed again.
        tags: nothing is kept of these steps.
        plugins: one of them may have to see the next step.
        fence: measures the time.

    Attributes:
        left: the number of steps that are left.
        depth: how many calls of each optimizer's step are running, by its id.
    """

    def __init__(self, state: StepState, steps: IdleSteps, tags: IdleTags, plugins: IdleWatchers, fence: Fence) -> None:
        self._state, self._steps, self._tags, self._plugins, self._fence = state, steps, tags, plugins, fence
        self.left = self._missed = self._forwards = self._thread = self._key = 0
        # calls of the model since the last followed step of an optimizer, and the most between two
        self._followed = self._most = 0
        self._due = self._spent = 0.0
        self.depth: dict[int, int] = {}
        self._captures, self._watching = capture_check(), plugins.watching

    def begin(self, steps: int) -> None:
        """The next ``steps`` steps are idle."""
        self.left, self._thread, self._due = steps, get_ident(), perf_counter() + LONGEST

    def stop(self) -> None:
        """Follow the loop again; an open step remains open."""
        if self.left:
            self.left = 0
            self._leave()

    def _leave(self) -> None:
        if self._forwards and self._state.is_open:
            self._state.patterns.called(in_eval=False)
        if (self._missed or self._forwards) and self._state.clock.step is not None:
            self._steps.pass_idle(self._state.clock.step)
            if not self._state.is_open:
                self._state.leave_idle(self._key)
        self._fence.add_time(self._spent)
        self._spent = 0.0

    def wake(self) -> None:
        """The same, and plugins know at once what they have missed."""
        self.stop()
        self.catch_up()

    def catch_up(self) -> None:
        """The loop is followed again: report what plugins have missed."""
        if self._missed or self._forwards:
            missed, forwards, self._missed, self._forwards = self._missed, self._forwards, 0, 0
            if missed:
                self._plugins.call("on_missed", missed)
            self._followed += forwards
            for _ in range(forwards):
                self._plugins.call("on_forward")

    def forward_followed(self) -> None:
        """The model is called, and the loop is followed."""
        self.catch_up()
        self._followed += 1

    def step_followed(self) -> None:
        """The optimizer has stepped, and the loop is followed."""
        self._most, self._followed = max(self._most, self._followed), 0

    # --- hooks: their code and data have left the cache since the last step, so each call and each object counts ---------------

    def forward_began(self, module: nn.Module) -> bool:
        """The model is called. Returns whether that is all, else the loop is followed again."""
        if not _has_grad() or _running_task() != -1:
            return True  # evaluation, or a recomputation
        if _interpreter() is not None or _tracing_state() is not None:
            return True  # a transform, or a trace
        began, state = perf_counter(), self._state
        is_usual = self._forwards < self._most  # else another optimizer may step now
        is_odd = not is_usual or not module.training or get_ident() != self._thread
        is_odd = is_odd or (self._captures is not None and self._captures())
        if is_odd or self._watching or state.progress.begun:
            self.stop()
            return False
        if not state.is_open:
            state.open_idle()
        self._forwards += 1
        self._spent += perf_counter() - began
        return True

    def step_began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The optimizer is about to step, perhaps with arguments. Returns whether that is all, else the loop is followed again."""
        state, key = self._state, id(optimizer)
        is_odd = not state.is_open or len(args) > 1 or bool(kwargs or state.progress.begun)
        is_odd = is_odd or getattr(optimizer, "found_inf", None) is not None
        is_odd = is_odd or (self._captures is not None and self._captures())
        if is_odd or self._watching or _running_task() != -1:
            self.stop()
            return False
        state.progress.begun.add(key)
        self.depth[key] = 1
        return True

    def step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The optimizer has stepped. Returns whether that is all, else the loop is followed again."""
        began, state, key = perf_counter(), self._state, id(optimizer)
        if not state.is_open or key not in state.progress.begun:
            self.stop()
            return False
        state.close_idle(key)
        self._key = key
        if self._tags.current:
            self._tags.clear()
        self.depth[key] = self._forwards = 0
        self._missed += 1
        ended = perf_counter()
        self._spent += ended - began
        self.left -= 1
        if ended >= self._due or self.left <= 0:  # below if another thread has stopped it
            self.left = 0
            self._leave()
        return True
