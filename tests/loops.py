"""A plain training loop with switches, as people write them, and which switches go together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .families import BY_NAME, Family

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw_loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}
#: Families that are compiled: those of one or two graphs that compile in a moment.
COMPILED = ("mlp", "gpt_tied", "frozen_unused")
CHOICES: dict[str, tuple[Any, ...]] = {
    "family": tuple(BY_NAME),
    "optimizer_name": tuple(OPTIMIZERS),
    "clip": ("off", "norm", "value"),
    "micro_batches": (1, 4),
    "scaler": (False, True),
    "recompute": ("", "reentrant", "nonreentrant"),
    "compile": (False, True),
}
Watch = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None], Any]


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    family: str = "mlp"
    optimizer_name: str = "sgd"
    clip: str = "off"
    micro_batches: int = 1
    scaler: bool = False
    recompute: str = ""
    compile: bool = False

    def __str__(self) -> str:
        told = [self.family, self.optimizer_name, f"clip_{self.clip}", f"{self.micro_batches}_micro"]
        told += ["scaler"] * self.scaler + [self.recompute] * bool(self.recompute) + ["compiled"] * self.compile
        return "-".join(told)

    def parts(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, getattr(self, name)) for name in CHOICES)


_ADAMW = ("adamw_loop", "adamw_foreach", "adamw_fused")
#: Settings that cannot be trained with any monitor or none, and what torch says to them.
REFUSED: list[tuple[str, Callable[[Setting], bool]]] = [
    ("Closure use is not currently supported", lambda s: s.scaler and s.optimizer_name == "lbfgs"),
    ("does not support sparse gradients", lambda s: s.family == "sparse_embedding" and s.optimizer_name in _ADAMW),
    ("Could not run 'aten::.*Sparse", lambda s: s.family == "sparse_embedding" and s.clip != "off"),
    ("requires all the params to be floating point", lambda s: s.family == "complex" and s.optimizer_name == "adamw_fused"),
    ("not implemented for 'ComplexFloat'", lambda s: s.family == "complex" and s.scaler),
    ("not supported for complex", lambda s: s.family == "complex" and s.clip == "value"),
    ("view size is not compatible", lambda s: s.family == "non_contiguous" and s.optimizer_name == "lbfgs"),
    # a fused optimizer unscales by itself, also in float16
    ("unscale FP16", lambda s: s.family == "fp16" and s.scaler and (s.optimizer_name != "adamw_fused" or s.clip != "off")),
]


def refusals(setting: Setting) -> list[str]:
    """What torch may say to a setting that it cannot train, as patterns."""
    return [message for message, applies in REFUSED if applies(setting)]


def valid(**choices: Any) -> bool:
    """Whether these choices go together: torch can train them, and the family has the switches."""
    setting = Setting(**choices)
    if (setting.recompute and setting.family != "gpt_tied") or (setting.compile and setting.family not in COMPILED):
        return False
    return not refusals(setting)


def settings() -> Iterator[Setting]:
    """Every setting that makes sense."""
    for values in itertools.product(*CHOICES.values()):
        setting = Setting(**dict(zip(CHOICES, values, strict=True)))
        if valid(**dict(setting.parts())):
            yield setting


def pairs(setting: Setting) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(setting.parts(), 2))


def _work(setting: Setting) -> float:
    """How long a setting takes, roughly, in units of the shortest."""
    family = 5 if setting.family in ("gpt_tied", "transformer") else 1
    return family * (10 if setting.compile else 1) * (3 if setting.optimizer_name == "lbfgs" else 1) * setting.micro_batches


def pairwise(candidates: list[Setting]) -> list[Setting]:
    """Few of ``candidates`` that together hold every pair of choices that any of them holds: the greedy cover, of short ones first."""
    left = {pair for setting in candidates for pair in pairs(setting)}
    chosen = []
    while left:
        best = max(candidates, key=lambda setting: len(pairs(setting) & left) / _work(setting) ** 0.25)
        chosen.append(best)
        left -= pairs(best)
    return chosen


def train(
    family: str = "mlp",
    optimizer_name: str = "sgd",
    *,
    clip: str = "off",
    micro_batches: int = 1,
    scaler: bool = False,
    recompute: str = "",
    compile: bool = False,
    steps: int = 12,
    monitored: Watch | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train and return everything that training left: parameters, buffers, gradients, optimizer, scaler, RNG and losses.

    With a scaler its scale grows after two steps, and the loss of the fourth is infinite, so that this step is refused.
    """
    ground = BY_NAME[family]
    inner = model = ground.model().to(device)
    if recompute:
        inner.recompute = recompute  # type: ignore[assignment]
    if compile:
        torch._dynamo.reset()
        model = torch.compile(inner, backend="aot_eager")  # type: ignore[assignment]
    optimizer = OPTIMIZERS[optimizer_name]([p for p in inner.parameters() if p.requires_grad])
    grad_scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2) if scaler else None
    torch.manual_seed(99)
    monitor = None if monitored is None else monitored(model, optimizer, grad_scaler)
    losses: list[Tensor] = []
    step_function = _by_closure if optimizer_name == "lbfgs" else _plainly
    batches = [tuple(tensor.to(device) for tensor in batch) for batch in ground.batches(steps * micro_batches)]
    for step in range(steps):
        wanted = batches[step * micro_batches : (step + 1) * micro_batches]
        spoil = float("inf") if scaler and step == 3 else 1.0
        step_function(ground, model, optimizer, grad_scaler, wanted, clip, spoil, losses)
    if monitor is not None:
        monitor.detach()
    return {
        "parameters": dict(inner.named_parameters()),
        "buffers": dict(inner.named_buffers()),
        "gradients": {name: parameter.grad for name, parameter in inner.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "scaler": grad_scaler.state_dict() if grad_scaler else None,
        "rng": torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]),
        "losses": losses,
    }


def _clip(parameters: list[nn.Parameter], clip: str) -> None:
    if clip == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    elif clip == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.01)


def _plainly(
    ground: Family,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    batches: list[Any],
    clip: str,
    spoil: float,
    losses: list[Tensor],
) -> None:
    for batch in batches:
        loss = ground.loss(model, batch) * (spoil / len(batches))
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    if scaler is not None and clip != "off":
        scaler.unscale_(optimizer)
    _clip(list(model.parameters()), clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def _by_closure(
    ground: Family,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    batches: list[Any],
    clip: str,
    spoil: float,
    losses: list[Tensor],
) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=batches[0][0].device)
        for batch in batches:
            loss = ground.loss(model, batch) / len(batches)
            loss.backward()
            total += loss.detach()
        _clip(list(model.parameters()), clip)
        losses.append(total)
        return total

    if scaler is None:
        optimizer.step(closure)
    else:
        scaler.step(optimizer, closure=closure)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if _identical(one, other) else [path]
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [where for key in one for where in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        return [where for i, (a, b) in enumerate(zip(one, other, strict=True)) for where in differences(a, b, f"{path}/{i}")]
    return [] if one == other or (one != one and other != other) else [f"{path}: {one!r} and {other!r}"]


def _identical(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout == torch.sparse_coo:
        return _identical(one._indices(), other._indices()) and _identical(one._values(), other._values())
    if one.stride() != other.stride():
        return False
    bits, others = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bits.equal(others)
