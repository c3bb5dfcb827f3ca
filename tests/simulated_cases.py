"""Programs on the simulated accelerator, each in a process that has it: ``python -m tests.simulated_cases NAME`` prints JSON.

A device once registered changes what torch takes for its accelerator, so no other test may share the process.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from benchmarks.launches import LAYERS, Loop, count, layers
from torch_gradmon import testing
from torch_gradmon.cli.demo_model import CharacterGPT, Sizes
from torch_gradmon.step.device_transfer import DeviceToHostCopy

torch.set_num_threads(1)
DEVICE = testing.simulated_device()
AT = DEVICE.torch_device
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A program by its name."""
    CASES[function.__name__] = function
    return function


@case
def launches() -> Any:
    """What the monitor adds to a step."""
    return count(of_all_activations=LAYERS[:2])


# --- values ------------------------------------------------------------------------------------------------------------------


def _gpt() -> CharacterGPT:
    torch.manual_seed(0)
    model = CharacterGPT(12, Sizes(blocks=2, width=16, heads=2, context=8, batch=2)).double()
    # moving it to a device of Python would untie them
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _train_gpt(device: torch.device, is_watched: bool = True) -> tuple[list[dict[str, float]], list[Tensor]]:
    model = _gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    monitor = gradmon.watch(model, optimizer, preset="full") if is_watched else None
    if monitor is not None:
        for metric in ("std", "l1", "zeros", "kurtosis"):
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
        for key in a.keys() - {"gradmon/overhead_pct"}:
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


# --- waits, and what happens without them --------------------------------------------------------------------------------------


@contextmanager
def _without(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


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
    with DEVICE.lazy(), _without(DeviceToHostCopy, "wait", lambda self: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    with DEVICE.lazy(), _without(DeviceToHostCopy, "wait", lambda self: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    with DEVICE.lazy(), _without(DeviceToHostCopy, "wait", lambda self: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong, _ = rows()
    return {"right": right, "without the wait": wrong, "reads": reads}


# --- the device itself ---------------------------------------------------------------------------------------------------------


def _race(program: Callable[[], Any]) -> str:
    try:
        with DEVICE.lazy():
            program()
    except AssertionError as error:
        return str(error)
    return ""


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
        "without a wait": _race(lambda: reads_across_streams(False)),
        "with a wait": _race(lambda: reads_across_streams(True)),
        "source": _race(changes_the_source),
        "release": _race(releases_early),
    }


if __name__ == "__main__":
    print("=", json.dumps(CASES[sys.argv[1]]()))
