"""A run whose script never calls ``detach()`` has ended, and was not killed, once nothing can be added to it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.many_runs import RunCard, next_action, status_dict
from torch_gradmon.cli.main import main
from torch_gradmon.runs.liveness import run_status
from torch_gradmon.runs.writer import RunWriter

_kept: list[object] = []


def _trial(path: Path, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, gradmon.ModuleMonitor]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=path)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer, monitor


def _collected(path: Path) -> None:
    _trial(path)


def _kept_to_the_end(path: Path) -> None:
    _kept.append(_trial(path))


def _raised(path: Path) -> None:
    _kept_to_the_end(path)
    os.close(2)
    raise RuntimeError


def _killed(path: Path) -> None:
    _kept_to_the_end(path)
    os.kill(os.getpid(), 9)


def test_a_run_has_ended_when_its_monitor_is_collected(tmp_path: Path) -> None:
    kept = _trial(tmp_path)
    assert not run_status(tmp_path).has_ended
    del kept
    gc.collect()
    status = run_status(tmp_path)
    assert (status.has_ended, status.step) == (True, 2)
    assert "listens" not in status.meta["tune"]


def test_a_run_has_ended_where_late_records_close_it(tmp_path: Path) -> None:
    kept = _trial(tmp_path)
    kept[2]._runtime.pipeline.close()
    assert run_status(tmp_path).has_ended


def test_a_run_that_another_monitor_has_claimed_goes_on(tmp_path: Path) -> None:
    first = _trial(tmp_path)
    with pytest.warns(UserWarning, match="takes its place"):
        second = _trial(tmp_path)
    del first
    gc.collect()
    assert not run_status(tmp_path).has_ended
    del second
    gc.collect()
    assert run_status(tmp_path).has_ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize(("run", "has_ended"), [(_collected, True), (_kept_to_the_end, True), (_raised, True), (_killed, False)])
def test_a_run_of_a_forked_process_has_ended_unless_killed(run: Callable[[Path], None], has_ended: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # no pool of threads is forked
    parent = _trial(tmp_path / "parent")
    process = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path / "child",))
    process.start()
    process.join(60)
    assert run_status(tmp_path / "child").has_ended is has_ended
    assert not run_status(tmp_path / "parent").has_ended
    parent[2].detach()


@pytest.mark.parametrize("error", [ValueError("a bad trial"), torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
def test_a_run_ends_with_the_exception_that_passes(tmp_path: Path, error: BaseException) -> None:
    def train() -> None:
        _model, _optimizer, monitor = _trial(tmp_path)
        with monitor:
            raise error

    with pytest.raises(type(error)):
        train()
    card = RunCard(tmp_path)
    assert card.raised == f"{type(error).__name__}: {error}".removesuffix(": ")
    assert card.status.endswith(f"the run has ended, with {card.raised}")


def test_a_run_in_a_handler_does_not_end_with_its_exception(tmp_path: Path) -> None:
    try:
        raise ValueError("the first try")
    except ValueError:
        _model, _optimizer, monitor = _trial(tmp_path)
        monitor.detach()
    assert RunCard(tmp_path).raised == ""


def test_the_end_of_an_iterator_is_no_exception_of_a_run(tmp_path: Path) -> None:
    _model, _optimizer, monitor = _trial(tmp_path)
    try:
        next(iter(()))
    except StopIteration:
        monitor.detach()
    assert RunCard(tmp_path).raised == ""


def test_a_continued_run_forgets_the_exception_of_its_part(tmp_path: Path) -> None:
    _model, _optimizer, monitor = _trial(tmp_path)
    with contextlib.suppress(ValueError), monitor:
        raise ValueError
    assert RunCard(tmp_path).raised == "ValueError"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradmon.watch(model, optimizer, run_dir=tmp_path, start_step=3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert RunCard(tmp_path).raised == ""


def test_a_script_that_raises_ends_the_run_trained_last(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from torch import nn; import torch_gradmon as gradmon; kept = []\n"
        "for name in sys.argv[1:]:\n"
        "    model = nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    kept.append((gradmon.watch(model, optimizer, run_dir=name), model, optimizer))\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "raise ValueError('a bad trial')\n"
    )
    paths = [tmp_path / "first", tmp_path / "second"]
    done = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [RunCard(path).raised for path in paths] == ["", "ValueError: a bad trial"]


def test_what_to_do_after_an_exception_is_to_look_at_it(tmp_path: Path) -> None:
    _model, _optimizer, monitor = _trial(tmp_path)
    with contextlib.suppress(ValueError), monitor:
        raise ValueError("a bad trial")
    found = status_dict(RunCard(tmp_path), gradmon.load_run(tmp_path).diagnose())
    assert found["raised"] == "ValueError: a bad trial"
    assert "traceback of ValueError" in found["next"]["action"]


def test_steps_that_could_not_be_written_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, monitor = _trial(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.warns(gradmon.GradmonWarning, match="could not be written"):
        patched.setattr(RunWriter, "log", full)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        status = run_status(tmp_path)
        assert "later steps could not be written (No space left on device)" in str(status)
        assert not status.has_ended
        found = status_dict(RunCard(tmp_path), gradmon.load_run(tmp_path).diagnose())
        assert (found["unwritten"], found["healthy"]) == (1, False)
        assert "Make room" in found["next"]["action"]
        monitor.detach()
    card = RunCard(tmp_path)
    assert card.unwritten >= 5
    assert f"{card.unwritten} steps could not be written" in card.status


def test_a_run_that_goes_on_after_a_full_disk_has_lost_nothing_lately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, monitor = _trial(tmp_path)
    failing = [True] * 2
    log = RunWriter.log

    def full(self: RunWriter, *args: object, **options: object) -> None:
        if failing and not options["update"]:
            failing.pop()
            raise OSError(28, "No space left on device")
        log(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RunWriter, "log", full)
    with pytest.warns(gradmon.GradmonWarning, match="could not be written"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert "could not be written" not in str(run_status(tmp_path))
    monitor.detach()
    assert RunCard(tmp_path).unwritten == 2


def test_a_killed_run_on_a_full_disk_may_have_lost_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "run",))
    process.start()
    process.join(60)
    assert str(run_status(tmp_path / "run")).endswith("its process is gone, so it was killed or crashed")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    assert str(run_status(tmp_path / "run")).endswith("its process is gone; later steps may be lost, since the disk is full")


def test_a_run_that_an_exception_ended_is_not_healthy(tmp_path: Path) -> None:
    _model, _optimizer, monitor = _trial(tmp_path)
    with contextlib.suppress(ValueError), monitor:
        raise ValueError("a bad trial")
    assert not status_dict(RunCard(tmp_path), gradmon.load_run(tmp_path).diagnose())["healthy"]
    assert main(["status", str(tmp_path)]) == 1


def test_a_diagnosis_without_a_step_has_the_exception_of_the_first_one(tmp_path: Path) -> None:
    model, _optimizer, monitor = _trial(tmp_path, steps=0)
    with contextlib.suppress(RuntimeError), monitor:
        model(torch.ones(1, 3))
    found = gradmon.load_run(tmp_path).diagnose()
    assert found.findings == ()
    assert found.unseen["everything"].startswith("the training ended in its first step, with RuntimeError: mat1 and mat2")
    assert "RuntimeError" in str(found)


def test_a_run_killed_in_its_first_step_is_not_waited_for(tmp_path: Path) -> None:
    def first_step() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        _kept.extend([optimizer, gradmon.watch(model, optimizer, run_dir=tmp_path / "run")])
        model(torch.ones(1, 2))
        os.kill(os.getpid(), 9)

    process = multiprocessing.get_context("fork").Process(target=first_step)
    process.start()
    process.join(60)
    card = RunCard(tmp_path / "run")
    assert (card.state, card.status) == ("silent", "nothing was recorded so far, and its process is gone")
    assert "Look at the process" in next_action(card, gradmon.load_run(tmp_path / "run").diagnose())
