"""What the user gives us raises once, or holds the training itself: model, optimizer, batches and outputs go all the same.

A kept exception holds its traceback, that the frames, and those the model, the batch and whatever else the training loop has.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, MonitorMixin, SpikeDetector, load_run
from torch_gradmon.core.errors import SpikeError
from torch_gradmon.plugins.clipping import ZClip
from torch_gradmon.sinks import JsonlSink

pytestmark = pytest.mark.filterwarnings("ignore::torch_gradmon.core.errors.GradmonWarning")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """The collector leaves alone what was there before, of which torch alone has half a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Once:
    """A function that raises in its first call."""

    def __init__(self, holds: object = None, result: Any = None) -> None:
        self.holds, self.result, self.raised = holds, result, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.raised:
            self.raised += 1
            raise RuntimeError(f"failed on {len(args)}")
        return self.result

    def __deepcopy__(self, memo: object) -> Once:
        return self  # a detector of many signals has a copy of its rule for each


class Loop:
    """A training that may fail somewhere.

    Args:
        holds: whether the functions that the monitor gets have this loop, and with it the model, the optimizer and the monitor.
    """

    def __init__(self, holds: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Sequential = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self.monitor: ModuleMonitor
        self.once = Once(self if holds else None)
        self.fails_in: dict[str, Once] = {}
        self.tensors: list[weakref.ref[Tensor]] = []

    def watch(self, **options: Any) -> ModuleMonitor:
        self.monitor = gradmon.watch(self.model, self.optimizer, **{"on_spike": None, **options})
        return self.monitor

    def bare(self, **options: Any) -> ModuleMonitor:
        self.monitor = ModuleMonitor(self.model, **options)
        return self.monitor

    def gives(self, result: Any) -> Once:
        self.once.result = result
        return self.once

    def steps(self, count: int) -> None:
        for _ in range(count):
            try:
                self.step(torch.randn(2, 3))
            except (RuntimeError, SpikeError):
                self.once.raised += 1

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        output = self.model(batch)
        self.tensors += [weakref.ref(output), weakref.ref(batch)]
        self.fails_in.get("forward", len)(())
        loss = output.square().mean()
        self.monitor.log_scalar("loss", loss)
        self.monitor.log_context(batch_ids=[0, 1])
        loss.backward()
        self.fails_in.get("backward", len)(())
        self.optimizer.step()


class Sink:
    """A sink of the user's with all that one may have."""

    def __init__(self, **methods: Any) -> None:
        self.methods = methods

    def log(self, values: dict[str, float], step: int) -> None:
        self.methods.get("log", len)(())

    def log_spike(self, event: Any, text: str) -> None:
        self.methods.get("log_spike", len)(())

    def close(self) -> None:
        self.methods.get("close", len)(())


class Logs(nn.Linear, MonitorMixin):
    """A module that logs by a function of the user's."""

    aggregate: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_monitoring and (monitor := self.get_module_monitor()) is not None:
            monitor.log_tensor("mine", x, self.aggregate)
        return super().forward(x)


class Fails(nn.Sequential):
    """A reference module that raises."""

    once: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.once()
        return super().forward(x)


def always(value: float) -> bool:
    return True


def metric(kind: str, **options: Any) -> Callable[[Loop], Any]:
    def add(loop: Loop) -> None:
        monitor = loop.bare()
        if "difference" in kind or "coordinate" in kind:
            monitor.set_reference_module("init")
        own = loop.gives(torch.ones(()))
        if kind == "coordinate":
            gradmon.RefinedCoordinateCheck(monitor, "mine", own, **options)
        else:
            getattr(monitor, f"add_{kind}_metric")("mine", own, **options)
        monitor.attach(loop.optimizer)

    return add


def aggregation(loop: Loop) -> None:
    loop.bare().add_activation_metric("mine", lambda x: x.mean(), metric_aggregation_fn=loop.gives(torch.ones(())))
    loop.monitor.attach(loop.optimizer)


def cadence(loop: Loop) -> None:
    once = loop.gives(True)
    loop.bare(monitor_step_fn=lambda step: step == 0 or once(step))._runtime.use_preset("standard")
    loop.monitor.attach(loop.optimizer)


def a_rollback(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
    scheduler.state_dict = loop.gives({})  # type: ignore[method-assign]
    loop.model.scheduler = scheduler  # type: ignore[assignment] # it is not kept alive otherwise
    loop.watch(on_spike=gradmon.Rollback(every=1, extra_state=(scheduler,)))


def a_reference(loop: Loop) -> None:
    loop.bare().set_reference_module(reference := Fails(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    reference.once = loop.once
    loop.monitor.add_activation_difference_metric("norm")
    loop.monitor.attach(loop.optimizer)


def a_module_that_logs(loop: Loop) -> None:
    loop.model[0] = Logs(3, 4)
    loop.model[0].aggregate = loop.gives(torch.ones(()))
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.01)
    loop.watch()


def a_closure(loop: Loop) -> None:
    loop.watch()
    optimizer, once = loop.optimizer, loop.gives(0.0)
    loop.step = lambda batch: optimizer.step(lambda: once(batch))  # type: ignore[method-assign]


def a_hook(loop: Loop) -> None:
    loop.watch().log_scalar("loss", 1.0)
    loop.optimizer.register_step_pre_hook(loop.once)


def a_clip(loop: Loop) -> None:
    class Clip(ZClip):
        def factors(self, *args: Any) -> Any:
            self.once()
            return super().factors(*args)

    clip = Clip()
    clip.once = loop.once  # type: ignore[attr-defined]
    loop.watch()
    loop.fails_in["backward"] = Clipping(loop.monitor, clip)  # type: ignore[assignment]


class Clipping:
    def __init__(self, monitor: ModuleMonitor, clip: Any) -> None:
        self.monitor, self.clip = weakref.ref(monitor), clip

    def __call__(self, *_: Any) -> None:
        if (monitor := self.monitor()) is not None:
            monitor.clip_grad_norm_(self.clip)


def a_name(loop: Loop) -> None:
    once = loop.gives("")
    once.raised = 1
    loop.bare(format_module_name_fn=lambda name: name + once())._runtime.use_preset("full")
    loop.monitor.attach(loop.optimizer)
    loop.model.append(nn.Linear(1, 1))  # so that names are asked for again, in the middle of the training
    once.raised = 0


def in_the_loop(place: str) -> Callable[[Loop], Any]:
    def add(loop: Loop) -> None:
        loop.fails_in[place] = loop.once
        loop.watch(preset="full")

    return add


CASES: dict[str, Callable[[Loop], Any]] = {
    "sink": lambda loop: loop.watch().add_sink(loop.once),
    "deferred sink": lambda loop: loop.watch().add_sink(loop.once, deferred=True),
    "sink in a thread": lambda loop: loop.watch().add_sink(loop.once, thread=True),
    "sink.log": lambda loop: loop.watch().add_sink(Sink(log=loop.once)),
    "sink.log_spike": lambda loop: loop.watch().add_sink(Sink(log_spike=loop.once)),
    "sink.close": lambda loop: loop.watch().add_sink(Sink(close=loop.once)),
    "gradient": metric("gradient"),
    "gradient before the clip": metric("gradient", stages=["before_clip"]),
    "gradient of a micro-batch": metric("gradient", stages=["local"]),
    "activation": metric("activation"),
    "input": metric("activation", of="input"),
    "gradient of an output": metric("activation", of="output_gradient"),
    "parameter": metric("parameter"),
    "update": metric("update"),
    "optimizer": metric("optimizer"),
    "activation difference": metric("activation_difference"),
    "parameter difference": metric("parameter_difference"),
    "coordinate check": metric("coordinate"),
    "aggregation": aggregation,
    "cadence": cadence,
    "on_spike": lambda loop: loop.watch(on_spike=loop.once).add_detector(SpikeDetector(always, "param_norm")),
    "on_spike='raise'": lambda loop: loop.watch(on_spike="raise").add_detector(SpikeDetector(always, "param_norm")),
    "detector": lambda loop: loop.watch().add_detector(SpikeDetector(loop.gives(False), "loss")),
    "detector that decides": lambda loop: loop.watch(on_spike="skip").add_detector(SpikeDetector(loop.gives(False), "loss")),
    "detector of many": lambda loop: loop.watch().add_detector(SpikeDetector(loop.gives(False), re.compile("norm$"))),
    "rollback": a_rollback,
    "reference": a_reference,
    "clip": a_clip,
    "name": a_name,
    "module that logs": a_module_that_logs,
    "closure": a_closure,
    "hook of the user": a_hook,
    "loop in its forward": in_the_loop("forward"),
    "loop in its backward": in_the_loop("backward"),
}


def trained(name: str, holds: bool, detach: bool) -> tuple[dict[str, weakref.ref[Any]], ModuleMonitor | None, Once]:
    loop = Loop(holds)
    CASES[name](loop)
    if name == "sink.log_spike":
        loop.monitor.add_detector(SpikeDetector(always, "param_norm"))
    loop.steps(3)
    if detach:
        loop.monitor.detach()
    if name == "sink in a thread":
        patience(lambda: bool(loop.once.raised))
    gone = {"model": weakref.ref(loop.model), "optimizer": weakref.ref(loop.optimizer)}
    gone |= {f"parameter {name}": weakref.ref(each) for name, each in loop.model.named_parameters()}
    gone |= {f"tensor {number}": each for number, each in enumerate(loop.tensors)}
    if holds:
        gone["monitor"] = weakref.ref(loop.monitor)
        gone["session"] = weakref.ref(loop.monitor._runtime)
    once = Once()
    once.raised = loop.once.raised
    return gone, None if holds else loop.monitor, once


def patience(until: Callable[[], bool]) -> None:
    """The sink's thread may run much later on a busy machine."""
    end = time.monotonic() + 30
    while not until() and time.monotonic() < end:
        time.sleep(0.01)


def still_there(gone: dict[str, weakref.ref[Any]]) -> list[str]:
    """Their names, after some patience with what a thread has still to send."""
    until = time.monotonic() + 30
    while True:
        gc.collect()
        found = [name for name, reference in gone.items() if reference() is not None]
        if not found or time.monotonic() > until or not _threads():
            return found
        time.sleep(0.02)


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("torch_gradmon")]


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("name", CASES)
def test_what_raised_keeps_nothing_alive_though_the_monitor_is_kept(name: str, detach: bool) -> None:
    gone, monitor, once = trained(name, holds=False, detach=detach)
    assert still_there(gone) == []
    assert monitor is not None
    assert once.raised or (name == "sink.close" and not detach)


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("name", CASES)
def test_what_holds_the_training_goes_with_it(name: str, detach: bool) -> None:
    gone, _, _ = trained(name, holds=True, detach=detach)
    assert still_there(gone) == []


def test_the_last_row_goes_out_when_all_is_collected_to_sinks_of_ours_and_of_the_user(tmp_path: Path) -> None:
    rows: list[int] = []
    loop = Loop(holds=True)
    monitor = loop.watch(run_dir=tmp_path)
    monitor.add_sink(JsonlSink(tmp_path / "rows.jsonl"))
    monitor.add_sink(lambda values, step, held=loop.optimizer: rows.append(step))
    loop.steps(3)
    gone = weakref.ref(monitor._runtime)
    assert rows == [0, 1]
    del loop, monitor
    gc.collect()
    assert gone() is None
    assert rows == [0, 1, 2]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
    assert not list(tmp_path.glob("*-wal"))  # it was closed
    assert load_run(tmp_path).steps == [0, 1, 2]


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
def test_a_scaler_that_goes_on_and_facts_about_a_step_hold_nothing(detach: bool) -> None:
    loop = Loop(holds=False)
    scaler = torch.amp.GradScaler("cpu")
    monitor = loop.watch(scaler=scaler, preset="full")
    for _ in range(3):
        output = loop.model(torch.randn(2, 3))
        monitor.log_context(output=output, batch_ids=[0, 1])
        monitor.log_tensor("mine", output)
        scaler.scale(output.sum()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    if detach:
        monitor.detach()
    gone = {"model": weakref.ref(loop.model), "optimizer": weakref.ref(loop.optimizer), "output": weakref.ref(output)}
    del loop, output
    assert still_there(gone) == []
    assert scaler.get_scale() > 0


def test_a_detector_that_failed_in_a_step_that_never_ended_holds_nothing() -> None:
    class Stops(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of memory, for instance")

    def rule(value: float) -> bool:
        raise ValueError("the rule fails")

    loop = Loop(holds=False)
    loop.optimizer = Stops(loop.model.parameters(), 0.1)
    monitor = loop.watch(on_spike="skip")
    monitor.add_detector(SpikeDetector(rule, "loss"))
    loop.steps(1)
    assert monitor.warning_counts()["detector:loss"] == 1
    gone = {"model": weakref.ref(loop.model), "optimizer": weakref.ref(loop.optimizer)}
    del loop
    assert still_there(gone) == []
