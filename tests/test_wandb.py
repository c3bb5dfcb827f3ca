"""The W&B sink with the real package, offline; what it wrote is read back from its file."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.sinks import WandbSink
from torch_gradmon.sinks.wandb import AXIS, counter_of

from . import forked
from .wandb_files import history, records, summary

wandb = pytest.importorskip("wandb")
# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = [pytest.mark.filterwarnings("ignore:torch_gradmon.*Gradients are not cleared"), pytest.mark.extra]

#: Enough for scripts that log every hundred steps or so, and for the others.
STEPS, FEW = 330, 120
#: Kept here, since a monitor keeps no model alive.
MODEL, OTHER = nn.Linear(1, 1), nn.Linear(1, 1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    run = wandb.init(project="tests", dir=tmp_path)
    yield run
    run.finish()


# --- what the script logs beside the monitor ---------------------------------------------------------------------------------------


class Script:
    """Passes everything on to the run and keeps what the script logged."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.logged: list[tuple[str, float]] = []
        self.buffer: list[int] = []

    def log(self, values: dict[str, float], **how: Any) -> None:
        self.logged += values.items()
        self.run.log(values, **how)


def _nothing(script: Script, step: int) -> None:
    pass


def _without_step(script: Script, step: int) -> None:
    script.log({"loss": step})


def _twice_without_step(script: Script, step: int) -> None:
    script.log({"loss": step})
    script.log({"accuracy": step})


def _in_two_parts(script: Script, step: int) -> None:
    script.log({"loss": step}, commit=False)
    script.log({"accuracy": step})


def _never_committed(script: Script, step: int) -> None:
    script.log({f"loss_{step}": step}, commit=False)


def _with_step(script: Script, step: int) -> None:
    script.log({"loss": step}, step=step)


def _with_step_from_one(script: Script, step: int) -> None:
    script.log({"loss": step}, step=step + 1)


def _with_step_in_two_parts(script: Script, step: int) -> None:
    script.log({"loss": step}, step=step)
    script.log({"accuracy": step}, step=step)


def _with_step_and_commit(script: Script, step: int) -> None:
    script.log({"loss": step}, step=2 * step, commit=True)


def _every_tenth_without_step(script: Script, step: int) -> None:
    if step % 10 == 9:
        script.log({"loss": step})


def _every_tenth_with_step(script: Script, step: int) -> None:
    if step % 10 == 0:
        script.log({"loss": step}, step=step)


def _every_hundredth_with_step(script: Script, step: int) -> None:
    if step % 100 == 99:
        script.log({"loss": step}, step=step)


def _with_tokens_for_step(script: Script, step: int) -> None:
    if step % 10 == 0:
        script.log({"loss": step}, step=4096 * step)


