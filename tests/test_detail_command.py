"""``gradmon detail`` as people call it: beside a training in a process of its own, and what it says of wrong requests."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import load_run
from torch_gradmon.cli.main import main
from torch_gradmon.runs import detail_request
from torch_gradmon.runs import liveness as pulse

from . import forked
from .stored_runs import VALUES

pytestmark = pytest.mark.thorough

_TRAINING = """
import os, sys, time, torch, warnings
from torch import nn
import torch_gradmon as gradmon
warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", "torch_gradmon: the run directory .* takes its place")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
monitor = gradmon.watch(model, optimizer, every=1000, run_dir=sys.argv[1], on_spike=None)
end = time.time() + 240
while time.time() < end and not os.path.exists(sys.argv[1] + "/stop"):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    if monitor.current_step == 0:
        print("begun", flush=True)
    time.sleep(0.005)
"""
_COMMAND = "import sys; from torch_gradmon.cli.main import main; sys.exit(main())"


def _command(*words: object, limit: float = 120.0) -> subprocess.CompletedProcess[str]:
    return forked.run(_COMMAND, "detail", *words, timeout=limit)


@contextlib.contextmanager
def _training(directory: Path) -> Iterator[forked.Program]:
    with forked.start(_TRAINING, directory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


def test_a_training_in_another_process_is_tuned_and_goes_back_by_itself(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with _training(directory) as process:
        asked = time.time()
        told = _command(directory, "--every", 1, "--preset", "full", "--for", 40, "--wait", "--timeout", 100)
        assert told.returncode == 0, told.stderr
        first, *_, last = told.stdout.splitlines()
        assert first.startswith("step 0 was recorded ")
        assert first.endswith(": the run looks alive")
        assert "until now: steps divisible by 1000, preset standard, as in the script" in told.stdout
        assert "requested, number 1: every step, preset full, for 40 steps" in told.stdout
        assert last.startswith("in force: every step, preset full, for 40 steps (number 1); from step ")
        begun, _, ended = last.rpartition("from step ")[2].partition(" to ")
        wanted = [*range(int(begun), int(ended) + 1)]
        assert len(wanted) == 40
        while len(_fine(directory)) < 40 and process.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)  # some 50 steps more
        with contextlib.closing(load_run(directory)) as run:
            assert [step for step in run.steps if step % 1000] == [step for step in wanted if step % 1000]
            assert run._reader.table("activation", wanted[0]) is not None
            assert run._reader.table("activation", 0) is None
            assert run.record(wanted[0]).context["tuned"] == {"every": 1, "preset": "full", "number": 1}
            # the command had to start, then there is a look a second, and a step; the machine may be busy
            assert run.record(wanted[0]).context["time"] - asked < 60
        status = _command(directory, "--status").stdout
        assert (
            f"the last one: every step, preset full, for 40 steps (number 1); from step {begun} to {ended}; its steps are over"
            in status
        )
        assert "only the settings of the script are in force" in status
        # and once more, until it is called off
        assert _command(directory, "--every", 5, "--wait", "--timeout", 100).returncode == 0
        told = _command(directory, "--reset", "--wait", "--timeout", 100)
        assert told.returncode == 0, told.stdout + told.stderr
        assert "until now: steps divisible by 5 (number 2); from step" in told.stdout
        assert told.stdout.splitlines()[-1].startswith("applied: what the script asked for (number 3); from step ")
        (directory / "stop").touch()
        assert process.wait(60) == 0
    refused = _command(directory, "--every", 1)
    assert refused.returncode == 2
    assert "this run has ended; after it is resumed" in refused.stderr
    assert refused.stdout.splitlines()[0].endswith(": the run has ended")


def _fine(directory: Path) -> list[int]:
    with contextlib.closing(load_run(directory)) as run:
        return [step for step in run.steps if step % 1000]


def test_a_run_that_was_killed_takes_nothing_and_neither_does_the_one_that_goes_on(tmp_path: Path) -> None:
    with _training(tmp_path) as process:
        process.kill()
        process.wait(60)
    told = _command(tmp_path, "--every", 1, "--wait", "--timeout", 2)
    assert told.returncode == 1
    assert told.stdout.splitlines()[-1] == "it was not in force within 2 s; the request stays, and may still be applied"
    with _training(tmp_path):
        time.sleep(2.5)
        assert load_run(tmp_path).steps == [0]
        assert "only the settings of the script are in force" in _command(tmp_path, "--status").stdout


# --- within this process -------------------------------------------------------------------------------------------------------------


#: The trainings of a test: one that nobody holds is collected at any moment, and its run has then ended.
_RUNNING: list[Training] = []


@pytest.fixture(autouse=True)
def _trainings_run_until_the_test_ends() -> Iterator[None]:
    yield
    _RUNNING.clear()


class Training:
    """Steps on demand."""

    def __init__(self, directory: Path, **arguments: Any) -> None:
        _RUNNING.append(self)
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.monitor = gradmon.watch(
            self.model, self.optimizer, **{"every": 50, "run_dir": directory, "on_spike": None, **arguments}
        )

    def go(self, steps: int) -> Training:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
        return self


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detail_request, "PERIOD", 0.0)


def _said(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    assert main(["detail", *map(str, words)]) == code
    streams = capsys.readouterr()
    return streams.out if code < 2 else streams.err


def _refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """By the parser, or by the command."""
    try:
        code = main(["detail", *map(str, words)])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no change was given; add --every, --preset, --reset or --status"),
        (["--for", 5], "no change was given"),
        (["--every", 0], "argument --every: '0' is not a positive whole number"),
        (["--every", "1.5"], "argument --every: '1.5' is not a positive whole number"),
        (["--preset", "fulll"], "argument --preset: invalid choice: 'fulll'"),
        (["--every", 1, "--first", -1], "argument --first"),
        (["--every", 10**20], "every=100000000000000000000 of type int is too large"),
        (["--reset", "--every", 1], "--reset returns to the settings of the script, and --every contradicts it"),
        (["--status", "--reset"], "--status changes nothing, and excludes all other options"),
        (["--status", "--preset", "full"], "--status changes nothing"),
    ],
)
def test_a_wrong_request_is_told_in_one_line_and_nothing_is_written(
    words: list[object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(tmp_path).go(1)
    assert told in _refused(capsys, tmp_path, *words)
    assert not (tmp_path / detail_request.FILE_NAME).exists()


def test_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run in" in _refused(capsys, tmp_path, "--every", 1)
    (tmp_path / VALUES).write_text("something else " * 10)
    assert "is not a run of torch_gradmon" in _refused(capsys, tmp_path, "--every", 1)
    assert [path.name for path in tmp_path.iterdir()] == [VALUES]


def test_a_directory_that_may_not_be_written_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(tmp_path).go(1)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(detail_request, "replacing", denied)
    assert main(["detail", str(tmp_path), "--every", "1"]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_ranks_with_directories_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path / "rank0").go(1)
    told = _refused(capsys, tmp_path, "--every", 1)
    assert "each rank has its own run directory, and the first rank decides: name" in told
    assert "rank0" in told


@pytest.mark.usefixtures("at_once")
def test_the_file_itself_may_be_named_and_numbers_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path).go(1)
    for number in (1, 2, 3):
        assert f"number {number}: every step" in _said(capsys, 0, tmp_path / VALUES, "--every", 1, "--for", 2)
        assert detail_request.read(tmp_path / detail_request.FILE_NAME)[0].number == number
    training.go(3)
    training.monitor.set_detail(every=2)  # which is a number too
    training.go(2)
    assert "number 5: preset full" in _said(capsys, 0, tmp_path, "--preset", "full")
    (tmp_path / detail_request.FILE_NAME).write_text("broken")
    assert "number 5:" in _said(capsys, 0, tmp_path, "--preset", "full")


@pytest.mark.usefixtures("at_once")
def test_what_whoever_asks_may_not_have_thought_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path, every=1, preset="minimal").go(10)
    assert "step 3 is over, so the change begins with the next step" in _said(capsys, 0, tmp_path, "--every", 1, "--first", 3)
    assert "without --every the cadence stays that of the script: every step, preset minimal" in _said(
        capsys, 0, tmp_path, "--preset", "full", "--for", 5
    )
    training.go(2)
    status = _said(capsys, 0, tmp_path, "--status")
    assert "in force: preset full, for 5 steps (number 2); from step 11 to 15" in status
    _said(capsys, 0, tmp_path, "--every", 1, "--first", 40)
    training.go(1)
    status = _said(capsys, 0, tmp_path, "--status")
    assert "requested and not yet in force: every step (number 3); not before step 40" in status


def test_a_cadence_that_is_a_function_is_called_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 1)
    monitor = gradmon.ModuleMonitor(model, monitor_step_fn=lambda step: step < 3, run_dir=tmp_path)
    monitor.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    told = _said(capsys, 0, tmp_path, "--status")
    assert told.splitlines()[:2] == ["nothing was recorded so far", "the script: the steps of monitor_step_fn"]


def test_waiting_for_a_run_that_ends_is_over_when_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path).go(1)
    leave = training.monitor.detach

    def ends(_: float) -> None:
        leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", ends)
        told = _said(capsys, 1, tmp_path, "--every", 1, "--wait")
    assert told.splitlines()[-1] == "it was not applied: the run has ended"


@pytest.mark.usefixtures("at_once")
def test_waiting_for_one_whose_place_another_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(tmp_path).go(1)

    def another(_: float) -> None:
        session = load_run(tmp_path)._reader.meta["tune"]["session"]
        detail_request.write(tmp_path, detail_request.detail_request(every=7, number=9), session)
        training.go(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", another)
        told = _said(capsys, 1, tmp_path, "--every", 1, "--wait")
    assert told.splitlines()[-1] == "another change replaced it: steps divisible by 7 (number 9); from step 2 on"


@pytest.mark.parametrize(
    ("age", "every", "looks_alive"),
    [(5.0, 1, True), (50.0, 1, True), (1000.0, 1, False), (1000.0, 1000, True), (50_000.0, 1000, False)],
)
def test_whether_a_run_looks_alive_depends_on_how_often_it_is_monitored(
    age: float, every: int, looks_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, every=every)
    now = 1_000_000.0
    monkeypatch.setattr("torch_gradmon.step.record_builder.time.time", lambda: now)
    for _ in range(3):  # of a run whose steps take a second
        training.monitor.set_detail(every=1, steps=1)
        for _ in range(10):
            training.go(1)
            now += 1.0
    now += age
    found = pulse.run_status(tmp_path)
    assert found.looks_alive is looks_alive
    assert ("the run looks alive" in str(found)) is looks_alive


def test_without_two_records_an_old_one_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Training(tmp_path).go(3)
    assert pulse.run_status(tmp_path).looks_alive is True
    later = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later)
    assert str(pulse.run_status(tmp_path)) == "step 0 was recorded 17 min ago: whether the run is alive cannot be determined"


# --- what was asked for, and what became of it ---------------------------------------------------------------------------------------


def test_what_was_asked_for_is_told_before_the_training_has_looked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detail_request, "PERIOD", 1e9)
    training = Training(tmp_path).go(3)
    _said(capsys, 0, tmp_path, "--every", 2, "--for", 7)
    pending = "requested, and not yet read by the training: steps divisible by 2, for 7 steps (number 1)"
    assert pending in _said(capsys, 0, tmp_path, "--status")
    training.monitor.detach()
    assert pending not in _said(capsys, 0, tmp_path, "--status")


def test_a_change_that_waits_for_its_step_is_told_by_the_one_that_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_once: None
) -> None:
    training = Training(tmp_path).go(3)
    _said(capsys, 0, tmp_path, "--every", 1, "--first", 1000)
    training.go(1)
    told = _said(capsys, 1, tmp_path, "--every", 3, "--first", 2000, "--wait", "--timeout", 1)
    assert "it replaces one that was not in force yet: every step (number 1); not before step 1000" in told
    training.go(1)
    waited = _said(capsys, 1, tmp_path, "--every", 4, "--first", 3000, "--wait", "--timeout", 1)
    assert "the training has read it" not in waited
    assert waited.endswith("it was not in force within 1 s; the request stays, and may still be applied\n")


def test_that_it_was_seen_and_waits_is_told_to_whoever_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path).go(3)
    monkeypatch.setattr(time, "sleep", lambda _: training.go(1))
    told = _said(capsys, 1, tmp_path, "--every", 1, "--first", 10**6, "--wait", "--timeout", 1)
    assert told.count("the training has read it: every step (number 1); not before step 1000000\n") == 1


def test_of_two_commands_with_one_number_the_one_that_lost_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path).go(3)
    write = detail_request.write

    def overtaken(directory: Path, asked: detail_request.DetailRequest, session: str) -> None:
        write(directory, asked, session)
        write(directory, detail_request.DetailRequest(every=5, steps=60, number=asked.number), session)
        training.go(2)

    monkeypatch.setattr(detail_request, "write", overtaken)
    told = _said(capsys, 1, tmp_path, "--every", 3, "--wait", "--timeout", 20)
    assert told.splitlines()[-1].startswith("another change replaced it: steps divisible by 5, for 60 steps (number 1)")


def test_a_run_that_has_ended_is_told_so_whatever_its_directory_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(tmp_path / "rank_loss").go(3).monitor.detach()
    assert "this run has ended" in _refused(capsys, tmp_path / "rank_loss", "--every", 1)


def test_a_stretch_in_which_nothing_may_be_measured_is_remarked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path).go(3)
    remark = "possibly none of 10 steps in a row is divisible by 50; then nothing is measured"
    assert remark in _said(capsys, 0, tmp_path, "--preset", "full", "--for", 10)
    assert "is divisible by" not in _said(capsys, 0, tmp_path, "--every", 2, "--for", 10)


def test_a_limit_without_waiting_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path).go(1)
    assert "--timeout is the limit of --wait; give both" in _refused(capsys, tmp_path, "--every", 1, "--timeout", 5)
    assert "--status changes nothing" in _refused(capsys, tmp_path, "--status", "--timeout", 5)
