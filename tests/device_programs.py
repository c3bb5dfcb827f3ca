"""Training loops under ``watch`` whose device is a parameter: a GPU, or the simulated device.

    python -m tests.device_programs cuda side_stream   # one program; prints JSON
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
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import testing
from torch_gradmon.core import torch_modes
from torch_gradmon.core.errors import GradmonWarning
from torch_gradmon.statistics import dispatch

from .places import Place

PROGRAMS: dict[str, Callable[[Place], dict[str, Any]]] = {}
#: Steps before those that are looked at. They allocate, compile, and measure updates twice with the standard preset.
WARM_UP = 12
STEPS = 12


def program(function: Callable[[Place], dict[str, Any]]) -> Callable[[Place], dict[str, Any]]:
    """A program by its name."""
    PROGRAMS[function.__name__] = function
    return function


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).double()


def _batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


class Loop:
    """A training loop; a monitor watches it where ``options`` of ``watch`` are given."""

    def __init__(self, place: Place, make_optimizer: Callable[..., torch.optim.Optimizer] | None = None, **options: Any) -> None:
        self.place, self.model = place, _model().to(place.at)
        make = make_optimizer or (lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=place.foreach))
        self.optimizer = make(self.model.parameters())
        self.monitor = gradmon.watch(self.model, self.optimizer, **options) if options else None
        self.batches = [batch.to(place.at) for batch in _batches(WARM_UP + STEPS)]
        self.norms: list[Tensor] = []

    def backward(self, batch: Tensor) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()

    def update(self) -> None:
        """Clip, then step."""
        self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=self.place.foreach))
        self.optimizer.step()

    def step(self) -> None:
        """One step, with the next batch."""
        self.backward(self.batches[len(self.norms)])
        self.update()

    def values(self) -> dict[int, dict[str, float]]:
        """What the monitor reports, by step; it is detached."""
        assert self.monitor is not None
        self.monitor.detach()
        return self.monitor.get_all_metrics()

    def worst(self) -> float:
        """The largest relative difference between a reported norm and the one that torch's clip returned."""
        values = self.values()
        return max(_apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(self.norms))

    def parameters(self) -> list[Tensor]:
        """The parameters on the host."""
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def _apart(a: float, b: float) -> float:
    """The relative difference, infinite where one is NaN."""
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-9)


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
def cheap(place: Place) -> dict[str, Any]:
    """Preset ``cheap``."""
    return hot_path(place, "cheap")


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
    for metric in ("norm", "mean", "std", "l1", "max", "zeros"):
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
    keys = [here.keys() - {"gradmon/overhead_pct"} for here, _ in pairs]
    assert all(here.keys() == there.keys() for here, there in pairs)
    worst = max(_apart(here[key], there[key]) for (here, there), names in zip(pairs, keys, strict=True) for key in names)
    return {"worst": worst, "values": sum(map(len, keys))}


@program
def numbers_in_float32(place: Place) -> dict[str, Any]:
    """The same float32 gradients here and on the CPU, since a forward in float32 rounds differently on each device."""
    shapes = ((3,), (1000, 33), (1 << 20,), (1,), (0, 4))
    metrics = ("norm", "rms", "mean", "std", "l1", "max", "min_value", "max_value", "sparsity", "zeros", "nonfinite")
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
    return {"worst": max(_apart(here[key], there[key]) for key in here), "values": len(here)}


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
        "worst": max(_apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(truth) if step != 5),
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


# --- graphs ----------------------------------------------------------------------------------------------------------------------


def _capturable_loop(place: Place, **options: Any) -> Loop:
    return Loop(place, lambda some: torch.optim.AdamW(some, 1e-2, capturable=True, foreach=place.foreach), **options)


def _warmed_up(loop: Loop) -> Tensor:
    """The memory of the captured input, after three steps with it."""
    static = loop.batches[0].clone()
    with loop.place.aside():
        for batch in loop.batches[:3]:
            static.copy_(batch)
            loop.backward(static)
            loop.update()
    return static


def captured_query(place: Place) -> dict[str, Any]:
    """What must be caught: a question about an event within a capture."""
    event, x = place.functions.Event(), torch.ones(3, device=place.at)
    event.record()
    with place.captured():
        x.add_(1)
        event.query()
    return {}


def captured_step(place: Place) -> dict[str, Any]:
    """A whole step is captured into a graph. No hook runs when the graph is replayed, so nothing may be reported of the replays."""
    found: dict[bool, Loop] = {True: _capturable_loop(place, preset="standard"), False: _capturable_loop(place)}
    for loop in found.values():
        static = _warmed_up(loop)
        norms = list(loop.norms)
        with place.captured() as graph:
            loop.backward(static)
            loop.update()
        for batch in loop.batches[3:6]:
            static.copy_(batch)
            graph.replay()
    values = found[True].values()
    return {
        "same_bits": all(map(torch.equal, *(loop.parameters() for loop in found.values()))),
        "worst": max(_apart(values[step]["gradmon/grad_norm"], norm.item()) for step, norm in enumerate(norms)),
        "of_replays": sorted(step for step in values if step >= len(norms)),
    }


def captured_backward(place: Place) -> dict[str, Any]:
    """Forward and backward are captured, and the optimizer steps outside. What is reported of a replay is right, or absent."""
    loop, bare = _capturable_loop(place, preset="standard"), _model().to(place.at)
    assert loop.monitor is not None
    loop.monitor.add_gradient_metric("norm")
    static = _warmed_up(loop)

    def replay() -> None:
        """On the simulated device: the gradients, written where those of the capture are, without a hook or a version counter."""
        for mine, theirs in zip(bare.parameters(), loop.model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        gradients = torch.autograd.grad(bare(static).square().mean(), list(bare.parameters()))
        for parameter, gradient in zip(loop.model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.data.copy_(gradient)

    with place.captured(replay) as graph:
        loop.backward(static)
    used: list[dict[str, Tensor]] = []
    for batch in loop.batches[3:8]:
        static.copy_(batch)
        graph.replay()
        loop.update()
        used.append({name: p.grad.norm() for name, p in loop.model.named_parameters() if p.grad is not None})
    values = loop.values()
    found = [
        (reported[f"gradient/{name}/norm"], norm.item())
        for step, norms in enumerate(used, 3)
        for name, norm in norms.items()
        if f"gradient/{name}/norm" in (reported := values.get(step, {}))
    ]
    whole = [(values[step].get("gradmon/grad_norm"), loop.norms[step].item()) for step in values]
    return {
        "worst": max(_apart(*pair) for pair in found),
        "values": len(found),
        "worst_of_whole": max(_apart(value, norm) for value, norm in whole if value is not None),
    }


#: Programs that run alone, since they may end in an error, or that do not run on every device.
OTHERS = {each.__name__: each for each in (side_stream_race, side_backward, captured_query, captured_step, captured_backward)}


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
