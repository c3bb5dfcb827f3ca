"""A run whose script never calls ``detach()`` has ended, and was not killed, once nothing can be added to it."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.runs.liveness import run_status

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
