"""The monitor in a loop, and what it says there."""

from __future__ import annotations

import contextlib
import io
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.spikes import Threshold

from .asks import asked
from .loop import Loop
from .observer import Observer
from .optimizers import inner
from .program import Program

Rows = list[tuple[int, dict[str, float]]]


@dataclass
class Poll:
    """What is read at one moment."""

    step: int | None
    values: dict[str, float]
    missing: dict[str, str]
    top: list[tuple[str, float]]


@dataclass
class Seen:
    """All that a monitor has said.

    Attributes:
        polls, history, rows: values, read in the loop, at its end, and by a sink.
        complaints, counts, findings, events: what its methods of these names give.
        saved: what the model was pickled to while it was watched.
        alive: the monitors, the model and the optimizers, which must die when they are dropped.
    """

    polls: list[Poll] = field(default_factory=list)
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    rows: Rows = field(default_factory=list)
    complaints: dict[str, int] = field(default_factory=dict)
    counts: Any = None
    events: list[Any] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    saved: list[bytes] = field(default_factory=list)
    alive: list[weakref.ref[Any]] = field(default_factory=list)


class Collecting:
    """A sink that keeps what it gets."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))


class Failing:
    """A sink whose disk is full."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise OSError("no space left on device")


class Watcher(Observer):
    """Makes the monitor that the program asks for, and reads it."""

    def __init__(self, place: Path) -> None:
        self.place, self.seen = place, Seen()
        self.monitor: ModuleMonitor | None = None
        self.companion: ModuleMonitor | None = None

    def built(self, loop: Loop) -> None:
        self.loop = loop
        self.monitor = self._made()
        if loop.p.companion:
            self.companion = ModuleMonitor(loop.model, every=2, on_spike=None, preset="full")
            self.companion.add_activation_metric("kurtosis")
            self.companion.attach(*loop.optimizers, scaler=loop.scaler)
        self.seen.alive += [weakref.ref(each) for each in (loop.model, *map(inner, loop.optimizers))]

    def _made(self) -> ModuleMonitor:
        loop, p = self.loop, self.loop.p
        monitor = made(p, loop, self.place, self.seen.events)
        for ask in asked(p):
            add = getattr(monitor, f"add_{ask.adder}_metric")
            if ask.adder == "attention":
                add(ask.metric, ask.pattern, every=ask.every, **ask.options)
            else:
                add(ask.metric, ask.function, ask.pattern, every=ask.every, **ask.options)
        for sink in p.sinks:
            monitor.add_sink(_sink(sink, self.seen.rows, self.place))
        if {"difference", "coordinates"} & {*p.metrics}:
            monitor.set_reference_module("init")
        if "coordinates" in p.metrics:
            gradmon.RefinedCoordinateCheck(monitor)
        if p.on_spike == "skip":
            monitor.add_detector(gradmon.SpikeDetector(Threshold(1e30)))
        self.seen.alive.append(weakref.ref(monitor))
        return monitor

    @property
    def _monitor(self) -> ModuleMonitor:
        assert self.monitor is not None
        return self.monitor

    # --- in the loop -----------------------------------------------------------------------------------------------------------

    def iteration(self, number: int) -> None:
        if self.loop.p.hand:
            self._monitor.begin_step(self.loop.p.start_step + number)

    @contextlib.contextmanager
    def stepping(self, index: int) -> Any:
        if not self.loop.p.attached:
            self._monitor.monitor_gradients()
            self._monitor.monitor_parameters()
        yield

    @contextlib.contextmanager
    def backward(self) -> Any:
        yield
        if not self.loop.p.attached:
            self._monitor.monitor_gradients(before_clip=True)

    def closure(self, index: int, closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        if not self.loop.p.attached:
            self._monitor.monitor_gradients()
        return loss

    def step_over(self) -> None:
        if self.loop.p.hand:
            self._monitor.end_step()

    def log(self, key: str, value: Any) -> None:
        self._monitor.log_scalar(key, value)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        if self.loop.p.monitor_clips:
            return self._monitor.clip_grad_norm_(limit, parameters=parameters)
        return super().clip(parameters, limit)

    def act(self, what: str) -> None:
        if what.startswith("detail_"):
            self._monitor.set_detail(preset=what.removeprefix("detail_"), every=1, steps=2)
            return
        state = self._monitor.state_dict()
        self._monitor.detach()
        if what == "detach_attach":
            self._monitor.attach(*self.loop.optimizers, scaler=self.loop.scaler)
        elif what == "resume":
            self.seen.history |= self._monitor.get_all_metrics()
            self.monitor = self._made()
            self.monitor.load_state_dict(state)

    def save(self, model: nn.Module) -> None:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        self.seen.saved.append(buffer.getvalue())

    def poll(self) -> None:
        monitor = self._monitor
        last = monitor.last_record
        step, top = (None, []) if last is None else (last.step, last.top_gradients(3))
        poll = Poll(step, monitor.get_step_metrics(), monitor.missing(), top)
        self.seen.polls.append(poll)
        repr(monitor), monitor.describe(), monitor.get_step_counts()  # which must be of no consequence

    def over(self) -> None:
        monitor = self._monitor
        self.seen.findings = list(monitor.diagnose().findings)
        monitor.detach()
        if self.companion is not None:
            self.companion.detach()
        self.seen.history |= monitor.get_all_metrics()
        self.seen.complaints, self.seen.counts = monitor.warning_counts(), monitor.get_step_counts()
        self.monitor = self.companion = None


def made(p: Program, loop: Loop, place: Path, events: list[Any]) -> ModuleMonitor:
    """The monitor, by ``watch`` where that takes all that is wanted."""
    options: dict[str, Any] = {
        "every": p.every,
        "on_spike": {"none": None, "function": events.append}.get(p.on_spike, p.on_spike),
    }
    options |= {"layers": p.layers} if p.layers else {}
    options |= {"run_dir": place / "run"} if p.run_dir else {}
    options |= {"max_overhead": p.max_overhead} if p.max_overhead else {}
    capture = gradmon.SpikeCapture(before=p.flight_recorder, after=p.post_spike_steps)
    more: dict[str, Any] = {"spike_capture": capture} if capture != gradmon.SpikeCapture() else {}
    more |= {"zero_threshold": p.eps} if p.eps != 1e-8 else {}
    if p.update_sample:
        more |= {"max_update_rows": int(p.update_sample)} if p.update_sample.isdigit() else {"update_regex": p.update_sample}
    more |= {"key_order": "metric_first"} if p.style == "metric_first" else {"prefix": p.style} if p.style else {}
    more |= {"format_module_name_fn": p.name} if p.names == "renamed" else {"excluded_modules_regex": p.names} if p.names else {}
    if p.preset != "none" and not more and p.attached and not p.start_step:
        return gradmon.watch(loop.model, *loop.optimizers, scaler=loop.scaler, preset=p.preset, **options)
    monitor = ModuleMonitor(loop.model, scaler=loop.scaler, **options, **more)
    if p.preset != "none":
        monitor._runtime.use_preset(p.preset)
    if p.attached:
        monitor.attach(*loop.optimizers, scaler=loop.scaler, start_step=p.start_step or None)
    return monitor


def _sink(kind: str, rows: Rows, place: Path) -> Any:
    if kind == "jsonl":
        return gradmon.sinks.JsonlSink(place / "log.jsonl")
    return Collecting(rows) if kind == "collecting" else Failing()
