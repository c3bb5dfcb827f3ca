"""Weights & Biases: the script logs as before, beside the monitor's rows, and no row is lost.

Runs offline unless WANDB_MODE is set; ``wandb sync`` uploads the run later.
"""

from __future__ import annotations

import os

import torch
import wandb
from torch import nn

import torch_gradmon as gradmon


def main() -> None:
    """Train for a while, with one bad batch."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs @ torch.randn(16, 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with (
        wandb.init(project="gradmon-example", mode=os.environ.get("WANDB_MODE", "offline")) as run,
        # whole-model values, one norm for each layer, and an alert for each spike instead of a warning
        gradmon.watch(model, optimizer, layers="blocks", on_spike=None, log_to="wandb") as monitor,
    ):
        monitor.add_gradient_metric("log2_histogram", metric_regex="weight", stages=("after_clip",), every=50)

        for step in range(320):
            batch = torch.randint(len(inputs), (64,))
            scale = 30.0 if step == 300 else 1.0  # a batch that was not normalised
            loss = nn.functional.mse_loss(model(scale * inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"train/loss": loss.item()}, step=step)

        history = monitor.get_all_metrics()
        worst = max(history, key=lambda step: history[step]["gradmon/grad_norm"])
        print(f"{len(history)} steps; the largest gradient norm was in step {worst}, the bad batch in 300")
    print(f"logged to {run.dir if run.offline else run.url}")


if __name__ == "__main__":
    main()
