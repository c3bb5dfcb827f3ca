"""Trainings on several ranks that should be equal, and the faults that make them differ, for :mod:`tests.test_replica_check`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon
from tests.watching import watch_with

from .rank_runs import Sequence

STEPS, EVERY, AT = 36, 8, 11
#: The first check after the fault; a verdict comes some steps later.
FOUND_BY = 16


class Net(nn.Module):
    """Two linear layers, and one that the wrapper may leave out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        """Plain."""
        return self.down(torch.tanh(self.up(x))) * self.scale


@dataclass
class Training:
    """One rank's part of a training."""

    rank: int
    model: nn.Module
    inner: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    after_backward: list[Callable[[int], None]] = field(default_factory=list)
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    width: int = 6
    seed: int = -1
    closure: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    overflows: bool = False
    scaler: torch.amp.GradScaler | None = None


def ddp(rank: int, **options: Any) -> Training:
    """Under DDP with AdamW."""
    inner = Net()
    model = DistributedDataParallel(inner, **options)
    return Training(rank, model, inner, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), model)


def by_hand(rank: int, own_seed: bool = False) -> Training:
    """Gradients are averaged by the loop."""
    model = Net(rank if own_seed else 0)
    training = Training(rank, model, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), model)

    def average(step: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    training.after_backward.append(average)
    return training


def local_sgd(rank: int) -> Training:
    """Ranks train by themselves, and average their parameters after every fourth step."""
    model = Net()
    training = Training(rank, model, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), model)

    def average(step: int) -> None:
        if step % 4 == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()

    training.before_step.append(average)
    return training


