"""The W&B sink with the real package, offline; what it wrote is read back from its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, WandbSink
from torch_gradmon.sinks.wandb import AXIS, counter_of

from .wandb_files import history, records, summary

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.extra

STEPS = 45
#: Kept here, since a monitor keeps no model alive.
MODEL = nn.Linear(1, 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    run = wandb.init(project="tests", dir=tmp_path)
    yield run
    run.finish()


# --- what the script logs beside the monitor ---------------------------------------------------------------------------------------


def _nothing(run: Any, step: int) -> None:
    pass


def _without_step(run: Any, step: int) -> None:
    run.log({"loss": step})


def _twice_without_step(run: Any, step: int) -> None:
    run.log({"loss": step})
    run.log({"accuracy": step})


def _in_two_parts(run: Any, step: int) -> None:
    run.log({"loss": step}, commit=False)
    run.log({"accuracy": step})


def _with_step(run: Any, step: int) -> None:
    run.log({"loss": step}, step=step)


def _with_step_from_one(run: Any, step: int) -> None:
    run.log({"loss": step}, step=step + 1)


def _with_step_in_two_parts(run: Any, step: int) -> None:
    run.log({"loss": step}, step=step)
    run.log({"accuracy": step}, step=step)


def _every_tenth_without_step(run: Any, step: int) -> None:
    if step % 10 == 9:
        run.log({"loss": step})


def _every_tenth_with_step(run: Any, step: int) -> None:
    if step % 10 == 0:
        run.log({"loss": step}, step=step)


def _with_tokens_for_step(run: Any, step: int) -> None:
    if step % 10 == 0:
        run.log({"loss": step}, step=4096 * step)


def _epochs_with_step(run: Any, step: int) -> None:
    if step % 10 == 9:
        run.log({"loss": step}, step=step // 10)


def _epochs_with_step_and_one_before(run: Any, step: int) -> None:
    if step % 10 == 0:
        run.log({"loss": step}, step=step // 10)


SCRIPTS: list[Callable[[Any, int], None]] = [
    _nothing,
    _without_step,
    _twice_without_step,
    _in_two_parts,
    _with_step,
    _with_step_from_one,
    _with_step_in_two_parts,
    _every_tenth_without_step,
    _every_tenth_with_step,
    _with_tokens_for_step,
    _epochs_with_step,
    _epochs_with_step_and_one_before,
]


class Spy:
    """Passes everything on to the run and keeps what the script logged."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.logged: list[tuple[str, float]] = []

    def log(self, values: dict[str, float], **how: Any) -> None:
        self.logged += values.items()
        self.run.log(values, **how)


def _pairs(rows: list[dict[str, Any]], *keys: str) -> list[tuple[str, float]]:
    return [(key, row[key]) for row in rows for key in row if key in keys]


