"""Trainings under FSDP1, and the same by one process, for :mod:`tests.test_fsdp1`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import torch_gradmon as gradmon

from .ranks import impatient, refusals

MAX_NORM, STEPS, ROWS = 0.05, 5, 4


def make_model() -> nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(step: int, micro: int, ranks: range) -> Iterator[Tensor]:
    """Those of some ranks."""
    for rank in ranks:
        for number in range(micro):
            yield torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(1000 * step + 10 * number + rank))


def add_metrics(monitor: gradmon.ModuleMonitor, by_layer: bool) -> None:
    """Those that are compared."""
    for metric in ("norm", "mean", "sparsity", "max") if by_layer else ():
        monitor.add_gradient_metric(metric, stages=["before_clip", "after_clip"])
        monitor.add_parameter_metric(metric)
    monitor.add_update_metric("norm")


def plain(ranks: int, micro: int, clips: bool) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """One process with the data of all ranks: the parameters at the end, and the values of each step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer)
    add_metrics(monitor, by_layer=True)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches(step, micro, range(ranks)):
            (model(batch).square().mean() / (ranks * micro)).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        values.append(monitor.get_step_metrics())
    monitor.detach()
    return model.state_dict(), values


def train(rank: int, watched: bool, original: bool, strategy: str, micro: int = 1, clips: bool = True) -> dict[str, Any]:
    """The parameters at the end, the values of each step, the norms that FSDP gives, and what was warned of."""
    options: dict[str, Any] = {
        "use_orig_params": original,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    inner = make_model()
    inner[0] = FullyShardedDataParallel(inner[0], **options)
    model = FullyShardedDataParallel(inner, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer) if watched else None
    if monitor is not None:
        add_metrics(monitor, by_layer=original)
    values, norms = [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            for number, batch in enumerate(batches(step, micro, range(rank, rank + 1))):
                with model.no_sync() if number < micro - 1 else nullcontext():
                    (model(batch).square().mean() / micro).backward()
            if strategy == "NO_SHARD":  # as torch recommends there
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) if clips else 0.0)
            else:
                norms.append(float(model.clip_grad_norm_(MAX_NORM)) if clips else 0.0)
            optimizer.step()
            if monitor is not None:
                values.append(monitor.get_step_metrics())
    names = [] if monitor is None else [name for name, _ in model.named_parameters()]
    missing = {} if monitor is None else monitor.missing()
    if monitor is not None:
        monitor.detach()
    with FullyShardedDataParallel.summon_full_params(model):
        state = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    dist.barrier()
    return {"state": state, "values": values, "norms": norms, "names": names, "missing": missing, "warnings": messages}


@impatient()
def unlike(rank: int) -> tuple[list[str], list[str]]:
    """The second rank asks for one metric more: the keys of the values, and the complaints."""
    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer)
    if rank == 1:
        monitor.add_update_metric("norm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            optimizer.zero_grad()
            for batch in batches(step, 1, range(rank, rank + 1)):
                model(batch).square().mean().backward()
            optimizer.step()
    keys, complaints = list(monitor.get_step_metrics()), list(monitor.warning_counts())
    monitor.detach()
    return keys, complaints


def refused(rank: int) -> list[str]:
    """The messages for what is not the outermost FSDP module, and for a clip by the monitor."""
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    inner = make_model()
    inner[0] = FullyShardedDataParallel(inner[0], **options)
    model = FullyShardedDataParallel(inner, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attempts: list[Callable[[], object]] = [
        lambda: gradmon.watch(inner, optimizer),
        lambda: gradmon.watch(model, optimizer).clip_grad_norm_(1.0),
    ]
    return refusals(attempts)
