"""Accelerate: what ``prepare`` returns is watched as it is, and its trackers and the monitor feed each other without going round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.sinks.adapters import adapted
from torch_gradmon.spikes import SpikeDetector, Threshold

from . import trainer_oracle as oracle

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker

from torch_gradmon.integrations.accelerate import GradmonTracker

pytestmark = pytest.mark.integration

Rows = dict[int | None, dict[str, Any]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Accelerator]]:
    """Makes an Accelerator for the CPU; several of a test know nothing of each other."""
    made: list[Accelerator] = []

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def build(setting: oracle.Setting | None = None, *trackers: Any) -> Accelerator:
        reset()
        setting = setting or oracle.Setting()
        precision = {"32": "no"}.get(setting.precision, setting.precision)
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_steps=setting.accumulation,
            log_with=list(trackers) or None,
            project_dir=tmp_path,
        )
        if setting.precision == "fp16":  # on a CPU it leaves both out, see below; on other devices it sets them so
            accelerator.native_amp, accelerator.scaler = True, setting.scaler()
        accelerator.init_trackers("run", config={"lr": 0.1})
        made.append(accelerator)
        return accelerator

    yield build
    reset()


class Kept(GeneralTracker):  # type: ignore[misc]
    """A tracker that somebody wrote, with all that it was given."""

    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: Rows = {}
        self.calls: Counter[str] = Counter()
        self.finished = False

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert not self.finished
        self.calls.update(list(values))
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.finished = True


def _loop(
    accelerator: Accelerator, parts: tuple[Any, ...], data: Any, clip: float | None = None, log: Any = None, poison: int = -1
) -> list[float]:
    """A loop as Accelerate's documentation has it.

    ``poison`` is the number of a batch whose loss is large, though not too large for half precision.
    """
    model, optimizer, *schedulers = parts
    losses = []
    for number, (inputs, labels) in enumerate(data):
        with accelerator.accumulate(model):
            loss = oracle.loss_of(model(inputs), labels) * (300.0 if number == poison else 1.0)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            for step_scheduler in schedulers:
                step_scheduler()
            optimizer.zero_grad()
        losses.append(loss.item())
        if log is not None and accelerator.sync_gradients:
            log(number, loss.item())
    return losses


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


# --- every number, and nothing changed ---------------------------------------------------------------------------------------


def _monitor() -> gradmon.ModuleMonitor:
    monitor = gradmon.ModuleMonitor(preset="standard")
    monitor.add_gradient_metric("norm")
    return monitor


def _trained(make: Any, setting: oracle.Setting, monitor: gradmon.ModuleMonitor | None) -> tuple[nn.Module, Rows, bool]:
    kept = Kept()
    accelerator = make(setting, *(() if monitor is None else (GradmonTracker(monitor),)), kept)
    net = oracle.model()
    model, optimizer = accelerator.prepare(net, oracle.OPTIMIZERS[setting.optimizer](net.parameters()))
    if monitor is not None:
        monitor.set_module(model)
        monitor.attach(optimizer)
        monitor.add_sink(accelerator)
    skipped: list[bool] = []

    def log(number: int, loss: float) -> None:
        skipped.append(accelerator.optimizer_step_was_skipped)
        accelerator.log({"loss": loss}, step=number // setting.accumulation)

    _loop(accelerator, (model, optimizer), oracle.batches(10 * setting.accumulation), setting.clip, log)
    accelerator.end_training()
    return accelerator.unwrap_model(model), kept.rows, any(skipped)


@pytest.mark.parametrize("setting", oracle.SETTINGS, ids=str)
def test_every_number_is_right_and_nothing_is_changed(setting: oracle.Setting, make: Any) -> None:
    by_hand = oracle.model()
    expected = oracle.by_hand(by_hand, oracle.batches(10 * setting.accumulation), setting)
    plain, history, refused = _trained(make, setting, None)
    model, rows, _ = _trained(make, setting, monitor := _monitor())
    assert _equal(model, plain)
    assert _equal(model, by_hand)
    assert {step: {"loss": row["loss"]} for step, row in rows.items()} == history
    # of a fused optimizer, which passes over an overflow by itself, Accelerate does not notice it
    assert refused == (setting.optimizer != "fused" and not all(step.applied for step in expected))
    found = monitor.get_all_metrics()
    for number, step in enumerate(expected):
        if number:  # updates are measured in every tenth step
            expected[number] = replace(step, values={k: v for k, v in step.values.items() if k != "gradmon/update_norm"})
    parameters = len(list(model.parameters()))
    applied = sum(step.applied for step in expected)
    compared = oracle.assert_logged(found, expected)
    each = 2 * parameters + 3 + (setting.clip is not None)
    assert compared == each * applied + (parameters + 2) * (10 - applied) + expected[0].applied
    assert rows.keys() == found.keys()
    for step, row in rows.items():
        logged, kept = ({k: v for k, v in of.items() if k != "loss"} for of in (row, found[step]))
        assert logged == pytest.approx(kept, rel=0, abs=0, nan_ok=True), "the trackers have the same"


def test_half_precision_on_a_cpu_is_neither_refused_nor_done_by_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    net = oracle.model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert (accelerator.scaler, optimizer.scaler) == (None, None)
    monitor = gradmon.watch(model, optimizer)
    _loop(accelerator, (model, optimizer), oracle.batches(1))
    expected = oracle.by_hand(oracle.model(), oracle.batches(1), oracle.Setting("sgd"))[0].values["gradmon/grad_norm"]
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6), "it is float32"
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("by", ["watch", "attach", "a bare wrapper"])
def test_the_scaler_of_an_accelerated_optimizer_is_found_from_the_first_step_on(by: str, make: Any) -> None:
    setting = oracle.Setting("sgd", "fp16")
    accelerator = make(setting)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    net = oracle.model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
    if by == "watch":
        monitor = gradmon.watch(model, optimizer)
    elif by == "attach":
        (monitor := _monitor()).set_module(model)
        monitor.attach(optimizer)
    else:
        scaler = accelerator.scaler
        wrapped = AcceleratedOptimizer(AcceleratedOptimizer(optimizer.optimizer, scaler=scaler))
        monitor = gradmon.watch(model, wrapped)
    norms = []
    inputs, labels = oracle.batches(1)[0]
    for _ in range(2):
        accelerator.backward(oracle.loss_of(model(inputs), labels))
        gradients = [p.grad.double() / 256 for p in net.parameters() if p.grad is not None]
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    assert [row["gradmon/grad_norm"] for row in monitor.get_all_metrics().values()] == pytest.approx(norms, rel=1e-6)
    assert monitor.warning_counts() == {}, "nobody had to be told that there is a scaler"


def test_a_scaler_that_is_named_wins_over_the_one_of_the_wrapper() -> None:
    net = oracle.model()
    mine, other = (torch.amp.GradScaler("cpu") for _ in range(2))
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    wrapped = AcceleratedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), scaler=other)
    before = vars(other).copy()
    monitor = gradmon.watch(net, wrapped, scaler=mine)
    assert vars(other) == before, "nothing hangs on it"
    assert vars(mine) != before
    monitor.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_prepared_loader_whose_last_step_has_fewer_batches(make: Any) -> None:
    accelerator = make(oracle.Setting(accumulation=4))
    net = oracle.model()
    data = torch.utils.data.DataLoader(oracle.batches(10), batch_size=None)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    monitor = gradmon.watch(model, optimizer)
    _loop(accelerator, (model, optimizer), loader)
    assert list(monitor.get_all_metrics()) == [0, 1, 2], "Accelerate steps at the end of the data whatever was accumulated"
    assert monitor.get_step_counts().attempted == 3


# --- the tracker ---------------------------------------------------------------------------------------------------------------


def _started(make: Any, monitor: gradmon.ModuleMonitor, *others: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = make(None, GradmonTracker(monitor), *others)
    net = oracle.model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    monitor.set_module(model)
    monitor.attach(optimizer)
    return accelerator, model, optimizer


def test_what_the_loop_logs_is_in_the_record_of_the_step_and_in_the_run_directory(make: Any, tmp_path: Path) -> None:
    monitor = gradmon.ModuleMonitor(run_dir=tmp_path / "run", preset="minimal")
    accelerator, model, optimizer = _started(make, monitor)
    losses = _loop(
        accelerator,
        (model, optimizer),
        oracle.batches(5),
        log=lambda number, loss: accelerator.log({"train/loss": loss, "epoch": torch.tensor(number / 5)}, step=100 + number),
    )
    assert [row["train/loss"] for row in monitor.get_all_metrics().values()] == losses
    assert accelerator.get_tracker("gradmon", unwrap=True) is monitor
    accelerator.end_training()
    run = gradmon.load_run(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4]
    assert list(run.series("train/loss").values()) == pytest.approx(losses)
    assert list(run.series("epoch").values()) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def test_a_detector_watches_what_the_loop_logs(make: Any) -> None:
    events: list[Any] = []
    monitor = gradmon.ModuleMonitor(on_spike=events.append)
    monitor.add_detector(SpikeDetector(Threshold(50.0), signal="loss"))
    accelerator, model, optimizer = _started(make, monitor)
    _loop(
        accelerator,
        (model, optimizer),
        oracle.batches(6),
        log=lambda number, _: accelerator.log({"loss": 99.0 if number == 3 else 1.0}, step=number),
    )
    accelerator.end_training()
    assert [(event.step, event.signal, event.value) for event in events] == [(3, "loss", 99.0)]


def test_what_is_no_number_is_left_out_with_one_warning_and_the_rest_is_there(make: Any) -> None:
    kept = Kept()
    accelerator, model, optimizer = _started(make, monitor := _monitor(), kept)
    row = {"note": "warm", "loss": 1.5, "nested": {"a": 1}, "pair": torch.ones(2), "ok": True}
    with pytest.warns(gradmon.GradmonWarning, match="the monitor's record leaves out 'note' of accelerator.log") as told:
        _loop(accelerator, (model, optimizer), oracle.batches(3), log=lambda number, _: accelerator.log(row, step=number))
    assert len(told) == 1
    values = monitor.get_step_metrics()
    assert (values["loss"], values["ok"]) == (1.5, 1.0)
    assert not {"note", "nested", "pair"} & values.keys()
    assert kept.rows[2]["note"] == "warm", "for the other trackers"


def test_values_of_the_monitor_go_round_neither_by_a_sink_nor_by_the_loop(make: Any) -> None:
    kept = Kept()
    monitor = _monitor()
    accelerator, model, optimizer = _started(make, monitor, kept)
    monitor.add_sink(accelerator)
    own = set()

    def log(number: int, loss: float) -> None:
        values = monitor.get_step_metrics()
        own.update(values)
        if number % 2:
            accelerator.log({"loss": loss, **values}, step=number)
        else:
            accelerator.log({"loss": loss}, step=number)

    _loop(accelerator, (model, optimizer), oracle.batches(6), log=log)
    found = monitor.get_all_metrics()
    assert all(row.keys() - {"loss"} <= own for row in found.values()), "no key that is the monitor's own came back as another"
    first = found[1]["gradient/0.weight/norm"]
    assert first == monitor.get_all_metrics()[1]["gradient/0.weight/norm"]
    assert monitor.warning_counts() == {}
    accelerator.end_training()
    assert kept.calls["loss"] == 6, "once from the loop, and not once more from the monitor"
    assert [tracker.name for tracker in accelerator.trackers] == ["gradmon", "kept"]
    assert [each for each in adapted(accelerator) if isinstance(each, GradmonTracker)] == []


def test_what_is_logged_twice_in_a_step_is_its_mean_and_not_taken_for_the_monitors_own(make: Any) -> None:
    accelerator, model, optimizer = _started(make, monitor := _monitor())

    def log(number: int, _: float) -> None:
        for value in (1.0, 3.0):
            accelerator.log({"loss": value})
            assert monitor.get_step_metrics()["loss"] in (1.0, 2.0)

    _loop(accelerator, (model, optimizer), oracle.batches(3), log=log)
    assert [row["loss"] for row in monitor.get_all_metrics().values()] == [2.0, 2.0, 2.0]


def test_without_the_tracker_all_that_the_monitor_has_goes_to_an_accelerators_trackers(make: Any) -> None:
    kept = Kept()
    accelerator = make(None, kept)
    net = oracle.model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    monitor = gradmon.watch(model, optimizer)
    monitor.add_sink(accelerator)
    _loop(accelerator, (model, optimizer), oracle.batches(3), log=lambda number, loss: monitor.log_scalar("loss", loss))
    monitor.detach()
    assert kept.calls["loss"] == 3


def test_the_last_step_reaches_the_other_trackers_before_they_close(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = Kept()
    monitor = _monitor()
    accelerator, model, optimizer = _started(make, monitor, kept, "tensorboard")
    monitor.add_sink(accelerator)
    _loop(
        accelerator,
        (model, optimizer),
        oracle.batches(4),
        log=lambda number, loss: accelerator.log({"loss": loss}, step=number),
    )
    accelerator.end_training()
    assert sorted(kept.rows) == [0, 1, 2, 3]
    assert "gradmon/grad_norm" in kept.rows[3]
    reader = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in reader.Scalars("gradmon/grad_norm")] == [0, 1, 2, 3]
    assert [event.step for event in reader.Scalars("loss")] == [0, 1, 2, 3]
    assert not optimizer.optimizer._optimizer_step_pre_hooks, "and the optimizer is as it was found"


def test_the_tracker_wants_a_monitor() -> None:
    with pytest.raises(TypeError, match="monitor must be a ModuleMonitor, got Linear"):
        GradmonTracker(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_before_there_is_a_step_and_where_it_is_switched_off_logging_does_no_harm(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = make(None, GradmonTracker(gradmon.ModuleMonitor()))
    accelerator.log({"loss": 1.0})
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    accelerator, model, optimizer = _started(make, monitor := _monitor())
    _loop(accelerator, (model, optimizer), oracle.batches(2), log=lambda number, loss: accelerator.log({"loss": loss}))
    accelerator.end_training()
    assert monitor.get_all_metrics() == {}


# --- a spike -------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch_gradmon:torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("precision", ["32", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_skip_is_no_overflow_for_accelerate_so_the_loop_asks_the_monitor_before_it_steps_its_scheduler(
    accumulation: int, precision: str, asks: bool, make: Any
) -> None:
    setting = oracle.Setting("adamw", precision, accumulation)

    def trained(spike: bool) -> tuple[nn.Module, Any, Any, gradmon.ModuleMonitor, list[bool]]:
        accelerator = make(setting)
        if precision == "fp16":
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        net = oracle.model()
        bare = torch.optim.AdamW(net.parameters(), lr=1e-2)
        model, optimizer, scheduler = accelerator.prepare(net, bare, torch.optim.lr_scheduler.ExponentialLR(bare, 0.9))
        monitor = gradmon.watch(model, optimizer, on_spike="skip")
        overflows: list[bool] = []

        def step() -> None:
            overflows.append(accelerator.optimizer_step_was_skipped)
            if not asks or not monitor.step_was_skipped:
                scheduler.step()

        data = oracle.batches(20 * accumulation)
        first = 15 * accumulation
        if not spike:
            del data[first : first + accumulation]
        by = first if spike else -1
        _loop(accelerator, (model, optimizer, step), data, poison=by)
        return net, bare.state_dict(), scheduler.get_last_lr(), monitor, overflows

    calm, poisoned = trained(False), trained(True)
    counts = poisoned[3].get_step_counts()
    assert (counts.skipped, counts.overflowed) == (1, 0)
    assert not any(poisoned[4]), "AcceleratedOptimizer knows of overflows only"
    if asks:
        assert _equal(calm[0], poisoned[0])
        assert repr(calm[1]) == repr(poisoned[1])
        assert calm[2] == poisoned[2] == pytest.approx([1e-2 * 0.9**19])
    else:
        assert poisoned[2] == pytest.approx([1e-2 * 0.9**20])


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def test_a_registered_monitor_goes_on_from_a_checkpoint_as_if_nothing_had_been_between(make: Any, tmp_path: Path) -> None:
    data = oracle.batches(20)

    def begun() -> tuple[Accelerator, Any, Any, gradmon.ModuleMonitor]:
        accelerator = make()
        net = oracle.model()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        monitor = gradmon.watch(model, optimizer)
        accelerator.register_for_checkpointing(monitor)
        return accelerator, model, optimizer, monitor

    accelerator, model, optimizer, whole = begun()
    _loop(accelerator, (model, optimizer), data[:12])
    accelerator.save_state(str(tmp_path / "checkpoint"))
    _loop(accelerator, (model, optimizer), data[12:])

    accelerator, again, optimizer, resumed = begun()
    accelerator.load_state(str(tmp_path / "checkpoint"))
    _loop(accelerator, (again, optimizer), data[12:])
    assert _equal(model, again)

    def rows(monitor: gradmon.ModuleMonitor) -> dict[int, dict[str, float]]:
        return {
            s: {k: v for k, v in row.items() if "overhead" not in k} for s, row in monitor.get_all_metrics().items() if s >= 12
        }

    assert rows(resumed) == rows(whole)
    assert list(rows(resumed)) == list(range(12, 20))
    assert all(math.isfinite(row["gradmon/spike_score"]) for row in rows(resumed).values())
    assert resumed.state_dict() == whole.state_dict()
