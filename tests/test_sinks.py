"""Sinks: what they get, when, and that nothing they do can touch the training."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.sinks import FilteredSink, JsonlSink, delivery
from torch_gradmon.sinks.delivery import Delivery, PendingCall

from . import forked
from .families import BY_NAME

#: Before the tests make it longer.
_SLOW = delivery.SLOW


def _read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Recorder(gradmon.testing.RecordingSink):
    """Fails on chosen calls."""

    def __init__(self, failing: frozenset[int] | set[int] = frozenset()) -> None:
        super().__init__()
        self.failing, self.calls = failing, 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise ConnectionError("the network is down")
        super().log(values, step)


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


def test_what_a_sink_fails_to_take_is_tried_again_and_comes_in_order(monitor: ModuleMonitor) -> None:
    flaky, other = Recorder(failing={1, 2, 5}), Recorder()
    monitor.add_sink(flaky)
    monitor.add_sink(other)
    _steps(monitor, 8)
    monitor.detach()
    assert flaky.steps == other.steps == list(range(8))
    assert flaky.calls == 8 + 3
    assert monitor.warning_counts() == {}


def test_a_sink_that_fails_at_the_end_is_told(monitor: ModuleMonitor) -> None:
    flaky = Recorder(failing=set(range(3, 100)))
    monitor.add_sink(flaky)
    _steps(monitor, 5)
    with pytest.warns(GradmonWarning, match=r"the sink Recorder failed 3 times in a row, first with step 3"):
        monitor.detach()
    assert monitor.warning_counts() == {"sink:Recorder": 2}

    short = Recorder(failing=set(range(4, 100)))
    monitor.add_sink(short)
    _steps(monitor, 5, start=10)
    with pytest.warns(GradmonWarning, match=r"last 1 row for the sink Recorder could not be sent \(ConnectionError: the network"):
        monitor.detach()


def test_a_sink_that_fails_three_times_in_a_row_is_dropped_and_what_it_lost_is_counted(
    monitor: ModuleMonitor, tmp_path: Path
) -> None:
    broken, other = Recorder(failing=set(range(100))), Recorder()
    monitor.add_sink(broken)
    monitor.add_sink(other)
    with pytest.warns(GradmonWarning, match=r"failed 3 times in a row.*is dropped; training continues \(Conn") as caught:
        _steps(monitor, 10)
        monitor.detach()
    assert len(caught) == 1
    assert broken.calls == 3
    assert other.steps == list(range(10))
    assert monitor.warning_counts() == {"sink:Recorder": 10}


def test_what_a_dropped_sink_missed_is_in_the_run_directory(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = ModuleMonitor(model, run_dir=tmp_path / "run")
    monitor.add_sink(Recorder(failing=set(range(100))))
    with pytest.warns(GradmonWarning, match=r"is dropped.*; all rows are in the run directory '.*run'"):
        _steps(monitor, 6)
    monitor.detach()
    assert gradmon.load_run(tmp_path / "run").series("x") == {step: step for step in range(6)}


# --- slow sinks --------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(delivery.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(delivery, "SLOW", _SLOW)


def _slow_rows(clock: Clock, seconds: float, training: float, complaints: WarningLog, count: int = 6) -> int:
    taken = []

    def call() -> None:
        clock.now += seconds
        taken.append(clock.now)

    sent = Delivery("Slow", complaints)
    for step in range(count):
        clock.now += training
        sent.put(PendingCall(step, call))
    return len(taken)


def test_a_sink_that_takes_longer_than_training_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = WarningLog()
    with pytest.warns(GradmonWarning, match=r"the sink Slow took 2.0 s for a row, longer than training.*thread=True") as caught:
        assert _slow_rows(Clock(monkeypatch), 2.0, 0.1, complaints) == 4  # the first may set itself up
    assert len(caught) == 1
    assert complaints.counts["sink:Slow"] == 2


@pytest.mark.parametrize(("seconds", "training"), [(0.4, 0.01), (5.0, 6.0)], ids=["short", "shorter than training"])
def test_a_sink_that_holds_nobody_up_is_kept(seconds: float, training: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _slow_rows(Clock(monkeypatch), seconds, training, WarningLog()) == 6


def test_in_a_thread_a_sink_may_hang_and_training_does_not_wait(monitor: ModuleMonitor) -> None:
    gate = threading.Event()
    rows: list[int] = []
    threads = set()

    def hanging(values: dict[str, float], step: int) -> None:
        gate.wait(30)
        threads.add(threading.current_thread().name)
        rows.append(step)

    monitor.add_sink(hanging, thread=True)
    _steps(monitor, 20)
    assert rows == []  # and all steps are done
    gate.set()
    monitor.detach()
    assert rows == list(range(20))
    assert threads == {"torch_gradmon hanging"}
    assert monitor.warning_counts() == {}


def test_in_a_thread_what_fails_is_tried_again_too(monitor: ModuleMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_PAUSE", 0.001)
    flaky = Recorder(failing={1, 2, 5})
    monitor.add_sink(flaky, thread=True)
    _steps(monitor, 8)
    monitor.detach()
    assert flaky.steps == list(range(8))


def test_in_a_thread_a_broken_sink_is_dropped(monitor: ModuleMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_PAUSE", 0.001)
    broken = Recorder(failing=set(range(100)))
    monitor.add_sink(broken, thread=True)
    with pytest.warns(GradmonWarning, match="failed 3 times in a row"):
        _steps(monitor, 8)
        monitor.detach()
    assert broken.calls == 3
    assert monitor.warning_counts() == {"sink:Recorder": 8}


def test_in_a_thread_too_many_rows_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, complaints = threading.Event(), WarningLog()
    monkeypatch.setattr(delivery, "CAPACITY", 5)
    sent = Delivery("Stuck", complaints, lambda: "the run directory 'x'", thread=True)
    taken: list[int] = []

    def call(step: int) -> None:
        gate.wait(30)
        taken.append(step)

    with pytest.warns(GradmonWarning, match=r"so slow that 5 rows wait for it.*all rows are in the run directory 'x'") as caught:
        for step in range(20):
            sent.put(PendingCall(step, functools.partial(call, step)))
    assert len(caught) == 1
    gate.set()
    sent.close()
    assert len(taken) + complaints.counts["sink:Stuck"] == 20
    assert taken == list(range(len(taken)))


def test_a_sink_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    script = """
    import threading, time
    from torch import nn
    from torch_gradmon import ModuleMonitor
    from torch_gradmon.sinks import delivery

    delivery._LAST = 0.5
    lock = threading.Lock()

    class Hanging:
        def log(self, values, step):
            with lock:
                time.sleep(1000)

        def close(self):
            with lock:
                pass

    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model)
    monitor.add_sink(Hanging(), thread=True)
    for step in range(5):
        monitor.begin_step(step)
        monitor.log_scalar("x", step)
        monitor.end_step()
    """
    done = forked.run(textwrap.dedent(script), cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert "the sink Hanging did not take its last 5 rows within" in done.stderr


@pytest.mark.parametrize("thread", [False, True], ids=["beside", "in a thread"])
def test_a_sink_that_wants_to_exit_is_a_sink_that_fails(
    thread: bool, monitor: ModuleMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_PAUSE", 0.001)
    rows, once = [], [True]

    def leaving(values: dict[str, float], step: int) -> None:
        if once:
            once.clear()
            raise SystemExit
        rows.append(step)

    monitor.add_sink(leaving, thread=thread)
    _steps(monitor, 5)
    monitor.detach()
    assert rows == list(range(5))


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_no_sink_loses_a_row_by_that_of_another(
    monitor: ModuleMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_PAUSE", 0.001)
    other, late = Recorder(), Recorder(failing=set(range(100)))
    monitor.add_sink(Recorder(failing=set(range(100))))
    monitor.add_sink(late, thread=True)
    monitor.add_sink(other)
    for step in range(6):
        with contextlib.suppress(GradmonWarning):
            _steps(monitor, 1, start=step)
    with contextlib.suppress(GradmonWarning):
        monitor.detach()
    assert other.steps == list(range(6))
    assert monitor.warning_counts() == {"sink:Recorder": 6, "sink:Recorder:2": 6}


def test_that_a_sink_is_dropped_is_said_also_where_something_was_said_before(monitor: ModuleMonitor) -> None:
    broken = Recorder(failing=set(range(1, 100)))
    monitor.add_sink(broken)
    _steps(monitor, 2)
    with pytest.warns(GradmonWarning, match="last 1 row"):
        monitor.detach()
    with pytest.warns(GradmonWarning, match="is dropped"):
        _steps(monitor, 3, start=2)
    monitor.detach()


def test_a_sink_may_do_with_its_dict_as_it_likes(monitor: ModuleMonitor) -> None:
    rows, failing = [], [True]

    def eats(values: dict[str, float], step: int) -> None:
        found = values.pop("x")
        if failing:
            failing.clear()
            raise ConnectionError
        rows.append(found)

    monitor.add_sink(eats)
    _steps(monitor, 4)
    monitor.detach()
    assert rows == [0, 1, 2, 3]


def test_spikes_are_not_counted_as_rows(monitor: ModuleMonitor) -> None:
    class Broken(Recorder):
        def log_spike(self, event: SpikeEvent, text: str) -> None:
            raise ConnectionError

    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.add_sink(Broken(failing=set(range(100))), every=10)
    with pytest.warns(GradmonWarning, match="is dropped"):
        for step in range(60):
            monitor.begin_step(step)
            monitor.log_scalar("loss", 100.0 if step == 50 else 1.0 + step % 3 / 10)
            monitor.end_step()
        monitor.detach()
    assert monitor.warning_counts() == {"sink:Broken": 6}


# --- what else a sink gets ---------------------------------------------------------------------------------------------------------


def test_between_two_rows_no_spike_of_the_norm_is_lost() -> None:
    sent = Recorder()
    outlet = FilteredSink(sent, None, 5, WarningLog())
    norms = [1.0, 9.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0, 7.0, 1.0, 1.0, math.inf, 1.0, math.nan, 50.0, 4.0]
    for step, norm in enumerate(norms):
        outlet.send({"gradmon/grad_norm": norm, "x": 0.0}, step)
    largest = [values["gradmon/grad_norm_max"] for _, values in sent.rows]
    assert largest[:3] == [1.0, 9.0, 7.0]
    assert math.isnan(largest[3])
    assert [values["gradmon/grad_norm"] for _, values in sent.rows] == norms[::5]


@pytest.mark.parametrize(("keys", "expected"), [("grad_norm$", {"gradmon/grad_norm", "gradmon/grad_norm_max"}), ("x", {"x"})])
def test_the_largest_norm_goes_where_the_norm_goes(keys: str, expected: set[str]) -> None:
    sent = Recorder()
    outlet = FilteredSink(sent, keys, 2, WarningLog())
    outlet.send({"gradmon/grad_norm": 1.0, "x": 0.0}, 0)
    assert sent.rows[0][1].keys() == expected


def test_the_largest_norm_waits_for_a_row_where_the_step_of_one_has_none() -> None:
    sent = Recorder()
    outlet = FilteredSink(sent, None, 5, WarningLog())
    for step in range(11):
        norm = {3: 100.0, 8: 2.0}.get(step, 1.0)
        outlet.send({"x": 0.0} if step == 5 else {"gradmon/grad_norm": norm, "x": 0.0}, step)
    assert [values.get("gradmon/grad_norm_max") for _, values in sent.rows] == [1.0, 100.0, 2.0]


def test_every_step_has_its_own_norm() -> None:
    sent = Recorder()
    FilteredSink(sent, None, 1, WarningLog()).send({"gradmon/grad_norm": 1.0}, 0)
    assert sent.rows == [(0, {"gradmon/grad_norm": 1.0})]


def test_a_sink_is_told_of_spikes_whatever_keys_and_every_say(monitor: ModuleMonitor) -> None:
    told: list[tuple[int, str]] = []

    class Listener(Recorder):
        def log_spike(self, event: SpikeEvent, text: str) -> None:
            told.append((event.step, text))

    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    monitor.add_sink(Listener(), keys="nothing", every=1000)
    for step in range(60):
        monitor.begin_step(step)
        monitor.log_scalar("loss", 100.0 if step == 50 else 1.0 + step % 3 / 10)
        monitor.end_step()
    monitor.detach()
    assert [step for step, _ in told] == [50]
    assert told[0][1].startswith("step 50: loss = 100 is 90.9 times the usual 1.1")


def test_jsonl_goes_on_behind_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 1.0}\n{"step": 1, "x"')
    sink = JsonlSink(path)
    sink.log({"x": 2.0}, 2)
    sink.close()
    assert path.read_text().splitlines() == ['{"step": 0, "x": 1.0}', '{"step": 1, "x"', '{"step": 2, "x": 2.0}']


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
    with pytest.warns(GradmonWarning, match=r"JsonlSink failed 3 times in a row, first with step 0.*No space left") as caught:
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
        import warnings, torch, torch_gradmon as gradmon
        warnings.simplefilter("error")
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradmon.watch(model, optimizer, run_dir={str(tmp_path)!r}).add_sink(gradmon.sinks.JsonlSink({str(tmp_path / "m.jsonl")!r}))
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        {end}
    """
    done = forked.run(textwrap.dedent(code))
    assert (done.returncode == 1) == (end == "1 / 0")
    assert "torch_gradmon" not in done.stderr
    assert [row["step"] for row in _read(tmp_path / "m.jsonl")] == [0, 1, 2]
    assert gradmon.load_run(tmp_path).steps == [0, 1, 2]


