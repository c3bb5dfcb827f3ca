"""A training loop for any device, with or without a monitor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

from .places import Place

#: Steps before those that are looked at. They allocate, compile, and measure updates twice with the standard preset.
WARM_UP = 12
STEPS = 12


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).double()


def _batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


class Loop:
    """A training loop; a monitor watches it where ``options`` of ``watch`` are given."""

    def __init__(self, place: Place, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None, **options: Any) -> None:
        self.place, self.model = place, build_model().to(place.at)
        make = make_optimizer or (lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=place.foreach))
        self.optimizer = make(self.model.parameters())
        self.monitor = gradmon.watch(self.model, self.optimizer, **options) if options else None
        self.batches = [batch.to(place.at) for batch in _batches(WARM_UP + STEPS)]
        self.norms: list[Tensor] = []

    def backward(self, batch: Tensor) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()

    def update(self) -> None:
        """Clip, then step."""
        self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=self.place.foreach))
        self.optimizer.step()

    def step(self) -> None:
        """One step, with the next batch."""
        self.backward(self.batches[len(self.norms)])
        self.update()

    def values(self) -> dict[int, dict[str, float]]:
        """What the monitor reports, by step; it is detached."""
        assert self.monitor is not None
        self.monitor.detach()
        return self.monitor.get_all_metrics()

    def worst(self) -> float:
        """The largest relative difference between a reported norm and the one that torch's clip returned."""
        values = self.values()
        return max(apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(self.norms))

    def parameters(self) -> list[Tensor]:
        """The parameters on the host."""
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def apart(a: float, b: float) -> float:
    """The relative difference, infinite where one is NaN."""
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-9)
