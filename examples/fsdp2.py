"""Watch a model under FSDP2: every rank has a part of each parameter, and the numbers are those of the whole.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import torch_gradmon as gradmon


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, width]`` to the same."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    """Train, and compare the monitor's norm of one layer with that of its whole gradient."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    weights = torch.randn(16, 1)

    model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 1))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard, like the monitor
    monitor = gradmon.watch(model, optimizer, layers="blocks")
    monitor.add_gradient_metric("norm", metric_regex=r"1\.up\.weight")

    data = torch.Generator().manual_seed(1 + rank)
    for step in range(61):
        inputs = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        optimizer.zero_grad()
        loss.backward()
        exact = model[1].up.weight.grad.full_tensor().double().norm().item()  # what the monitor never does: gather a tensor
        monitor.log_scalar("loss", loss.detach(), dist_reduce="mean")
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

        values = monitor.get_step_metrics()
        found = values["gradient_before_clip/1.up.weight/norm"]
        assert abs(found - exact) <= 1e-6 * exact
        if rank == 0 and step % 20 == 0:
            print(
                f"step {step:3}  loss {values['loss']:7.3f}  gradient norm {values['gradmon/grad_norm']:7.3f}, clipped "
                f"{values['gradmon/grad_norm_after_clip']:5.3f}  1.up.weight {found:.6f}, gathered {exact:.6f}"
            )
    monitor.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
