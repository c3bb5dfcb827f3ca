"""Pipelines on several ranks, and the same by one process, for :mod:`tests.test_pipelines`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon
from torch_gradmon.monitor.engines import PipelineSource

from .ranks import impatient, refusals

WIDTH, LAYERS, ROWS, MICRO, STEPS, MAX_NORM = 8, 4, 8, 4, 5, 0.05
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Layer(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Plain."""
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Whose parts keep the names of the whole, as torchtitan cuts models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: nn.Module | None = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Through what there is."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def part(self, stage: int, stages: int) -> Model:
        """A copy of the layers of one stage."""
        found = copy.deepcopy(self)
        for number in range(LAYERS):
            if number * stages // LAYERS != stage:
                del found.layers[str(number)]
        if stage:
            found.embedding = None
        if stage < stages - 1:
            found.head = None
        return found


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one replica."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    """The mean square."""
    return (out - target).square().mean()


def _total(x: Tensor) -> Tensor:
    return x.abs().sum()


def add_metrics(monitor: gradmon.ModuleMonitor) -> None:
    """Those that are compared."""
    for metric in ("norm", "mean", "max"):
        monitor.add_gradient_metric(metric, stages=["before_clip", "after_clip"])
    monitor.add_gradient_metric("total", _total, metric_aggregation_fn="sum", shardwise=True)
    monitor.add_optimizer_metric("exp_avg_norm")
    monitor.add_update_metric("norm")
    monitor.add_parameter_metric("norm")
    monitor.add_activation_metric("max", metric_regex=r"layers")


def whole(replicas: int) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """One process: the parameters at the end, and the values of each step."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    monitor = gradmon.watch(model, optimizer)
    add_metrics(monitor)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            for x, y in zip(*(tensor.chunk(MICRO) for tensor in batch(step, replica)), strict=True):
                loss = loss_of(model(x), y)
                monitor.log_scalar("loss", loss.detach())
                (loss / (MICRO * replicas)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        values.append(monitor.get_step_metrics())
    monitor.detach()
    return model.state_dict(), values


def _with(part: nn.Module, beside: str, mesh: Any) -> nn.Module:
    if beside == "ddp":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    if beside == "fsdp2":
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    if beside == "tp":
        for layer in part.layers.values():
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return part


def clip(parameters: list[nn.Parameter], group: Any) -> None:
    """By the norm of all stages, as torchtitan does."""
    gradients = [_full(parameter.grad) for parameter in parameters]
    square = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    dist.all_reduce(square, group=group)
    factor = min(1.0, MAX_NORM / (square.sqrt().item() + 1e-6))
    for parameter in parameters:
        parameter.grad.mul_(factor)


def train(rank: int, schedule: str, beside: str, watched: bool) -> dict[str, Any]:
    """The parameters of this rank at the end, the values of each step, and what was warned of."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "other"))
    depth, stages = mesh["pp"].get_local_rank(), 2 if schedule in ("gpipe", "1f1b") else 4
    replica = mesh["other"].get_local_rank() if beside in ("ddp", "fsdp2") else 0
    numbers = [depth] if stages == 2 else [depth, 3 - depth if schedule == "zbv" else depth + 2]
    is_last = stages - 1 in numbers
    parts = [_with(Model().part(number, stages), beside, mesh["other"]) for number in numbers]
    group = mesh["pp"].get_group()
    made = [
        PipelineStage(part, number, stages, torch.device("cpu"), group=group) for part, number in zip(parts, numbers, strict=True)
    ]
    runner = SCHEDULES[schedule](made if stages == 4 else made[0], MICRO, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(part.parameters(), 1e-2, foreach=False) for part in parts]
    monitor = gradmon.watch(runner, *optimizers) if watched else None
    if monitor is not None:
        add_metrics(monitor)
    values = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, y = batch(step, replica)
            losses: list[Tensor] = []
            runner.step(*([x] if depth == 0 else []), **({"target": y, "losses": losses} if is_last else {}))
            if monitor is not None and is_last:  # on whose ranks alone there is a loss
                monitor.log_scalar("loss", torch.stack(losses).mean().detach(), dist_reduce="mean")
            clip([parameter for part in parts for parameter in part.parameters()], group)
            for optimizer in optimizers:
                optimizer.step()
            if monitor is not None:
                values.append(monitor.get_step_metrics())
    missing = {} if monitor is None else monitor.missing()
    if monitor is not None:
        monitor.detach()
    state = {name.removeprefix("module."): _full(tensor) for part in parts for name, tensor in part.state_dict().items()}
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    return {"state": state, "values": values, "missing": missing, "warnings": messages}


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def refused(rank: int) -> list[str]:
    """The messages for what a pipeline cannot do."""
    part = Model().part(rank, 2)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    runner = ScheduleGPipe(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    attempts: list[Callable[[], object]] = [
        lambda: gradmon.watch(runner, optimizer, on_spike="skip"),
        lambda: gradmon.watch(runner, optimizer).clip_grad_norm_(1.0),
        lambda: gradmon.watch(stage, optimizer),
    ]
    return refusals(attempts)


def two_stages(part: nn.Module, rank: int) -> ScheduleGPipe:
    """The schedule of a model that two ranks share."""
    return ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), MICRO, loss_fn=loss_of)


def compute_gradients(runner: nn.Module | ScheduleGPipe, rank: int, step: int) -> None:
    """Of a model of one process, or by a schedule of two."""
    x, y = batch(step, 0)
    if isinstance(runner, nn.Module):
        loss_of(runner(x), y).backward()
    else:
        runner.step(*([x] if rank == 0 else []), **({"target": y} if rank else {}))


def values_of(monitor: gradmon.ModuleMonitor) -> dict[str, float]:
    """Those of the last step that do not depend on time."""
    return {key: value for key, value in monitor.get_step_metrics().items() if "overhead" not in key}


def thaw(rank: int, watched: bool) -> dict[str, Any]:
    """A layer of the first rank is frozen at first, and thawed in the third step; the schedule evaluates before each step."""
    part = Model().part(rank, 2)
    if rank == 0:
        part.layers["1"].requires_grad_(False)
    runner = two_stages(part, rank)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    monitor = gradmon.watch(runner, optimizer) if watched else None
    if monitor is not None:
        add_metrics(monitor)
    values = []
    for step in range(4):
        if rank == 0 and step == 2:
            part.layers["1"].requires_grad_(True)
        x, y = batch(step, 0)
        of_rank: tuple[tuple[Tensor, ...], dict[str, Tensor]] = ((x,), {}) if rank == 0 else ((), {"target": y})
        if step:
            arguments, named = of_rank
            runner.eval(*(1000 * each for each in arguments), **named)
        optimizer.zero_grad()
        runner.step(*of_rank[0], **of_rank[1])
        optimizer.step()
        if monitor is not None:
            values.append(values_of(monitor))
    if monitor is not None:
        monitor.detach()
    return {"state": {name: tensor.clone() for name, tensor in part.state_dict().items()}, "values": values}


def _range(x: Tensor) -> Tensor:
    return x.amax() - x.amin()


def _of_matrices(x: Tensor) -> Tensor:
    if x.ndim == 1:
        raise RuntimeError("no matrix")
    return torch.linalg.matrix_norm(x, 2)


def _add_functions(monitor: gradmon.ModuleMonitor) -> None:
    monitor.add_gradient_metric("range", _range)
    monitor.add_update_metric("range", _range)
    monitor.add_parameter_metric("spectral", _of_matrices)
    for metric in ("exp_avg_norm", "grad_momentum_cosine"):
        monitor.add_optimizer_metric(metric)


def functions(rank: int) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Metric functions in a pipeline of two ranks; in a process alone those of the whole model."""
    is_alone = dist.get_world_size() == 1
    model = Model() if is_alone else Model().part(rank, 2)
    runner = model if is_alone else two_stages(model, rank)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
    monitor = gradmon.watch(runner, optimizer)
    _add_functions(monitor)
    values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the function that fails
        for step in range(3):
            optimizer.zero_grad()
            compute_gradients(runner, rank, step)
            optimizer.step()
            values.append(values_of(monitor))
    missing = {key: why for key, why in monitor.missing().items() if "spectral" in key}
    monitor.detach()
    return values, missing


def _groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases."""
    of = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    return [{"params": parameters, "weight_decay": 0.1 * (not number)} for number, parameters in enumerate(of)]


def options(rank: int) -> dict[str, Any]:
    """A pipeline of two ranks with names left out, sums over blocks and groups, and a metric of one stage; alone, the whole model."""
    is_alone = dist.get_world_size() == 1
    model = Model() if is_alone else Model().part(rank, 2)
    runner = model if is_alone else two_stages(model, rank)
    before = dict(vars(runner))
    optimizer = torch.optim.AdamW(_groups_of(model), 1e-2, foreach=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monitor = gradmon.watch(runner, optimizer, layers="blocks", exclude=r"layers\.[12]|^head$")
        monitor.add_gradient_metric("norm")
        monitor.add_update_metric("norm")
        monitor.add_activation_metric("max", metric_regex=r"^embedding$")
        monitor.add_activation_metric("max", metric_regex=r"layers\.3\.down")
        overlap = refusals([lambda: monitor.add_activation_metric("max", metric_regex=r"^layers\.3")])
    values, missing = [], {}
    for step in range(3):
        optimizer.zero_grad()
        compute_gradients(runner, rank, step)
        optimizer.step()
        values.append(values_of(monitor))
        if step == 1:  # in which only the metric measures updates
            missing = {key: why for key, why in monitor.missing().items() if key.startswith("update/layers.2")}
    facts, setup = monitor._runtime.planner.inventory.facts, monitor._runtime.built_in.setup.groups
    trains = [set(group["parameters"]) for group in setup]
    kinds = {name: kind for name, kind in facts["kinds"].items() if kind in ("Linear", "Layer")}
    monitor.detach()
    after = vars(runner)
    left = {name for name in ("step", *PipelineSource.trials) if after.get(name) is not before.get(name)}
    found = {"values": values, "overlap": overlap, "warned": [str(each.message) for each in warned], "left": left}
    return {**found, "trains": trains, "kinds": kinds, "missing": missing}


def frozen(rank: int) -> tuple[list[str], dict[str, float]]:
    """The first stage is frozen: what is refused, and the values with an optimizer that changes nothing."""
    part = Model().part(rank, 2).requires_grad_(rank == 1)
    runner = two_stages(part, rank)
    refused = refusals([lambda: gradmon.watch(runner)]) if rank == 0 else []
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    monitor = gradmon.watch(runner, optimizer)
    monitor.add_gradient_metric("norm")
    compute_gradients(runner, rank, 0)
    optimizer.step()
    values = values_of(monitor)
    monitor.detach()
    return refused, values


def tied(rank: int) -> tuple[list[tuple[dict[str, float], float]], list[str]]:
    """The first rank has the first and the last stage, which share a weight: the values of each step with the norm of all gradients, and
    the keys of missing values.

    torch divides the gradient of such a weight by the number of micro-batches twice, so one process is no comparison.
    """
    numbers = (0, 3) if rank == 0 else (1, 2)
    parts = [Model().part(number, 4) for number in numbers]
    if rank == 0:
        parts[1].layers["3"].up.weight = parts[0].layers["0"].up.weight
    stages = [PipelineStage(part, n, 4, torch.device("cpu")) for part, n in zip(parts, numbers, strict=True)]
    runner = ScheduleZBVZeroBubble(stages, MICRO, loss_fn=loss_of)
    own = dict.fromkeys(parameter for part in parts for parameter in part.parameters())
    optimizer = torch.optim.SGD(own, 0.1)
    monitor = gradmon.watch(runner, optimizer)
    monitor.add_gradient_metric("norm")
    found = []
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(step, 0)
        runner.step(*([x] if rank == 0 else []), **({"target": y} if rank == 0 else {}))
        square = torch.stack([parameter.grad.double().square().sum() for parameter in own]).sum()
        dist.all_reduce(square)
        optimizer.step()
        values = values_of(monitor)
        found.append((values, square.sqrt().item()))
    missing = list(monitor.missing())
    monitor.detach()
    return found, missing


def again(rank: int) -> tuple[list[str], list[int | None]]:
    """A schedule is watched twice: what was warned of, and the last steps of both monitors."""
    part = Model().part(rank, 2)
    runner = two_stages(part, rank)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    monitors = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(4):
            if step % 2 == 0:
                monitors.append(gradmon.watch(runner, optimizer))
            optimizer.zero_grad()
            compute_gradients(runner, rank, step)
            optimizer.step()
    monitors[-1].detach()
    return [str(each.message) for each in warned], [monitor.last_record.step for monitor in monitors]


@impatient()
def unlike(rank: int, what: str) -> tuple[list[str], list[str]]:
    """The second rank asks for one metric more, or for every second step: the keys of the values, and the complaints."""
    part = Model().part(rank, 2)
    runner = two_stages(part, rank)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    monitor = gradmon.watch(runner, optimizer, every=1 + (rank == 1 and what == "cadence"))
    if rank == 1 and what == "metric":
        monitor.add_update_metric("norm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            optimizer.zero_grad()
            compute_gradients(runner, rank, step)
            optimizer.step()
    keys, complaints = list(monitor.get_step_metrics()), list(monitor.warning_counts())
    monitor.detach()
    return keys, complaints
