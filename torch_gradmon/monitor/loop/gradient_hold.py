"""Skipping an optimizer's step: its gradients are removed before the step and restored after it."""

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
    """A gradient that belongs to a skipped step, until it is written to or replaced."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    version: int

    def is_there(self) -> bool:
        """Whether the parameter still has this gradient, unchanged."""
        parameter, gradient = self.parameter(), self.gradient()
        return parameter is not None and gradient is not None and parameter.grad is gradient and gradient._version == self.version


class SetAside:
    """Removes the gradients of an optimizer, the only way to skip a step that works with every optimizer of ``torch.optim``.

    Zero gradients would enter the moments and count as steps, and weight decay would still apply.
    Some optimizers change other state even without gradients: L-BFGS counts evaluations, others create an empty state. So the
    non-tensor values of the optimizer's state and its options are saved and restored too.
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
        """Remove the new gradients of a closure; they replace those that were removed before."""
        found = [(p, p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if found:
            self._gradients = found
        for parameter, _ in found:
            parameter.grad = None

    def put_back(self) -> list[PutBack]:
        """Restore everything after the step, except where a parameter has a new gradient. Returns the restored gradients."""
        back = []
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
                if not is_dtensor(gradient):  # the version counter of a DTensor does not count writes
                    back.append(PutBack(weakref.ref(parameter), weakref.ref(gradient), gradient._version))
        self.undo()
        return back

    def undo(self) -> None:
        """Restore state and options only: after a failed step the gradients are useless."""
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
        """Whether the step changed parameters although it had no gradients, according to their version counters."""
        return versions(self._optimizer) != self._versions


def versions(optimizer: Optimizer) -> list[int]:
    """The number of in-place writes to each of its parameters, without those of fused kernels and through ``.data``."""
    return [p._version for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def _copied(value: Any) -> Any:
    """Options are few and small; functions among them are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


class GradientHolds:
    """Removes the gradients of optimizers whose step must change nothing.

    Args:
        complaints: receives a warning when a step changes something nevertheless.

    Attributes:
        any: some gradients are removed at the moment.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self._held: dict[int, SetAside] = {}
        self.any = False
        self._left: dict[int, list[PutBack]] = {}  # gradients of each optimizer that belong to a skipped step
        self._versions: dict[int, list[int]] = {}

    def hold(self, optimizer: Optimizer) -> None:
        """Remove the gradients of ``optimizer`` until its step ends."""
        held, self.any = self._held.get(id(optimizer)), True
        if held is None:
            self._held[id(optimizer)] = SetAside(optimizer)
        else:
            held.again()

    def restore(self, optimizer: Optimizer, is_wrapped: bool) -> None:
        """Restore the gradients of ``optimizer`` after its step. Warns if the step changed parameters without them."""
        held = self._held.pop(id(optimizer), None)
        self.any = bool(self._held)
        if held is None:
            return
        self._left[id(optimizer)] = held.put_back()
        if held.changed_parameters:
            kind, what = type(optimizer).__name__, "changed parameters in a skipped step"
            inner = f"{kind} {what}, although it had no gradients; attach the optimizer that it wraps instead"
            outer = f"the wrapper around {kind} {what}: what it changes outside the step of {kind} cannot be prevented"
            self._complaints.add("skip:changed", outer if is_wrapped else inner)

    def drop(self) -> None:
        """Restore the state of optimizers that raised in their steps, but not their gradients, which the loop may have zeroed."""
        while self._held:
            self._held.popitem()[1].undo()
        self.any = False

    def leftovers(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of ``optimizer`` that still have the gradients of a skipped step."""
        self._left[id(optimizer)] = [left for left in self._left.get(id(optimizer), []) if left.is_there()]
        found = (left.parameter() for left in self._left[id(optimizer)])
        return [parameter for parameter in found if parameter is not None]

    def accept(self) -> None:
        """Let optimizers use the gradients that skipped steps left."""
        self._left = {}

    def note_versions(self, optimizer: Optimizer) -> None:
        """Note the parameters' versions before the optimizer calls its closure."""
        self._versions[id(optimizer)] = versions(optimizer)

    def was_changed(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has written to its parameters since :meth:`note_versions`."""
        return self._versions.get(id(optimizer), []) != versions(optimizer)
