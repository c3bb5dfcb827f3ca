"""Did a change of the code change the training? Two runs of one seed, the second with a mistake, and their first difference.

From step 120 on the second one drops the gradient of a bias on the way to the optimizer, as a wrong filter of parameters does.
``gradmon report runs/two/before runs/two/after`` overlays both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon

STEPS, SLIP = 300, 120


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape ``[batch, width]``, and the same."""
        update: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + update


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors of eight numbers, and the sine of their sum."""
    for _ in range(STEPS):
        x = torch.randn(64, 8)
        yield x, torch.sin(x.sum(1, keepdim=True))


def train(run_dir: str, slips: bool) -> None:
    """Train six blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), *(Block(32) for _ in range(6)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=run_dir, on_spike=None)
    for step, (x, y) in enumerate(batches()):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if slips and step >= SLIP:
            model.get_parameter("3.up.bias").grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    monitor.detach()


def main() -> None:
    """Train twice, and compare."""
    train("runs/two/before", slips=False)
    train("runs/two/after", slips=True)
    print(gradmon.diff_runs("runs/two/before", "runs/two/after"))


if __name__ == "__main__":
    main()
