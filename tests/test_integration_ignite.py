"""The handler for PyTorch-Ignite, on real engines. What its pull request 3624 asked for is in the part named so."""

from __future__ import annotations

import gc
import math
import socket
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.spikes import MeanStd, Ratio, SpikeDetector, Threshold

from . import trainer_oracle as oracle
from .reads import HostReads

pytest.importorskip("ignite")

import ignite.distributed as idist
from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, CosineAnnealingScheduler, DiskSaver, LRScheduler, create_lr_scheduler_with_warmup
from ignite.metrics import RunningAverage

from torch_gradmon.integrations.ignite import GradmonHandler

pytestmark = [
    pytest.mark.integration,
    # Ignite's step for mixed precision asks for CUDA whatever the device is, and torch says that there is none
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda', but CUDA is not available"),
    pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported. Disabling autocast"),
    pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available"),
]

Batch = tuple[torch.Tensor, torch.Tensor]
POISON = 1e6


def _poisoned(data: list[Batch], at: int, by: float = POISON) -> list[Batch]:
    return [(inputs * by if number == at else inputs, labels) for number, (inputs, labels) in enumerate(data)]


def _model() -> nn.Module:
    """One without a norm, which would take the size of a poisoned batch away."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(oracle.FEATURES, 24), nn.GELU(), nn.Linear(24, oracle.CLASSES))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _stock(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> Engine:
    return create_supervised_trainer(model, optimizer, oracle.loss_of, **arguments)


def _own(
    model: nn.Module, optimizer: torch.optim.Optimizer, setting: oracle.Setting, scaler: Any = None, after: Any = None
) -> Engine:
    """An update function as people write it; ``after`` is what it ends with."""
    accumulation = setting.accumulation

    def update(engine: Engine, batch: Batch) -> float:
        inputs, labels = batch
        if after is None and (engine.state.iteration - 1) % accumulation == 0:
            optimizer.zero_grad()
        with setting.autocast:
            loss = oracle.loss_of(model(inputs), labels) / accumulation
        (loss if scaler is None else scaler.scale(loss)).backward()
        if engine.state.iteration % accumulation == 0:
            if setting.clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if after is not None:
                after(optimizer)
        return loss.item() * accumulation

    return Engine(update)


def _rows(trainer: Engine) -> list[dict[str, float]]:
    """What a handler that was attached now sees after each iteration, and whether it was a spike."""
    rows: list[dict[str, float]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine: Engine) -> None:
        rows.append({**engine.state.metrics, "spike": engine.state.unhealthy_spike, "iteration": engine.state.iteration})

    return rows


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


# --- every number, and nothing changed ---------------------------------------------------------------------------------------


def _trained(setting: oracle.Setting, watched: bool) -> tuple[nn.Module, list[dict[str, float]], list[Any]]:
    model = oracle.model()
    optimizer = oracle.OPTIMIZERS[setting.optimizer](model.parameters())
    scaler = setting.scaler()
    trainer = _own(model, optimizer, setting, scaler)
    trainer.state.scaler = scaler
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running_loss")
    if watched:
        monitor = gradmon.ModuleMonitor(preset="standard")
        monitor.add_gradient_metric("norm")
        GradmonHandler(monitor, keys=".").attach(trainer, model, optimizer)
    rows = _rows(trainer) if watched else []
    history: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: history.append((engine.state.output, engine.state.metrics["running_loss"]))
    )
    trainer.run(oracle.batches(12 * setting.accumulation))
    return model, rows, history


@pytest.mark.parametrize("setting", oracle.SETTINGS, ids=str)
def test_every_number_is_right_and_nothing_is_changed(setting: oracle.Setting) -> None:
    by_hand = oracle.model()
    expected = oracle.by_hand(by_hand, oracle.batches(12 * setting.accumulation), setting)
    plain, _, history = _trained(setting, watched=False)
    model, rows, with_history = _trained(setting, watched=True)
    assert _equal(model, plain)
    assert _equal(model, by_hand)
    assert with_history == history, "Ignite's own output and metrics"
    steps = [row for row in rows if "gradmon/param_norm" in row]
    assert [row["iteration"] for row in steps] == [setting.accumulation * number for number in range(1, 13)]
    for number, step in enumerate(expected):  # updates are measured in step 10, which is the tenth
        if number != 9:
            expected[number] = replace(step, values={k: v for k, v in step.values.items() if k != "gradmon/update_norm"})
    names = 2 * len(list(model.parameters())) + 3 + (setting.clip is not None)
    applied = sum(step.applied for step in expected)
    assert applied >= 8
    compared = oracle.assert_logged(dict(enumerate(steps)), expected)
    assert compared == names * applied + (12 - applied) * (2 + len(list(model.parameters()))) + expected[9].applied


# --- Ignite's own trainers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_stock_trainer_has_values_when_the_optimizer_steps_and_none_that_are_stale(accumulation: int) -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer, gradient_accumulation_steps=accumulation)
    handler = GradmonHandler()
    handler.attach(trainer, model, optimizer)
    rows = _rows(trainer)
    trainer.run(oracle.batches(8))
    assert [row["iteration"] for row in rows if "gradmon/grad_norm" in row] == list(range(accumulation, 9, accumulation))
    assert all(row.keys() == {"spike", "iteration"} for row in rows if "gradmon/grad_norm" not in row)
    monitor = handler.monitor
    assert monitor is not None
    assert list(monitor.get_all_metrics()) == list(range(1, 8 // accumulation + 1)), "steps are counted from 1"
    assert all(type(value) is float for value in trainer.state.metrics.values())


def test_every_means_the_iterations_that_ignite_means_by_it() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    GradmonHandler(every=3).attach(trainer, model, optimizer)
    rows = _rows(trainer)
    theirs: list[int] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=3), lambda engine: theirs.append(engine.state.iteration))
    trainer.run(oracle.batches(8))
    assert [row["iteration"] for row in rows if "gradmon/grad_norm" in row] == theirs == [3, 6]


@pytest.mark.parametrize("kind", ["True", "a GradScaler"])
def test_the_stock_trainer_for_mixed_precision(kind: str) -> None:
    norms = []
    for amp in (False, True):
        model = oracle.model()
        optimizer = _adam(model)
        scaler: Any = True if kind == "True" else torch.amp.GradScaler("cpu", init_scale=1024.0)
        arguments = {"amp_mode": "amp", "scaler": scaler} if amp else {}
        trainer = _stock(model, optimizer, **arguments)
        GradmonHandler(preset="minimal").attach(trainer, model, optimizer, scaler=None if scaler is True or not amp else scaler)
        rows = _rows(trainer)
        trainer.run(oracle.batches(4))
        norms.append([row["gradmon/grad_norm"] for row in rows])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6), "on a CPU autocast is off, and the scale is a power of two"


def test_several_optimizers_make_one_step() -> None:
    model = oracle.model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[3].parameters(), lr=0.1)]

    def update(engine: Engine, batch: Batch) -> None:
        model.zero_grad()
        oracle.loss_of(model(batch[0]), batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()

    handler = GradmonHandler()
    handler.attach(trainer := Engine(update), model, *optimizers)
    trainer.run(oracle.batches(3))
    assert list(handler.monitor.get_all_metrics()) == [1, 2, 3]
    assert handler.monitor.get_step_counts().attempted == 3


def test_an_evaluation_in_between_is_none_of_its_business() -> None:
    def trained(evaluates: bool) -> list[dict[str, float]]:
        model = oracle.model()
        optimizer = _adam(model)
        trainer = _stock(model, optimizer)
        GradmonHandler(layers="all").attach(trainer, model, optimizer)
        rows = _rows(trainer)
        evaluator = Engine(lambda engine, batch: model.eval()(batch[0]).sum().item())
        if evaluates:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda _: evaluator.run(oracle.batches(2)))
        trainer.run(oracle.batches(6))
        return [{key: value for key, value in row.items() if key != "gradmon/overhead_fraction"} for row in rows]

    assert trained(True) == trained(False)


# --- metrics for loggers -----------------------------------------------------------------------------------------------------


def _tensorboard(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.mark.parametrize("names", ["all", ["gradmon/grad_norm", "gradmon/param_norm"]])
def test_a_logger_of_ignite_that_is_attached_later_has_the_values_in_its_file(names: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    handler = GradmonHandler()
    handler.attach(trainer, model, optimizer)
    logger = TensorboardLogger(log_dir=tmp_path)
    logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", metric_names=names)
    with logger:
        trainer.run(oracle.batches(11))
    values = handler.monitor.get_all_metrics()
    found = _tensorboard(tmp_path)
    assert found["train/gradmon/grad_norm"] == [
        (step, pytest.approx(row["gradmon/grad_norm"], rel=1e-6)) for step, row in values.items()
    ]
    assert [step for step, _ in found["train/gradmon/param_norm"]] == list(range(1, 12))
    if names == "all":
        assert [step for step, _ in found["train/gradmon/update_norm"]] == [10]
    else:
        assert set(found) == {"train/gradmon/grad_norm", "train/gradmon/param_norm"}


def test_a_logger_that_was_attached_before_sees_nothing_rather_than_what_is_stale() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    rows = _rows(trainer)
    GradmonHandler().attach(trainer, model, optimizer)
    trainer.run(oracle.batches(3))
    assert all(row.keys() == {"spike", "iteration"} for row in rows)
    assert "gradmon/grad_norm" in trainer.state.metrics, "those of the last iteration stay after the run"


def test_metrics_of_others_are_never_touched_be_they_of_the_same_name() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    attached = GradmonHandler().attach(trainer, model, optimizer)
    trainer.state.metrics.update({"accuracy": 0.5, "gradmon/grad_norm": -1.0})
    rows = _rows(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update({"gradmon/grad_max": -2.0}))
    with pytest.warns(gradmon.GradmonWarning, match="another 'gradmon/grad_norm', which stays; choose another prefix=") as told:
        trainer.run(oracle.batches(3))
    assert len([each for each in told if "another" in str(each.message)]) == 1
    assert [row["accuracy"] for row in rows] == [0.5] * 3
    assert [row["gradmon/grad_norm"] for row in rows] == [-1.0] * 3
    assert [row["gradmon/grad_max"] == -2.0 for row in rows] == [False, True, True]
    attached.remove()
    assert trainer.state.metrics == {"accuracy": 0.5, "gradmon/grad_norm": -1.0, "gradmon/grad_max": -2.0}


@pytest.mark.parametrize(
    ("arguments", "sees", "lacks"),
    [
        ({"layers": "all"}, "gradmon/grad_norm", "gradient_before_clip/0.weight/norm"),
        ({"layers": "all", "keys": "."}, "gradient_before_clip/0.weight/norm", "no"),
        ({"prefix": "a/"}, "a/gradmon/grad_norm", "gradmon/grad_norm"),
        ({"keys": "grad_(norm|max)$"}, "gradmon/grad_max", "gradmon/param_norm"),
    ],
)
def test_which_values_go_to_the_metrics(arguments: dict[str, Any], sees: str, lacks: str) -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    GradmonHandler(**arguments).attach(trainer, model, optimizer)
    trainer.run(oracle.batches(1))
    assert sees in trainer.state.metrics
    assert lacks not in trainer.state.metrics


def test_sinks_of_a_given_monitor_have_every_value_of_every_layer() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    rows: dict[int, dict[str, float]] = {}
    monitor = gradmon.ModuleMonitor(layers="all", preset="standard")
    monitor.add_sink(lambda values, step: rows.update({step: values}))
    GradmonHandler(monitor).attach(trainer, model, optimizer)
    trainer.run(oracle.batches(3))
    assert list(rows) == [1, 2, 3], "also the last one, when the run has ended"
    assert all("gradient_before_clip/0.weight/norm" in row for row in rows.values())
    assert not any(key.startswith("gradient") for key in trainer.state.metrics)


# --- a spike: the flag, the callback, the skip ---------------------------------------------------------------------------------


def test_the_flag_is_there_before_the_run_and_says_which_iterations_were_spikes() -> None:
    model = _model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    events: list[tuple[int, int, str]] = []
    callback = lambda engine, event: events.append((engine.state.iteration, event.step, event.signal))  # noqa: E731
    GradmonHandler(on_spike=None, callback=callback).attach(trainer, model, optimizer)
    assert trainer.state.unhealthy_spike is False
    rows = _rows(trainer)
    trainer.run(_poisoned(oracle.batches(20), 15))
    assert [row["iteration"] for row in rows if row["spike"]] == [16]
    assert all(isinstance(row["spike"], bool) for row in rows)
    assert events == [(16, 16, "grad_norm")]


@pytest.mark.parametrize("spiking", [0, 1])
def test_of_two_handlers_on_one_trainer_either_may_say_that_an_iteration_was_a_spike(spiking: int) -> None:
    models = [_model(), _model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]

    def update(engine: Engine, batch: Batch) -> None:
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            spikes = engine.state.iteration == 4 and number == spiking
            oracle.loss_of(model(batch[0] * (POISON if spikes else 1)), batch[1]).backward()
            optimizer.step()

    trainer = Engine(update)
    for prefix, model, optimizer in zip(("", "other/"), models, optimizers, strict=True):
        GradmonHandler(rule=Threshold(100.0), on_spike="skip", prefix=prefix).attach(trainer, model, optimizer)
    rows = _rows(trainer)
    with pytest.warns(gradmon.GradmonWarning, match="step 4: grad_norm"):
        trainer.run(oracle.batches(6))
    assert [row["iteration"] for row in rows if row["spike"]] == [4]


def test_a_spike_in_a_loss_that_is_logged_after_the_step_is_flagged_in_its_iteration() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    handler = GradmonHandler(on_spike=None, rule=SpikeDetector(Threshold(50.0), signal="loss"))

    def update(engine: Engine, batch: Batch) -> None:
        optimizer.zero_grad()
        loss = oracle.loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        handler.monitor.log_scalar("loss", 100.0 if engine.state.iteration == 5 else 1.0)

    handler.attach(trainer := Engine(update), model, optimizer)
    rows = _rows(trainer)
    trainer.run(oracle.batches(8))
    assert [row["iteration"] for row in rows if row["spike"]] == [5]


def test_a_step_that_is_skipped_for_nan_is_flagged_also_where_no_detector_looks_on() -> None:
    model = _model()
    trainer = _stock(model, optimizer := _adam(model))
    monitor = gradmon.ModuleMonitor(on_spike="skip")
    monitor.add_gradient_metric("norm")
    GradmonHandler(monitor).attach(trainer, model, optimizer)
    rows = _rows(trainer)
    with pytest.warns(gradmon.GradmonWarning, match="step 3: .* skipped"):
        trainer.run(_poisoned(oracle.batches(5), 2, math.nan))
    assert [row["iteration"] for row in rows if row["spike"]] == [3]


def test_a_callback_that_fails_is_told_once_and_training_goes_on() -> None:
    def fails(engine: Engine, event: SpikeEvent) -> None:
        raise RuntimeError("mine")

    model = oracle.model()
    optimizer = _adam(model)
    trainer = _stock(model, optimizer)
    GradmonHandler(rule=lambda norm: True, on_spike=None, callback=fails).attach(trainer, model, optimizer)
    with pytest.warns(gradmon.GradmonWarning, match="the callback of GradmonHandler failed; training continues") as told:
        trainer.run(oracle.batches(4))
    assert len(told) == 1
    assert trainer.state.iteration == 4


def _skips(kind: str) -> tuple[Callable[[nn.Module, torch.optim.Optimizer], tuple[Engine, Any]], int]:
    """A trainer and its scaler, and how many iterations a step has."""
    setting = oracle.Setting()

    def amp(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Engine, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return _stock(model, optimizer, amp_mode="amp", scaler=scaler), scaler

    of: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], tuple[Engine, Any]], int]] = {
        "stock": (lambda m, o: (_stock(m, o), None), 1),
        "stock, deterministic": (lambda m, o: (_stock(m, o, deterministic=True), None), 1),
        "stock, accumulation": (lambda m, o: (_stock(m, o, gradient_accumulation_steps=4), None), 4),
        "stock, amp": (amp, 1),
        "stock, amp with scaler=True": (lambda m, o: (_stock(m, o, amp_mode="amp", scaler=True), None), 1),
        "own": (lambda m, o: (_own(m, o, setting), None), 1),
        "own, zero_grad last": (lambda m, o: (_own(m, o, setting, after=lambda o: o.zero_grad(set_to_none=False)), None), 1),
        "own, set_to_none last": (lambda m, o: (_own(m, o, setting, after=lambda o: o.zero_grad(set_to_none=True)), None), 1),
        "own, accumulation, clip": (lambda m, o: (_own(m, o, replace(setting, accumulation=4, clip=0.05)), None), 4),
    }
    return of[kind]


@pytest.mark.filterwarnings("ignore:torch_gradmon:torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("bad", [POISON, math.nan])
@pytest.mark.parametrize(
    "kind",
    [
        "stock",
        "stock, deterministic",
        "stock, accumulation",
        "stock, amp",
        "stock, amp with scaler=True",
        "own",
        "own, zero_grad last",
        "own, set_to_none last",
        "own, accumulation, clip",
    ],
)
def test_a_skipped_batch_leaves_the_model_as_if_it_had_not_come_with_no_code_in_the_step(kind: str, bad: float) -> None:
    make, per_step = _skips(kind)
    data = oracle.batches(20 * per_step)
    first = 15 * per_step
    calm = data[:first] + data[first + per_step :]
    ends = []
    for each in (calm, _poisoned(data, first, bad)):
        model = _model()
        optimizer = _adam(model)
        trainer, scaler = make(model, optimizer)
        handler = GradmonHandler(on_spike="skip")
        handler.attach(trainer, model, optimizer, scaler=scaler)
        rows = _rows(trainer)
        trainer.run(each)
        flags = [row["iteration"] for row in rows if row["spike"]]
        ends.append((model, optimizer.state_dict()["state"], None if scaler is None else scaler.state_dict(), flags, handler))
    refused = math.isnan(bad) and kind == "stock, amp"  # the scaler refuses it before anybody could skip it
    assert ends[0][3] == []
    assert ends[1][3] == ([] if refused else [16 * per_step])
    monitor = ends[1][4].monitor
    assert monitor is not None
    assert (monitor.get_step_counts().skipped, monitor.get_step_counts().overflowed) == ((0, 1) if refused else (1, 0))
    assert _equal(ends[0][0], ends[1][0])
    assert repr(ends[0][1]) == repr(ends[1][1]), "moments and step counters"
    assert refused or ends[0][2] == ends[1][2], "the scale"


# --- what the pull request's reviewers asked for -------------------------------------------------------------------------------


def _flagged(norms: Mapping[int, float] | list[float], **arguments: Any) -> tuple[list[int], GradmonHandler]:
    """Iterations that are called spikes, of gradients that have exactly these norms."""
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1e-9)
    handler = GradmonHandler(on_spike=None, **arguments)

    def update(engine: Engine, norm: float) -> None:
        optimizer.zero_grad()
        (weight(torch.ones(1, 1)) * norm).sum().backward()
        optimizer.step()

    handler.attach(trainer := Engine(update), weight, optimizer)
    rows = _rows(trainer)
    trainer.run(list(norms))
    return [int(row["iteration"]) for row in rows if row["spike"]], handler


def _noise(count: int, level: float = 1.0) -> list[float]:
    return (level * torch.randn(count, generator=torch.Generator().manual_seed(0)).mul(0.1).exp()).tolist()


@pytest.mark.parametrize("level", [1e-4, 1.0, 1e4])
def test_the_default_threshold_is_dynamic_and_needs_no_number_of_the_user(level: float) -> None:
    norms = _noise(60, level)
    norms[39] *= 5
    assert _flagged(norms)[0] == [40]


def test_mean_and_k_standard_deviations_with_the_users_k() -> None:
    norms = _noise(100)
    norms[79] = 1.45  # between three and seven standard deviations
    assert _flagged(norms, rule=MeanStd(k=3))[0][-1:] == [80]
    assert _flagged(norms, rule=MeanStd(k=7))[0] == []


def test_a_static_limit_on_the_norm() -> None:
    norms = [*_noise(5), 99.0, 101.0, 1.0]
    assert _flagged(norms, rule=Threshold(100.0))[0] == [7]


def test_five_times_a_moving_average() -> None:
    norms = [*[1.0] * 20, 4.9, *[1.0] * 20, 5.5, 1.0]
    assert _flagged(norms, rule=Ratio(limit=5.0, alpha=0.1))[0] == [42], "4.9 has moved the average a little, and left it again"


def test_no_history_is_kept_for_mean_and_variance() -> None:
    sizes = []
    for count in (30, 300):
        _, handler = _flagged(_noise(count), rule=MeanStd())
        rule = handler.state_dict()["detectors"]["grad_norm"]["rule"]
        assert sorted(rule) == ["count", "mean", "squares"]
        assert all(isinstance(value, (int, float)) for value in rule.values())
        sizes.append(rule["count"])
    assert sizes == [30, 300]


def test_a_norm_is_compared_first_and_learned_afterwards() -> None:
    norms = _noise(50)
    mean = math.fsum(norms) / 50
    std = math.sqrt(math.fsum((norm - mean) ** 2 for norm in norms) / 49)
    events: list[SpikeEvent] = []
    _flagged([*norms, 9.0], rule=MeanStd(), callback=lambda _, event: events.append(event))
    assert events[-1].score == pytest.approx((9.0 - mean) / std, rel=1e-4)


def test_while_the_rule_knows_too_little_nothing_is_a_spike() -> None:
    norms = [1.0] * 6 + [1e6] + [1.0] * 20
    assert _flagged(norms, rule=MeanStd(warmup=20))[0] == []


@pytest.mark.parametrize("kind", ["own", "own, zero_grad last", "stock"])
def test_it_is_known_before_the_weights_are_updated_and_not_only_after_the_iteration(kind: str) -> None:
    model = _model()
    optimizer = _adam(model)
    trainer, _ = _skips(kind)[0](model, optimizer)
    before: list[list[torch.Tensor]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda _: before.append([p.detach().clone() for p in model.parameters()]))
    GradmonHandler(on_spike="skip").attach(trainer, model, optimizer)
    moved: list[bool] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: moved.append(not all(map(torch.equal, model.parameters(), before[-1])))
    )
    with pytest.warns(gradmon.GradmonWarning, match="step 16: .* skipped"):
        trainer.run(_poisoned(oracle.batches(18), 15))
    assert [number for number, each in enumerate(moved, 1) if not each] == [16]


def test_a_user_may_read_the_flag_as_a_plain_attribute_before_any_iteration_and_after_detaching() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    attached = GradmonHandler(rule=lambda norm: True, on_spike=None).attach(trainer, model, optimizer)
    assert trainer.state.unhealthy_spike is False
    trainer.run(oracle.batches(2))
    assert trainer.state.unhealthy_spike is True
    attached.remove()
    assert trainer.state.unhealthy_spike is False


@pytest.mark.parametrize("where", ["engine.state.scaler", "scaler="])
def test_gradients_are_unscaled_by_the_scaler_of_the_engine_or_the_one_that_is_named(where: str) -> None:
    model = oracle.model()
    optimizer = _adam(model)
    setting = oracle.Setting(precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    trainer = _own(model, optimizer, setting, scaler)
    if where == "engine.state.scaler":
        trainer.state.scaler = scaler
    GradmonHandler().attach(trainer, model, optimizer, scaler=scaler if where == "scaler=" else None)
    rows = _rows(trainer)
    trainer.run(oracle.batches(1))
    other = oracle.model()
    with setting.autocast:
        loss = oracle.loss_of(other(oracle.batches(1)[0][0]), oracle.batches(1)[0][1])
    gradients = torch.autograd.grad(loss * 512, list(other.parameters()))
    norm = torch.cat([(gradient.double() / 512).flatten() for gradient in gradients]).norm().item()
    assert rows[0]["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6), "known from the first step on"


def test_something_else_in_engine_state_scaler_is_left_alone() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    trainer.state.scaler = "standard"  # of the data
    GradmonHandler().attach(trainer, model, optimizer)
    trainer.run(oracle.batches(1))
    assert "gradmon/grad_norm" in trainer.state.metrics


def test_numbers_are_read_once_an_iteration_and_not_for_each_parameter() -> None:
    counts = []
    for layers in (5, 50):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def update(engine: Engine, batch: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        trainer = Engine(update)
        GradmonHandler().attach(trainer, model, optimizer)
        trainer.run([torch.ones(2, 8)] * 3)
        with HostReads() as reads:
            trainer.state.max_epochs = None
            trainer.run([torch.ones(2, 8)])
        counts.append(reads.counts["scalar"])
    assert counts[0] == counts[1] > 0


def test_gradients_are_looked_at_and_not_touched() -> None:
    def gradients(watched: bool) -> list[torch.Tensor]:
        model = oracle.model()
        trainer = _stock(model, optimizer := _adam(model))
        if watched:
            GradmonHandler().attach(trainer, model, optimizer)
        trainer.run(oracle.batches(3))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    assert all(gradient.grad_fn is None for gradient in gradients(True))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_step_that_ends_with_zero_grad_is_seen_all_the_same(set_to_none: bool) -> None:
    ends = []
    for after in (None, lambda optimizer: optimizer.zero_grad(set_to_none=set_to_none)):
        model = oracle.model()
        trainer = _own(model, optimizer := _adam(model), oracle.Setting(), after=after)
        GradmonHandler().attach(trainer, model, optimizer)
        rows = _rows(trainer)
        trainer.run(oracle.batches(4))
        ends.append([row["gradmon/grad_norm"] for row in rows])
    assert ends[0] == ends[1]
    assert all(norm > 0 for norm in ends[0])


def test_a_callback_is_optional_and_comes_beside_whatever_is_done_about_a_spike() -> None:
    events: list[int] = []
    for callback in (None, lambda engine, event: events.append(engine.state.iteration)):
        model = _model()
        trainer = _stock(model, optimizer := _adam(model))
        GradmonHandler(on_spike="skip", callback=callback).attach(trainer, model, optimizer)
        with pytest.warns(gradmon.GradmonWarning, match="skipped"):
            trainer.run(_poisoned(oracle.batches(17), 15))
        assert trainer.state.unhealthy_spike is False
    assert events == [16]


class _Alternating:
    """A rule of the user's own: every third value."""

    threshold = 0.5

    def __init__(self) -> None:
        self.seen = 0

    def score(self, value: float) -> float:
        return float(self.seen % 3 == 2)

    def update(self, value: float) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class _Stricter(MeanStd):
    """One that overrides a part of another."""

    def score(self, value: float) -> float | None:
        return None if value < 1 else super().score(value)