def group_of_two(rank: int) -> Training:
    """Two models with equal names, each on two of four ranks."""
    torch.manual_seed(0)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    training = by_hand(rank)
    own = groups[rank // 2]
    with torch.no_grad():
        training.inner.up.weight.add_(rank // 2)

    def average(step: int) -> None:
        for parameter in training.inner.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=own)

    training.after_backward[:] = [average]
    training.options = {"distributed": gradmon.Distributed(process_group=own)}
    return training


def plain_parts(rank: int, seed: int = 0) -> Training:
    """Each two of four ranks have another part of the model, as in tensor parallelism by plain tensors; DDP copies the parts."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inner = Net(rank % 2)
    model = DistributedDataParallel(inner, process_group=groups[rank % 2])
    return Training(rank, model, inner, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), model)


def scaled(rank: int) -> Training:
    """Under DDP with a GradScaler."""
    training = ddp(rank)
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
    training.options = {"scaler": training.scaler}
    return training


def hsdp(rank: int) -> Training:
    """FSDP2 over two copies."""
    model = Net()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(rank, model, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), model)


def tensor_parallel(rank: int) -> Training:
    """Tensor and sequence parallelism, whose norm weights are on all ranks."""
    model = Sequence()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, {"up": plan["up"], "down": plan["down"]})
    return Training(rank, model, model, torch.optim.AdamW(model.parameters(), 1e-2, foreach=False), model, width=8)


def local(tensor: Tensor) -> Tensor:
    """The part of this rank, without autograd."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def flip(tensor: Tensor, bit: int = 0) -> None:
    """Flip one bit of the first element: the last one of the mantissa by default."""
    words = local(tensor).view(-1).view(torch.int32)
    words[0] = words[0] ^ (1 << bit)


def once(training: Training, change: Callable[[], None], on: int, at: int = AT) -> Callable[[int], None]:
    """``change`` in one step on one rank."""
    return lambda step: change() if step == at and training.rank == on else None


# --- faults ----------------------------------------------------------------------------------------------------------------------


def bypassed(t: Training) -> None:
    t.forward = t.inner


def bypassed_every_second_step(t: Training) -> None:
    calls = iter(range(10_000))
    t.forward = lambda x: (t.inner if next(calls) % 2 else t.model)(x)


def no_sync_left_on(t: Training) -> None:
    t.model.require_backward_grad_sync = False


def gradient_ulp(t: Training) -> None:
    t.after_backward.append(once(t, lambda: flip(t.inner.down.weight.grad), on=1, at=FOUND_BY))


def gradient_flip(t: Training) -> None:
    t.after_backward.append(once(t, lambda: flip(t.inner.down.weight.grad, bit=20), on=1))


def lost_transfer(t: Training) -> None:
    def lose(step: int) -> None:
        if step >= AT and t.rank == 1:
            gradient = local(t.inner.up.weight.grad).view(-1)
            gradient[:: max(1, len(gradient) // 3)] = 0

    t.after_backward.append(lose)


def other_clip(t: Training) -> None:
    limit = 1e-3 if t.rank == 1 else 1e9
    t.after_backward.append(lambda step: step >= AT and nn.utils.clip_grad_norm_(t.inner.parameters(), limit))


def weight_flip(t: Training) -> None:
    t.before_step.append(once(t, lambda: flip(t.inner.up.weight, bit=20), on=1))


def weight_flip_of_averages(t: Training) -> None:
    t.before_step.append(once(t, lambda: flip(t.inner.up.weight, bit=20), on=1, at=FOUND_BY))
    t.options = {"distributed": gradmon.Distributed(sync_every=4)}


def weight_ulp(t: Training) -> None:
    t.before_step.append(once(t, lambda: flip(t.inner.down.bias), on=1))


def momentum_flip(t: Training) -> None:
    t.before_step.append(once(t, lambda: flip(t.optimizer.state[t.inner.down.weight]["exp_avg"], bit=20), on=1))


def lost_state(t: Training) -> None:
    t.before_step.append(once(t, t.optimizer.state.clear, on=1))


def own_rate(t: Training) -> None:
    def change() -> None:
        t.optimizer.param_groups[0]["lr"] = 2e-2

    t.before_step.append(once(t, change, on=1))


def drifting_norm(t: Training) -> None:
    def drift(step: int) -> None:
        if step >= AT and t.rank == 1:
            local(t.inner.norm.weight).mul_(1.001)

    t.before_step.append(drift)


def own_decay(t: Training) -> None:
    if t.rank == 1:
        t.optimizer.param_groups[0]["weight_decay"] = 0.5


def own_betas(t: Training) -> None:
    if t.rank == 1:
        t.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def other_checkpoint(t: Training) -> None:
    def load() -> None:
        t.inner.load_state_dict({name: value + 0.1 for name, value in t.inner.state_dict().items()})

    t.before_step.append(once(t, load, on=1))


def missed_step(t: Training) -> None:
    step = t.optimizer.step

    def skip(number: int) -> None:
        t.optimizer.step = (lambda: None) if number == AT and t.rank == 1 else step

    t.before_step.append(skip)


def swapped_rows(t: Training) -> None:
    def swap() -> None:
        weight = local(t.inner.up.weight)
        weight[[0, 1]] = weight[[1, 0]]

    t.before_step.append(once(t, swap, on=1))


def same_batches(t: Training) -> None:
    t.seed = 0


def in_a_closure(t: Training) -> None:
    """As Lightning's automatic optimisation steps."""
    weight_flip(t)
    t.closure = True


def overflowed_when_due(t: Training) -> None:
    weight_flip(t)
    t.overflows = True


def other_frozen_part(t: Training) -> None:
    with torch.no_grad():
        t.inner.frozen.add_(float(t.rank))


def lost_broadcast(t: Training) -> None:
    """From some step on, one rank gets other buffers than the first rank sends."""
    send, steps = t.model._sync_buffers, iter(range(10_000))

    def lose() -> None:
        send()
        if next(steps) >= AT and t.rank == 1:
            flip(t.inner.scale, bit=20)

    t.model._sync_buffers = lose


def own_scale(t: Training) -> None:
    """Gradients are the same, since the scale is a power of two."""
    update, steps = t.scaler.update, iter(range(10_000))

    def grow() -> None:
        update()
        if next(steps) == AT and t.rank == 1:
            t.scaler._scale *= 2

    t.scaler.update = grow


def flip_of_a_part(t: Training) -> None:
    t.before_step.append(once(t, lambda: flip(t.inner.up.weight, bit=20), on=2))


def nothing(t: Training) -> None:
    """Sound."""


def train(
    rank: int,
    make: Callable[..., Training],
    fault: Callable[[Training], None],
    options: dict[str, Any],
    made_with: dict[str, Any],
) -> dict[str, Any]:
    """Train, and return what was found on this rank, and what was warned of."""
    training = make(rank, **made_with)
    if training.inner is training.model and make is local_sgd:
        training.options = {"distributed": gradmon.Distributed(sync_every=4)}
    monitor = watch_with(
        training.model, training.optimizer, **{"checks": gradmon.Checks(replicas_every=EVERY), **training.options, **options}
    )
    fault(training)
    generator = torch.Generator().manual_seed(rank if training.seed < 0 else training.seed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            shared = isinstance(training.inner, Sequence)  # ranks of tensor parallelism have one batch
            batch = torch.randn(4, training.width, generator=torch.Generator().manual_seed(step) if shared else generator)
            training.optimizer.zero_grad()
            loss = training.forward(batch).square().mean()
            monitor.log_scalar("loss", loss.detach())
            (loss if training.scaler is None else training.scaler.scale(loss)).backward()
            for change in (*training.after_backward, *training.before_step):
                change(step)
            if training.overflows and step == FOUND_BY:
                pass  # as a GradScaler leaves out the step
            elif training.scaler is not None:
                training.scaler.step(training.optimizer)
                training.scaler.update()
            elif training.closure:
                training.optimizer.step(lambda: loss)  # noqa: B023 (called at once)
            else:
                training.optimizer.step()
            dist.barrier()  # so that answers come in the step after the question
        facts = [fact.to_dict() for fact in monitor._runtime.built_in.replicas.facts()]
        findings = [(f.rule, f.where, f.steps) for f in monitor.diagnose().findings if f.rule.startswith("ranks")]
        monitor.detach()
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    return {"facts": facts, "findings": findings, "warnings": messages}


def train_with_an_early_monitor(rank: int) -> list[Any]:
    """The monitor is made before the process group, as for a trainer that starts it; returns the rules and tensors that were found."""
    with mock.patch.object(dist, "is_initialized", return_value=False):
        monitor = gradmon.ModuleMonitor(checks=gradmon.Checks(replicas_every=EVERY))
    training = ddp(rank)
    weight_flip(training)
    monitor.set_module(training.model)
    monitor.attach(training.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.model(torch.ones(4, training.width)).square().mean().backward()
            for change in (*training.after_backward, *training.before_step):
                change(step)
            training.optimizer.step()
            dist.barrier()
    found = [(f.rule, f.where) for f in monitor.diagnose().findings if f.rule.startswith("ranks")]
    monitor.detach()
    return found


def train_apart(rank: int, factor: float, every: int, reduce: str | None = None) -> dict[str, Any]:
    """Train on batches that on rank 1 are larger by a factor, for a little more than four checks."""
    training = ddp(rank)
    monitor = gradmon.watch(training.model, training.optimizer, checks=gradmon.Checks(replicas_every=every))
    monitor.add_micro_batch_metrics(batch_size=4)
    generator = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(4 * every + 6):
            training.optimizer.zero_grad()
            batch = torch.randn(4, 6, generator=generator) * (factor if rank == 1 else 1.0)
            loss = (training.model(batch) - batch[:, :3]).square().mean()
            monitor.log_scalar("loss", loss.detach(), dist_reduce=reduce)
            loss.backward()
            training.optimizer.step()
            dist.barrier()
        facts = [fact.to_dict() for fact in monitor._runtime.built_in.replicas.facts()]
        findings = [(f.rule, f.where, f.severity) for f in monitor.diagnose().findings if "rank" in f.rule]
        monitor.detach()
    messages = [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)]
    return {"facts": facts, "findings": findings, "warnings": [text for text in messages if "rank" in text]}


def train_beside_none(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train with a monitor on the first rank, and on the other one with other options or, without any, with none."""
    training = ddp(rank)
    monitor = None
    if rank == 0 or options:
        monitor = watch_with(
            training.model, training.optimizer, **({"checks": gradmon.Checks(replicas_every=EVERY)} if rank == 0 else options)
        )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(60):
            training.optimizer.zero_grad()
            training.model(torch.randn(4, 6)).square().mean().backward()
            training.optimizer.step()
            dist.barrier()
    findings = [] if monitor is None else [f for f in monitor.diagnose().findings if "rank" in f.rule]
    if monitor is not None:
        monitor.detach()
    return {"findings": [(f.rule, f.severity, f.evidence) for f in findings], "warnings": [str(each.message) for each in warned]}
