"""Going back to a snapshot: in place, bit for bit, and the data go on behind the spike."""

from __future__ import annotations

import copy
import inspect
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, Rollback, SpikeDetector, SpikeError
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.plugins.reactions import RollbackResult
from torch_gradmon.plugins.spike_policy import Snapshots
from torch_gradmon.spikes import Threshold
from torch_gradmon.step.ranks import Ranks

from .test_skip import CLASSES, Task

pytestmark = pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning", "ignore:.*closure.*:UserWarning")
LIMIT, BAD = 1e4, 1e6


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def _batch(number: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(number))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, by: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(_batch(number)).square().mean() * by).backward()
    optimizer.step()


def _watched(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Rollback) -> ModuleMonitor:
    monitor = ModuleMonitor(model, on_spike=policy, spike_capture=gradmon.SpikeCapture(after=0))
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    return monitor.attach(optimizer)


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [list(state.values()) for state in optimizer.state_dict()["state"].values()]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_run_goes_on_as_one_that_had_skipped_those_batches(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots after steps 0, 10, 20; a spike in step 25 goes back to 20, and the batches 21 to 25 are passed over, with two more."""
    model, reference = _model(), _model()
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))
    directory = tmp_path / "snapshots" if on_disk else None
    files, make = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: files.append(make(dir=dir)) or files[-1])
    monitor = _watched(model, optimizer, Rollback(every=10, margin=0, skip_batches=2, directory=directory))
    addresses = [p.data_ptr() for p in model.parameters()]
    batches = iter(range(100))
    for step in range(40):
        number = next(batches)
        _step(model, optimizer, number, BAD if number == 25 else 1.0)
        assert monitor.step_was_skipped == (number == 25)
        if (back := monitor.last_record.rollback) is not None:
            assert back == RollbackResult(step=25, to_step=20, seen=5, skip_batches=2)
            assert step == 25
            if on_disk:  # those of steps 10 and 20, which nobody else sees
                assert [os.fstat(file.fileno()).st_size > 0 for file in files if not file.closed] == [True, True]
                assert list(directory.iterdir()) == []
            for _ in range(back.skip_batches):
                next(batches)
    for number in [*range(21), *range(28, 42)]:
        _step(reference, other, number)
    assert _same(model, reference)
    assert _equal(_states(optimizer), _states(other))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert monitor.get_step_counts().rolled_back == monitor.get_step_counts().skipped == 1
    assert monitor.get_all_metrics()[25]["gradmon/steps_skipped"] == 1
    assert "went back to the state after step 20" in monitor.why()
    monitor.detach()
    assert len(files) == (4 if on_disk else 0)  # after steps 0, 10, 20 and 35
    assert all(file.closed for file in files)


@pytest.mark.parametrize("flag", ["plain", "fused", "foreach"])
@pytest.mark.parametrize("name", CLASSES)
def test_with_every_optimizer(name: str, flag: str) -> None:
    if flag != "plain" and flag not in inspect.signature(CLASSES[name]).parameters:
        pytest.skip(f"{name} has no such variant")
    if flag == "fused" and name not in ("Adam", "AdamW", "SGD", "Adagrad"):
        pytest.skip("not on the CPU")
    task = Task(name, flag, "closure")
    monitor = ModuleMonitor(
        task.model, on_spike=Rollback(every=4, margin=0, limit=None), spike_capture=gradmon.SpikeCapture(after=0)
    )
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    monitor.attach(task.optimizer)
    kept = []
    for _ in range(6):
        task.train()
        kept.append(task.content())
    for bad in (1e9, math.nan):
        task.train(bad)
        assert monitor.last_record.rollback is not None
        assert task.content() == kept[monitor.last_record.rollback.to_step]
    # the first went to the snapshot after step 4, the second one further, to that after step 0
    task.train()
    assert monitor.last_record.rollback is None


def _went(policy: Rollback, spikes: Iterable[int], steps: int) -> list[tuple[int, int, int]]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = _watched(model, optimizer, policy)
    found = []
    for step in range(steps):
        _step(model, optimizer, step, BAD if step in spikes else 1.0)
        if (back := monitor.last_record.rollback) is not None:
            found.append((back.step, back.to_step, back.seen))
    return found


def test_it_goes_back_far_enough() -> None:
    assert _went(Rollback(every=10, margin=0), [21], 30) == [(21, 20, 1)]
    assert _went(Rollback(every=10), [21], 30) == [(21, 10, 11)]  # by default half of ``every`` at least
    assert _went(Rollback(every=10, margin=15, keep=3), [21], 30) == [(21, 0, 21)]
    assert _went(Rollback(every=10, keep=1), [21], 30) == [(21, 20, 1)]  # where there is none that is old enough


def test_a_second_spike_before_a_new_snapshot_goes_further_back() -> None:
    assert _went(Rollback(every=10, margin=0), [25, 29], 30) == [(25, 20, 5), (29, 10, 19)]
    assert _went(Rollback(every=10, margin=0), [25, 29, 32], 34) == [(25, 20, 5), (29, 10, 19), (32, 10, 22)]
    assert _went(Rollback(every=10, margin=0), [25, 36], 40) == [(25, 20, 5), (36, 35, 1)]  # with a new one it does not


def test_batches_that_were_passed_over_count_for_a_loader_that_goes_back() -> None:
    assert _went(Rollback(every=10, margin=0, skip_batches=7, keep=1), [25, 29], 30) == [(25, 20, 5), (29, 20, 16)]


def test_the_cap_counts_until_there_is_a_new_snapshot() -> None:
    assert len(_went(Rollback(every=10), [25, 26, 27, 28, 29], 31)) == 4  # the fourth was accepted, with which a new row begins
    with pytest.raises(SpikeError, match="the 3rd spike in a row"):
        _went(Rollback(every=10, limit=2, on_limit="stop"), [25, 27, 29], 31)


def test_until_there_is_a_snapshot_the_step_is_skipped() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = _watched(model, optimizer, Rollback())
    before = copy.deepcopy(model)
    _step(model, optimizer, 0, math.nan)
    assert monitor.step_was_skipped
    assert monitor.last_record.rollback is None
    assert _same(model, before)


def test_what_else_belongs_to_a_run_goes_back_with_it() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    monitor = _watched(model, optimizer, Rollback(every=5, margin=0, extra_state=(scheduler, average)))
    rates, averages = [], []
    for step in range(8):
        _step(model, optimizer, step, 1e-3 if step < 7 else BAD)
        if monitor.last_record.rollback is None:
            scheduler.step()
            average.update_parameters(model)
        rates.append(optimizer.param_groups[0]["lr"])
        averages.append(copy.deepcopy(average.state_dict()))
    assert monitor.last_record.rollback is not None
    # the snapshot was taken when step 6 began, with all that the loop had done in step 5
    assert rates[-1] == pytest.approx(0.9**6)
    assert scheduler.last_epoch == 6
    assert all(torch.equal(value, averages[5][name]) for name, value in average.state_dict().items())


def test_without_them_the_rate_stays_as_the_loop_has_set_it() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = _watched(model, optimizer, Rollback(every=5, margin=0))
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        _step(model, optimizer, step, 1.0 if step < 7 else BAD)
    assert monitor.last_record.rollback is not None
    assert optimizer.param_groups[0]["lr"] == 1e-3 / 8


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_a_model_that_has_changed_since_is_left_alone_and_that_is_said() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = _watched(model, optimizer, Rollback(every=100, margin=0))
    for step in range(3):
        _step(model, optimizer, step)
    model.extra = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [model.extra]})
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(gradmon.GradmonWarning, match="is skipped, but the model could not go back to step 0"):
        _step(model, optimizer, 3, BAD)
    assert monitor.step_was_skipped
    assert monitor.last_record.rollback is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "running" not in name)


def test_what_was_one_tensor_and_is_two_is_put_back_as_two() -> None:
    """And the other way round: into a tensor that stands for two values by now only one of them is written."""

    class Shares(torch.optim.SGD):
        pass

    model = _model()
    optimizer = Shares(model.parameters(), lr=0.1)
    parameter = model[0].weight
    optimizer.state[parameter] = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    snapshots = Snapshots(Rollback(every=1), Ranks(), WarningLog())
    snapshots.due = 0
    assert snapshots.take_due(model, [optimizer])
    one = torch.zeros(3)
    optimizer.state[parameter] = {"a": one, "b": one}
    snapshots.load(0, model, [optimizer])
    snapshots.restore(1, model, [optimizer])
    assert {name: value.tolist() for name, value in optimizer.state[parameter].items()} == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_a_snapshot_can_be_gone_back_to_twice() -> None:
    """What is loaded into somebody else's object is a copy, which that may change."""

    class Keeps:
        def __init__(self) -> None:
            self.values = [0.0]

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state["values"]

    kept = Keeps()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = _watched(model, optimizer, Rollback(every=100, margin=0, keep=1, extra_state=(kept,)))
    for step in range(8):
        _step(model, optimizer, step, BAD if step in (3, 6) else 1.0)
        if monitor.last_record.rollback is not None:
            assert kept.values == [0.0]
        kept.values[0] += step
    assert monitor.get_step_counts().rolled_back == 2


def test_snapshots_share_no_memory_with_the_run() -> None:
    task = Task("LBFGS", "plain", "closure")
    snapshots = Snapshots(Rollback(keep=2, every=1), Ranks(), WarningLog())
    contents = []
    for step in range(2):
        for _ in range(2):
            task.train()
        snapshots.due = step
        assert snapshots.take_due(task.model, [task.optimizer])
        contents.append(task.content())
    for _ in range(3):
        task.train()
    snapshots.load(1, task.model, [task.optimizer])
    snapshots.restore(5, task.model, [task.optimizer])
    assert task.content() == contents[1]
    task.train()
    snapshots.load(0, task.model, [task.optimizer])
    snapshots.restore(6, task.model, [task.optimizer])
    assert task.content() == contents[0]


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_a_disk_that_takes_no_snapshot_does_not_stop_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = _watched(model, optimizer, Rollback(directory=tmp_path / "file"))
    with pytest.warns(gradmon.GradmonWarning, match="no snapshot could be taken after step 0"):
        for step in range(3):
            _step(model, optimizer, step)
    assert monitor.get_step_counts().applied == 3
