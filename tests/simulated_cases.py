"""Numbers, launches and waits on the simulated accelerator: ``python -m tests.simulated_cases NAME`` prints JSON."""

from __future__ import annotations

import gc
import math
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from benchmarks.launches import Loop, count, layers
from tests.simulated import AT, DEVICE, Programs, races_of, without
from torch_gradmon import testing
from torch_gradmon.capture import gradients
from torch_gradmon.cli.demo_model import CharacterGPT, Sizes
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.moments import ALL_COLUMNS
from torch_gradmon.spikes.attribution import nonfinite_origin
from torch_gradmon.statistics.dispatch import Statistics
from torch_gradmon.statistics.fingerprint import fingerprints
from torch_gradmon.step.buffer import DeviceToHostCopy
from torch_gradmon.testing.simulated import Memory

torch.set_num_threads(1)
case = Programs()


@case
def launches() -> Any:
    """What the monitor adds to a step."""
    return count()


# --- values ------------------------------------------------------------------------------------------------------------------


def _gpt(dtype: torch.dtype) -> CharacterGPT:
    torch.manual_seed(0)
    model = CharacterGPT(12, Sizes(blocks=2, width=16, heads=2, context=8, batch=2)).to(dtype)
    # moving it to a device of Python would untie them
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _train_gpt(
    device: torch.device, is_watched: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[list[dict[str, float]], list[Tensor]]:
    model = _gpt(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    monitor = gradmon.watch(model, optimizer, preset="full") if is_watched else None
    if monitor is not None:
        for metric in ("std", "l1_norm", "zero_count", "kurtosis"):
            monitor.add_gradient_metric(metric)
        monitor.add_gradient_metric("median", lambda gradient: gradient.abs().median())
        monitor.add_attention_metric("entropy")
        monitor.add_attention_metric("max_logit")
        monitor.add_update_metric("ratio", every=2)
        monitor.add_parameter_metric("norm")
        monitor.add_activation_metric("norm")
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(12, (2, 9), generator=generator)
        loss = model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        if monitor is not None:
            monitor.log_scalar("loss", loss.detach())
    if monitor is not None:
        monitor.detach()
    found = [] if monitor is None else list(monitor.get_all_metrics().values())
    return found, [parameter.detach().cpu() for parameter in model.parameters()]


def _compared(ours: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, Any]:
    """The largest relative difference, and how many values there are."""
    worst, count = 0.0, 0
    for a, b in zip(ours, others, strict=True):
        assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
        for key in a.keys() - {"gradmon/overhead_fraction"}:
            count += 1
            worst = max(worst, abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 1e-9))
            if math.isnan(a[key]) != math.isnan(b[key]):
                worst = math.inf
    return {"worst": worst, "values": count, "steps": len(ours)}


@case
def gpt() -> Any:
    """The same training on the CPU and on the device, with and without the monitor."""
    on_cpu, _ = _train_gpt(torch.device("cpu"))
    on_device, watched = _train_gpt(AT)
    _, bare = _train_gpt(AT, is_watched=False)
    return {**_compared(on_cpu, on_device), "same_bits": all(map(torch.equal, watched, bare))}


@case
def gpt_lazy() -> Any:
    """The same while nothing finishes before the host waits for it."""
    eager, parameters = _train_gpt(AT)
    with DEVICE.lazy():
        lazy, others = _train_gpt(AT)
    return {**_compared(eager, lazy), "same_bits": all(map(torch.equal, parameters, others))}


@case
def gpt_without_float64() -> Any:
    """The same on a device that has no float64, with a GradScaler's arithmetic."""
    on_cpu, _ = _train_gpt(torch.device("cpu"), dtype=torch.float32)
    DEVICE.has_float64 = False
    on_device, watched = _train_gpt(AT, dtype=torch.float32)
    _, bare = _train_gpt(AT, is_watched=False, dtype=torch.float32)
    scaler = torch.amp.GradScaler(AT.type, init_scale=8.0)
    model = nn.Linear(4, 2).to(AT)
    # a fused optimizer reads the scale on the device
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    scaler.scale(model(torch.ones(3, 4).to(AT)).square().sum()).backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5 / 8
    scaler.step(optimizer)
    scaler.update()
    monitor.detach()
    scaled = monitor.get_step_metrics()["gradmon/grad_norm"] / norm
    return {**_compared(on_cpu, on_device), "same_bits": all(map(torch.equal, watched, bare)), "scaled": scaled}


# --- waits, and what happens without them --------------------------------------------------------------------------------------


def _norms() -> list[float]:
    loop = Loop(layers(2), "standard")
    for _ in range(4):
        loop.step()
    assert loop.monitor is not None
    loop.monitor.detach()
    return [values["gradmon/grad_norm"] for values in loop.monitor.get_all_metrics().values()]


@case
def wait_for_the_copy() -> Any:
    """Values of a step are read after the event of their copy."""
    with DEVICE.lazy():
        right = _norms()
    with DEVICE.lazy(), without(DeviceToHostCopy, "wait", lambda self: None):
        wrong = _norms()
    return {"right": right, "without the wait": wrong}


def _skipped() -> list[int]:
    loop = Loop(layers(2), "standard", on_spike="skip")
    for step in range(60):
        loop.step(factor=1e6 if step == 50 else 1.0)
    assert loop.monitor is not None
    loop.monitor.detach()
    return [step for step, values in loop.monitor.get_all_metrics().items() if values["gradmon/steps_not_applied"]][:1]


@case
def wait_for_the_decision() -> Any:
    """A step is skipped by values that have arrived."""
    with DEVICE.lazy():
        right = _skipped()
    with DEVICE.lazy(), without(DeviceToHostCopy, "wait", lambda self: None):
        wrong = _skipped()
    return {"right": right, "without the wait": wrong}


@case
def wait_for_a_deferred_sink() -> Any:
    """A deferred sink gets values once they have arrived, without a wait in the loop."""

    def rows() -> tuple[list[float], int]:
        found: list[float] = []
        loop = Loop(layers(2), "standard")
        assert loop.monitor is not None
        loop.monitor.add_sink(lambda values, step: found.append(values["gradmon/grad_norm"]), deferred=True)
        with DEVICE.counted() as work:
            for _ in range(4):
                loop.step()
                loop.monitor.log_scalar("loss", 1.0)
        loop.monitor.detach()
        return found, work.reads.total()

    with DEVICE.lazy():
        right, reads = rows()
    with DEVICE.lazy(), without(DeviceToHostCopy, "wait", lambda self: None):
        wrong, _ = rows()
    return {"right": right, "without the wait": wrong, "reads": reads}


def _lag(sink: str = "", **options: Any) -> list[float]:
    """Of each step of a lazy device, how many steps of work the host had not waited for when the step ended."""
    loop = Loop(layers(2), "minimal", **options)
    assert loop.monitor is not None
    if sink:
        loop.monitor.add_sink(lambda values, step: None, deferred=sink == "deferred")
    found, ends = [], [0]
    with DEVICE.lazy():
        for _ in range(12):
            loop.step()
            ends.append(DEVICE.timeline.clock_of(0)[0])
            known = DEVICE.timeline.awaited(0)
            found.append(sum(end > known for end in ends[1:]))
        loop.monitor.detach()
    return found


@case
def lag() -> Any:
    """The host waits for a step that is two steps behind, so it cannot run further ahead, and for a nearer one where it is asked to."""
    with tempfile.TemporaryDirectory() as folder:
        in_directory = _lag(run_dir=folder)
    return {
        "alone": _lag(),
        "run_dir": in_directory,
        "deferred sink": _lag("deferred"),
        "sink": _lag("at once"),
        "skip": _lag(on_spike="skip"),
    }


@case
def lifetimes() -> Any:
    """Memory of the device that is alive after some steps, without a monitor and with one, and when that has gone."""

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, Memory) for each in gc.get_objects())

    def after(loop: Loop, *steps: int) -> list[int]:
        found = []
        for step in range(max(steps) + 1):
            loop.step()
            if step in steps:
                found.append(alive())
        return found

    before = alive()
    (bare,) = after(Loop(layers(2)), 2)
    loop = Loop(layers(2), "full")
    watched = after(loop, 11, 21, 31)
    assert loop.monitor is not None
    loop.monitor.detach()
    loop.monitor = None
    return {"before": before, "bare": bare, "watched": watched, "gone": alive(), "at the end": (loop := None) or alive()}


