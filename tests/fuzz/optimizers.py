"""Optimizers by name, how parameters are shared among several, and optimizers around optimizers as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .program import Program

Parameters = list[nn.Parameter]


class OwnSgd(Optimizer):
    """As somebody writes one: a plain loop, and state of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
                    parameter.add_(parameter.grad.to(parameter.dtype), alpha=-group["lr"])
        return loss


class Lookahead(Optimizer):
    """Around an optimizer whose groups and state it shares: every second step goes half way back."""

    def __init__(self, optimizer: Optimizer, every: int = 2) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)
        return loss


class Holder:
    """No optimizer by its class, as a trainer's wrapper."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def _muon(parameters: Parameters) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.5, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True, amsgrad=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "muon": _muon,
    "own": lambda ps: OwnSgd(ps, lr=0.05),
    "sgd_closure": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.5),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3, history_size=3),
}
#: Those that are given a closure.
BY_CLOSURE = ("sgd_closure", "lbfgs")


def inner(optimizer: Any) -> Optimizer:
    """The optimizer whose hooks are called, where a holder is around it."""
    return optimizer.optimizer if isinstance(optimizer, Holder) else optimizer


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {"": lambda o: o, "lookahead": Lookahead, "holder": Holder}


def build(p: Program, model: nn.Module) -> list[Any]:
    """The optimizers of a program, as its loop calls them."""
    return [WRAPPERS[p.wrapped](OPTIMIZERS[p.optimizer](parameters)) for parameters in shares(p, model)]


def shares(p: Program, model: nn.Module) -> Sequence[Parameters]:
    """Whose parameters are whose. A parameter that is frozen for good belongs to nobody."""
    trained = [(name, q) for name, q in model.named_parameters() if q.requires_grad]
    if p.players == "one":
        return [[q for _, q in trained]]
    if p.players == "in_backward":
        return [[q] for _, q in trained]
    if p.players == "gan":
        return [[q for name, q in trained if name.startswith(player)] for player in ("critic", "generator")]
    half = len(trained) // 2
    return [[q for _, q in trained[:half]], [q for _, q in trained[half:]]]
