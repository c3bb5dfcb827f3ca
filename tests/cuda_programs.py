"""Trainings that only a GPU can run, with and without a monitor: compiled in bfloat16, and under torch's wrappers over NCCL.

They are programs for :mod:`tests.device_programs`. NCCL has one rank here: its collectives run, on a stream of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon

from .device_loop import apart
from .families import TinyGPT, _next_token
from .loops import differences
from .places import Place

STEPS = 6


def _model(device: torch.device) -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(vocabulary=64, width=64, layers=2, context=32).to(device)


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, of all ranks where they share it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _trained(place: Place, wrap: Callable[[nn.Module], nn.Module], *, is_watched: bool, autocast: bool) -> dict[str, Any]:
    """What a training leaves; with a monitor also what it reports."""
    inner = _model(place.at)
    model = wrap(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    monitor = gradmon.watch(model, optimizer, preset="full") if is_watched else None
    if monitor is not None:
        for add in (
            monitor.add_gradient_metric,
            monitor.add_parameter_metric,
            monitor.add_update_metric,
            monitor.add_activation_metric,
        ):
            add("norm")
    generator, norms, losses = torch.Generator().manual_seed(1), [], []
    for _ in range(STEPS):
        tokens = torch.randint(64, (8, 32), generator=generator).to(place.at)
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            loss = _next_token(model, (tokens,))
        loss.backward()
        norms.append(_whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.detach()
    return {
        "left": {
            "parameters": {name: _whole(parameter) for name, parameter in inner.named_parameters()},
            "losses": losses,
            "rng": [torch.get_rng_state(), torch.cuda.get_rng_state()],
        },
        "norms": norms,
        "values": None if monitor is None else list(monitor.get_all_metrics().values()),
    }


def _compared(place: Place, wrap: Callable[[nn.Module], nn.Module], *, autocast: bool = False) -> dict[str, Any]:
    """Three trainings: two without a monitor, which show whether the device repeats itself, and one with."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    first, again = (_trained(place, wrap, is_watched=False, autocast=autocast) for _ in range(2))
    watched = _trained(place, wrap, is_watched=True, autocast=autocast)
    values = watched["values"]
    return {
        "repeats": differences(first["left"], again["left"]),
        "changed": differences(first["left"], watched["left"]),
        "steps": len(values),
        "worst": max(apart(step["gradmon/grad_norm"], norm) for step, norm in zip(values, watched["norms"], strict=True)),
        "kinds": sorted({key.split("/")[0] for step in values for key in step}),
    }


@contextmanager
def _one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        try:
            yield
        finally:
            dist.destroy_process_group()


def compiled_in_bfloat16(place: Place) -> dict[str, Any]:
    """A model compiled by inductor, in autocast."""

    def wrap(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model)  # type: ignore[return-value]

    return _compared(place, wrap, autocast=True)


def ddp_over_nccl(place: Place) -> dict[str, Any]:
    """DistributedDataParallel."""
    with _one_rank():
        return _compared(place, lambda model: DistributedDataParallel(model, device_ids=[0]))


def fsdp2_over_nccl(place: Place) -> dict[str, Any]:
    """FSDP2, computing in bfloat16."""

    def wrap(model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    with _one_rank():
        return _compared(place, wrap)


PROGRAMS = {each.__name__: each for each in (compiled_in_bfloat16, ddp_over_nccl, fsdp2_over_nccl)}
