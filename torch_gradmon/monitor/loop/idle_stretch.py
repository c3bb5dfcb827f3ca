"""Consecutive idle steps in which hooks do no more than count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..machine.step_state import StepState

#: The longest time without a look at requests from other processes, in seconds.
_LONGEST = 1.0
#: Calls of the model in one step, while it is unknown how many are usual. With more than usual the loop is followed again: perhaps
#: another optimizer steps now.
_AT_FIRST = 32


class IdleWatchers(Protocol):
    """The plugins."""

    @property
    def watch_idle_steps(self) -> bool:
        """Whether any plugin watches idle steps at this moment."""

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call a method of each."""


class IdleSteps(Protocol):
    """Takes steps that only begin and end."""

    def open_idle(self, step: int) -> None:
        """Begin ``step``."""


class IdleStretch:
    """Steps after an idle one that are certain to be idle as well, in a loop whose habits are known.

    The last idle step before a monitored one is never part of it, so that hooks are there in time. Nothing here is fenced: there is
    nothing that could fail.

    Args:
        state: of the step machine.
        steps: takes them.
        plugins: one of them may have to see the next step.
        clock: a monotonic clock, in seconds.

    Attributes:
        left: the number of steps that are left.
    """

    def __init__(
        self, state: StepState, steps: IdleSteps, plugins: IdleWatchers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state, self._steps, self._plugins, self._clock = state, steps, plugins, clock
        self.left = self._missed = self._forwards = 0
        self._most = 0  # calls of the model in one step
        self._due = 0.0

    def begin(self, steps: int) -> None:
        """The next ``steps`` steps are idle."""
        self.left, self._forwards, self._due = steps, 0, self._clock() + _LONGEST

    def shorten(self) -> None:
        """What is measured may have changed: end with the open step, if there is one."""
        self.left = min(self.left, int(self._state.is_open))

    def stop(self) -> None:
        """End at once."""
        self.left = 0

    def catch_up(self) -> None:
        """The loop is followed again: report what plugins have missed."""
        if self._missed or self._forwards:
            missed, forwards, self._missed, self._forwards = self._missed, self._forwards, 0, 0
            self._plugins.call("on_missed", missed)
            for _ in range(forwards):
                self._plugins.call("on_forward")

    # --- hooks ---------------------------------------------------------------------------------------------------------------

    def forward_began(self, module: nn.Module) -> bool:
        """The model is called. Returns whether that is all, else the loop is followed again."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return True  # evaluation, or a recomputation
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return True  # a transform
        state = self._state
        if (
            not module.training
            or self._forwards >= (self._most or _AT_FIRST)
            or (not state.is_open and self._plugins.watch_idle_steps)
        ):
            self.left = 0
        elif not state.is_open:
            step = state.clock.next_step
            state.open(step, is_tentative=False)
            self._steps.open_idle(step)
        self._forwards += self.left > 0
        return self.left > 0

    def step_began(self) -> bool:
        """The optimizer is about to step. Returns whether that is all, else the loop is followed again."""
        if not self._state.is_open:
            self.left = 0  # no call of the model was seen
        return self._state.is_open

    def step_ended(self) -> bool:
        """The optimizer has stepped. Returns whether that is all, else the loop is followed again."""
        state = self._state
        if not state.is_open:
            self.left = 0
            return False
        state.attempt()
        state.close()
        self._most, self._forwards = max(self._most, self._forwards), 0
        self._missed += 1
        self.left = 0 if self._clock() >= self._due else self.left - 1
        return True
