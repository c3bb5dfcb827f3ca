"""What a person with a debugger would write down of a training: naive numbers, taken with plain hooks and nothing of ours."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.faults import Training


def rms(x: Tensor) -> float:
    return float(x.detach().float().square().mean().sqrt()) if x.numel() else 0.0


@dataclass
class Step:
    """Per parameter: rms of gradient and of parameter, share of zeros, relative update; ``None`` where there is no gradient."""

    gradient: dict[str, float | None] = field(default_factory=dict)
    parameter: dict[str, float] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)
    update: dict[str, float] = field(default_factory=dict)
    frozen_moved: bool = False
    norm: float = 0.0


class Spy:
    """Stands in for ``watch`` and for the monitor that it returns."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[Step] = []
        self.events: list[str] = []
        self.clips: list[tuple[float, float]] = []  # the norm and its bound
        self.first: dict[str, int] = {}  # the first step on which a loss, activation, gradient or parameter was not finite
        self.active: dict[str, deque[Tensor]] = {}
        self.ends: dict[str, list[float]] = {}
        self.entropy: list[float] = []
        self.logit: list[float] = []
        self.fired: list[int] = []
        self.exchanged = 0  # accumulations in backward passes in which DDP exchanged gradients
        self.outside: int = 0
        self.untied: bool = False

    # -- what a training calls

    def __call__(self, model: nn.Module, *optimizers: Any, scaler: Any = None) -> Spy:
        self.model, self.optimizers = model, optimizers
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.gains = {n: float(_whole(p).float().std()) * p[0].numel() ** 0.5 for n, p in model.named_parameters() if p.dim() > 1}
        self.ties = self._ties()
        owned = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self.outside = sum(p.requires_grad and p not in owned for p in model.parameters())
        for module_name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._saw(module_name))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
        return self

    def log_scalar(self, name: str, value: Tensor) -> None:
        self.losses.append(float(value))
        if not math.isfinite(self.losses[-1]):
            self.first.setdefault("loss", len(self.steps))

    @contextlib.contextmanager
    def no_monitor(self) -> Iterator[None]:
        yield

    # -- what the hooks see

    def _accumulated(self, _: Tensor) -> None:
        self.fired.append(len(self.steps))
        self.exchanged += bool(getattr(self.model, "require_backward_grad_sync", False))

    def _ties(self) -> set[tuple[str, ...]]:
        groups: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return {tuple(names) for names in groups.values() if len(names) > 1}

    def _saw(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            out = (output[0] if isinstance(output, tuple) else output).detach()
            if not bool(out.isfinite().all()):
                self.first.setdefault("activation", len(self.steps))
            if isinstance(module, nn.ReLU):
                units = out.transpose(1, -1) if out.dim() == 4 else out
                self.active.setdefault(name, deque(maxlen=20)).append((units.flatten(0, -2) > 0).any(0))
            if isinstance(module, (nn.Tanh, nn.RNN)):
                self.ends.setdefault(name, []).append(float((out.abs() > 0.95).float().mean()))

        return hook

    def _before(self, optimizer: Any, *_: Any) -> None:
        self.events.append("step")
        step, squares = Step(), 0.0
        self.kept = {p: p.detach().clone() for p in self.model.parameters()}
        for name, p in self.model.named_parameters():
            step.parameter[name] = rms(p)
            if p.requires_grad:
                step.gradient[name] = None if p.grad is None else rms(p.grad)
            if p.grad is not None:
                step.zeros[name] = float((p.grad == 0).float().mean())
                squares += float(p.grad.float().square().sum())
                if not bool(p.grad.isfinite().all()):
                    self.first.setdefault("gradient", len(self.steps))
        step.norm = math.sqrt(squares) if math.isfinite(squares) else math.inf
        self.pending = step

    def _after(self, *_: Any) -> None:
        for name, p in self.model.named_parameters():
            old = self.kept.get(p)
            if old is None:
                continue
            moved = rms(p.detach() - old)
            self.pending.update[name] = moved / max(rms(old), 1e-12)
            self.pending.frozen_moved |= moved > 0 and not p.requires_grad
            if not bool(p.isfinite().all()):
                self.first.setdefault("parameter", len(self.steps))
        self.steps.append(self.pending)

    # -- what is worked out at the end

    def dead(self) -> float:
        """The largest share, over the layers, of ReLUs that were silent for the last twenty forwards."""
        return max(1 - float(torch.stack(list(seen)).any(0).float().mean()) for seen in self.active.values())

    def saturated(self) -> float:
        """The largest share, over the layers, of outputs near -1 or 1, in the median forward."""
        return max(map(median, self.ends.values()))

    def matrices(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.dim() > 1]

    def ratios(self, begin: int = 0) -> dict[str, float]:
        """The median of each matrix's relative updates."""
        return {name: median([s.update[name] for s in self.steps[begin:] if name in s.update]) for name in self.matrices()}

    def text(self) -> str:
        return " ".join(self.events)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextlib.contextmanager
def _noted(spy: Spy) -> Iterator[None]:
    """Write down who calls what, and what attention looks like."""

    def noting(event: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            spy.events.append(event)
            return real(*args, **kwargs)

        return call

    def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        spy.events.append("clip")
        norm = clip(parameters, max_norm, *args, **kwargs)
        spy.clips.append((float(norm), max_norm))
        return norm

    def attending(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            logits = (q @ k.transpose(-1, -2)).float() * (kwargs.get("scale") or q.shape[-1] ** -0.5)
            if kwargs.get("is_causal"):
                logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
            weights = logits.softmax(-1)
            keys = logits.isfinite().sum(-1).clamp(min=2).log()
            spy.entropy.append(float((-(weights * weights.clamp(min=1e-30).log()).sum(-1) / keys)[..., 1:].mean()))
            spy.logit.append(float(logits.max()))
        return sdpa(q, k, v, **kwargs)

    clip, sdpa = nn.utils.clip_grad_norm_, nn.functional.scaled_dot_product_attention
    scaler, optimizer = torch.amp.GradScaler, torch.optim.Optimizer
    with (
        mock.patch.object(nn.utils, "clip_grad_norm_", clipping),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", attending),
        mock.patch.object(torch.Tensor, "backward", noting("backward", torch.Tensor.backward)),
        mock.patch.object(optimizer, "zero_grad", noting("zero", optimizer.zero_grad)),
        mock.patch.object(scaler, "unscale_", noting("unscale", scaler.unscale_)),
    ):
        yield


def seen(training: Training, healed: bool, seed: int = 0) -> tuple[Spy, float]:
    """Run it, and give what was written down and the last mean loss."""
    spy = Spy()
    with _noted(spy):
        end = training.run(spy, seed, healed)
    spy.untied = spy.ties != spy._ties()
    return spy, end


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """Its values on all ranks: older releases have no std of a sharded tensor."""
    values = parameter.detach()
    whole: torch.Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return whole
