"""An optimizer's step that changes nothing: gradients are set aside before it, and put back after it."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...core.errors import WarningLog
from ...step.ranks import is_dtensor


class PutBack(NamedTuple):
    """A gradient that belongs to a skipped step, as long as nobody has written to it or replaced it since."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int

    def is_there(self) -> bool:
        """Whether the parameter still has it, as it was."""
        parameter, gradient = self.parameter(), self.gradient()
        return parameter is not None and gradient is not None and parameter.grad is gradient and gradient._version == self.version


class SetAside:
    """Takes the gradients of an optimizer away, which is the one way to skip a step that every optimizer of ``torch.optim``
    understands: zeros would be weighed into moments and counted as steps, and weight decay works without any gradient.

    A few count something even so, such as the evaluations of L-BFGS, or make an empty state at their first step. So what is no
    tensor in the optimizer's state, and its options, are noted, and put back too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._state = {parameter: _shallow(state) for parameter, state in optimizer.state.items()}
        self._options = [
            {name: (value, _copied(value)) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._versions = versions(optimizer)
        self.again()

    def again(self) -> None:
        """A closure has brought new gradients: they take the place of those that were set aside."""
        found = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if found:
            self._gradients = found
        for parameter, _ in found:
            parameter.grad = None

    def put_back(self) -> list[PutBack]:
        """The step is over: the loop finds everything as it was. Where somebody has made new gradients, those stay."""
        back = []
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
                if not is_dtensor(gradient):  # whose counter does not tell of what is written to it
                    back.append(PutBack(weakref.ref(parameter), weakref.ref(gradient), gradient._version))
        self.undo()
        return back

    def undo(self) -> None:
        """Put back state and options alone: the step has failed, and the gradients are of no use any more."""
        self._gradients = []
        state: dict[Any, Any] = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._state:
                del state[parameter]
            elif isinstance(state[parameter], dict):
                state[parameter].clear()
                state[parameter].update(self._state[parameter])
        for group, options in zip(self._optimizer.param_groups, self._options, strict=False):
            for name in [name for name in group if name != "params" and name not in options]:
                del group[name]
            for name, (value, before) in options.items():
                group[name] = before
                if isinstance(value, Tensor):
                    group[name] = value
                    with torch.no_grad():
                        value.copy_(before)

    @property
    def changed_parameters(self) -> bool:
        """Whether the step has changed parameters although it had no gradients, as far as their version counters tell."""
        return versions(self._optimizer) != self._versions


def versions(optimizer: Optimizer) -> list[int]:
    """How often each of its parameters was written to in place. Fused kernels and ``.data`` write without being counted."""
    return [p._version for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def _copied(value: Any) -> Any:
    """Options are few and small; functions among them stay what they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


class GradientHolds:
    """Holds back the gradients of optimizers whose step must change nothing.

    Args:
        complaints: where it is reported that a step changed something all the same.

    Attributes:
        any: gradients are held back right now.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self._held: dict[int, SetAside] = {}
        self.any = False
        self._left: dict[int, list[PutBack]] = {}  # gradients of each optimizer that belong to a skipped step
        self._versions: dict[int, list[int]] = {}

    def hold(self, optimizer: Optimizer) -> None:
        """Hold back the gradients of ``optimizer`` until its step is over."""
        held, self.any = self._held.get(id(optimizer)), True
        if held is None:
            self._held[id(optimizer)] = SetAside(optimizer)
        else:
            held.again()

    def restore(self, optimizer: Optimizer, is_wrapped: bool) -> None:
        """The optimizer's step is over: give its gradients back. Warns where the step changed parameters without them."""
        held = self._held.pop(id(optimizer), None)
        self.any = bool(self._held)
        if held is None:
            return
        self._left[id(optimizer)] = held.put_back()
        if held.changed_parameters:
            kind, what = type(optimizer).__name__, "changed parameters in a step that was to be skipped"
            inner = f"{kind} {what}, although it had no gradients; attach the optimizer that it wraps instead"
            outer = f"the wrapper around {kind} {what}: what it does besides the step of {kind} cannot be held back"
            self._complaints.add("skip:changed", outer if is_wrapped else inner)

    def drop(self) -> None:
        """Optimizers raised in their steps: their state is restored, and not their gradients, which the loop may have zeroed."""
        while self._held:
            self._held.popitem()[1].undo()
        self.any = False

    def leftovers(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of ``optimizer`` that still have the gradients of a skipped step."""
        self._left[id(optimizer)] = [left for left in self._left.get(id(optimizer), []) if left.is_there()]
        found = (left.parameter() for left in self._left[id(optimizer)])
        return [parameter for parameter in found if parameter is not None]

    def accept(self) -> None:
        """What is left of skipped steps may be used after all."""
        self._left = {}

    def note_versions(self, optimizer: Optimizer) -> None:
        """The optimizer is about to call its closure."""
        self._versions[id(optimizer)] = versions(optimizer)

    def was_changed(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has written to its parameters since it was about to call its closure."""
        return self._versions.get(id(optimizer), []) != versions(optimizer)