def test_a_sink_that_is_removed_gets_the_last_row_is_closed_and_hears_no_more() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, sink = gradmon.watch(model, optimizer), gradmon.testing.RecordingSink()
    handle = monitor.add_sink(sink)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        if step == 2:
            assert sink.steps == [0, 1], "the last row waits for the next step"
            handle.remove()
            assert sink.steps == [0, 1, 2]
            assert sink.closed == 1
    monitor.detach()
    assert sink.steps == [0, 1, 2]
    handle.remove()  # a second time, and after the end
    assert sink.closed == 1


def test_a_forked_process_sends_nothing_twice(tmp_path: Path) -> None:
    """In a program of its own: what runs at the end of a fork undoes what its parent has, such as temporary directories."""
    script = """
import atexit, os, torch
from torch import nn
import torch_gradmon as gradmon

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir="run")
monitor.add_sink(gradmon.sinks.JsonlSink("rows.jsonl"))
for step in range(6):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            atexit._run_exitfuncs()
            os._exit(0)
"""
    done = forked.run(script, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert gradmon.load_run(tmp_path / "run").steps == list(range(6))


def _trained_model(count: int, run_dir: Path, sink: Any = None) -> ModuleMonitor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=run_dir)
    if sink is not None:
        monitor.add_sink(sink)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    with torch.inference_mode():
        monitor.get_step_metrics()
    monitor.detach()
    return monitor