def test_a_rule_of_the_users_own_a_changed_one_a_function_or_a_detector_takes_the_place_of_the_default() -> None:
    norms = [1.0, 2.0, 3.0, 10.0, 3.0, 2.0]
    assert _flagged(norms, rule=_Alternating())[0] == [3, 6]
    assert _flagged(norms, rule=lambda norm: norm > 5)[0] == [4]
    assert _flagged(norms, rule=SpikeDetector(Threshold(2.5), signal="grad_max"))[0] == [3, 4, 5]
    calm = [*_noise(30, 0.5), 0.9, *_noise(3, 0.5), 9.0]
    assert {31, 35} <= set(_flagged(calm, rule=MeanStd(k=3))[0])
    assert _flagged(calm, rule=_Stricter(k=3))[0] == [35]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"rule": 3.0}, TypeError, "rule must have the methods score and update and a threshold"),
        ({"rule": MeanStd}, TypeError, "rule must have the methods"),
        ({"callback": 3}, TypeError, "callback must be a function of the engine and the event, got 3"),
        ({"keys": "("}, ValueError, "keys='\\(' is not a valid regular expression"),
        ({"on_spike": "jump"}, ValueError, "on_spike='jump' is not one of 'warn', 'skip', 'raise'"),
        ({"every": 0}, ValueError, "every=0"),
        ({"window": 10}, TypeError, "there is no argument 'window'"),
        ({"monitor": gradmon.ModuleMonitor(), "rule": Threshold(3.0)}, ValueError, "call monitor.add_detector"),
        ({"monitor": 1}, TypeError, "monitor must be a ModuleMonitor"),
    ],
)
def test_arguments_are_checked_when_the_handler_is_made(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        GradmonHandler(**arguments)


def test_arguments_of_attach_are_checked_before_anything_is_hung() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    for arguments, kind, message in (
        ((model, model, optimizer), TypeError, "trainer must be an ignite.engine.Engine, got Sequential"),
        ((trainer, optimizer, model), TypeError, "expected a torch.nn.Module"),
        ((trainer, model), ValueError, "the optimizer is missing"),
        ((trainer, model, optimizer, optimizer), ValueError, "named twice"),
        ((trainer, model, _adam(oracle.model())), ValueError, "was made for another model: no parameter of this Sequential"),
    ):
        with pytest.raises(kind, match=message):
            handler.attach(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got 1\.0"):
        handler.attach(trainer, model, optimizer, scaler=1.0)  # type: ignore[arg-type]
    assert not any(trainer._event_handlers.values())
    handler.attach(trainer, model, optimizer)
    with pytest.raises(ValueError, match="attached already"):
        handler.attach(trainer, model, optimizer)


def test_a_model_that_is_moved_between_attaching_and_the_run_is_watched_where_it_is_then() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    GradmonHandler().attach(trainer, model, optimizer)
    model.double()
    trainer.run([(inputs.double(), labels) for inputs, labels in oracle.batches(2)])
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    assert trainer.state.metrics["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-12)


def test_the_changelog_names_it_under_the_version_to_come() -> None:
    text = (Path(__file__).parent.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = text.split("## [Unreleased]")[1].split("\n## [")[0]
    assert "GradmonHandler" in unreleased


def _train_on_a_rank(rank: int, directory: str) -> None:
    """Rank 1 alone has a poisoned batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ends = []
    for at in (None, 15):
        model = idist.auto_model(_model())
        optimizer = idist.auto_optim(_adam(model))
        trainer = _stock(model, optimizer)
        handler = GradmonHandler(on_spike="skip")
        handler.attach(trainer, model, optimizer)
        rows = _rows(trainer)
        data = oracle.batches(40)[rank::2]
        if at is None:
            del data[15]
        trainer.run(_poisoned(data, 15) if at is not None and rank == 1 else data)
        ends.append(([row["iteration"] for row in rows if row["spike"]], [p.detach().clone() for p in model.parameters()]))
        norms = [row["gradmon/grad_norm"] for row in rows]
    torch.save({"flags": [end[0] for end in ends], "ends": [end[1] for end in ends], "norms": norms}, f"{directory}/{rank}.pt")


def test_all_ranks_see_the_same_flag_and_skip_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with idist.Parallel(backend="gloo", nproc_per_node=2, master_port=port) as parallel:
        parallel.run(_train_on_a_rank, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["flags"] == second["flags"] == [[], [16]]
    assert first["norms"] == second["norms"]
    for found in (first, second):
        assert all(map(torch.equal, found["ends"][0], found["ends"][1])), "as if the batch had not come"
    assert all(map(torch.equal, first["ends"][1], second["ends"][1]))


# --- runs begin, end, break off and go on ------------------------------------------------------------------------------------------


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many hooks hang on them."""
    of_model = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    of_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # type: ignore[attr-defined]
    return of_model + of_parameters + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class _Breaks(Exception):
    pass


@pytest.mark.parametrize("how", ["completed", "terminate", "terminate, skip_completed", "exception", "interrupt signal"])
def test_when_the_run_ends_however_it_ends_the_model_is_as_it_was_found_and_all_is_sent(how: str) -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    clean = _hooks(model, optimizer)
    rows: list[int] = []
    monitor = gradmon.ModuleMonitor(preset="minimal")
    monitor.add_sink(lambda values, step: rows.append(step))
    GradmonHandler(monitor).attach(trainer, model, optimizer)
    assert _hooks(model, optimizer) == clean

    @trainer.on(Events.ITERATION_COMPLETED(once=3))
    def _(engine: Engine) -> None:
        assert _hooks(model, optimizer) > clean
        if how.startswith("terminate"):
            engine.terminate(skip_completed="skip" in how)
        elif how != "completed":
            raise _Breaks("here") if how == "exception" else KeyboardInterrupt

    if how in ("exception", "interrupt signal"):
        with pytest.raises(_Breaks if how == "exception" else KeyboardInterrupt):
            trainer.run(oracle.batches(4))
    else:
        trainer.run(oracle.batches(4))
    assert _hooks(model, optimizer) == clean
    assert rows == ([1, 2, 3, 4] if how == "completed" else [1, 2, 3])


@pytest.mark.parametrize("watched", [0, 1, 2])
def test_an_exception_comes_out_as_without_the_handler_and_another_handler_may_deal_with_it(watched: int) -> None:
    def engine(deals: bool) -> tuple[Engine, list[str], list[GradmonHandler]]:
        model = oracle.model()
        optimizer = _adam(model)
        seen: list[str] = []

        def update(engine: Engine, batch: Batch) -> None:
            if engine.state.iteration == 2:
                raise _Breaks("here")
            oracle.loss_of(model(batch[0]), batch[1]).backward()
            optimizer.step()

        trainer = Engine(update)
        handlers = [GradmonHandler(prefix=f"{number}/") for number in range(watched)]
        for handler in handlers[:1]:
            handler.attach(trainer, model, optimizer)
        if deals:
            trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: seen.append(str(error)))
        for handler in handlers[1:]:
            handler.attach(trainer, model, optimizer)
        return trainer, seen, handlers

    trainer, _, _ = engine(deals=False)
    with pytest.raises(_Breaks, match="here"):
        trainer.run(oracle.batches(3))
    trainer, seen, _ = engine(deals=True)
    trainer.run(oracle.batches(3), max_epochs=2)
    assert seen == ["here"]
    assert trainer.state.iteration == 5, "Ignite goes on with the next epoch"


def test_two_handlers_on_one_trainer_both_let_go_when_an_exception_comes_out() -> None:
    models = [oracle.model() for _ in range(2)]
    optimizers = [_adam(model) for model in models]
    trainer = Engine(lambda engine, batch: [model(batch[0]).sum().backward() for model in models] and 1 / 0)
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        GradmonHandler(prefix=f"{number}/").attach(trainer, model, optimizer)
    with pytest.raises(ZeroDivisionError):
        trainer.run(oracle.batches(2))
    assert [_hooks(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)] == [0, 0]


def test_where_another_handler_has_dealt_with_an_exception_the_watching_goes_on() -> None:
    model = oracle.model()
    optimizer = _adam(model)

    def update(engine: Engine, batch: Batch) -> None:
        optimizer.zero_grad()
        loss = oracle.loss_of(model(batch[0]), batch[1])
        if engine.state.iteration == 2:
            raise _Breaks
        loss.backward()
        optimizer.step()

    handler = GradmonHandler()
    handler.attach(trainer := Engine(update), model, optimizer)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None)
    rows = _rows(trainer)
    trainer.run(oracle.batches(3), max_epochs=2)
    assert [row["iteration"] for row in rows if "gradmon/grad_norm" in row] == [1, 3, 4, 5]


def test_after_it_was_taken_away_exceptions_come_out_and_nothing_of_it_is_left() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    clean = _hooks(model, optimizer)
    with GradmonHandler().attach(trainer, model, optimizer):
        trainer.run(oracle.batches(2))
    assert trainer.state.metrics == {}
    assert not any(trainer._event_handlers.values())
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: (_ for _ in ()).throw(_Breaks))
    with pytest.raises(_Breaks):
        trainer.run(oracle.batches(2))
    assert _hooks(model, optimizer) == clean


def test_it_may_be_taken_away_in_the_middle_of_a_run_and_attached_in_the_middle() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine: handler.attach(engine, model, optimizer))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda engine: handler.detach())
    trainer.run(oracle.batches(8))
    assert list(handler.monitor.get_all_metrics()) == [3, 4, 5]
    assert trainer.state.metrics == {}


