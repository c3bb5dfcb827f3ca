"""What the ranks of a test do: a small model under one of torch's wrappers, trained and watched, beside a naive oracle."""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from benchmarks import exchange
from benchmarks.exchange import Collectives
from tests.watching import watch_with
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.keys import GRADIENT, Key
from torch_gradmon.core.moments import ALL_COLUMNS, Column, identity
from torch_gradmon.monitor.runtime import at_exit
from torch_gradmon.step.buffer import StepBuffer
from torch_gradmon.step.exchange import RankExchange
from torch_gradmon.step.ranks import Ranks

from . import oracle
from .ranks import impatient

#: Of gradients, parameters and updates.
METRICS = ("norm", "rms", "mean", "std", "max", "min_value", "max_value", "l1_norm", "sparsity", "nonfinite_count")
STEPS, BATCH, WIDTH = 2, 8, 8


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


def of_everybody(thing: Any) -> list[Any]:
    """``thing`` of each rank, without NumPy."""
    sent = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(sent)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(sent)] = sent
    found = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [pickle.loads(bytes(each[: int(size)].tolist())) for each, size in zip(found, sizes, strict=True)]


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


# --- values of a rank's own batches -----------------------------------------------------------------------------------------------


def wrapped(wrap: str) -> nn.Module:
    """A small model that all ranks have, or that is spread over them."""
    model = Net(idle=False)
    if wrap == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model.first)
    fully_shard(model)
    return model