@pytest.mark.parametrize("at", [2, 4], ids=["in the loop", "at the end"])
def test_a_training_inside_of_a_sink_is_recorded_like_any_other(at: int, tmp_path: Path) -> None:
    def probe(values: dict[str, float], step: int) -> None:
        if step == at:
            _trained_model(3, tmp_path / "inner")

    alone = _trained_model(5, tmp_path / "alone")
    outer = _trained_model(5, tmp_path / "outer", probe)
    assert gradmon.load_run(tmp_path / "inner").steps == [0, 1, 2]
    assert outer.warning_counts() == alone.warning_counts() == {}
    norms = [gradmon.load_run(tmp_path / name).series("gradmon/grad_norm") for name in ("alone", "inner", "outer")]
    assert norms[1] == {step: norms[0][step] for step in range(3)}
    assert norms[2].keys() == norms[0].keys()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_what_is_called_about_a_spike_may_train(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, on_spike=lambda event: _trained_model(3, tmp_path))
    monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
    for step in range(40):
        monitor.begin_step(step)
        monitor.log_scalar("loss", 1.0 + 0.01 * (step % 5) + 100.0 * (step == 30))
        monitor.end_step()
    monitor.detach()
    assert gradmon.load_run(tmp_path).steps == [0, 1, 2]
    assert "on_spike" not in monitor.warning_counts()