def test_a_run_that_is_extended_and_one_that_begins_again_go_on_counting() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    handler.attach(trainer, model, optimizer)
    trainer.run(oracle.batches(3), max_epochs=1)
    monitor = handler.monitor
    trainer.run(oracle.batches(3), max_epochs=2)
    assert handler.monitor is monitor
    assert monitor is not None
    assert list(monitor.get_all_metrics()) == [1, 2, 3, 4, 5, 6]
    trainer.state.max_epochs = None
    trainer.run(oracle.batches(2), max_epochs=1)
    assert trainer.state.iteration == 2
    assert list(monitor.get_all_metrics()) == list(range(1, 9))


def test_values_of_the_run_before_are_not_those_of_the_first_iterations_of_the_next() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model), gradient_accumulation_steps=4)
    GradmonHandler().attach(trainer, model, optimizer)
    trainer.run(oracle.batches(4))
    assert "gradmon/grad_norm" in trainer.state.metrics
    rows = _rows(trainer)
    trainer.run(oracle.batches(4), max_epochs=2)
    assert [row["iteration"] for row in rows if "gradmon/grad_norm" in row] == [8]


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    handler.attach(trainer, model, optimizer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.interrupt())
    data = oracle.batches(4)
    trainer.run(data)
    assert trainer.state.iteration == 2
    trainer.run(data)
    assert list(handler.monitor.get_all_metrics()) == [1, 2, 3, 4]


