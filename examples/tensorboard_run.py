"""TensorBoard: ``tensorboard --logdir runs`` shows the tags under ``gradmon`` and one section for each kind of layer value."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import torch_gradmon as gradmon


def main() -> None:
    """Train for a while."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs @ torch.randn(16, 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with SummaryWriter("runs/gradmon") as writer, gradmon.watch(model, optimizer, layers="all", log_to=writer) as monitor:
        monitor.add_gradient_metric("log2_histogram", metric_regex="weight", stages=("after_clip",), every=20)
        for step in range(300):
            batch = torch.randint(len(inputs), (64,))
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            monitor.log_scalar("train/loss", loss.detach())
            if step % 100 == 0:
                print(f"step {step:3}  loss {loss.item():.3f}")
    print("now run: tensorboard --logdir runs")


if __name__ == "__main__":
    main()
