"""What the ranks of a test do: a small model under one of torch's wrappers, trained and watched, beside a naive oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

from . import oracle

#: Of gradients, parameters and updates.
METRICS = ("norm", "rms", "mean", "std", "max", "min_value", "max_value", "l1", "sparsity", "nonfinite")
STEPS, BATCH, WIDTH = 3, 8, 8


class Net(nn.Module):
    """Parameters of uneven sizes, one of a single element, one that is used on some ranks only, and one that never is."""

    def __init__(self, width: int = WIDTH, idle: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 7)
        self.last = nn.Linear(7, 1)
        if idle:
            self.extra = nn.Parameter(torch.randn(3, 5))
            self.unused = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        y = self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))
        return y + (x @ self.extra.t()).sum(dim=-1, keepdim=True) if with_extra else y


class Sequence(nn.Module):
    """For tensor and sequence parallelism: a norm between two layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.norm(x)))))


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        wrap: name of one of :data:`WRAPS`.
        arguments: of it.
        micro: backward passes in a step; all but the last are not synchronised.
        clip: ``"torch"`` or ``"monitor"`` clips to a norm that clips.
        extra: ``"some"`` uses a parameter on rank 0 only.
        every: cadence, with a flight recorder that keeps the steps between.
    """

    wrap: str
    arguments: tuple[tuple[str, Any], ...] = ()
    micro: int = 1
    clip: str = ""
    extra: str = ""

    def __str__(self) -> str:
        words = [self.wrap, *(f"{name}={value}" for name, value in self.arguments)]
        return "-".join([*words, *(f"{self.micro}-micro" for _ in [0] if self.micro > 1), *filter(None, (self.clip, self.extra))])


@dataclass
class Wrapped:
    """A model on this rank.

    Attributes:
        model: as the loop calls it.
        part: which share of the batch it gets, and of how many.
        unsynchronised: around the micro-batches before the last.
    """

    model: nn.Module
    part: tuple[int, int]
    unsynchronised: Callable[[], contextlib.AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


def _ddp(**arguments: Any) -> Wrapped:
    model = DistributedDataParallel(Net(idle="find_unused_parameters" in arguments), **arguments)
    return Wrapped(model, (dist.get_rank(), dist.get_world_size()), model.no_sync)


def _unsharded(model: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def unsynchronised() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return unsynchronised


def _fsdp2(mixed: bool = False, offload: bool = False, shape: tuple[int, ...] = (), **arguments: Any) -> Wrapped:
    model = Net(width=7)  # of which no number of ranks is a divisor
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=("copies", "shards")[-len(shape or (1,)) :])
    options: dict[str, Any] = {"mesh": mesh, **arguments}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for part in (model.first, model.second):
        fully_shard(part, **options)
    fully_shard(model, **options)
    return Wrapped(model, (dist.get_rank(), dist.get_world_size()), _unsharded(model))


def _tensor_parallel(sequence: bool = False, with_fsdp: bool = False) -> Wrapped:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if with_fsdp else (1, world), mesh_dim_names=("data", "tensor"))
    model = Sequence()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        from torch.distributed.tensor import Replicate, Shard

        plan = {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
        plan = {"up": ColwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    if with_fsdp:
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return Wrapped(model, (mesh.get_coordinate()[0], mesh.shape[0]) if with_fsdp else (0, 1))


WRAPS: dict[str, Callable[..., Wrapped]] = {"ddp": _ddp, "fsdp2": _fsdp2, "tp": _tensor_parallel}


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
    """All built-in metrics of gradients, parameters and updates."""
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for metric in METRICS:
        monitor.add_gradient_metric(metric)
        monitor.add_parameter_metric(metric)
        monitor.add_update_metric(metric)
    return monitor


def batches() -> Tensor:
    """The inputs of all steps: ``[STEPS, BATCH, 4, features]``."""
    return torch.randn(STEPS, BATCH, 4, 8, generator=torch.Generator().manual_seed(1))


def full(tensor: Tensor) -> Tensor:
    """All elements, on each rank."""
    whole = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return whole.clone()


def truth(source: str, tensors: dict[str, Tensor]) -> dict[str, float]:
    """The naive value of each key."""
    return {
        f"{source}/{name}/{metric}": value
        for name, tensor in tensors.items()
        for metric, value in oracle.values(tensor).items()
        if metric in METRICS
    }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {_short(name): full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _short(name: str) -> str:
    return name.removeprefix("module.")


def train(rank: int, setting: Setting) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each step what the monitor says, and what is true."""
    wrapped = WRAPS[setting.wrap](**dict(setting.arguments))
    model = wrapped.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watched(model, optimizer)
    features = 5 if isinstance(getattr(model, "module", model), Net) else 8
    found = []
    for whole in batches():
        share, shares = wrapped.part
        mine = whole[..., :features].tensor_split(shares)[share].tensor_split(setting.micro)
        optimizer.zero_grad()
        for number, x in enumerate(mine):
            with wrapped.unsynchronised() if number < setting.micro - 1 else contextlib.nullcontext():
                y = model(x, rank == 0) if setting.extra else model(x)
                (y.square().mean() / setting.micro).backward()
        expected = truth("gradient_before_clip", _gradients(model))
        if setting.clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif setting.clip == "monitor":
            monitor.clip_grad_norm_(1e-3)
        expected |= truth("gradient", _gradients(model))
        before = {_short(name): full(p) for name, p in model.named_parameters()}
        expected |= truth("parameter", before)
        optimizer.step()
        after = {_short(name): full(p) for name, p in model.named_parameters()}
        moved = {name: after[name].double() - before[name].double() for name in after}
        expected |= truth("update", moved)
        squares = [expected[key] ** 2 for key in expected if key.startswith("gradient_before") and key.endswith("/norm")]
        expected["gradmon/grad_norm"] = sum(squares) ** 0.5
        found.append((monitor.get_step_metrics(), expected))
    monitor.detach()
    return found
