"""Optimizers that step within the backward pass, each as soon as the gradients of its parameters are there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture.hooks import Hook


def is_running() -> bool:
    """Whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1


def is_nested() -> bool:
    """At the end of a backward pass: whether it is one of a re-entrant checkpoint, within another one."""
    return torch._C._current_autograd_node() is not None


class StepsInBackward:
    """Which optimizers do so, as far as is known.

    Attributes:
        any_now: whether any has done so in the open step.
    """

    def __init__(self) -> None:
        self.any_now = False
        self._known: set[int] = set()
        self._outside: set[int] = set()
        self._parameters: set[int] = set()
        self._is_settled = False

    def step_opened(self) -> None:
        """A step was opened."""
        self.any_now = False

    def step_closed(self) -> None:
        """A step in which hooks were hung is over: what does so is known by now."""
        self._is_settled = True

    def began(self, optimizer: Optimizer) -> bool:
        """The optimizer is about to step; whether that is within the backward pass."""
        if not is_running():
            self._outside.add(id(optimizer))
            self._known.discard(id(optimizer))
            return False
        self.any_now = True
        if id(optimizer) not in self._known:
            self._known.add(id(optimizer))
            self._outside.discard(id(optimizer))
            self._parameters.update(id(p) for group in optimizer.param_groups for p in group["params"])
        return True

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer does so."""
        return id(optimizer) in self._known

    def concerns(self, parameter: Tensor) -> bool:
        """Whether the optimizer of ``parameter`` may do so, before the first step by what hangs on it."""
        if id(parameter) in self._parameters:
            return True
        if self._is_settled and not self._known:
            return False
        hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        foreign = any(type(hook) is not Hook for hook in hooks.values()) or hasattr(parameter, "_in_backward_optimizers")
        return foreign or not (self._is_settled or not self._known)

    def awaited(self, optimizers: Iterable[Optimizer], done: set[int]) -> bool:
        """Whether the backward pass is over, and one of ``optimizers`` that is not ``done`` is to step behind it."""
        return any(
            id(each) in self._outside or any(p.grad is not None for group in each.param_groups for p in group["params"])
            for each in optimizers
            if id(each) not in done and id(each) not in self._known
        )
