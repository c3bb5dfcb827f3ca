"""Optimizers from elsewhere that wrap another one, in the shapes that people copy."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class SAM(Optimizer):
    """Sharpness-aware minimisation, as it is copied from repository to repository."""

    def __init__(self, params: Any, base_optimizer: Callable[..., Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]).norm(p=2)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class TimmLookahead(Optimizer):
    """Without ``super().__init__()``, on purpose, as in timm."""

    def __init__(self, base_optimizer: Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(lookahead_alpha=alpha, lookahead_k=k, lookahead_step=0)

    def _slow(self, p: torch.Tensor, alpha: float) -> None:
        state = self._base_optimizer.state[p]
        if "slow" not in state:
            state["slow"] = p.detach().clone() * 0.9
        state["slow"].add_(p - state["slow"], alpha=alpha)
        p.copy_(state["slow"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for p in group["params"]:
                    if p.grad is not None:
                        self._slow(p, group["lookahead_alpha"])
        return loss


class BareLookahead(Optimizer):
    """Without hooks at all, as in torch_optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.defaults = optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.data.clone() * 0.9)
                p.data.mul_(0.5).add_(slow, alpha=0.5)
                slow.copy_(p.data)
        return loss


class HookedLookahead(Optimizer):
    """With hooks of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return loss


class ScheduleFree:
    """No optimizer of torch, and it moves the parameters before the one inside steps, and after."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        self.base.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1.1)


class Accumulating(Optimizer):
    """Steps in every second call only, as wrappers that accumulate gradients do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._calls = optimizer, 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._calls % 2 == 0:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._calls += 1
        if self._calls % 2 == 0:
            self.optimizer.step(closure)


class Lightning:
    """Takes on the class of the optimizer inside, as the wrappers of Lightning and Fabric do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (self.__class__, optimizer.__class__), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
