"""Watch a model under DDP: gradients are equal on all ranks, and the loss is averaged over the ranks' batches.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon


def main() -> None:
    """Train, with a bad batch on the last rank in step 60, and print the values of the first rank."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    weights = torch.randn(16, 1)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    events = []
    monitor = gradmon.watch(model, optimizer, on_spike=events.append, run_dir="runs/ddp")  # written by the first rank
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))  # of all ranks, so the result is the same on all
    monitor.add_activation_metric("std", metric_regex="^1$")  # over the batches of all ranks

    data = torch.Generator().manual_seed(1 + rank)  # each rank has its own batches
    for step in range(101):
        inputs = torch.randn(64, 16, generator=data)
        noise = 50.0 if rank == ranks - 1 and step == 60 else 0.1
        targets = inputs @ weights + noise * torch.randn(64, 1, generator=data)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach(), dist_reduce="mean")  # before the step, because the exchange is at its end
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

        if rank == 0 and step % 20 == 0:
            values = monitor.get_step_metrics()
            print(
                f"step {step:3}  loss of {ranks} ranks {values['loss']:8.3f}  gradient norm {values['gradmon/grad_norm']:8.3f}  "
                f"hidden layer {values['activation/1/std']:.3f}"
            )

    told = "\n".join(str(event) for event in events if event.step == 60)
    sums = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sums, torch.tensor([sum(place * ord(letter) for place, letter in enumerate(told))]))
    if rank == 0:
        print(f"\n{told}")
        print("the same on every rank:", all(torch.equal(each, sums[0]) for each in sums))
    monitor.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