def batch_values(rank: int, wrap: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Activations and logged values, by the monitor and in the naive way over all ranks; the last layer runs on rank 1 alone."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model)
    for metric in ("norm", "mean", "std", "max", "nonfinite_count"):
        monitor.add_activation_metric(metric)
    monitor.add_activation_metric("peak", lambda x: x.abs().max(), metric_aggregation_fn="max")
    monitor.add_activation_metric("average", lambda x: x, metric_aggregation_fn="mean")
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    outputs: dict[str, Tensor] = {}
    root = getattr(model, "module", model)
    for name in ("first", "norm", "second", "last"):
        getattr(root, name).register_forward_hook(lambda _, __, y, name=name: outputs.update({name: y.detach()}))
    found, expected = [], []
    for step in range(4):
        rows = 2 + rank + step  # each rank has as many as it likes
        x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        mine = {"mean": float(loss), "sum": float(rows), "min": float(rank + step), "max": float(rank - step)}
        for reducer, value in mine.items():
            monitor.log_scalar(f"by {reducer}", value, dist_reduce=reducer)
        if rank == 1 and step >= 2:
            monitor.log_scalar("seldom", 10.0 * step, dist_reduce="mean")
        monitor.log_scalar("own", float(rank))
        optimizer.step()
        found.append(monitor.get_step_metrics())
        everybody = of_everybody((dict(outputs), mine))
        true: dict[str, float] = {"own": float(rank)}
        for name in outputs:
            whole = torch.cat([theirs[name].double().reshape(-1) for theirs, _ in everybody])
            values = oracle.values(whole)
            true |= {
                f"activation/{name}/{metric}": values[metric] for metric in ("norm", "mean", "std", "max", "nonfinite_count")
            }
            true[f"activation/{name}/peak"] = values["max"]
            true[f"activation/{name}/average"] = values["mean"]
        numbers = {reducer: [logged[reducer] for _, logged in everybody] for reducer in mine}
        true |= {"by mean": sum(numbers["mean"]) / len(everybody), "by sum": sum(numbers["sum"])}
        true |= {"by min": min(numbers["min"]), "by max": max(numbers["max"])}
        true |= {"seldom": 10.0 * step} if step >= 2 else {}
        expected.append(true)
    monitor.detach()
    return found, expected


def counted(rank: int, wrap: str, values: bool) -> list[list[tuple[str, int]]]:
    """The collectives of ours in each step."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    if values:
        monitor.add_activation_metric("norm")
        monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    calls = []
    for _ in range(13):
        with Collectives() as counts:
            loss = model(torch.ones(4, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss)
            optimizer.step()
            monitor.get_step_metrics()
        calls.append(counts.calls)
    monitor.detach()
    return calls


def decided(rank: int, wrap: str, late: bool = False) -> tuple[list[tuple[int, str, float]], list[float], dict[str, int]]:
    """Events, losses and complaints of a run in which one rank's loss is NaN in step 30, and large in step 40."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    events: list[Any] = []
    monitor = ModuleMonitor(model, on_spike=events.append, preset="minimal")
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.attach(optimizer)
    losses = []
    for step in range(50):
        loss = model(torch.ones(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        logged = float(loss) * (float("nan") if rank == 1 and step == 30 else 50.0 if rank == 1 and step == 40 else 1.0)
        if not late:
            monitor.log_scalar("loss", logged)
        optimizer.step()
        if late:
            monitor.log_scalar("loss", logged)
        losses.append(monitor.get_step_metrics()["loss"])
    monitor.detach()
    return [(event.step, event.signal, event.value) for event in events], losses, monitor.warning_counts()


def in_disorder(rank: int, what: str) -> list[dict[str, float]]:
    """Steps in which this rank does what the other does not."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_gradient_metric("norm")
    monitor.add_activation_metric("norm")

    def fails_once(x: Tensor) -> Tensor:
        if rank == 1 and what == "raises":
            raise ValueError("only here")
        return x.abs().mean()

    monitor.add_activation_metric("custom", fails_once)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        if what == "no gradients" and rank == 1 and step == 1:
            optimizer.zero_grad()
        if what == "logs" and rank == 1 and step == 1:
            monitor.log_scalar("only here", 3.0, dist_reduce="sum")
        if what == "reads" and rank == 0:
            monitor.get_step_metrics()
            str(monitor.missing())
        optimizer.step()
        found.append(monitor.get_step_metrics())
    monitor.detach()
    return found


@impatient()
def alone(rank: int, wrap: str) -> tuple[list[dict[str, float]], dict[str, str], dict[str, int]]:
    """A monitor on rank 0 only."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None) if rank == 0 else None
    if monitor is not None:
        monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    found, missing = [], {}
    for _ in range(4):
        loss = model(torch.ones(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.log_scalar("loss", loss)
            found.append(monitor.get_step_metrics())
            missing = monitor.missing()
    if monitor is None:
        return [], {}, {}
    monitor.detach()
    return found, missing, monitor.warning_counts()


def logged(rank: int, directory: str, on_all: bool) -> list[int]:
    """The steps that a sink of this rank got."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run_dir = f"{directory}/run" if on_all or rank == 0 else None
    monitor = ModuleMonitor(
        model, run_dir=run_dir, distributed=gradmon.Distributed(log_on_all_ranks=on_all), on_spike="warn", preset="standard"
    )
    steps: list[int] = []
    everywhere: list[int] = []
    monitor.add_sink(lambda values, step: steps.append(step))
    monitor.add_sink(lambda values, step: everywhere.append(step), every=2, on_all_ranks=True)
    monitor.attach(optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(30):
            optimizer.zero_grad()
            (model(torch.ones(4, 5)).square().mean() * (100 if step == 20 else 1)).backward()
            optimizer.step()
        monitor.detach()
    told = [str(warning.message) for warning in said if "grad_norm" in str(warning.message)]
    assert len(told) == (2 if on_all or rank == 0 else 0), told
    assert everywhere == list(range(0, 30, 2)), everywhere
    return steps


def coordinates(rank: int, ranks: int, wrap: bool) -> dict[str, float]:
    """The refined coordinate check of the third step, where each rank has its share of a batch; without ``wrap`` one has all."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    model = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model)
    monitor.set_reference_module("init")
    gradmon.RefinedCoordinateCheck(monitor)
    monitor.attach(optimizer)
    for step in range(3):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    values = monitor.get_step_metrics()
    monitor.detach()
    return values


class Experts(nn.Module):
    """A layer that all ranks have, and an expert that each rank has for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        torch.manual_seed(1 + rank)
        self.expert = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x))


def with_experts(rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Metrics of a model with an expert on each rank, beside the truth."""
    inner = Experts(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["expert.weight", "expert.bias"])
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model, distributed=gradmon.Distributed(distinct=r"^expert\."), preset="standard")
    for metric in METRICS:
        monitor.add_gradient_metric(metric)
    monitor.add_gradient_metric("custom", lambda g: g.abs().max())
    monitor.attach(optimizer)
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    everybody = of_everybody({_short(name): p.grad.clone() for name, p in model.named_parameters()})
    together = {name: everybody[0][name] for name in everybody[0] if name.startswith("shared")}
    together |= {name: torch.stack([theirs[name] for theirs in everybody]) for name in everybody[0] if name.startswith("expert")}
    optimizer.step()
    expected = truth("gradient", together)
    expected["gradmon/grad_norm"] = sum(value**2 for key, value in expected.items() if key.endswith("/norm")) ** 0.5
    return monitor.get_step_metrics(), expected, monitor.missing()


def in_groups(rank: int) -> tuple[float, float]:
    """Two models, each of two ranks; the norm by the monitor and the true one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
    model = Net(width=7, idle=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model, distributed=gradmon.Distributed(process_group=groups[rank // 2]), preset="minimal")
    monitor.attach(optimizer)
    (model(torch.ones(4, 5)).square().mean() * (1 + rank // 2)).backward()
    true = sum(float(p.grad.full_tensor().double().square().sum()) for p in model.parameters()) ** 0.5
    optimizer.step()
    return monitor.get_step_metrics()["gradmon/grad_norm"], true


def attached(rank: int, order: str) -> tuple[list[dict[str, float]], list[float], dict[str, int], list[str]]:
    """A monitor that comes before or after a wrapper, or whose hooks die on the way; norms by the monitor and true ones."""
    model: nn.Module = Net(idle=False)
    watched_model = model
    monitor = ModuleMonitor(preset="minimal")
    if order == "set, then fully_shard":
        monitor.set_module(model)
    if order in ("watch, then ddp",):
        model = DistributedDataParallel(model)
    elif order == "replaced":
        pass
    elif order == "tensor parallel, converted":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = watched_model = Sequence()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model.first)
        fully_shard(model)
    if order != "set, then fully_shard":
        monitor.set_module(watched_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor.attach(optimizer)
    features = 8 if isinstance(watched_model, Sequence) else 5
    found, true = [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 2 and order == "tensor parallel, converted":
                model.to(torch.float64)
            if step == 2 and order == "replaced":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            x = torch.ones(4, features, dtype=next(model.parameters()).dtype)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            true.append(sum(float(full(p.grad).double().square().sum()) for p in model.parameters()) ** 0.5)
            optimizer.step()
            found.append(monitor.get_step_metrics())
    monitor.detach()
    return found, true, monitor.warning_counts(), [str(warning.message) for warning in said]


def out_of_step(rank: int, apart: int) -> tuple[list[str], dict[str, float], dict[str, int]]:
    """An exchange of buffers whose steps lie apart; the sources of tables, the values, and the complaints."""
    complaints = WarningLog()
    ranks = Ranks()
    buffer = StepBuffer(5 + apart * rank, complaints)
    buffer.put_rows(GRADIENT, ["a"], torch.ones(1, 8, dtype=torch.float64), ALL_COLUMNS)
    buffer.merge_value(Key("", "x", ""), 1.0 + rank)
    buffer.share(Key("", "x", ""), "mean")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RankExchange(ranks, complaints).run(buffer, {GRADIENT: (["a"], ALL_COLUMNS)}, True, lambda _: False)
        tables, values, _ = buffer.flush()
    return sorted(tables), {key.name: value for key, value in values.items()}, dict(complaints.counts)


def looks_closer(rank: int) -> tuple[list[int], list[int], dict[str, int]]:
    """The steps in which outputs were measured, and those monitored, of a run with a cadence and a spike in step 100; one rank reads
    its values at once and has a budget.
    """
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = ModuleMonitor(model, every=5, max_overhead=1e-6, preset="minimal")
        monitor.attach(optimizer)
        close = []
        for step in range(111):
            optimizer.zero_grad()
            (model(torch.ones(4, 5)).square().mean() * (100 if step == 100 else 1)).backward()
            optimizer.step()
            if rank == 0:
                monitor.get_step_metrics()
            last = monitor._runtime.pipeline.last
            if last is not None and "activation" in last.tables:
                close.append(last.step)
    monitored = sorted(monitor.get_all_metrics())
    monitor.detach()
    return close, monitored, monitor.warning_counts()


def merged(rank: int, seed: int, columns: list[int], gathers: bool) -> tuple[Tensor, Tensor]:
    """Rows of all ranks merged by the exchange, and by hand; in one collective, or in two as for many ranks."""
    from torch_gradmon.core.moments import merge
    from torch_gradmon.step import ranks as distributed

    torch.manual_seed(seed)
    everybody = torch.randn(dist.get_world_size(), 5, 8, dtype=torch.float64)
    everybody[..., 0] = torch.randint(0, 9, everybody.shape[:2])
    everybody[torch.rand(everybody.shape) < 0.05] = torch.inf
    everybody[..., :6][torch.rand(everybody[..., :6].shape) < 0.05] = torch.nan
    empty = torch.rand(everybody.shape[:2]) < 0.3
    everybody[empty] = identity(int(empty.sum()))
    before, distributed.GATHERED = distributed.GATHERED, 1 << 20 if gathers else 0
    try:
        found = Ranks().merged(everybody[rank], frozenset(map(Column, columns)))
    finally:
        distributed.GATHERED = before
    return found, merge(everybody)


def train_with_reductions(rank: int, setting: Setting) -> list[tuple[dict[str, float], dict[str, float]]]:
    """:func:`train` as if there were very many ranks."""
    from torch_gradmon.step import ranks as distributed

    before, distributed.GATHERED = distributed.GATHERED, 0
    try:
        return train(rank, setting)
    finally:
        distributed.GATHERED = before


def bytes_of(rank: int, wrap: str) -> list[list[tuple[str, int]]]:
    """What the benchmark counts, of a model of two blocks."""
    before, exchange.SIZES = exchange.SIZES, replace(exchange.SIZES, blocks=2)
    try:
        return exchange.counted(wrap)
    finally:
        exchange.SIZES = before


# --- micro-batches ----------------------------------------------------------------------------------------------------------------

#: So many features that few steps tell the noise.
FEATURES, MEAN, SPREAD = 500, 0.5, 1.5


def noisy(rank: int, micro: int, size: int, divided: bool) -> float:
    """The noise scale after 80 steps of a model whose gradient is the mean of its inputs, whatever its weights are."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model: nn.Module = nn.Linear(FEATURES, 1, bias=False)
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, preset="minimal")
    monitor.add_micro_batch_metrics(batch_size=size)
    monitor.attach(optimizer)
    data = torch.Generator().manual_seed(rank)
    for _ in range(80):
        optimizer.zero_grad()
        for number in range(micro):
            with model.no_sync() if ranks > 1 and number < micro - 1 else contextlib.nullcontext():  # type: ignore[operator]
                loss = model(MEAN + SPREAD * torch.randn(size, FEATURES, generator=data)).mean()
                (loss / micro if divided else loss).backward()
        optimizer.step()
    found = monitor.get_step_metrics()["gradmon/noise_scale"]
    monitor.detach()
    return found


def batches_of(rank: int, wrap: str) -> tuple[list[str], Any, dict[str, list[float]]]:
    """What is said of a spike that one micro-batch of one rank brings; norms by rank, or why there are none; and the true ones."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    events: list[Any] = []
    monitor = ModuleMonitor(model, on_spike=events.append, preset="minimal")
    monitor.add_micro_batch_metrics()
    monitor.attach(optimizer)
    data = torch.Generator().manual_seed(rank)
    norms: list[float] = []
    for step in range(31):
        optimizer.zero_grad()
        norms = []
        for number in range(2):
            last = number == 1
            unsynchronised = model.no_sync if wrap == "ddp" else _unsharded(model)  # type: ignore[union-attr]
            with contextlib.nullcontext() if last else unsynchronised():
                loss = model(torch.randn(4, 5, generator=data)).square().mean() * (
                    200 if (step, rank, number) == (30, 1, 1) else 1
                )
                if wrap == "ddp":
                    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                    norms.append(sum(float(part.double().square().sum()) for part in parts) ** 0.5)
                loss.backward()
        optimizer.step()
    everybody = of_everybody(norms)
    record = monitor._runtime.settle_now()
    assert record is not None
    found = record.context.get("batch_norms") or monitor.missing()["gradmon/micro_batch_grad_norm_max"]
    monitor.detach()
    return (
        [event.where for event in events if event.step == 30],
        found,
        {str(each): norms for each, norms in enumerate(everybody)},
    )


def changed_on_the_way(rank: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """A metric that is added, and a parameter that thaws, between two steps: norms before clipping, and the true ones."""
    model = Net(width=7, idle=False)
    fully_shard(model.first)
    fully_shard(model)
    model.second.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    found = []
    for step in range(4):
        if step == 1:
            monitor.add_gradient_metric("max")
        if step == 2:
            model.second.weight.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        true = {name: float(gradient.double().norm()) for name, gradient in _gradients(model).items()}
        optimizer.step()
        values = monitor.get_step_metrics()
        keys = {name: f"gradient_before_clip/{name}/norm" for name, _ in model.named_parameters()}
        found.append(({name: values[key] for name, key in keys.items() if key in values}, true))
    monitor.detach()
    return found


def recorded(rank: int, directory: str, every: int) -> None:
    """A run with a spike in step 100, with a cadence and a recorder or without."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    arguments = {"every": every, "spike_capture": gradmon.SpikeCapture(before=4)} if every > 1 else {}
    monitor = watch_with(model, optimizer, on_spike=None, run_dir=f"{directory}/{every}", **arguments)  # type: ignore[arg-type]
    for step in range(112):
        optimizer.zero_grad()
        (model(torch.ones(4, 5)).square().mean() * (100 if step == 100 else 1)).backward()
        optimizer.step()
    monitor.detach()


def shardwise(rank: int, wrap: str) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Functions of the parts of tensors, beside their values on whole tensors; and why there is none of what was not declared."""
    wrapped = WRAPS[wrap]()
    model = wrapped.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model)
    functions: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "positive": (lambda x: (x > 0).double().mean(), "mean"),
        "elementwise": (lambda x: x.double().square(), "mean"),
        "peak": (lambda x: x.abs().amax(), "max"),
        "low": (lambda x: x.amin(), "min"),
        "total": (lambda x: x.double().sum(), "sum"),
    }
    for name, (function, reducer) in functions.items():
        for add in (monitor.add_gradient_metric, monitor.add_parameter_metric, monitor.add_update_metric):
            add(name, function, metric_aggregation_fn=reducer, shardwise=True)
    monitor.add_gradient_metric("median", lambda x: x.median())
    for built_in in ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine", "second_moment_ratio"):
        monitor.add_optimizer_metric(built_in)
    for built_in in ("angle", "growth"):
        monitor.add_update_metric(built_in)
    monitor.attach(optimizer)
    features = 5 if isinstance(model, Net) else 8
    model(batches()[0][..., :features].tensor_split(wrapped.part[1])[wrapped.part[0]]).square().mean().backward()
    gradients = _gradients(model)
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    optimizer.step()
    moved = {name: full(parameter) - before[name] for name, parameter in model.named_parameters() if name in gradients}
    sources = {"gradient_before_clip": gradients, "gradient": gradients, "parameter": before, "update": moved}
    expected = {
        f"{source}/{name}/{metric}": float(function(tensor).double().mean())
        for source, tensors in sources.items()
        for name, tensor in tensors.items()
        for metric, (function, _) in functions.items()
    }
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            old, new = before[name].double(), full(parameter).double()
            if old.any():
                expected[f"update/{name}/growth"] = float(new.norm() / old.norm() - 1)
                expected[f"update/{name}/angle"] = float(2 * torch.asin((old / old.norm() - new / new.norm()).norm() / 2))
            state = optimizer.state[parameter]
            first, second, gradient = (full(x).double() for x in (state["exp_avg"], state["exp_avg_sq"], parameter.grad))
            expected[f"optimizer/{name}/exp_avg_norm"] = float(first.norm())
            expected[f"optimizer/{name}/exp_avg_sq_norm"] = float(second.norm())
            expected[f"optimizer/{name}/grad_momentum_cosine"] = float((first * gradient).sum() / first.norm() / gradient.norm())
            if "betas" in optimizer.param_groups[0]:
                corrected = second / (1 - optimizer.param_groups[0]["betas"][1] ** float(state["step"]))
                ratios = gradient.square() / corrected.clamp(min=optimizer.param_groups[0]["eps"] ** 2)
                expected[f"optimizer/{name}/second_moment_ratio"] = float(ratios.mean().sqrt())
    values, missing = monitor.get_step_metrics(), monitor.missing()
    monitor.detach()
    return values, expected, missing


# --- what a stranger found --------------------------------------------------------------------------------------------------------


def left_in_the_middle(rank: int, how: str) -> bool:
    """One rank leaves in the middle of a step, and waits for nobody."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_activation_metric("norm")
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        if step < 2:
            optimizer.step()
    if rank == 1:
        if how == "detach":
            monitor.detach()
        else:
            at_exit(lambda: monitor._runtime)
    dist.barrier()
    return bool(monitor.get_all_metrics()[1])


def badly_aggregated(rank: int) -> list[dict[str, float]]:
    """A value whose aggregation function raises on one rank, and one that is as it should be."""
    model = wrapped("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    monitor.attach(optimizer)

    def total(values: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("only here")
        return values.sum()

    found = []
    for _ in range(3):
        model(torch.ones(4, 5)).square().mean().backward()
        monitor.log_scalar("bad", 1.0, total, dist_reduce="mean")
        monitor.log_scalar("good", 1.0 + rank, dist_reduce="mean")
        optimizer.step()
        found.append(monitor.get_step_metrics())
    monitor.detach()
    return found


@impatient()
def alone_with_partial_sums(rank: int) -> tuple[list[set[str]], dict[str, str]]:
    """A monitor on the first rank alone, of a model whose gradients have to be added up over ranks."""
    wrapped = WRAPS["tp"](sequence=True)
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1)
    monitor = gradmon.watch(wrapped.model, optimizer) if rank == 0 else None
    keys, missing = [], {}
    for _ in range(3):
        optimizer.zero_grad()
        wrapped.model(torch.ones(4, 4, 8)).square().mean().backward()
        optimizer.step()
        if monitor is not None:
            keys.append(set(monitor.get_step_metrics()))
            missing = monitor.missing()
    if monitor is not None:
        monitor.detach()
    return keys, missing


def logged_between(rank: int, wrap: str, directory: str) -> None:
    """Values that are logged in steps that are recorded, and in those that are monitored."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = watch_with(
        model, optimizer, every=5, spike_capture=gradmon.SpikeCapture(before=4), on_spike=None, run_dir=f"{directory}/{wrap}"
    )
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    for step in range(107):
        optimizer.zero_grad()
        (model(torch.ones(4, 5)).square().mean() * (100 if step == 100 else 1)).backward()
        monitor.log_scalar("mean", float(step + rank), dist_reduce="mean")
        monitor.log_scalar("loss", 1.0 + rank)
        optimizer.step()
    monitor.detach()


def with_a_plain_reference(rank: int) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
    """Differences of spread parameters to a reference that is not spread."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.add_parameter_difference_metric("norm")
    monitor.set_reference_module(Net(idle=False))
    monitor.attach(optimizer)
    model(torch.ones(4, 5)).square().mean().backward()
    optimizer.step()
    found = monitor.get_step_metrics(), monitor.missing(), monitor.warning_counts()
    monitor.detach()
    return found


def watched_in_part(rank: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """A part of a model whose parameters a module above it keeps: norms of gradients and updates, and the true ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model[0], optimizer, on_spike=None)
    monitor.add_gradient_metric("norm")
    monitor.add_update_metric("norm")
    found = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 5) * (1 + step)).square().mean().backward()
        true = {f"gradient/{name}/norm": float(full(p.grad).double().norm()) for name, p in model[0].named_parameters()}
        before = {name: full(p).double() for name, p in model[0].named_parameters()}
        optimizer.step()
        true |= {
            f"update/{name}/norm": float((full(p).double() - before[name]).norm()) for name, p in model[0].named_parameters()
        }
        found.append((monitor.get_step_metrics(), true))
    assert monitor._runtime.planner.inventory is not None
    assert monitor._runtime.planner.inventory.spread == {"0.weight", "0.bias"}
    monitor.detach()
    return found


def converted(rank: int, spread: bool) -> tuple[list[float | None], list[float], str, list[str]]:
    """A model all of whose hooks die in a conversion before step 3: norms before clipping, true ones, why one is absent, warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    if spread:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    found, true, why = [], [], ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 3:
                torch.__future__.set_swap_module_params_on_conversion(not spread)
                model.to(torch.float64)
                torch.__future__.set_swap_module_params_on_conversion(False)
            optimizer.zero_grad()
            model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).square().mean().backward()
            true.append(sum(float(gradient.double().square().sum()) for gradient in _gradients(model).values()) ** 0.5)
            optimizer.step()
            found.append(monitor.get_step_metrics().get("gradmon/grad_norm"))
            why = monitor.missing().get("gradmon/grad_norm", why)
    monitor.detach()
    return found, true, why, [str(warning.message) for warning in said if "hooks" in str(warning.message)]


def unchanged(rank: int, setting: Setting, every: int) -> bool:
    """Whether training ends with the same bits, on this rank, with a monitor of everything and without one."""
    return all(torch.equal(a, b) for a, b in zip(_trained(setting, None, rank), _trained(setting, every, rank), strict=True))


def _trained(setting: Setting, every: int | None, rank: int) -> list[Tensor]:
    """This rank's parameters and the state of its random generator after a training; ``every``: the monitor's cadence."""
    torch.manual_seed(0)
    wrapped = WRAPS[setting.wrap](**dict(setting.arguments))
    model = wrapped.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = None
    if every is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            monitor = ModuleMonitor(
                model, every=every, spike_capture=gradmon.SpikeCapture(before=4 if every > 1 else 0), preset="full"
            )
            monitor.add_micro_batch_metrics()
            monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
            monitor.add_gradient_metric("random", lambda x: x.abs().mean() + torch.rand(()), shardwise=True)
            monitor.attach(optimizer)
    features = 5 if isinstance(getattr(model, "module", model), Net) else 8
    torch.manual_seed(1 + rank)
    for number, whole in enumerate([*batches(), *batches()]):
        share, shares = wrapped.part
        optimizer.zero_grad()
        mine = whole[..., :features].tensor_split(shares)[share].tensor_split(setting.micro)
        for micro, x in enumerate(mine):
            with wrapped.unsynchronised() if micro < setting.micro - 1 else contextlib.nullcontext():
                y = model(x, rank == 0) if setting.extra else model(x)
                loss = nn.functional.dropout(y, 0.1).square().mean() / setting.micro
                loss.backward()
        if monitor is not None:
            monitor.log_scalar("loss", loss.detach(), dist_reduce="mean")
        if setting.clip:
            clip = torch.nn.utils.clip_grad_norm_ if setting.clip == "torch" or monitor is None else None
            if clip is None:
                assert monitor is not None
                monitor.clip_grad_norm_(1e-3)
            else:
                clip(model.parameters(), 1e-3)
        optimizer.step()
        if monitor is not None and number == 1:
            monitor.get_step_metrics()
    if monitor is not None:
        monitor.detach()
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()]
    return [*(parameter.detach().clone() for parameter in local), torch.get_rng_state()]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def compiled_blocks(rank: int, wrap: str) -> list[tuple[int, list[Tensor], dict[str, float]]]:
    """Ten blocks under FSDP2 or DDP, eager and watched, compiled one by one, and both: graphs, parameters, values of outputs."""
    results = []
    for is_compiled, is_watched in ((False, True), (True, False), (True, True)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        called: nn.Module = nn.Sequential(*(_Block() for _ in range(10)))
        for block in called.children() if is_compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        if wrap == "ddp":
            called = DistributedDataParallel(called)
        else:
            for block in called.children():
                fully_shard(block)
            fully_shard(called)
        optimizer = torch.optim.SGD(called.parameters(), 0.01)
        monitor = gradmon.watch(called, optimizer, on_spike=None) if is_watched else None
        if monitor is not None:
            for metric in ("rms", "max"):
                monitor.add_activation_metric(metric, metric_regex=r"\d\.up$|^3$")
        torch.manual_seed(rank)
        for _ in range(2):
            called(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {} if monitor is None else monitor.get_step_metrics()
        parameters = [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in called.parameters()]
        found = {key: value for key, value in values.items() if key.startswith("activation/")}
        results.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], parameters, found))
        if monitor is not None:
            monitor.detach()
    return results


def by_functions(rank: int, wrap: str) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Activations and logged values that a function aggregates: the values, the true ones over all ranks, and the reasons."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = ModuleMonitor(model)
    add, seen = monitor.add_activation_metric, list[Tensor]()
    add("largest", lambda x: x.abs().amax(0), "^first$", metric_aggregation_fn=lambda values: values.max())
    add("several", lambda x: x.abs().amax(0), "^first$", metric_aggregation_fn=lambda values: {"max": values.max()})
    add("named", lambda x: x.abs().amax(0), "^first$", metric_aggregation_fn="max")
    monitor.add_activation_metric(
        "largest", lambda x: x.abs().amax(0), "^first$", lambda values: values.max(), of="output_gradient"
    )
    monitor.attach(optimizer)
    getattr(model, "module", model).first.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) * (1 + 3 * rank)).square().mean().backward()
    monitor.log_scalar("both", float(rank), lambda values: {"a": values.sum(), "b": values.sum()}, dist_reduce="sum")
    optimizer.step()
    whole = torch.cat(of_everybody(seen[0]))
    values, missing = monitor.get_step_metrics(), monitor.missing()
    monitor.detach()
    return values, {"activation/first/named": whole.abs().max().item()}, missing


