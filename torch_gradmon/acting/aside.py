"""An optimizer's step that changes nothing: gradients are set aside before it, and put back after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SetAside:
    """Takes the gradients of an optimizer away, which is the one way to skip a step that every optimizer of ``torch.optim``
    understands: zeros would be weighed into moments and counted as steps, and weight decay works without any gradient.

    A few count something even so, such as the evaluations of L-BFGS, or make an empty state at their first step. So what is no
    tensor in the optimizer's state and options is noted, and put back too.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._state = {parameter: _shallow(state) for parameter, state in optimizer.state.items()}
        self._options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        self.again()

    def again(self) -> None:
        """A closure has brought new gradients: they take the place of those that were set aside."""
        found = [
            (parameter, parameter.grad)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if found:
            self._gradients = found
        for parameter, _ in found:
            parameter.grad = None

    def put_back(self) -> None:
        """The step is over: the loop finds everything as it was. Where somebody has made new gradients, those stay."""
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
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
            group.update(options)


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


class ScalerAsItWas:
    """Scale and growth of a GradScaler, to be put back after an ``update()`` that counted a skipped step as a good one.

    Where it found infinite gradients the update stands, which is told on the device. Does not synchronise.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._kept = [
            (name, tensor.clone()) for name in ("_scale", "_growth_tracker") if (tensor := _of(scaler, name)) is not None
        ]
        states = getattr(scaler, "_per_optimizer_states", {}).values()
        found = [tensor for state in states for tensor in state.get("found_inf_per_device", {}).values()]
        self._found_inf = torch.stack([tensor.to(found[0].device).max() for tensor in found]).max() if found else None

    def put_back(self, overruled: bool) -> None:
        """Undo the update, ``overruled`` also where it found infinite gradients: on this rank, and others did not."""
        for name, before in self._kept:
            now = _of(self._scaler, name)
            if now is not None:
                refused = None if self._found_inf is None or overruled else self._found_inf.to(now.device) > 0
                now.copy_(before if refused is None else torch.where(refused, now, before))


def _of(scaler: torch.amp.GradScaler, name: str) -> Tensor | None:
    found = getattr(scaler, name, None)
    return found if isinstance(found, Tensor) else None
