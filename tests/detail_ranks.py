"""What the ranks of a test do under a live change of detail."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_gradmon as gradmon
from benchmarks.exchange import Collectives
from torch_gradmon import ModuleMonitor
from torch_gradmon.cli.main import main
from torch_gradmon.runs import detail_request

from .rank_runs import wrapped


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _local(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def from_outside(rank: int, wrap: str, directory: str, every: int, calls: dict[int, list[str]]) -> dict[str, Any]:
    """A training of 60 steps, before some of which the first rank is given commands; what each step brought on this rank.

    The clock of the mailbox is as good as stopped for none of it: a look is due in every step.
    """
    period, detail_request.PERIOD = detail_request.PERIOD, 0.0
    model = wrapped(wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, preset="minimal", every=every, on_spike=None, run_dir=f"{directory}/run")
    before = _hooks(model)
    found: dict[str, Any] = {name: [] for name in ("keys", "tuned", "collectives", "activations", "hooks")}
    for step in range(60):
        if rank == 0:
            for call in calls.get(step, []):
                assert main(["detail", f"{directory}/run", *call.split()]) == 0
        dist.barrier()
        with Collectives() as collectives:
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        found["keys"].append(sorted(monitor.get_step_metrics()))
        record = monitor._runtime.pipeline.last
        found["tuned"].append(None if record is None else record.context.get("tuned"))
        found["collectives"].append(len(collectives.calls))
        table = None if record is None else record.tables.get("activation")
        found["activations"].append(None if table is None else table.rows.tolist())
        found["hooks"].append(_hooks(model) - before)
    detail_request.PERIOD = period
    found["monitored"] = sorted(monitor.get_all_metrics())
    monitor.detach()
    found["complaints"] = monitor.warning_counts()
    found["parameters"] = _local(model)
    return found


# --- anything at any time ----------------------------------------------------------------------------------------------------------

#: Of a training at random: enough for the spikes to be seen.
STEPS = 30


def at_random(rank: int, seed: int, directory: str, is_tuned: bool) -> dict[str, Any]:
    """A training of which the seed says how it is watched, when its ranks begin to tell each other values, when it spikes, and what the
    first rank, or all of them, change when.
    """
    dice = random.Random(seed)
    wrap = dice.choice(["ddp", "ddp", "fsdp2"])
    every = dice.choice([1, 3, 7])
    acts = dice.choice([None, None, "skip"])
    recorder = dice.choice([0, 4]) if every > 1 else 0
    reduces_from = dice.choice([0, dice.randrange(STEPS), dice.randrange(STEPS), 1000])
    adds_at = dice.choice([dice.randrange(STEPS), 1000, 1000])
    preset = dice.choice(["minimal", "standard", "full"])
    spikes = {dice.randrange(10, STEPS): dice.choice([0, None]) for _ in range(3)}
    changes: dict[int, dict[str, Any]] = {dice.randrange(STEPS): _change(dice) for _ in range(6)}
    everybody = dice.choice([False, True])
    model = wrapped(wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {
        "told": f"{wrap} every={every} {preset} {acts} {recorder} {reduces_from} {adds_at} {everybody} {changes} {spikes}"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = ModuleMonitor(
            model,
            every=every,
            on_spike=acts,
            spike_capture=gradmon.SpikeCapture(before=recorder),
            run_dir=f"{directory}/{seed}",
            preset=preset,
        )
        monitor.attach(optimizer)
        states, seen = [], []
        for step in range(STEPS):
            if step == adds_at:
                monitor.add_activation_metric("rms", metric_regex="last")
            if is_tuned and step in changes and (rank == 0 or everybody):
                monitor.set_detail(**changes[step])
            optimizer.zero_grad()
            factor = 1e4 if step in spikes and spikes[step] in (None, rank) else 1.0
            (model(_batch(rank, step)).square().mean() * factor).backward()
            if step >= reduces_from:
                monitor.log_scalar("step", float(step), dist_reduce="mean")
            optimizer.step()
            states.append(monitor.last_record.detail)
            seen.append(monitor.last_record.step if monitor.get_step_metrics() else None)
        last = monitor.last_record.detail
        meets = monitor._runtime.lifecycle.exchange.exchanges_values
        monitor.detach()
    found |= {"states": states, "seen": seen, "last": last, "meets": meets, "complaints": monitor.warning_counts()}
    found |= {
        "parameters": _local(model),
        "hooks": _hooks(model),
        "skipped": monitor.get_step_counts().skipped,
        "always": wrap == "fsdp2",
    }
    return found


def _change(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.2:
        return {"reset": True}
    change: dict[str, Any] = {"every": dice.choice([None, 1, 2, 5]), "preset": dice.choice([None, "minimal", "standard", "full"])}
    if change == {"every": None, "preset": None}:
        change["every"] = 1
    if dice.random() < 0.6:
        change["steps"] = dice.randrange(1, 12)
    if dice.random() < 0.3:
        change["first"] = dice.randrange(STEPS)
    return change


def judged(rank: int) -> dict[str, Any]:
    """A detector on each of two ranks under DDP, of which the first one asks for more detail in vain, with a spike meanwhile."""
    model = wrapped("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, every=5, on_spike="raise")
    scores = []
    for step in range(300):
        if step == 205 and rank == 0:
            monitor.set_detail(every=1, steps=50)
        optimizer.zero_grad()
        (model(_batch(0, step)).square().mean() * (1e4 if step == 213 else 1)).backward()
        optimizer.step()
        scores.append(monitor.get_step_metrics().get("gradmon/spike_score"))
    state = monitor.state_dict()["detectors"]
    monitor.detach()
    return {"scores": scores, "state": state}


def of_a_reset(rank: int, steps: int, at: int) -> list[int]:
    """The steps before which anything changes, of a training that goes on long after a reset."""
    model = wrapped("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, preset="minimal", every=5, on_spike=None)
    versions = []
    for step in range(steps):
        if step == at and rank == 0:
            monitor.set_detail(reset=True)
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
        versions.append(monitor._runtime.planner.version)
    monitor.detach()
    return [step for step in range(2, steps) if versions[step] != versions[step - 1]]
