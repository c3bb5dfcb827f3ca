"""A training in a process of its own that writes a run directory: ``python -m tests.live_training DIRECTORY STEPS SPIKE SECONDS [LR]``."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

#: The layer whose gradient is ten thousand times too large in the step of the spike.
LAYER = "4.weight"


def train(path: Path, steps: int, spike: int | None = None, seconds: float = 0.0, lr: float = 2e-3) -> None:
    """Train a small perceptron; ``seconds`` of rest after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())], nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    is_spoiled = [False]

    def spoiled(gradient: Tensor) -> Tensor:
        return gradient * (1e4 if is_spoiled[0] else 1)

    model.get_parameter(LAYER).register_hook(spoiled)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps):
            is_spoiled[0] = step == spike
            x = torch.randn(32, 8)
            loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            time.sleep(seconds)
        monitor.detach()


if __name__ == "__main__":
    place, steps, spike, seconds, *rate = sys.argv[1:]
    train(Path(place), int(steps), int(spike), float(seconds), *map(float, rate))
