"""Steps that are not monitored, recorded on the device in case of a spike, and the steps after one that are monitored all the same."""

from __future__ import annotations

import gc
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests.watching import watch_with
from torch_gradmon import ModuleMonitor, SpikeDetector, load_run
from torch_gradmon.core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, PARAMETER, Key
from torch_gradmon.step.buffer import DeviceToHostCopy

from .reads import HostReads

pytestmark = pytest.mark.thorough

MOVED, SPIKE, STEPS = 197, 200, 240
REMEMBERED = 16


def _train(steps: int = STEPS, scaler: Any = None, clip: bool = False, **arguments: Any) -> tuple[ModuleMonitor, nn.Sequential]:
    """A run in which one layer leaves its normal in step 197, which the whole shows in step 200."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = watch_with(model, optimizer, on_spike=None, **arguments)
    data = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(32, 6, generator=data)
        loss = model(x).square().mean() * (60 if step == SPIKE else 1)
        if MOVED <= step <= SPIKE:
            loss = loss + 400 * model[1](model[0](x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        monitor.log_context(batch=step)
    return monitor, model


@pytest.mark.parametrize("clip", [False, True])
def test_the_steps_around_a_spike_are_there_with_the_numbers_of_a_monitor_that_takes_every_step(
    tmp_path: Path, clip: bool
) -> None:
    seldom, other = _train(
        every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path / "seldom", clip=clip
    )
    always, model = _train(run_dir=tmp_path / "always", clip=clip)
    seldom.detach()
    always.detach()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    run, reference = load_run(tmp_path / "seldom"), load_run(tmp_path / "always")
    cadence = set(range(0, STEPS, 10))
    before = [step for step in range(SPIKE) if step not in cadence][-REMEMBERED:]
    looked_closer = set(range(SPIKE + 1, SPIKE + 4))
    after = [step for step in range(SPIKE, STEPS) if step not in cadence | looked_closer][:REMEMBERED]
    assert run.steps == sorted(cadence | looked_closer | {*before, *after})
    for step in [*before, *after]:
        for source in (GRADIENT, GRADIENT_BEFORE_CLIP):
            here, there = run._reader.table(source, step), reference._reader.table(source, step)
            assert here is not None
            assert there is not None
            assert here.columns == there.columns
            assert torch.equal(here.rows, there.rows)
        assert run._reader.table(PARAMETER, step) is None
        values, truth = run.record(step).metrics, reference.record(step).metrics
        assert values["loss"] == truth["loss"]
        whole = {key for key in values if key.startswith("gradmon/")}
        assert whole == {
            f"gradmon/grad_{name}" for name in ("norm", "max", "nonfinite_count", "top_fraction", *["norm_after_clip"] * clip)
        }
        assert all(values[key] == truth[key] for key in whole)
        context = run.record(step).context
        assert {name: context[name] for name in ("tags", "lr", "applied", "monitored")} == {
            "tags": {"batch": step},
            "lr": [1e-6],
            "applied": True,
            "monitored": False,
        }
        assert reference.record(step - 1).context["time"] <= reference.record(step).context["time"]
    times = [run.record(step).context["time"] for step in run.steps]
    assert times == sorted(times)
    assert [event.step for event in run.spikes] == [SPIKE]


def test_the_story_knows_that_a_layer_moved_between_two_monitored_steps() -> None:
    monitor, _ = _train(every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED))
    text = monitor.why()
    lines = text.splitlines()
    first = lines[next(row for row, line in enumerate(lines) if line.startswith("parameter, by suspicion")) + 1].split()
    assert first[0] in ("1.weight", "1.bias")
    assert first[-1] == str(MOVED)
    titles = next(line for line in lines if line.startswith("signal")).split()
    assert titles == ["signal", "197", "198", "199", "[200]", "201", "202", "203", "204"]
    without, _ = _train(every=10)
    assert str(MOVED) not in without.why()


def test_dashboards_get_the_cadence_and_the_closer_look_and_nothing_else() -> None:
    monitor, _ = _train(every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED))
    assert set(monitor.get_all_metrics()) == {*range(0, STEPS, 10), 201, 202, 203}
    assert set(_train(every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), steps=150)[0].get_all_metrics()) == set(
        range(0, 150, 10)
    )


def test_after_a_spike_some_steps_are_monitored_whatever_the_cadence() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, every=10, on_spike=None)
    monitored = []
    for step in range(230):
        foretold = monitor.is_step_monitored(step)
        loss = model(torch.ones(8, 4)).square().mean() * (100 if step == SPIKE else 1)
        assert monitor.is_monitoring() == foretold == monitor.is_step_monitored(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert bool(monitor.get_step_metrics()) == foretold
        if foretold:
            monitored.append(step)
    assert monitored == [*range(0, 201, 10), 201, 202, 203, 210, 220]


def _tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    value = vars(value) if is_dataclass(value) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors_in(part)]


def test_a_recorded_step_sends_nothing_to_the_host_and_keeps_26_kilobytes_for_200_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    begin = DeviceToHostCopy.__init__
    monkeypatch.setattr(
        DeviceToHostCopy, "__init__", lambda self, sends, *fixed: (sent.append(len(sends)), begin(self, sends, *fixed))[1]
    )
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch_with(model, optimizer, every=1000, spike_capture=gradmon.SpikeCapture(before=8))
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(sent) == 1
    kept = monitor._runtime.built_in.recorder._kept
    assert len(kept) == 8
    for recorded, _ in kept:
        blocks = [block.untyped_storage() for block in _tensors_in(vars(recorded.buffer))]
        storages = {block.data_ptr(): block.nbytes() for block in blocks}
        assert sum(storages.values()) == 2 * 200 * 8 * 8  # rows of 8 columns in float64, before and after clipping
    assert len(sent) == 1


@pytest.mark.gpu
def test_a_recorded_step_copies_nothing_from_the_gpu() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch_with(model, optimizer, every=1000, spike_capture=gradmon.SpikeCapture(before=8))
    for step in range(4):
        with HostReads("cuda") as reads:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert step == 0 or not reads.counts


def test_without_it_a_step_that_is_not_monitored_measures_nothing() -> None:
    monitor, _ = _train(steps=15, every=10)
    assert monitor._runtime.built_in.recorder is None


def test_steps_that_a_scaler_refuses_are_counted_once_and_kept_as_not_applied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = watch_with(
        model,
        optimizer,
        scaler=scaler,
        every=10,
        spike_capture=gradmon.SpikeCapture(before=REMEMBERED),
        on_spike=None,
        run_dir=tmp_path,
    )
    for step in range(206):
        loss = model(torch.ones(8, 4)).square().mean() * (100 if step == SPIKE else 1) * (torch.inf if step == 195 else 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.get_all_metrics()[200]["gradmon/steps_not_applied"] == 1
    monitor.detach()
    run = load_run(tmp_path)
    assert [step for step in run.steps if not run.record(step).context["applied"]] == [195]
    assert run.record(194).context["amp_scale"] == 1024.0
    assert run.record(194).metrics["gradmon/grad_norm"] == pytest.approx(run.record(190).metrics["gradmon/grad_norm"], rel=1e-3)


def test_a_rollback_forgets_what_comes_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    monitor = ModuleMonitor(
        model, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path, preset="minimal"
    )

    def step(number: int, factor: float = 1.0) -> None:
        monitor.begin_step(number)
        model.zero_grad()
        (model(torch.ones(8, 4)).square().mean() * factor).backward()
        monitor.monitor_gradients(before_clip=True)
        monitor.end_step()

    for number in range(196):
        step(number)
    with pytest.warns(gradmon.GradmonWarning, match="comes after step 195"):
        step(193)
    for number in range(194, 230):
        step(number, 100.0 if number == SPIKE else 1.0)
    monitor.detach()
    run = load_run(tmp_path)
    assert run.steps == [*range(0, 191, 10), *range(193, 222)]
    assert [event.step for event in run.spikes] == [SPIKE]


def test_a_late_signal_brings_the_steps_too() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = ModuleMonitor(model, every=10, spike_capture=gradmon.SpikeCapture(after=0, before=REMEMBERED))
    monitor.add_detector(SpikeDetector(signal="loss"))
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    for step in range(205):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
        monitor.log_scalar("loss", 9.0 if step == SPIKE else 1.0)
    assert [record for record in monitor._runtime.pipeline.history._backfilled if record > 195] == [196, 197, 198, 199]
    assert monitor._runtime.pipeline.history._backfilled[199].values[Key("", "loss", "")] == 1.0


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_what_is_no_number_of_steps_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"before={value!r} must be a positive int, or 0 for none"):
        ModuleMonitor(spike_capture=gradmon.SpikeCapture(before=value))


def test_a_budget_and_a_recorder_exclude_each_other() -> None:
    with pytest.raises(
        ValueError, match=r"SpikeCapture\(before=8\) measures every step, so max_overhead=0\.01 could save nothing"
    ):
        ModuleMonitor(spike_capture=gradmon.SpikeCapture(before=8), max_overhead=0.01)


def test_the_run_directory_has_what_followed_when_the_run_ends_early(tmp_path: Path) -> None:
    monitor, _ = _train(steps=SPIKE + 8, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path)
    monitor.detach()
    assert load_run(tmp_path).steps[-4:] == [204, 205, 206, 207]


def _by_hand(monitor: ModuleMonitor, model: nn.Module, number: int, factor: float = 1.0) -> None:
    monitor.begin_step(number)
    model.zero_grad()
    (model(torch.ones(8, 4)).square().mean() * factor).backward()
    monitor.monitor_gradients(before_clip=True)
    monitor.log_scalar("factor", factor)
    monitor.end_step()


@pytest.mark.parametrize("again", [False, True])
def test_after_a_rollback_nothing_of_the_abandoned_branch_is_told(tmp_path: Path, again: bool) -> None:
    model = nn.Linear(4, 1)
    monitor = ModuleMonitor(
        model, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path, preset="minimal"
    )
    for number in range(207):
        _by_hand(monitor, model, number, 100.0 if number == SPIKE else 1.0)
    with pytest.warns(gradmon.GradmonWarning, match="comes after step 206"):
        _by_hand(monitor, model, 195, 1.1)
    for number in range(196, 230):
        _by_hand(monitor, model, number, 100.0 if again and number == 210 else 1.1)
    told = monitor.why(200).splitlines()
    monitor.detach()
    factors = load_run(tmp_path).series("factor")
    assert all(factors[step] == 1.0 for step in factors if step < 195)
    assert all(factors[step] == 1.1 for step in factors if step >= 195 and step != 210)
    assert set(factors).isdisjoint(range(195, 200)) != again
    if again:
        row = next(line for line in told if line.startswith("grad_norm")).split()
        assert row[1] == row[4]  # of 197 and of 200


def test_a_run_that_is_continued_replaces_what_was_recorded_from_there_on(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    for start, factor in ((0, 1.0), (195, 1.1)):
        monitor = ModuleMonitor(
            model, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path, preset="minimal"
        )
        for number in range(start, start + 207):
            _by_hand(monitor, model, number, 100.0 if number == SPIKE and not start else factor)
        monitor.detach()
    factors = load_run(tmp_path).series("factor")
    assert {step for step, factor in factors.items() if factor == 1.0} == {*range(0, 191, 10), *range(183, 195)}
    assert not any(195 <= step < 200 for step in factors)


def test_tags_are_taken_as_they_are_when_they_are_given(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = watch_with(
        model, optimizer, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), on_spike=None, run_dir=tmp_path
    )
    ids, number = [0], torch.zeros(())
    for step in range(205):
        ids[:] = [step]
        number.fill_(step)
        monitor.log_context(ids=ids, number=number)
        optimizer.zero_grad()
        (model(torch.ones(8, 4)).square().mean() * (100 if step == SPIKE else 1)).backward()
        optimizer.step()
    monitor.detach()
    run = load_run(tmp_path)
    assert {step: run.record(step).context["tags"]["ids"] for step in run.steps} == {step: [step] for step in run.steps}
    assert run.record(199).context["tags"]["number"] == "tensor(199.)"


def test_what_is_logged_after_a_story_was_told_still_counts(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = watch_with(
        model, optimizer, every=10, spike_capture=gradmon.SpikeCapture(before=4), on_spike=None, run_dir=tmp_path
    )
    for step in range(230):
        optimizer.zero_grad()
        (model(torch.ones(8, 4)).square().mean() * (100 if step == SPIKE else 1)).backward()
        optimizer.step()
        if step == 205:
            monitor.why()
        monitor.log_scalar("late", float(step))
        monitor.log_context(step=step)
    monitor.detach()
    run = load_run(tmp_path)
    recorded = [step for step in run.steps if step % 10 and step not in (201, 202, 203)]
    assert recorded == [196, 197, 198, 199, 204, 205, 206, 207]
    assert {step: run.record(step).metrics["late"] for step in recorded} == {step: float(step) for step in recorded}
    assert {run.record(step).context["tags"]["step"] for step in recorded} == set(recorded)


def test_gradients_are_recorded_whatever_is_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = ModuleMonitor(model, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED))
    monitor.add_detector(SpikeDetector(signal="loss"))
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    for step in range(205):
        factor = 100.0 if step == SPIKE else 1.0
        optimizer.zero_grad()
        (model(torch.ones(8, 4)).square().mean() * factor).backward()
        monitor.log_scalar("loss", factor)
        optimizer.step()
    row = next(line for line in monitor.why().splitlines() if line.startswith("grad_norm ")).split()
    assert "-" not in row[1:4]


def test_steps_in_which_a_loop_measures_nothing_leave_no_empty_records() -> None:
    model = nn.Linear(4, 1)
    monitor = ModuleMonitor(model, every=10, spike_capture=gradmon.SpikeCapture(after=0, before=REMEMBERED), preset="minimal")
    for step in range(230):
        if monitor.begin_step(step):
            model.zero_grad()
            (model(torch.ones(8, 4)).square().mean() * (100.0 if step == SPIKE else 1.0)).backward()
            monitor.monitor_gradients(before_clip=True)
        monitor.end_step()
    titles = next(line for line in monitor.why().splitlines() if line.startswith("signal")).split()
    assert titles[1:6] == ["170", "180", "190", "[200]", "210"]


def test_the_steps_after_a_spike_are_not_lost_where_everything_is_collected(tmp_path: Path) -> None:
    monitor, model = _train(steps=SPIKE + 8, every=10, spike_capture=gradmon.SpikeCapture(before=REMEMBERED), run_dir=tmp_path)
    del monitor, model
    gc.collect()
    assert load_run(tmp_path).steps[-4:] == [204, 205, 206, 207]


def test_what_was_monitored_is_told_afterwards_too() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, every=10, on_spike="raise")
    for step in range(206):
        optimizer.zero_grad()
        (model(torch.ones(8, 4)).square().mean() * (100 if step == SPIKE else 1)).backward()
        if step == SPIKE:
            with pytest.raises(gradmon.SpikeError):
                optimizer.step()
            assert [monitor.is_step_monitored(number) for number in range(199, 206)] == [False, *[True] * 4, False, False]
        else:
            optimizer.step()
    assert [monitor.is_step_monitored(number) for number in range(199, 206)] == [False, *[True] * 4, False, False]