def _epochs_with_step(script: Script, step: int) -> None:
    if step % 10 == 9:
        script.log({"loss": step}, step=step // 10)


def _epochs_with_step_and_one_before(script: Script, step: int) -> None:
    if step % 10 == 0:
        script.log({"loss": step}, step=step // 10)


def _long_epochs_with_step(script: Script, step: int) -> None:
    if step % 150 == 149:
        script.log({"loss": step}, step=step // 150)


def _long_epochs_without_step(script: Script, step: int) -> None:
    if step % 150 == 149:
        script.log({"loss": step})


def _kept_and_logged_together(script: Script, step: int) -> None:
    script.buffer.append(step)
    if len(script.buffer) == 10:
        for each in script.buffer:
            script.log({"loss": each}, step=each)
        script.buffer.clear()


def _only_steps_that_were_applied(script: Script, step: int) -> None:
    if step % 17 != 5:
        script.log({"loss": step}, step=len(script.logged))


def _epochs_and_the_last(script: Script, step: int) -> None:
    epoch = step // 20
    if step % 20 == 19 and (epoch % 5 == 0 or epoch == 11):
        script.log({"loss": step}, step=epoch)


def _iterations_of_five_steps(script: Script, step: int) -> None:
    iteration = step // 5
    if step % 5 == 4 and iteration % 10 == 0:
        script.log({"loss": step}, step=iteration)
    if step % 5 == 4 and iteration % 25 == 0:
        script.log({"accuracy": step}, step=iteration)


def _parts_without_step_and_epochs_with(script: Script, step: int) -> None:
    script.log({f"rate_{step}": step}, commit=False)
    if step % 10 == 9:
        script.log({"loss": step}, step=step // 10)


def _with_a_call_that_fails(script: Script, step: int) -> None:
    script.log({"loss": step}, step=step)
    with contextlib.suppress(TypeError):
        script.run.log({1: 2})


SCRIPTS: list[Callable[[Script, int], None]] = [
    _nothing,
    _without_step,
    _twice_without_step,
    _in_two_parts,
    _never_committed,
    _with_step,
    _with_step_from_one,
    _with_step_in_two_parts,
    _with_step_and_commit,
    _every_tenth_without_step,
    _every_tenth_with_step,
    _every_hundredth_with_step,
    _with_tokens_for_step,
    _epochs_with_step,
    _epochs_with_step_and_one_before,
    _long_epochs_with_step,
    _long_epochs_without_step,
    _kept_and_logged_together,
    _only_steps_that_were_applied,
    _epochs_and_the_last,
    _iterations_of_five_steps,
    _parts_without_step_and_epochs_with,
    _with_a_call_that_fails,
]
SELDOM = (
    _every_hundredth_with_step,
    _long_epochs_with_step,
    _long_epochs_without_step,
    _epochs_and_the_last,
    _iterations_of_five_steps,
)
KEPT_BACK = "ignore:.*are kept back from this script's W&B run:torch_gradmon.GradmonWarning"


def _pairs(rows: list[dict[str, Any]], *keys: str) -> list[tuple[str, float]]:
    return [(key, row[key]) for row in rows for key in row if key in keys]


def _step(monitor: ModuleMonitor, step: int, **values: float) -> None:
    monitor.begin_step(step)
    monitor.log_scalars(values)
    monitor.end_step()


@pytest.mark.parametrize("first", ["the monitor first", "the script first"])
@pytest.mark.parametrize("logs", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.filterwarnings(KEPT_BACK)
def test_no_row_is_lost_neither_ours_nor_the_scripts(
    logs: Callable[[Script, int], None], first: str, run: Any, tmp_path: Path
) -> None:
    script, steps = Script(run), STEPS if logs in SELDOM else FEW
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(steps):
        if first == "the script first":
            logs(script, step)
        _step(monitor, step, norm=step / 8)
        if first == "the monitor first":
            logs(script, step)
        if step % 20 == 0:
            assert counter_of(run) == run.step
    monitor.detach()
    script.log({"test": 1.0}, **({"step": steps * 10_000} if "tokens" in logs.__name__ else {}))
    run.finish()
    rows = history(tmp_path)
    ours = [(row[AXIS], row["norm"]) for row in rows if "norm" in row]
    assert ours == [(step, step / 8) for step in range(steps)]
    keys = {key for key, _ in script.logged}
    assert sorted(_pairs(rows, *keys)) == sorted(script.logged)
    assert monitor.warning_counts() == {}


@pytest.mark.filterwarnings(KEPT_BACK)
def test_every_tenth_step_and_an_evaluation_between(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run, every=10)
    logged = []
    for step in range(400):
        _step(monitor, step, x=step)
        if step % 100 == 99 or step in (201, 303):
            logged.append(step)
            run.log({"loss": step}, step=step)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert [value for _, value in _pairs(rows, "loss")] == logged
    assert _pairs(rows, "x") == [("x", step) for step in range(0, 400, 10)]


@pytest.mark.filterwarnings(KEPT_BACK)
def test_two_monitors_of_different_clocks(run: Any, tmp_path: Path) -> None:
    fast, slow = ModuleMonitor(MODEL), ModuleMonitor(OTHER)
    for monitor in (fast, slow):
        monitor.add_sink(run)
    logged = []
    for step in range(300):
        _step(fast, step, fast=step)
        if step % 5 == 4:
            iteration = step // 5
            _step(slow, iteration, slow=iteration)
            if iteration % 10 == 0 or iteration % 25 == 0:
                logged.append(iteration)
                run.log({"loss": iteration}, step=iteration)
    fast.detach()
    slow.detach()
    run.finish()
    rows = history(tmp_path)
    assert [value for _, value in _pairs(rows, "loss")] == logged
    assert sorted(_pairs(rows, "fast")) == [("fast", step) for step in range(300)]
    assert sorted(_pairs(rows, "slow")) == [("slow", step) for step in range(60)]


@pytest.mark.filterwarnings(KEPT_BACK)
def test_one_sink_for_two_monitors(run: Any, tmp_path: Path) -> None:
    one, other, sink = ModuleMonitor(MODEL), ModuleMonitor(OTHER), WandbSink(run)
    one.add_sink(sink)
    other.add_sink(sink)
    for step in range(30):
        _step(one, step, one=step)
        _step(other, step, other=step)
    one.detach()
    other.detach()
    run.finish()
    rows = history(tmp_path)
    assert _pairs(rows, "one") == [("one", step) for step in range(30)]
    assert _pairs(rows, "other") == [("other", step) for step in range(30)]


def test_a_spike_that_is_raised_at_the_end_keeps_no_row_back(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL, on_spike="raise")
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.add_sink(run)
    for step in range(60):
        _step(monitor, step, loss=1.0 + step % 3 / 10)
    monitor.begin_step(60)
    monitor.log_scalar("loss", 1e6)
    run.finish()  # in the middle of a step, which ends with it
    assert [row[AXIS] for row in history(tmp_path)] == list(range(61))


def test_a_run_that_is_disabled_takes_everything_and_keeps_nothing(tmp_path: Path) -> None:
    disabled = wandb.init(mode="disabled", dir=tmp_path)
    for given in (disabled, WandbSink(disabled)):
        monitor = ModuleMonitor(MODEL)
        monitor.add_sink(given)
        for step in range(150):
            _step(monitor, step, x=step)
        monitor.detach()
        assert monitor.warning_counts() == {}
    disabled.finish()


@pytest.mark.filterwarnings("error")
def test_no_warning_of_ours_is_raised_by_the_scripts_own_call(run: Any) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(30):
        with contextlib.suppress(GradmonWarning):
            _step(monitor, step, x=step)
        run.log({"loss": step}, **({} if step < 20 else {"step": step // 10}))
    with contextlib.suppress(GradmonWarning):
        monitor.detach()


@pytest.mark.filterwarnings(KEPT_BACK)
def test_what_was_logged_before_the_training_says_nothing_of_it(run: Any, tmp_path: Path) -> None:
    run.log({"parameters": 7})
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(60):
        _step(monitor, step, x=step)
        if step % 10 == 5:
            run.log({"loss": step}, step=step)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert _pairs(rows, "loss") == [("loss", step) for step in range(5, 60, 10)]
    assert _pairs(rows, "x") == [("x", step) for step in range(60)]


def test_a_script_that_logs_every_step_keeps_its_step_numbers(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(20):
        _step(monitor, step, x=step)
        run.log({"loss": step})
    monitor.detach()
    run.finish()
    assert [(row["_step"], row["loss"]) for row in history(tmp_path) if "loss" in row] == [(step, step) for step in range(20)]


def test_with_step_both_are_in_the_same_row(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(20):
        _step(monitor, step, x=step)
        run.log({"loss": step}, step=step)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert [row["_step"] for row in rows] == list(range(20))
    assert all(row["loss"] == row["x"] == row[AXIS] == row["_step"] for row in rows)


def test_what_the_script_merges_by_hand_needs_no_sink(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    for step in range(5):
        _step(monitor, step, x=step)
        run.log({"loss": step, **monitor.get_step_metrics()})
    run.finish()
    assert [(row["loss"], row["x"]) for row in history(tmp_path)] == [(step, step) for step in range(5)]


@pytest.mark.parametrize(
    ("logs", "lag"),
    [
        (_without_step, 0),
        (_every_tenth_without_step, 10),
        (_with_step, 0),
        (_every_tenth_with_step, 20),
        (_every_hundredth_with_step, 200),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings(KEPT_BACK)
def test_rows_come_while_the_run_goes_on(logs: Callable[[Script, int], None], lag: int, run: Any) -> None:
    script, sink = Script(run), WandbSink(run)
    for step in range(450):
        logs(script, step)
        sink.log({"x": step}, step)
        if step > lag + 1:  # two rows of the script show how it goes on
            assert len(sink._held) <= lag


def test_alone_nothing_is_kept_back(run: Any, tmp_path: Path) -> None:
    sink = WandbSink(run, alone=True)
    for step in range(150):
        sink.log({"x": step}, step)
    run.finish()
    assert _pairs(history(tmp_path), "x") == [("x", step) for step in range(150)]


def test_what_is_kept_back_is_told_once(run: Any) -> None:
    script, monitor = Script(run), ModuleMonitor(MODEL)
    monitor.add_sink(run)
    words = "kept back from this script's W&B run until it finishes, because .*counts more slowly than training steps"
    with pytest.warns(GradmonWarning, match=words) as caught:
        for step in range(250):
            _step(monitor, step, x=step)
            _epochs_with_step(script, step)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error")
def test_rows_come_at_once_while_the_script_logs_nothing(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(150):
        _step(monitor, step, x=step)
        assert counter_of(run) >= step - 1
    monitor.detach()
    run.finish()
    assert _pairs(history(tmp_path), "x") == [("x", step) for step in range(150)]


def test_steps_named_late_are_counted_from_the_monitors_rows(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for step in range(60):
        _step(monitor, step, x=step)
        if step % 20 == 19:
            run.log({"loss": step}, step=step // 20)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert [row["_step"] for row in rows if "loss" in row] == [19, 20, 21]
    assert _pairs(rows, "loss") == [("loss", 19), ("loss", 39), ("loss", 59)]
    assert _pairs(rows, "x") == [("x", step) for step in range(60)]


def test_a_script_that_begins_to_name_steps_is_told_that_wandb_drops_them(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    with pytest.warns(GradmonWarning, match="logged to W&B with step=30, where its run stood at [0-9]+ already; W&B drops"):
        for step in range(60):
            _step(monitor, step, x=step)
            if step < 30 and step % 5 == 0:
                run.log({"loss": step})
            elif step >= 30:
                run.log({"loss": step}, step=step)
    monitor.detach()
    run.finish()
    assert _pairs(history(tmp_path), "x") == [("x", step) for step in range(60)]


def test_after_a_rollback_wandb_drops_no_more_than_it_would_by_itself(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    for count in range(80):
        step = count if count < 30 else count - 15
        _step(monitor, count, x=count)
        run.log({"loss": count}, step=step)
    monitor.detach()
    run.finish()
    dropped = range(30, 44)
    assert [value for _, value in _pairs(history(tmp_path), "loss")] == [n for n in range(80) if n not in dropped and n != 29]
    assert _pairs(history(tmp_path), "x") == [("x", count) for count in range(80)]


def test_a_run_that_is_detached_and_attached_again_goes_on(run: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_sink(run)
    for step in range(40):
        if step == 25:
            monitor.detach()
            monitor.attach(optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step % 10 == 9:
            run.log({"loss": step}, step=step // 10)
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert [value for _, value in _pairs(rows, "loss")] == [9, 19, 29, 39]
    assert [row[AXIS] for row in rows if AXIS in row] == list(range(40))


def test_a_row_that_failed_half_way_is_there_once(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(WandbSink(run, alone=True))
    real, calls = run.log, []

    def flaky(*args: Any, **how: Any) -> None:
        calls.append(args)
        if len(calls) in (3, 4, 9):
            raise OSError("no connection")
        real(*args, **how)

    monkeypatch.setattr(run, "log", flaky)
    for step in range(15):
        _step(monitor, step, x=step)
    monitor.detach()
    run.finish()
    assert _pairs(history(tmp_path), "x") == [("x", step) for step in range(15)]
    assert monitor.warning_counts() == {}


@pytest.mark.filterwarnings(KEPT_BACK)
def test_what_can_be_kept_back_no_longer_is_counted(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.sinks.wandb.MOST", 60)
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)
    run.log({"epoch": 0}, step=0)  # a script whose steps are none of the monitor's
    for step in range(100):
        _step(monitor, step, x=step)
    monitor.detach()
    run.finish()
    kept = [value for _, value in _pairs(history(tmp_path), "x")]
    assert kept == [0, *range(70, 100)]
    assert monitor.warning_counts() == {"sink:WandbSink": 69}


def test_another_thread_may_log_at_the_same_time(run: Any, tmp_path: Path) -> None:
    monitor = ModuleMonitor(MODEL)
    monitor.add_sink(run)

    def script() -> None:
        for step in range(200):
            run.log({"loss": step}, step=step)
            run.log({"accuracy": step}, step=step)

    thread = threading.Thread(target=script)
    thread.start()
    for step in range(200):
        _step(monitor, step, x=step)
    thread.join()
    monitor.detach()
    run.finish()
    rows = history(tmp_path)
    assert sorted(_pairs(rows, "x")) == [("x", step) for step in range(200)]
    assert _pairs(rows, "accuracy") == [("accuracy", step) for step in range(200)]


def test_a_thread_of_our_own_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="W&B takes rows without delay"):
        ModuleMonitor(MODEL).add_sink(run, thread=True)


@pytest.mark.parametrize("end", ["", "run.finish()", "monitor.detach(); run.finish()", "raise SystemExit", "1 / 0"])
def test_no_row_is_lost_however_the_script_ends(end: str, tmp_path: Path) -> None:
    script = f"""
import torch, wandb
from torch import nn
import torch_gradmon as gradmon

run = wandb.init(project="tests")
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gradmon.watch(model, optimizer, on_spike=None)
monitor.add_sink(run)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""
    settings = {**os.environ}
    settings.pop("WANDB_SERVICE", None)  # that of the tests would go on beyond the script's end
    done = forked.run(script, environment=settings, cwd=tmp_path, timeout=120)
    assert done.returncode == (1 if end == "1 / 0" else 0), done.stderr
    assert "GradmonWarning" not in done.stderr
    rows = history(tmp_path)
    assert [row[AXIS] for row in rows] == list(range(5))
    assert all("gradmon/grad_norm" in row for row in rows)


# --- a run ---------------------------------------------------------------------------------------------------------------------------


def test_a_watched_run_reads_back_with_its_values(run: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, layers="all")
    monitor.add_sink(WandbSink())  # the active run
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    expected = {step: dict(values) for step, values in monitor.get_all_metrics().items()}
    run.finish()
    rows = {row[AXIS]: {k: v for k, v in row.items() if not k.startswith("_") and k != AXIS} for row in history(tmp_path)}
    assert rows == expected
    assert any(key.startswith("gradient_before_clip/") for key in rows[0])


def test_layers_stay_out_of_the_summary_and_have_the_monitors_axis(run: Any, tmp_path: Path) -> None:
    own = {"gradmon/grad_norm", "run1_gradmon/grad_norm"}
    layers = {"gradient/a.b/norm", "update_ratio/a.b", "activation/[root module]/mean", "attention_entropy/a.head_1"}
    layers |= {"run1_gradient/a.b/norm", "mine/gradient/a.b/norm", "gradient_before_clip/a/b.std"}
    free = {"epoch", "train/loss", "optimizer/lr", "my*key", "update/all"}
    sink = WandbSink(run)
    for step in range(3):
        run.log({"own": step})
        sink.log(dict.fromkeys(own | layers | free, 1.0), step)
    run.finish()
    assert {key for key in summary(tmp_path) if not key.startswith("_")} == own | free | {AXIS, "own"}
    metrics = [record.metric for record in records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert not [metric.glob_name for metric in metrics if metric.glob_name]  # nothing of the script's falls under it
    defined = {metric.name.replace("\\.", "."): metric.step_metric for metric in metrics}
    assert defined == {AXIS: "", **dict.fromkeys(own | layers, AXIS)}


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
    with pytest.warns(
        GradmonWarning, match=r"WandbSink failed 3 times in a row, first with step 0.*the run is finished"
    ) as caught:
        for step in range(6):
            monitor.begin_step(step)
            monitor.log_scalar("x", step)
            monitor.end_step()
        monitor.detach()
    assert len(caught) == 1
