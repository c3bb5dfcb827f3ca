"""Models under ``DistributedDataParallel`` and ``fully_shard``, on one rank, which is enough for the order of calls to be wrong."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .families import Task, adamw, task
from .training import STEPS, Training, Watch, last, over

ACCUMULATED = 4


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for as long as it takes; one that is there already is used, and stays."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # Models go first: DDP's reducer is freed with Python's lock held, and if it is the last owner of the group, it waits for the
        # group's thread, which may be waiting for that lock.
        gc.collect()
        dist.destroy_process_group()


def sharded(model: nn.Module) -> None:
    """``fully_shard`` over this rank, the whole model as one."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))


def _before_sharding(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer is made, and watched, before ``fully_shard`` puts other parameters into the model; it keeps the old ones."""
    with one_rank():
        job = task(family, seed)
        if healed:
            sharded(job.model)
        optimizer = adamw(job.model)
        monitor = watch(job.model, optimizer)
        if not healed:
            sharded(job.model)
        losses = []
        for _ in range(STEPS):
            loss = job.loss(job.model, next(job.batches))
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        return last(losses)


def _always_synced(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Gradients are exchanged at each of four micro-batches, and not only at the last."""
    with one_rank():
        return replicated(task(family, seed), watch, waits=healed)


def replicated(job: Task, watch: Watch, waits: bool, steps: int = STEPS // 2) -> float:
    """Four micro-batches to a step under DDP, ``waits`` with the exchange until the last."""
    model = nn.parallel.DistributedDataParallel(job.model)
    optimizer = adamw(model)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = []
        for micro in range(ACCUMULATED):
            with model.no_sync() if waits and micro < ACCUMULATED - 1 else contextlib.nullcontext():
                loss = job.loss(model, next(job.batches)) / ACCUMULATED
                loss.backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).sum())
        monitor.log_scalar("loss", losses[-1])
        optimizer.step()
    return last(losses)


TRAININGS: list[Training] = [
    *over(
        ["mlp", "autoencoder"],
        "made-before-sharding",
        "optimizer-before-sharding",
        _before_sharding,
        "make the optimizer after fully_shard",
        held_back="autoencoder",
    ),
    *over(
        ["mlp", "cnn"],
        "synced-each-time",
        "sync-every-micro-batch",
        _always_synced,
        "no_sync() for all micro-batches but the last",
        held_back="cnn",
    ),
]
