"""How much of an MLP's change its weights cause, how much its inputs, and how both grow with the width.

The refined coordinate check of Haas et al. 2025 (arXiv 2505.22491): per layer the update term (W_t - W_0) x_t and the propagated
term W_0 (x_t - x_0), root mean squares over the features, beside the outputs at initialisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import torch_gradmon as gradmon

LAYERS = {"0": "input", "2": "hidden", "4": "output"}


def train(width: int, steps: int = 11) -> dict[int, dict[str, float]]:
    """The terms of each layer in every fifth step of SGD at one learning rate for all widths."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    targets = torch.sin(3 * inputs @ torch.randn(16, 1))
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    monitor = gradmon.ModuleMonitor(model)
    monitor.set_reference_module("init")
    gradmon.RefinedCoordinateCheck(monitor, "rms", metric_regex=r"^[024]$", every=5)
    monitor.attach(optimizer)

    found = {}
    for step in range(steps):
        batch = torch.randint(len(inputs), (64,))
        F.mse_loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if values := monitor.get_step_metrics():
            found[step] = values
    monitor.detach()
    return found


def main() -> None:
    """Train at three widths, and print a row for each checked step."""
    print("             ", "".join(f"{layer:^24}" for layer in LAYERS.values()))
    print("width   step ", "  (W_t-W_0)x_t W_0(x_t-x_0)" * len(LAYERS))
    for width in (64, 256, 1024):
        for step, values in train(width).items():
            terms = [values[f"RCC {term}/{name}/rms"] for name in LAYERS for term in ("(W_t-W_0)x_t", "W_0(x_t-x_0)")]
            print(f"{width:5} {step:6} ", "".join(f"{term:13.4f}" for term in terms))


if __name__ == "__main__":
    main()
