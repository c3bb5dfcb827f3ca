"""Training loops under ``watch`` whose device is a parameter: a GPU, or the simulated device.

    python -m tests.device_programs cuda side_update   # one program; prints JSON
    python -m tests.device_programs simulated          # all programs

The simulated device changes what torch takes for its accelerator, so it needs a process of its own. It is lazy here: whatever a program
uses too early is an error at its end.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import testing
from torch_gradmon.core import torch_modes
from torch_gradmon.core.errors import GradmonWarning
from torch_gradmon.statistics import dispatch

from . import capture_programs, cuda_programs
from .device_loop import STEPS, WARM_UP, Loop, apart
from .places import Place

PROGRAMS: dict[str, Callable[[Place], dict[str, Any]]] = {}


def program(function: Callable[[Place], dict[str, Any]]) -> Callable[[Place], dict[str, Any]]:
    """A program by its name."""
    PROGRAMS[function.__name__] = function
    return function


# --- waits -------------------------------------------------------------------------------------------------------------------


def hot_path(place: Place, preset: str, on_spike: str | None = None) -> dict[str, Any]:
    """Whole steps in which an operation that waits for the device is an error. Counts waits for events, and copies to the host."""
    loop = Loop(place, preset=preset, on_spike=on_spike)
    for _ in range(WARM_UP):
        loop.step()
    counts = []
    for _ in range(STEPS):
        place.synchronize()
        with place.undisturbed() as seen:
            loop.step()
        counts.append({"waits": seen.waits, "copies": seen.copies, "unpinned": seen.unpinned})
    return {"counts": counts, "worst": loop.worst()}


@program
def minimal(place: Place) -> dict[str, Any]:
    """Preset ``minimal``."""
    return hot_path(place, "minimal")


@program
def standard(place: Place) -> dict[str, Any]:
    """Preset ``standard``."""
    return hot_path(place, "standard")


@program
def full(place: Place) -> dict[str, Any]:
    """Preset ``full``."""
    return hot_path(place, "full")


@program
def skip(place: Place) -> dict[str, Any]:
    """Spikes are skipped, for which each step waits once."""
    return hot_path(place, "standard", on_spike="skip")


@program
def control(place: Place) -> dict[str, Any]:
    """What must be caught: a read of a value, and a copy that waits."""
    x = torch.ones(3, device=place.at)

    def is_caught(call: Callable[[], object]) -> bool:
        try:
            with place.undisturbed():
                call()
        except (RuntimeError, AssertionError):
            return True
        return False

    return {"read": is_caught(lambda: x.sum().item()), "copy": is_caught(x.cpu), "nothing": is_caught(lambda: x + 1)}


# --- numbers -----------------------------------------------------------------------------------------------------------------


def _trained(place: Place | None) -> dict[int, dict[str, float]]:
    """A watched training, on the CPU if there is no place."""
    loop = Loop(place or Place("cpu"), preset="full")
    assert loop.monitor is not None
    for metric in ("norm", "mean", "std", "l1_norm", "max", "zero_count"):
        loop.monitor.add_gradient_metric(metric)
        loop.monitor.add_activation_metric(metric)
    loop.monitor.add_update_metric("norm")
    for _ in range(5):
        loop.step()
    return loop.values()


@program
def numbers_of_training(place: Place) -> dict[str, Any]:
    """A training in float64 here and on the CPU."""
    pairs = list(zip(_trained(place).values(), _trained(None).values(), strict=True))
    keys = [here.keys() - {"gradmon/overhead_fraction"} for here, _ in pairs]
    assert all(here.keys() == there.keys() for here, there in pairs)
    worst = max(apart(here[key], there[key]) for (here, there), names in zip(pairs, keys, strict=True) for key in names)
    return {"worst": worst, "values": sum(map(len, keys))}


@program
def numbers_in_float32(place: Place) -> dict[str, Any]:
    """The same float32 gradients here and on the CPU, since a forward in float32 rounds differently on each device."""
    shapes = ((3,), (1000, 33), (1 << 20,), (1,), (0, 4))
    metrics = (
        "norm",
        "rms",
        "mean",
        "std",
        "l1_norm",
        "max",
        "min_value",
        "max_value",
        "sparsity",
        "zero_count",
        "nonfinite_count",
    )
    found = []
    for device in (place.at, torch.device("cpu")):
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(shape) for shape in shapes])
        gradients = [torch.randn(shape) * 10.0 ** (3 * i - 6) for i, shape in enumerate(shapes)]
        gradients[1][:100] = 0
        model.to(device)
        monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
        for metric in metrics:
            monitor.add_gradient_metric(metric)
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient.to(device)
        monitor.begin_step(0)
        monitor.monitor_gradients()
        monitor.end_step()
        found.append(monitor.get_step_metrics())
    here, there = found
    assert here.keys() == there.keys()
    return {"worst": max(apart(here[key], there[key]) for key in here), "values": len(here)}


# --- streams -----------------------------------------------------------------------------------------------------------------


@contextmanager
def _everything_seen() -> Iterator[None]:
    """Dispatch modes see the monitor's operations too, and all of these are torch's: the stream sanitizer is such a mode."""
    hidden, has_kernels = torch_modes._disable_current_modes, dispatch.has_triton_kernels
    torch_modes._disable_current_modes = nullcontext  # type: ignore[assignment]
    dispatch.has_triton_kernels = lambda device: False
    try:
        yield
    finally:
        torch_modes._disable_current_modes, dispatch.has_triton_kernels = hidden, has_kernels


def _on_two_streams(place: Place, *, is_backward_aside: bool) -> dict[str, Any]:
    """Watched steps of which either the first half, forward and backward, or the second half runs on a side stream."""
    with _everything_seen():
        loop = Loop(place, preset="full")
        main, side = place.functions.current_stream(), place.functions.Stream()
        first, second = (side, main) if is_backward_aside else (main, side)
        for batch in loop.batches[:4]:
            first.wait_stream(second)
            with place.functions.stream(first):
                loop.backward(batch)
            second.wait_stream(first)
            with place.functions.stream(second):
                loop.update()
        main.wait_stream(side)
        return {"worst": loop.worst()}


@program
def side_update(place: Place) -> dict[str, Any]:
    """The optimizer steps on a side stream."""
    return _on_two_streams(place, is_backward_aside=False)


def side_backward(place: Place) -> dict[str, Any]:
    """Forward and backward on a side stream. The simulated device has one stream for all backward passes."""
    return _on_two_streams(place, is_backward_aside=True)


def side_stream_race(place: Place) -> dict[str, Any]:
    """What must be caught: a stream that reads what another one writes."""
    x, side = torch.ones(1000, device=place.at), place.functions.Stream()
    with place.functions.stream(side):
        y = x * 2
    return {"sum": y.sum().item()}


# --- optimizers that work on the device alone ------------------------------------------------------------------------------------


@program
def fused_with_scaler(place: Place) -> dict[str, Any]:
    """Fused AdamW unscales its gradients itself, and refuses a step of infinite ones without asking the host."""
    scaler = torch.amp.GradScaler(place.at.type, init_scale=1024.0)
    loop = Loop(place, lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True), preset="standard", scaler=scaler)
    truth, counts = [], []
    for number in range(8):
        place.synchronize()
        with place.undisturbed() if number > 2 else nullcontext() as seen:
            loop.optimizer.zero_grad()
            loss = loop.model(loop.batches[number]).square().mean() * (math.inf if number == 5 else 1.0)
            scaler.scale(loss).backward()
            gradients = [parameter.grad for parameter in loop.model.parameters()]
            truth.append(torch.stack([(gradient / scaler._scale).square().sum() for gradient in gradients]).sum().sqrt())
            scaler.step(loop.optimizer)
            scaler.update()
        counts.append(0 if seen is None else seen.waits)
    values = loop.values()
    return {
        "worst": max(apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(truth) if step != 5),
        "spoiled": not math.isfinite(values[5]["gradmon/grad_norm"]),
        "not_applied": [values[step]["gradmon/steps_not_applied"] for step in values],
        "waits": counts,
    }


@program
def capturable(place: Place) -> dict[str, Any]:
    """Capturable AdamW has its learning rate and its step count on the device."""
    rate = torch.tensor(1e-2, dtype=torch.float64).to(place.at)
    loop = Loop(
        place,
        lambda parameters: torch.optim.AdamW(parameters, rate, capturable=True, foreach=place.foreach),
        preset="standard",
    )
    assert loop.monitor is not None
    waits = []
    with testing.collect_records(loop.monitor) as records:
        for number in range(8):
            place.synchronize()
            with place.undisturbed() if number > 2 else nullcontext() as seen:
                loop.step()
                rate.mul_(0.5)
            waits.append(0 if seen is None else seen.waits)
    rates = [record.context["lr"] for record in records]
    return {"worst": loop.worst(), "waits": waits, "rates": rates}


#: Programs that run alone, since they may end in an error, or that do not run on every device.
OTHERS = capture_programs.PROGRAMS | cuda_programs.PROGRAMS | {each.__name__: each for each in (side_stream_race, side_backward)}


def run(place: Place, name: str) -> dict[str, Any]:
    """One program; a warning of the monitor is an error."""
    with warnings.catch_warnings(), place.strict():
        warnings.simplefilter("error", GradmonWarning)
        return (PROGRAMS | OTHERS)[name](place)


def main(kind: str, *names: str) -> None:
    """Run programs, by default all, and print what they return."""
    torch.set_num_threads(1)
    place = Place(kind)
    print("=", json.dumps({name: run(place, name) for name in names or PROGRAMS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