@pytest.mark.parametrize("first", ["the monitor first", "the script first"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.filterwarnings("ignore:.*counts more slowly than training steps:torch_gradmon.GradmonWarning")
def test_no_row_is_lost_neither_ours_nor_the_scripts(
    script: Callable[[Any, int], None], first: str, run: Any, tmp_path: Path
) -> None:
    spy = Spy(run)
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(WandbSink(run, patience=12))
    for step in range(STEPS):
        if first == "the script first":
            script(spy, step)
        monitor.begin_step(step)
        monitor.log_scalar("gradient/fc/norm", step / 8)
        monitor.end_step()
        if first == "the monitor first":
            script(spy, step)
        assert counter_of(run) == run.step
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    ours = [(row[AXIS], row["gradient/fc/norm"]) for row in rows if "gradient/fc/norm" in row]
    assert ours == [(step, step / 8) for step in range(STEPS)]
    assert sorted(_pairs(rows, "loss", "accuracy")) == sorted(spy.logged)
    assert monitor.complaints() == {}


def test_a_script_that_logs_every_step_keeps_its_step_numbers(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(20):
        monitor.begin_step(step)
        monitor.log_scalar("x", step)
        monitor.end_step()
        run.log({"loss": step})
    monitor.detach()
    run.finish()
    assert [(row["_step"], row["loss"]) for row in history(tmp_path) if "loss" in row] == [(step, step) for step in range(20)]


def test_with_step_both_are_in_the_same_row(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(20):
        monitor.begin_step(step)
        monitor.log_scalar("x", step)
        monitor.end_step()
        run.log({"loss": step}, step=step)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == list(range(20))
    assert all(row["loss"] == row["x"] == row[AXIS] == row["_step"] for row in rows)


def test_what_the_script_merges_by_hand_needs_no_sink(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    for step in range(5):
        monitor.begin_step(step)
        monitor.log_scalar("x", step)
        monitor.end_step()
        run.log({"loss": step, **monitor.get_step_metrics()})
    run.finish()
    assert [(row["loss"], row["x"]) for row in history(tmp_path)] == [(step, step) for step in range(5)]


def test_rows_come_while_the_run_goes_on(run: Any) -> None:
    sink = WandbSink(run, patience=5)
    for step in range(20):
        sink.log({"x": step}, step)
    assert run.step == 20


def test_a_clock_that_is_slower_than_steps_is_told_once(run: Any, tmp_path: Path) -> None:
    sink = WandbSink(run, patience=5)
    with pytest.warns(GradmonWarning, match=r"counts more slowly than training steps.*kept back until it is detached") as caught:
        for step in range(40):
            if step % 10 == 0:
                run.log({"loss": step}, step=step // 10)
            sink.log({"x": step}, step)
    assert len(caught) == 1
    sink.close()
    run.finish()
    assert _pairs(history(tmp_path), "x") == [("x", step) for step in range(40)]
    assert _pairs(history(tmp_path), "loss") == [("loss", step) for step in range(0, 40, 10)]


# --- a run ---------------------------------------------------------------------------------------------------------------------------


def _train(monitor: ModuleMonitor, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[int, dict[str, float]]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return {step: dict(values) for step, values in monitor.get_all_metrics().items()}


def test_a_watched_run_reads_back_with_its_values(run: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, layers="all")
    monitor.add_sink(WandbSink())  # the active run
    expected = _train(monitor, model, optimizer, 12)
    monitor.detach()
    expected = {step: dict(values) for step, values in monitor.get_all_metrics().items()}
    run.finish()
    rows = {row[AXIS]: {k: v for k, v in row.items() if not k.startswith("_") and k != AXIS} for row in history(tmp_path)}
    assert rows == expected
    assert any(key.startswith("gradient_before_clip/") for key in rows[0])


def test_layers_stay_out_of_the_summary_and_have_the_monitors_axis(run: Any, tmp_path: Path) -> None:
    values = {"gradmon/grad_norm": 1.0, "gradient/a.b/norm": 2.0, "update_ratio/a.b": 3.0, "activation/a/mean": 4.0, "epoch": 5.0}
    sink = WandbSink(run)
    for step in range(3):
        sink.log(values, step)
    run.finish()
    assert {key for key in summary(tmp_path) if not key.startswith("_")} == {"gradmon/grad_norm", AXIS, "epoch"}
    metrics = [record.metric for record in records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    globs = {metric.glob_name or metric.name for metric in metrics}
    sections = {"gradmon/*", "gradient/*", "update_ratio/*", "activation/*"}
    assert globs == sections | {AXIS, "epoch", r"gradient/a\.b/norm", r"update_ratio/a\.b"}
    assert {metric.step_metric for metric in metrics if metric.name != AXIS} == {AXIS}


def test_nan_and_infinity_are_kept(run: Any, tmp_path: Path) -> None:
    sink = WandbSink(run)
    sink.log({"x": math.nan, "y": math.inf, "z": -math.inf}, 0)
    run.finish()
    (row,) = history(tmp_path)
    assert math.isnan(row["x"])
    assert (row["y"], row["z"]) == (math.inf, -math.inf)


def test_a_spike_is_an_alert(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL, on_spike=None)
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.add_sink(run, every=100)
    for step in range(60):
        monitor.begin_step(step)
        monitor.log_scalar("loss", 100.0 if step == 50 else 1.0 + step % 3 / 10)
        monitor.end_step()
    monitor.detach()
    run.finish()
    alerts = [record.alert for record in records(tmp_path) if record.WhichOneof("record_type") == "alert"]
    assert [(alert.title, alert.level) for alert in alerts] == [("spike in loss", "WARN")]
    assert "step 50" in alerts[0].text


def test_two_sinks_for_one_run_get_on(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run, keys="x")
    monitor.add_sink(run, keys="y", every=5)
    for step in range(20):
        monitor.begin_step(step)
        monitor.log_scalars({"x": step, "y": step})
        monitor.end_step()
        run.log({"loss": step})
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert _pairs(rows, "x") == [("x", step) for step in range(20)]
    assert _pairs(rows, "y") == [("y", step) for step in range(0, 20, 5)]
    assert all(row[AXIS] == row["x"] for row in rows if "x" in row)
    assert all(row[AXIS] == row["y"] for row in rows if "y" in row)


# --- bad input -----------------------------------------------------------------------------------------------------------------------


def test_without_a_run_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no W&B run is active: call wandb.init\(\) before"):
        WandbSink()
    with pytest.raises(ValueError, match="no W&B run is active"):
        ModuleMonitor(MODEL).add_sink(wandb)
    with pytest.raises(TypeError, match=r"run must be what wandb.init\(\) gives, got 'mine'"):
        WandbSink("mine")


def test_a_finished_run_is_dropped_with_one_warning(run: Any) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    run.finish()
    with pytest.warns(GradmonWarning, match=r"the sink WandbSink failed 3 times in a row, first with step 0") as caught:
        for step in range(6):
            monitor.begin_step(step)
            monitor.log_scalar("x", step)
            monitor.end_step()
        monitor.detach()
    assert len(caught) == 1
