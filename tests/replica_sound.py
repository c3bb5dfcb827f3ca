"""Sound trainings on several ranks, of which the check of replicas must say nothing, for :mod:`tests.test_replica_check`."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon.plugins.replica_check import Board

from .replica_runs import EVERY, Net

STEPS = 22
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda some: torch.optim.SGD(some, 1e-2),
    "momentum": lambda some: torch.optim.SGD(some, 1e-2, momentum=0.9, nesterov=True),
    "adam": lambda some: torch.optim.Adam(some, 1e-2, amsgrad=True),
    "adamw": lambda some: torch.optim.AdamW(some, 1e-2),
    "fused": lambda some: torch.optim.AdamW(some, 1e-2, fused=True),
    "loop": lambda some: torch.optim.AdamW(some, 1e-2, foreach=False),
    "rmsprop": lambda some: torch.optim.RMSprop(some, 1e-2, centered=True),
    "adagrad": lambda some: torch.optim.Adagrad(some, 1e-2),
    "adamax": lambda some: torch.optim.Adamax(some, 1e-2),
    "nadam": lambda some: torch.optim.NAdam(some, 1e-2),
    "radam": lambda some: torch.optim.RAdam(some, 1e-2),
    "adadelta": lambda some: torch.optim.Adadelta(some, 1.0),
}
#: Options of DDP.
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "no_buffers": {"broadcast_buffers": False},
    "small_buckets": {"bucket_cap_mb": 0.0001},
}


class Norms(nn.Module):
    """With batch norm, whose running statistics differ between ranks, and dropout, which draws otherwise on each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Plain."""
        return self.net(x)


class Loop:
    """A training with everything that a program may add.

    Args:
        model: wrapped or not.
        optimizers: that step it.
        options: of ``watch``.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> None:
        self.model, self.optimizers = model, optimizers
        self.monitor = gradmon.watch(model, *optimizers, **{"checks": gradmon.Checks(replicas_every=EVERY), **options})
        self.scaler = options.get("scaler")
        self.before_step: Callable[[int], Any] = lambda step: None
        self.after_step: Callable[[int], Any] = lambda step: None
        self.forward: Callable[[Tensor], Tensor] = model
        self.micro_batches, self.steps = 1, STEPS
        self.shared_batches = False
        self.has_copies = True  # there is something to compare

    def run(self) -> list[str]:
        """What was found."""
        torch.manual_seed(100 + dist.get_rank())
        for step in range(self.steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if self.shared_batches:
                torch.manual_seed(step)
            for number in range(self.micro_batches):
                is_last = number == self.micro_batches - 1
                has_no_sync = isinstance(self.model, DistributedDataParallel)
                with self.model.no_sync() if has_no_sync and not is_last else nullcontext():
                    loss = self.forward(torch.randn(4, 6)).square().mean()
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.before_step(step)
            for optimizer in self.optimizers:
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            if self.scaler is not None:
                self.scaler.update()
            self.after_step(step)
            dist.barrier()
        plugin = self.monitor._runtime.built_in.replicas
        found = [fact.rule for fact in plugin.facts()]
        if self.has_copies and plugin._last_good is None:
            found.append(f"no check was finished: {self.monitor.warning_counts()}")
        self.monitor.detach()
        return found


def average(model: nn.Module) -> None:
    """The mean of all parameters over ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def ddp(model: nn.Module | None = None, optimizer: str = "adamw", wrapper: str = "ddp", **options: Any) -> Loop:
    """Under DDP."""
    wrapped = DistributedDataParallel(Net() if model is None else model, **WRAPPERS[wrapper])
    return Loop(wrapped, OPTIMIZERS[optimizer](wrapped.parameters()), **options)


def sharded(shape: tuple[int, ...], optimizer: str = "adamw", **options: Any) -> Loop:
    """Under FSDP2, with as many copies as the first of two numbers says."""
    model = Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Loop(model, OPTIMIZERS[optimizer](model.parameters()), **options)


# --- what programs do --------------------------------------------------------------------------------------------------------


def accumulated() -> Loop:
    loop = ddp()
    loop.micro_batches = 3
    return loop


def with_scaler() -> Loop:
    return ddp(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3))


def two_optimizers() -> Loop:
    model = DistributedDataParallel(Net())
    return Loop(
        model, torch.optim.SGD(model.module.up.parameters(), 1e-2), torch.optim.AdamW(model.module.down.parameters(), 1e-2)
    )


def scheduled() -> Loop:
    loop = ddp()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizers[0], STEPS)
    loop.after_step = lambda step: scheduler.step()
    return loop


def frozen_later() -> Loop:
    loop = ddp(wrapper="unused")
    loop.after_step = lambda step: loop.model.module.up.requires_grad_(step % 2 == 0)
    return loop


def moving_average() -> Loop:
    loop = ddp()
    averaged = copy.deepcopy(loop.model.module)

    def update(step: int) -> None:
        for ours, theirs in zip(averaged.parameters(), loop.model.module.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.1)

    loop.after_step = update
    return loop


def clipped() -> Loop:
    loop = ddp()
    loop.before_step = lambda step: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    return loop


def clipped_by_the_monitor() -> Loop:
    loop = ddp()
    loop.before_step = lambda step: loop.monitor.clip_grad_norm_(0.1, exact=True)
    return loop


def local_sgd() -> Loop:
    model = Net()
    loop = Loop(model, torch.optim.AdamW(model.parameters(), 1e-2), distributed=gradmon.Distributed(sync_every=4))
    loop.after_step = lambda step: average(model) if step % 4 == 3 else None
    return loop


def experts() -> Loop:
    torch.manual_seed(7 + dist.get_rank())
    expert = nn.Linear(3, 3)
    net = Net()
    model = nn.Sequential(net, expert)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), 1e-2), distributed=gradmon.Distributed(distinct="^1"))
    loop.before_step = lambda step: [dist.all_reduce(p.grad) for p in net.parameters() if p.grad is not None]
    return loop


def marked_by_megatron() -> Loop:
    torch.manual_seed(7 + dist.get_rank())
    own = nn.Linear(3, 3)
    for number, parameter in enumerate(own.parameters()):
        setattr(parameter, *(("tensor_model_parallel", True) if number else ("allreduce", False)))
    net = Net()
    model = nn.Sequential(net, own)
    loop = Loop(model, torch.optim.AdamW(model.parameters(), 1e-2))
    loop.before_step = lambda step: [dist.all_reduce(p.grad) for p in net.parameters() if p.grad is not None]
    return loop


def zero_redundancy() -> Loop:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of TorchScript when it is loaded

    model = DistributedDataParallel(Net())
    return Loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))


def compressed() -> Loop:
    loop = ddp()
    loop.model.register_comm_hook(None, fp16_compress_hook)
    return loop


def recomputed() -> Loop:
    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return ddp(Recomputed())


def in_bfloat16() -> Loop:
    loop = ddp()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loop.model(x)

    loop.forward = forward
    return loop


def resumed() -> Loop:
    loop = ddp()

    def reload(step: int) -> None:
        if step == 5:
            loop.model.load_state_dict(copy.deepcopy(loop.model.state_dict()))
            loop.optimizers[0].load_state_dict(copy.deepcopy(loop.optimizers[0].state_dict()))

    loop.after_step = reload
    return loop


class _Reducing(torch.optim.SGD):
    """Averages gradients in its step, as optimizers of Horovod and Megatron-LM do, and leaves those of the model alone."""

    def step(self, closure: Any = None) -> Any:
        kept = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter, gradient in kept.items():
            parameter.grad = gradient.clone()
            dist.all_reduce(parameter.grad)
        try:
            return super().step(closure)
        finally:
            for parameter, gradient in kept.items():
                parameter.grad = gradient


def reduces_itself() -> Loop:
    model = Net()
    return Loop(model, _Reducing([p for p in model.parameters() if p.requires_grad], 1e-2))


def own_state() -> Loop:
    """Each rank has noise of its own in the state, as where it keeps the state of its own parameters only."""
    loop = ddp(optimizer="momentum")

    def spoil(step: int) -> None:
        for state in loop.optimizers[0].state.values():
            state["of this rank"] = torch.full((3,), float(dist.get_rank()))

    loop.before_step = spoil
    return loop


def left_to_each_rank() -> Loop:
    """A parameter that DDP is told to ignore."""
    model = Net()
    with torch.no_grad():
        model.up.bias.add_(float(dist.get_rank()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["up.bias", "up.weight"])
    return ddp(model)


def joined() -> Loop:
    """One rank has more batches than the other, in each of three epochs."""

    class Joined(Loop):
        def run(self) -> list[str]:
            torch.manual_seed(100 + dist.get_rank())
            for _ in range(3):
                with self.model.join():
                    for _ in range(6 + dist.get_rank()):
                        self.optimizers[0].zero_grad()
                        self.model(torch.randn(4, 6)).square().mean().backward()
                        self.optimizers[0].step()
            plugin = self.monitor._runtime.built_in.replicas
            self.monitor.detach()
            return [fact.rule for fact in plugin.facts()]

    model = DistributedDataParallel(Net())
    return Joined(model, OPTIMIZERS["sgd"](model.parameters()))


def probed() -> Loop:
    """Before each step the same rows go through the model on all ranks, which are no batch."""
    loop = ddp()

    def forward(x: Tensor) -> Tensor:
        with loop.monitor.no_monitor(), torch.no_grad():
            loop.model(torch.randn(4, 6, generator=torch.Generator().manual_seed(loop.monitor.current_step or 0)))
        return loop.model(x)

    loop.forward = forward
    return loop


def fixed_shards() -> Loop:
    """Each rank has the same rows in each step, and losses that have converged."""
    loop = ddp(optimizer="sgd")
    own = torch.randn(32, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def forward(x: Tensor) -> Tensor:
        out = loop.model(own)
        loop.monitor.log_scalar("loss", (out - own[:, :3]).square().mean().detach())
        return out - own[:, :3]

    loop.forward, loop.steps = forward, 7 * 24
    loop.monitor._runtime.built_in.replicas._every = 24
    return loop


def compiled() -> Loop:
    loop = ddp()
    loop.forward = torch.compile(loop.model, backend="eager")
    return loop


def parts(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> Loop:
    """Each two of four ranks have another part of the model, which DDP copies."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = wrap(DistributedDataParallel(Net(dist.get_rank() % 2), process_group=groups[dist.get_rank() % 2]))
    return Loop(model, OPTIMIZERS["adamw"](model.parameters()), **options)


def parts_within_their_group() -> Loop:
    """Watched with the group that has one batch."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loop = parts(lambda model: model, distributed=gradmon.Distributed(process_group=pairs[dist.get_rank() // 2]))
    loop.forward, loop.has_copies = lambda x: loop.model(torch.full_like(x, float(loop.monitor.current_step or 0))), False
    return loop


def spectral() -> Loop:
    torch.manual_seed(0)
    return ddp(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))


def tied() -> Loop:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return ddp(model)


def evaluated() -> Loop:
    loop = ddp(Norms())

    def evaluate(step: int) -> None:
        loop.model.eval()
        with torch.no_grad():
            loop.model(torch.randn(4, 6))
        loop.model.train()

    loop.after_step = evaluate
    return loop


PROGRAMS: dict[str, Callable[[], Loop]] = {
    **{
        f"{wrapper}-{optimizer}": (lambda w=wrapper, o=optimizer: ddp(None, o, w))
        for wrapper in WRAPPERS
        for optimizer in OPTIMIZERS
    },
    **{f"norms-{wrapper}": (lambda w=wrapper: ddp(Norms(), "adamw", w)) for wrapper in WRAPPERS},
    **{
        f"fsdp2-{optimizer}": (lambda o=optimizer: sharded((dist.get_world_size(),), o))
        for optimizer in ("momentum", "adamw", "loop")
    },
    **{f"every{every}": (lambda e=every: ddp(every=e)) for every in (2, 5, 100)},
    **{f"preset-{preset}": (lambda p=preset: ddp(preset=p)) for preset in ("minimal", "full")},
    **{f"on_spike-{action}": (lambda a=action: ddp(on_spike=a)) for action in ("skip", "raise")},
    **{
        each.__name__: each
        for each in (
            accumulated,
            with_scaler,
            two_optimizers,
            scheduled,
            frozen_later,
            moving_average,
            clipped,
            clipped_by_the_monitor,
            local_sgd,
            experts,
            marked_by_megatron,
            zero_redundancy,
            compressed,
            recomputed,
            in_bfloat16,
            resumed,
            spectral,
            tied,
            evaluated,
            reduces_itself,
            own_state,
            left_to_each_rank,
            joined,
            probed,
            fixed_shards,
            compiled,
        )
    },
}
#: Of four ranks.
WITH_COPIES: dict[str, Callable[[], Loop]] = {
    **{f"hsdp-{optimizer}": (lambda o=optimizer: sharded((2, 2), o)) for optimizer in ("sgd", "momentum", "adamw", "loop")},
    "parts": lambda: parts(lambda model: model),
    "parts-compiled": lambda: parts(lambda model: torch.compile(model, backend="eager")),
    "parts-inside": lambda: parts(nn.Sequential),
    "parts-within": parts_within_their_group,
}


def run_all(rank: int, names: list[str]) -> dict[str, list[str]]:
    """What was found in each program, and what was warned of."""
    found: dict[str, list[str]] = {}
    for name in names:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            rules = {**PROGRAMS, **WITH_COPIES}[name]().run()
        found[name] = [
            *rules,
            *(str(each.message) for each in warned if "anks" in str(each.message) and "gradmon" in str(each.message)),
        ]
        dist.barrier()
    return found


def run_one_sided(rank: int) -> list[str]:
    """A monitor on the first rank alone."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, checks=gradmon.Checks(replicas_every=EVERY)) if rank == 0 else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    found = [] if monitor is None else [fact.rule for fact in monitor._runtime.built_in.replicas.facts()]
    if monitor is not None:
        monitor.detach()
    return found


def run_counted(rank: int) -> list[tuple[str, int]]:
    """The messages of a sound training, each with its size in bytes."""
    put, found = Board.put, []

    def counted(board: Board, name: str, message: Any) -> None:
        found.append((name, len(json.dumps(message))))
        put(board, name, message)

    Board.put = counted  # type: ignore[method-assign]
    try:
        ddp(nn.Sequential(*[nn.Linear(6, 6) for _ in range(50)])).run()
    finally:
        Board.put = put  # type: ignore[method-assign]
    return found