@case
def fingerprints_of_many() -> Any:
    """Those of the CPU, and the launches and reads that they take on the device."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5 + number) for number in range(100)]
    moved = [tensor.to(AT) for tensor in tensors]
    with DEVICE.counted() as work:
        found = fingerprints(moved)
    return {
        "equal": found.cpu().tolist() == fingerprints(tensors).tolist(),
        "launches": work.launches,
        "reads": work.reads.total(),
    }


@case
def statistics_of_many_sizes() -> Any:
    """The launches of statistics of tensors whose sizes are new, as in each step of a loop whose shapes change."""
    moved = [torch.randn(100 + 17 * number).to(AT) for number in range(50)]
    with DEVICE.counted() as work:
        Statistics(WarningLog()).measure(moved, ALL_COLUMNS)
    return work.launches


# --- failures, and the order of values -------------------------------------------------------------------------------------------


class _Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * 0 - 1)


@case
def origin_of_nan() -> Any:
    """The first NaN comes from a small output, before one that is measured at once because it is large."""

    def origin(at: torch.device) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), _Log(), nn.Linear(8, 300), nn.Linear(300, 2)).to(at)
        optimizer = torch.optim.SGD(model.parameters(), 0.0, foreach=False)
        monitor = gradmon.ModuleMonitor(model)
        monitor.attach(optimizer)
        monitor.add_activation_metric("norm")
        with testing.collect_records(monitor) as records:
            model(torch.ones(4000, 4).to(at)).square().mean().backward()
            optimizer.step()
        monitor.detach()
        return str(nonfinite_origin(records[0]))

    return {"cpu": origin(torch.device("cpu")), "device": origin(AT)}


@case
def failures() -> Any:
    """What cannot be measured costs no more than itself."""
    loop = Loop(layers(2))
    monitor = gradmon.ModuleMonitor(loop.model)
    monitor.attach(loop.optimizer)
    monitor.add_gradient_metric("norm")
    monitor.add_activation_metric("norm")
    monitor.add_update_metric("norm")
    loop.step()
    measure, found = Statistics.measure, {}

    def fails(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_flush":
            raise torch.OutOfMemoryError("out of memory")
        return measure(*args, **options)

    with without(Statistics, "measure", fails):
        loop.step()
        found["activations"] = (
            sorted({key.split("/")[0] for key in monitor.get_step_metrics()}),
            monitor.missing()["activation/0/norm"],
        )

    def cannot_copy(tensors: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with without(gradients, "copies", cannot_copy):
        loop.step()
        found["updates"] = (
            sorted({key.split("/")[0] for key in monitor.get_step_metrics()}),
            monitor.missing()["update/0.weight/norm"],
        )
    monitor.detach()
    return found


# --- the device itself ---------------------------------------------------------------------------------------------------------


@case
def the_device() -> Any:
    """What it shows of a program's mistakes."""
    module = torch.get_device_module(AT)
    side = module.Stream()

    def copies_too_early() -> list[float]:
        host = torch.empty(3)
        host.copy_(torch.ones(3, device=AT), non_blocking=True)
        early = host.tolist()
        event = module.Event()
        event.record()
        event.synchronize()
        return early + host.tolist()

    def reads_across_streams(waits: bool) -> None:
        x = torch.ones(3, device=AT)
        with module.stream(side):
            if waits:
                side.wait_stream(module.Stream(stream_id=0))
            y = x + 1
        if waits:
            module.current_stream().wait_stream(side)
        y.sum().item()

    def changes_the_source() -> None:
        host = torch.ones(3)
        host.to(AT, non_blocking=True)
        host.zero_()

    def releases_early() -> None:
        x = torch.ones(3, device=AT)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            x + 1
        del x

    with DEVICE.lazy():
        values = copies_too_early()
    with DEVICE.counted() as work:
        x = torch.ones(4, 3, device=AT)
        (x @ x.t()).sum().item()
    return {
        "early": values,
        "reads": dict(work.reads),
        "without a wait": races_of(lambda: reads_across_streams(False)),
        "with a wait": races_of(lambda: reads_across_streams(True)),
        "source": races_of(changes_the_source),
        "release": races_of(releases_early),
    }


if __name__ == "__main__":
    case.main()
