"""Sinks: what they get, when, and that nothing they do can touch the training."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, JsonlSink, ModuleMonitor

from .families import BY_NAME


def _read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Recorder:
    """Keeps what it was given, and fails on chosen calls."""

    def __init__(self, failing: frozenset[int] | set[int] = frozenset()) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.failing, self.calls, self.closed = failing, 0, 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise ConnectionError("the network is down")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def _steps(monitor: ModuleMonitor, count: int, start: int = 0, value: float = 1.0) -> None:
    for step in range(start, start + count):
        monitor.begin_step(step)
        monitor.log_scalar("x", value * step)
        monitor.log_scalar("y/z", -step)
        monitor.end_step()


@pytest.fixture
def monitor():
    model = nn.Linear(2, 1)
    yield ModuleMonitor(model)
    del model


# --- what a sink gets --------------------------------------------------------------------------------------------------------------


def test_jsonl_has_one_strict_line_for_each_step(monitor: ModuleMonitor, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "metrics.jsonl"
    monitor.add_sink(JsonlSink(path))
    _steps(monitor, 5)
    assert _read(path) == [{"step": step, "x": float(step), "y/z": -float(step)} for step in range(5)]


@pytest.mark.parametrize(
    ("value", "written"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1e-310, 1e-310)]
)
def test_jsonl_writes_what_json_has_no_number_for_as_text(
    monitor: ModuleMonitor, tmp_path: Path, value: float, written: Any
) -> None:
    monitor.add_sink(JsonlSink(tmp_path / "m.jsonl"))
    monitor.begin_step(0)
    monitor.log_scalar("größe", value)
    monitor.end_step()
    assert _read(tmp_path / "m.jsonl") == [{"step": 0, "größe": written}]
    assert written == value or float(written) == value or math.isnan(float(written))


def test_jsonl_goes_on_in_an_existing_file(tmp_path: Path) -> None:
    for start in (0, 3):
        model = nn.Linear(2, 1)
        monitor = ModuleMonitor(model)
        monitor.add_sink(JsonlSink(str(tmp_path / "m.jsonl")))
        _steps(monitor, 3, start)
        monitor.detach()
    assert [row["step"] for row in _read(tmp_path / "m.jsonl")] == list(range(6))


def test_a_sink_is_an_object_with_log_or_log_metrics_or_a_callable(monitor: ModuleMonitor) -> None:
    got: list[tuple[str, int, float]] = []

    class Trainer:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            got.append(("log_metrics", step, metrics["x"]))

    class Both(Trainer):
        def log(self, values: dict[str, float], step: int) -> None:
            got.append(("log", step, values["x"]))

    monitor.add_sink(Trainer())
    monitor.add_sink(Both())
    monitor.add_sink(lambda values, step: got.append(("callable", step, values["x"])))
    _steps(monitor, 2)
    assert got == [(kind, step, float(step)) for step in range(2) for kind in ("log_metrics", "log", "callable")]


def test_a_sink_gets_plain_floats_and_a_dict_of_its_own(monitor: ModuleMonitor) -> None:
    monitor.add_parameter_metric("norm")
    second = Recorder()
    monitor.add_sink(lambda values, step: values.clear())
    monitor.add_sink(second)
    monitor.begin_step(0)
    monitor.monitor_parameters()
    monitor.log_scalar("a", torch.tensor(2))
    monitor.end_step()
    assert {type(value) for value in second.rows[0][1].values()} == {float}
    assert second.rows[0][1] == monitor.get_step_metrics()
    assert len(second.rows[0][1]) == 3


def test_keys_and_every_choose_what_a_sink_gets(monitor: ModuleMonitor) -> None:
    only, sparse = Recorder(), Recorder()
    monitor.add_sink(only, keys="^y/")
    monitor.add_sink(sparse, every=3)
    _steps(monitor, 7)
    assert only.rows == [(step, {"y/z": -float(step)}) for step in range(7)]
    assert sparse.steps == [0, 3, 6]


def test_steps_that_are_not_monitored_send_nothing() -> None:
    model, sink = nn.Linear(2, 1), Recorder()
    monitor = ModuleMonitor(model, every=4)
    monitor.add_sink(sink)
    _steps(monitor, 9)
    assert sink.steps == [0, 4, 8]


def test_a_value_logged_after_the_optimizers_step_is_in_the_row_of_that_step() -> None:
    model, sink = nn.Linear(2, 1), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_sink(sink)
    for step in range(4):
        monitor.log_scalar("before", step) if step == 0 else None
        loss = model(torch.ones(1, 2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_scalar("late", step * 10)
        assert monitor.get_step_metrics()["late"] == step * 10
    monitor.detach()
    assert [(step, row["late"]) for step, row in sink.rows] == [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0)]
    assert all("loss" in row and "gradmon/grad_norm" in row for _, row in sink.rows)
    assert sink.rows[0][1]["before"] == 0.0


# --- what a failing sink does ------------------------------------------------------------------------------------------------------


def test_a_sink_that_fails_once_is_tried_again(monitor: ModuleMonitor) -> None:
    flaky, other = Recorder(failing={1, 2, 5}), Recorder()
    monitor.add_sink(flaky)
    monitor.add_sink(other)
    with pytest.warns(GradmonWarning, match=r"sink Recorder failed in step 1; training goes on.*network is down") as caught:
        _steps(monitor, 8)
    assert len(caught) == 1
    assert flaky.steps == [0, 3, 4, 6, 7]
    assert other.steps == list(range(8))
    assert sum(monitor.complaints().values()) == 3


def test_a_sink_that_fails_three_times_in_a_row_is_dropped_and_what_it_lost_is_counted(monitor: ModuleMonitor) -> None:
    broken, other = Recorder(failing=set(range(100))), Recorder()
    monitor.add_sink(broken)
    monitor.add_sink(other)
    with pytest.warns(GradmonWarning, match="after 3 failures in a row the sink is dropped") as caught:
        _steps(monitor, 10)
    assert len(caught) == 1
    assert broken.calls == 3
    assert other.steps == list(range(10))
    assert sum(monitor.complaints().values()) == 10


def test_a_sink_that_cannot_be_closed_is_told_and_nothing_more(monitor: ModuleMonitor) -> None:
    class Sticky(Recorder):
        def close(self) -> None:
            raise OSError("busy")

    monitor.add_sink(Sticky())
    _steps(monitor, 1)
    with pytest.warns(GradmonWarning, match=r"Sticky could not be closed.*busy"):
        monitor.detach()


def _trained(sink: object | None) -> list[Tensor]:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if sink is not None:
        gradmon.watch(model, optimizer, on_spike=None).add_sink(sink)
    for batch in BY_NAME["mlp"].batches(8):
        optimizer.zero_grad()
        BY_NAME["mlp"].loss(model, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_warns_once_and_training_is_unchanged() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.warns(GradmonWarning, match=r"JsonlSink failed in step 0.*No space left") as caught:
        watched = _trained(sink)
    assert len(caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(watched, _trained(None), strict=True))
    del sink
    gc.collect()  # nothing is left in a buffer that would fail again


# --- the last step -----------------------------------------------------------------------------------------------------------------


def test_detach_sends_the_last_step_and_closes(monitor: ModuleMonitor) -> None:
    sink = Recorder()
    monitor.add_sink(sink)
    _steps(monitor, 2)
    monitor.begin_step(2)
    monitor.log_scalar("x", 7)
    monitor.detach()
    assert sink.rows[-1] == (2, {"x": 7.0})
    assert sink.closed == 1


def test_the_last_step_goes_out_when_everything_is_collected() -> None:
    sink, model = Recorder(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradmon.watch(model, optimizer).add_sink(sink)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert sink.steps == [0, 1, 2]
    assert sink.closed == 1


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "del model, optimizer", "1 / 0"])
def test_the_last_step_goes_out_when_the_interpreter_ends(end: str, tmp_path: Path) -> None:
    code = f"""
        import torch, torch_gradmon as gradmon
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradmon.watch(model, optimizer, run_dir={str(tmp_path)!r}).add_sink(gradmon.JsonlSink({str(tmp_path / "m.jsonl")!r}))
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 1) == (end == "1 / 0")
    assert "torch_gradmon" not in done.stderr
    assert [row["step"] for row in _read(tmp_path / "m.jsonl")] == [0, 1, 2]
    assert gradmon.load_run(tmp_path).steps == [0, 1, 2]