def logged_again(rank: int) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Values that are logged before the optimizer's step, and again after it: of each step, and the complaints."""
    model = wrapped("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor, found = gradmon.watch(model, optimizer, on_spike=None), []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        for value in (1.0 + rank, 10.0 + rank):
            monitor.log_scalar("sum", value, dist_reduce="sum")
            monitor.log_scalar("total", value, "sum", dist_reduce="max")
            if value >= 10.0:
                monitor.log_scalar("own", value, dist_reduce="sum")
            elif step < 2:
                optimizer.step()
        if step == 2:
            optimizer.step()
        found.append({key: value for key, value in monitor.get_step_metrics().items() if "/" not in key})
    complaints = monitor.warning_counts()
    monitor.detach()
    return found, complaints


@impatient(0.5)
def late(rank: int, wrap: str) -> tuple[list[dict[str, float]], list[dict[str, str]], dict[str, int], list[float]]:
    """The second of two ranks is late before its first optimizer step."""
    model = wrapped(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_activation_metric("mean", metric_regex="^first$")
    values, missing, waited = [], [], []
    for step in range(5):
        if wrap == "fsdp2" and step == 0 and rank == 1:  # the ranks meet before the first forward pass
            time.sleep(1.5)
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        if wrap == "ddp" and step == 0 and rank == 1:
            time.sleep(1.5)
        began = time.perf_counter()
        monitor.log_scalar("rank", float(rank), dist_reduce="sum")
        optimizer.step()
        waited.append(time.perf_counter() - began)
        optimizer.zero_grad()
        values.append(monitor.get_step_metrics())
        missing.append(monitor.missing())
    complaints = monitor.warning_counts()
    monitor.detach()
    return values, missing, complaints, waited


def unlike(rank: int, what: str) -> tuple[dict[str, float], dict[str, float], dict[str, str], list[str]]:
    """The second of two ranks has a layer of another name, or one metric more: values, true ones, reasons and warnings."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(5, 4))
    model.add_module(f"expert{rank}" if what == "names" else "second", nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.add_activation_metric("max", metric_regex="^first$")
    if what == "metrics" and rank:
        monitor.add_parameter_metric("norm")
    monitor.attach(optimizer)
    outputs = list[Tensor]()
    model.first.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        gradient = full(model.first.weight.grad).norm().item()
        monitor.log_scalar("rank", float(rank), dist_reduce="sum")
        optimizer.step()
    true = {"activation/first/max": torch.cat(of_everybody(outputs[0])).abs().max().item(), "rank": 1.0}
    if what == "names":
        true["gradient/first.weight/norm"] = gradient
    values, missing = monitor.get_step_metrics(), monitor.missing()
    monitor.detach()
    return values, true, missing, [str(each.message) for each in warned]


def dropped(rank: int) -> tuple[list[bool], list[float | None]]:
    """The first rank alone has a monitor, twice, and drops it without ``detach()``: whether each was freed. Then both ranks have one,
    twice: the sums of a value.
    """

    def trained(name: str) -> tuple[weakref.ref[ModuleMonitor], float | None]:
        model = wrapped("ddp")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        monitor = gradmon.watch(model, optimizer, on_spike=None)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 5)).square().mean().backward()
            monitor.log_scalar(name, 1.0, dist_reduce="sum")
            optimizer.step()
        return weakref.ref(monitor), monitor.get_step_metrics().get(name)

    def bare() -> None:
        model = wrapped("ddp")
        for _ in range(2):
            model(torch.ones(4, 5)).square().mean().backward()

    with impatient():
        freed = []
        for _ in range(2):
            if rank == 0:
                reference, _ = trained("alone")
                gc.collect()
                freed.append(reference() is None)
            else:
                bare()
            dist.barrier()
        time.sleep(0.5)  # a thread that nobody waits for marks the end
        dist.barrier()
    return freed, [trained("both")[1] for _ in range(2)]