def test_the_handler_keeps_neither_the_model_nor_the_trainer_alive() -> None:
    handler = GradmonHandler()

    def train() -> tuple[Any, Any]:
        model = oracle.model()
        trainer = _stock(model, optimizer := _adam(model))
        handler.attach(trainer, model, optimizer)
        trainer.run(oracle.batches(2))
        return weakref.ref(model), weakref.ref(trainer)

    references = train()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert list(handler.monitor.get_all_metrics()) == [1, 2]
    handler.detach()


def test_switched_off_by_the_environment_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = _model()
    trainer = _stock(model, optimizer := _adam(model))
    GradmonHandler(on_spike="skip").attach(trainer, model, optimizer)
    rows = _rows(trainer)
    trainer.run(_poisoned(oracle.batches(18), 15))
    assert all(row.keys() == {"spike", "iteration"} and not row["spike"] for row in rows)


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def _without_time(rows: Mapping[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {step: {key: value for key, value in row.items() if "overhead" not in key} for step, row in rows.items()}


@pytest.mark.parametrize("loads", ["before attach", "after attach"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_was_not_interrupted(
    loads: str, accumulation: int, tmp_path: Path
) -> None:
    data = _poisoned(oracle.batches(8 * accumulation), 3, 1e-3)

    def parts() -> tuple[dict[str, Any], GradmonHandler]:
        model = _model()
        optimizer = _adam(model)
        trainer = _stock(model, optimizer, gradient_accumulation_steps=accumulation)
        handler = GradmonHandler(on_spike="skip")
        return {"trainer": trainer, "model": model, "optimizer": optimizer, "gradmon": handler}, handler

    whole, handler = parts()
    handler.attach(whole["trainer"], whole["model"], whole["optimizer"])
    saver = Checkpoint(whole, DiskSaver(tmp_path, create_dir=True), n_saved=None)
    whole["trainer"].add_event_handler(Events.EPOCH_COMPLETED, saver)
    whole["trainer"].run(data, max_epochs=3)
    (path,) = tmp_path.glob(f"*_{8 * accumulation}.pt")

    resumed, again = parts()
    if loads == "after attach":
        again.attach(resumed["trainer"], resumed["model"], resumed["optimizer"])
    Checkpoint.load_objects(resumed, path)
    assert again.state_dict()["next_step"] == 9, "what was loaded can be saved before the run"
    if loads == "before attach":
        again.attach(resumed["trainer"], resumed["model"], resumed["optimizer"])
    resumed["trainer"].run(data, max_epochs=3)
    assert _equal(whole["model"], resumed["model"])
    rows = _without_time(handler.monitor.get_all_metrics())
    assert len(rows) == 24
    assert _without_time(again.monitor.get_all_metrics()) == {step: row for step, row in rows.items() if step > 8}
    assert again.state_dict() == handler.state_dict()


def test_without_a_state_of_its_own_a_resumed_run_counts_from_the_iteration() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    handler.attach(trainer, model, optimizer)
    trainer.load_state_dict({"iteration": 6, "epoch_length": 3, "max_epochs": 3})
    trainer.run(oracle.batches(3))
    assert list(handler.monitor.get_all_metrics()) == [7, 8, 9]


def test_a_state_may_be_loaded_within_a_run_and_one_that_is_none_is_refused() -> None:
    model = oracle.model()
    trainer = _stock(model, optimizer := _adam(model))
    handler = GradmonHandler()
    assert handler.state_dict() == {}
    handler.load_state_dict({})
    with pytest.raises(TypeError, match=r"expected the dict of GradmonHandler.state_dict\(\), got 3"):
        handler.load_state_dict(3)  # type: ignore[arg-type]
    handler.attach(trainer, model, optimizer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2), lambda _: handler.load_state_dict({**handler.state_dict(), "next_step": 30})
    )
    trainer.run(oracle.batches(4))
    assert list(handler.monitor.get_all_metrics()) == [1, 2, 30, 31]


# --- schedulers ----------------------------------------------------------------------------------------------------------------


def _schedulers() -> dict[str, tuple[Any, Any]]:
    """By name: what makes one, and the event that it follows."""
    of = torch.optim.lr_scheduler
    warm = {"warmup_start_value": 0.001, "warmup_duration": 6}
    return {
        "a torch scheduler": (lambda o: LRScheduler(of.ExponentialLR(o, 0.8)), Events.ITERATION_STARTED),
        "cosine": (lambda o: CosineAnnealingScheduler(o, "lr", 0.1, 0.001, 20), Events.ITERATION_STARTED),
        "cosine, completed": (lambda o: CosineAnnealingScheduler(o, "lr", 0.1, 0.001, 20), Events.ITERATION_COMPLETED),
        "warm-up": (
            lambda o: create_lr_scheduler_with_warmup(of.StepLR(o, 3, 0.5), **warm),
            Events.ITERATION_STARTED,
        ),
    }


@pytest.mark.filterwarnings("ignore:torch_gradmon.*step 1:torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("first", ["handler", "scheduler"])
@pytest.mark.parametrize("kind", _schedulers())
def test_a_scheduler_with_the_filter_ends_as_if_the_skipped_batch_had_not_come(kind: str, first: str) -> None:
    make, event = _schedulers()[kind]

    def trained(data: list[Batch], filtered: bool = True) -> tuple[nn.Module, float]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = _stock(model, optimizer)
        handler, scheduler = GradmonHandler(on_spike="skip"), make(optimizer)
        if first == "handler":
            handler.attach(trainer, model, optimizer)
        scheduler.attach(trainer, event(event_filter=handler.unless_skipped) if filtered else event)
        if first == "scheduler":
            handler.attach(trainer, model, optimizer)
        trainer.run(data)
        return model, optimizer.param_groups[0]["lr"]

    data = oracle.batches(18)
    calm, rate = trained(data[:13] + data[14:])
    model, same = trained(_poisoned(data, 13))
    assert _equal(calm, model)
    assert rate == same
    assert trained(_poisoned(data, 13), filtered=False)[1] != rate, "without it the rate follows the iterations"


def test_a_deterministic_engine_is_an_engine() -> None:
    model = oracle.model()
    optimizer = _adam(model)
    GradmonHandler().attach(trainer := _stock(model, optimizer, deterministic=True), model, optimizer)
    assert isinstance(trainer, DeterministicEngine)
    trainer.run(oracle.batches(2))
    assert "gradmon/grad_norm" in trainer.state.metrics


# --- the loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("returns", ["a number", "a dict", "a tensor"])
def test_the_loss_that_the_update_returns_is_in_the_run(returns: str, accumulation: int, tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "a number": lambda x, y, y_pred, loss: loss.item(),
        "a dict": lambda x, y, y_pred, loss: {"loss": loss.item(), "size": len(x)},
        "a tensor": lambda x, y, y_pred, loss: loss.detach(),
    }
    model = oracle.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = _stock(model, optimizer, gradient_accumulation_steps=accumulation, output_transform=made[returns])
    GradmonHandler(run_dir=tmp_path).attach(trainer, model, optimizer)
    losses: list[float] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine: Engine) -> None:
        output = engine.state.output
        losses.append(float(output["loss"] if isinstance(output, dict) else output))

    trainer.run(oracle.batches(12))
    means = [sum(losses[at : at + accumulation]) / accumulation for at in range(0, 12, accumulation)]
    assert list(gradmon.load_run(tmp_path).series("loss").values()) == pytest.approx(means, rel=1e-6)


def test_an_output_that_is_no_loss_is_left_out(tmp_path: Path) -> None:
    model = oracle.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = _stock(model, optimizer, output_transform=lambda x, y, y_pred, loss: (y_pred, y))
    GradmonHandler(run_dir=tmp_path).attach(trainer, model, optimizer)
    trainer.run(oracle.batches(3))
    assert "loss" not in set(gradmon.load_run(tmp_path).keys())
    assert gradmon.load_run(tmp_path).diagnose().unseen["loss"].startswith("return the loss from the update function")
