"""The callback for Lightning, in real trainers, beside the plain loop by hand."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon

from . import trainer_oracle as oracle
from .trainer_oracle import SETTINGS, Setting

pytestmark = [
    pytest.mark.integration,
    # advice, of which small runs like these get a lot
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*mid-epoch but your dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*Starting from v1.9.0, `tensorboardX` has been removed"),
    pytest.mark.filterwarnings("ignore:.*The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from torch_gradmon.integrations.lightning import GradmonCallback  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Net(lightning.LightningModule):
    """The oracle's model in Lightning's clothes."""

    def __init__(self, setting: Setting = Setting(), spike_at: int | None = None, interval: str = "") -> None:  # noqa: B008
        super().__init__()
        self.net = oracle.model()
        self.setting, self.spike_at, self.interval = setting, spike_at, interval

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = oracle.loss_of(self.net(inputs), labels)
        self.log("loss", loss)
        return loss * math.nan if index == self.spike_at else loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        self.log("val_loss", oracle.loss_of(self.net(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = oracle.OPTIMIZERS[self.setting.optimizer](self.net.parameters())
        if not self.interval:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Everything(GradmonCallback):
    """Keeps the rows that it hands out, and takes norms of every parameter before and after the clip."""

    def __init__(self, **more: Any) -> None:
        monitor = gradmon.ModuleMonitor(key_order="name_first", **more, preset="standard")
        monitor.add_gradient_metric("norm")
        super().__init__(monitor, log_every_n_steps=1)


def trainer(*callbacks: Any, setting: Setting | None = None, epochs: int = 1, **more: Any) -> Any:
    setting = setting or Setting()
    settings: dict[str, Any] = {"precision": {"32": None, "bf16": "bf16-mixed", "fp16": None}[setting.precision]}
    if setting.precision == "fp16":
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", setting.scaler())]
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=setting.accumulation,
        gradient_clip_val=setting.clip,
        callbacks=list(callbacks),
        **{**quiet, **settings, **more},
    )


def loader(count: int = 8) -> Any:
    return torch.utils.data.DataLoader(oracle.batches(count), batch_size=None)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows(directory: Path) -> list[dict[str, str]]:
    (file,) = directory.rglob("metrics.csv")
    with file.open() as lines:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(lines)]


# --- the table ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_number_is_that_of_the_plain_loop_and_nothing_changes(setting: Setting, tmp_path: Path) -> None:
    data = loader(24)
    plain, watched = Net(setting), Net(setting)
    callback = Everything()
    runs = []
    for net, callbacks, name in ((plain, [], "plain"), (watched, [callback], "watched")):
        logger = CSVLogger(tmp_path, name=name)
        run = trainer(*callbacks, setting=setting, logger=logger, log_every_n_steps=1)
        if setting.optimizer == "fused" and setting.precision != "32" and setting.clip:
            with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
                run.fit(net, data)
            continue
        run.fit(net, data)
        runs.append(run)
    if not runs:
        return  # Lightning refuses it, with the callback as without
    assert same(parameters(plain), parameters(watched))
    assert runs[0].logged_metrics.keys() <= runs[1].logged_metrics.keys()
    losses = [[row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("plain", "watched")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 24 // setting.accumulation

    hand = nn.ModuleDict({"net": oracle.model()})
    expected = oracle.by_hand(_Called(hand), data.dataset, setting)
    found = callback.monitor.get_all_metrics()
    assert list(found) == list(range(24 // setting.accumulation))
    assert oracle.assert_logged(found, expected) > 10 * len(expected)
    logged = {int(row["step"]): row for row in rows(tmp_path / "watched") if "gradmon/grad_norm" in row}
    assert list(logged) == list(found)
    for step, row in logged.items():
        assert {key: float(value) for key, value in row.items() if key not in ("step", "epoch")} == pytest.approx(
            found[step], nan_ok=True
        )


class _Called(nn.Module):
    """A module with the names of parameters that it has in Lightning."""

    def __init__(self, inner: nn.ModuleDict) -> None:
        super().__init__()
        self.net = inner["net"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


# --- what goes where ---------------------------------------------------------------------------------------------------------


def test_rows_go_to_every_logger_and_a_few_values_through_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    before = lightning.LightningModule.log

    def counted(self: Any, name: str, *arguments: Any, **more: Any) -> None:
        calls.append(name)
        before(self, name, *arguments, **more)

    monkeypatch.setattr(lightning.LightningModule, "log", counted)
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    callback = GradmonCallback(layers="all")
    run = trainer(callback, logger=loggers, log_every_n_steps=5)
    run.fit(Net(), loader(12))

    found = [row for row in rows(tmp_path) if "gradmon/grad_norm" in row]
    assert [row["step"] for row in found] == ["0", "5", "10"]
    assert "gradient_before_clip/net.0.weight/norm" in found[0]
    assert "gradmon/grad_norm_max" in found[1], "the largest of the steps between two rows"
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(events.parent), size_guidance={"scalars": 0})
    board.Reload()
    assert [each.step for each in board.Scalars("gradient_before_clip/net.0.weight/norm")] == [0, 5, 10]
    assert [f"{each.value:.5g}" for each in board.Scalars("gradmon/grad_norm")] == [
        f"{float(row['gradmon/grad_norm']):.5g}" for row in found
    ]

    assert calls.count("gradmon/grad_norm") == 3
    assert calls.count("gradmon/update_ratio") == 2, "updates are measured on every tenth step"
    assert {name for name in calls if "/" in name and not name.startswith("gradmon")} == set()
    assert run.progress_bar_metrics["gradmon/grad_norm"] == pytest.approx(float(found[-1]["gradmon/grad_norm"]))
    assert "gradmon/update_ratio" in run.callback_metrics
    assert "gradmon/update_ratio" not in run.progress_bar_metrics


def test_every_whole_model_value_may_be_one_of_the_few() -> None:
    wanted = ("grad_max", "param_norm", "steps_not_applied")
    run = trainer(GradmonCallback(log_every_n_steps=1, summary=wanted, prog_bar=wanted[:1]))
    run.fit(Net(), loader(3))
    for section in ("gradmon", "gradmon_epoch"):
        assert {f"{section}/{name}" for name in wanted} <= run.callback_metrics.keys()
    assert "gradmon/grad_max" in run.progress_bar_metrics


def test_the_keys_of_lightnings_own_monitor(tmp_path: Path) -> None:
    monitor = gradmon.ModuleMonitor(layers="all")
    for name in ("grad_norm", "grad_mean", "grad_std", "grad_sparsity"):
        monitor.add_model_metric(name)
    callback = GradmonCallback(monitor, log_every_n_steps=2, step_prefix="train/", epoch_prefix="train_epoch/")
    run = trainer(callback, logger=CSVLogger(tmp_path))
    run.fit(Net(), loader(4))
    wanted = {"grad_norm", "grad_mean", "grad_std", "grad_sparsity"}
    steps = [row for row in rows(tmp_path) if "train/grad_norm" in row]
    assert [row["step"] for row in steps] == ["0", "2"]
    assert all({f"train/{name}" for name in wanted} <= row.keys() for row in steps)
    (epoch,) = [row for row in rows(tmp_path) if "train_epoch/grad_norm" in row]
    assert {f"train_epoch/{name}" for name in wanted} <= epoch.keys()
    every = [values["gradmon/grad_std"] for values in monitor.get_all_metrics().values()]
    assert float(epoch["train_epoch/grad_std"]) == pytest.approx(sum(every) / 4), "of all steps, not of those with a row"
    assert "train_epoch/gradient_before_clip/net.0.weight/norm" in epoch
    assert run.callback_metrics["train_epoch/grad_norm"] == pytest.approx(float(epoch["train_epoch/grad_norm"]))


def test_no_rows_of_steps_where_none_are_wanted_and_none_of_epochs(tmp_path: Path) -> None:
    quiet = GradmonCallback(log_every_n_steps=0, track_epochs=False)
    run = trainer(quiet, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(Net(), loader(3))
    assert {key for row in rows(tmp_path) for key in row} == {"epoch", "step", "loss"}
    assert len(quiet.monitor.get_all_metrics()) == 3


def test_means_of_an_epoch_leave_out_what_is_not_finite_and_begin_anew(tmp_path: Path) -> None:
    setting = Setting(precision="fp16")
    callback = GradmonCallback(log_every_n_steps=0)
    trainer(callback, setting=setting, logger=CSVLogger(tmp_path), epochs=3).fit(Net(setting), loader(10))
    every = callback.monitor.get_all_metrics()
    norms = [values["gradmon/grad_norm"] for values in every.values()]
    assert not math.isfinite(norms[0]), "the scale begins too large"
    found = [row for row in rows(tmp_path) if "gradmon_epoch/grad_norm" in row]
    assert len(found) == 3
    for epoch, row in enumerate(found):
        finite = [norm for norm in norms[10 * epoch : 10 * epoch + 10] if math.isfinite(norm)]
        assert float(row["gradmon_epoch/grad_norm"]) == pytest.approx(sum(finite) / len(finite))
        assert float(row["gradmon_epoch/grad_norm_max"]) == pytest.approx(max(finite))
        assert row["step"] == str(10 * epoch + 9)
        refused = sum(not math.isfinite(norm) for norm in norms[: 10 * epoch + 10])
        assert float(row["gradmon_epoch/steps_not_applied"]) == refused > 0, "a counter has no mean"


def test_checkpoints_may_be_chosen_by_a_value_of_a_step_or_of_an_epoch(tmp_path: Path) -> None:
    by_step = ModelCheckpoint(tmp_path / "step", monitor="gradmon/grad_norm", every_n_train_steps=1, mode="min")
    by_epoch = ModelCheckpoint(tmp_path / "epoch", monitor="gradmon_epoch/grad_norm", save_on_train_epoch_end=True)
    callback = GradmonCallback(log_every_n_steps=1)
    trainer(callback, by_step, by_epoch, enable_checkpointing=True, epochs=2).fit(Net(), loader(5))
    norms = [values["gradmon/grad_norm"] for values in callback.monitor.get_all_metrics().values()]
    assert float(by_step.best_model_score) == pytest.approx(min(norms))
    assert float(by_epoch.best_model_score) == pytest.approx(min(sum(norms[:5]) / 5, sum(norms[5:]) / 5))


def test_an_explosion_is_said_once_and_before_clipping(tmp_path: Path) -> None:
    callback = GradmonCallback(explosion_threshold=1e-3)
    with pytest.warns(
        gradmon.GradmonWarning, match=r"step 0: the gradient norm before clipping is .* explosion_threshold=0.001"
    ) as said:
        trainer(callback, setting=Setting(clip=1e-4)).fit(Net(), loader(5))
    assert len([each for each in said if "explosion" in str(each.message)]) == 1
    high = GradmonCallback(explosion_threshold=1e4)
    trainer(high).fit(Net(), loader(5))  # where a warning would be an error


def test_what_is_logged_may_be_changed_by_a_subclass(tmp_path: Path) -> None:
    class Mine(GradmonCallback):
        def step_values(self, values: dict[str, float]) -> dict[str, float]:
            return {"log10": math.log10(values["mine/grad_norm"])}

        def epoch_values(self, values: dict[str, float]) -> dict[str, float]:
            return {"mine": values["gradmon_epoch/grad_norm"]}

        @property
        def step_prefix(self) -> str:
            return "mine/"

    callback = Mine(log_every_n_steps=1)
    trainer(callback, logger=CSVLogger(tmp_path)).fit(Net(), loader(2))
    ours = [row for row in rows(tmp_path) if "loss" not in row]
    assert {key for row in ours for key in row} == {"step", "log10", "mine"}


@pytest.mark.parametrize("by", ["the environment", "the cadence"])
def test_a_subclass_is_not_asked_about_an_epoch_without_values(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GradmonCallback):
        def epoch_values(self, values: dict[str, float]) -> dict[str, float]:
            return {"mine": values["gradmon_epoch/grad_norm"]}

    if by == "the environment":
        monkeypatch.setenv("GRADMON_DISABLE", "1")
    plain, watched = Net(), Net()
    callback = Mine(run_dir=tmp_path / "run", every=lambda step: False)
    trainer().fit(plain, loader(3))
    trainer(callback, logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(watched, loader(3))
    assert same(parameters(plain), parameters(watched))
    assert {key for row in rows(tmp_path) for key in row} == {"epoch", "step", "loss"}
    assert (tmp_path / "run").exists() == (by == "the cadence")


# --- resuming ----------------------------------------------------------------------------------------------------------------


class Resumable:
    """A loader that a checkpoint in the middle of an epoch can go on with."""

    def __init__(self, count: int) -> None:
        self.batches, self.first, self.at = oracle.batches(count), 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[oracle.Batch]:
        first, self.first = self.first, 0
        for number in range(first, len(self.batches)):
            self.at = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


@pytest.mark.parametrize("at", [4, 6, 9])  # in the middle of an epoch, at its end, in the next one
def test_a_run_that_goes_on_from_a_checkpoint_ends_like_one_that_was_never_stopped(at: int, tmp_path: Path) -> None:
    def run(directory: str, steps: int, checkpoint: Path | None = None) -> tuple[Everything, list[dict[str, str]], Any]:
        callback = Everything()
        saves = ModelCheckpoint(tmp_path / directory, every_n_train_steps=at, save_top_k=-1, filename="{step}")
        logger = CSVLogger(tmp_path / directory)
        fit = trainer(callback, saves, enable_checkpointing=True, logger=logger, epochs=2, max_steps=steps, log_every_n_steps=1)
        net = Net()
        fit.fit(net, Resumable(6), ckpt_path=None if checkpoint is None else str(checkpoint))
        return callback, rows(tmp_path / directory), net

    whole, whole_rows, trained = run("whole", 12)
    (checkpoint,) = (tmp_path / "whole").glob(f"step={at}.ckpt")
    later, later_rows, resumed = run("later", 12, checkpoint)
    assert same(parameters(trained), parameters(resumed))
    timeless = [
        {step: {k: v for k, v in values.items() if "overhead" not in k} for step, values in each.get_all_metrics().items()}
        for each in (whole.monitor, later.monitor)
    ]
    assert timeless[1] == {step: values for step, values in timeless[0].items() if step >= at}
    assert len(timeless[1]) == 12 - at
    epochs = [
        [{k: v for k, v in row.items() if "overhead" not in k} for row in each if "gradmon_epoch/grad_norm" in row]
        for each in (whole_rows, later_rows)
    ]
    assert epochs[0][-len(epochs[1]) :] == epochs[1], "an epoch's means are of all its steps, also of those before the checkpoint"
    states = [callback.state_dict()["monitor"] for callback in (whole, later)]
    assert repr(states[0]["detectors"]) == repr(states[1]["detectors"])


def test_a_checkpoint_of_a_run_without_the_callback_gives_the_number_of_the_step(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="last")
    trainer(saves, enable_checkpointing=True).fit(Net(), loader(4))
    callback = GradmonCallback()
    trainer(callback, epochs=2).fit(Net(), loader(4), ckpt_path=str(tmp_path / "last.ckpt"))
    assert list(callback.monitor.get_all_metrics()) == [4, 5, 6, 7]


def test_two_callbacks_with_another_prefix_each_have_their_keys_and_their_states(tmp_path: Path) -> None:
    def both() -> list[GradmonCallback]:
        return [GradmonCallback(log_every_n_steps=1), GradmonCallback(log_every_n_steps=1, every=2, prefix="other/")]

    first, saves = both(), ModelCheckpoint(tmp_path, filename="last", monitor="other/gradmon/grad_norm")
    run = trainer(*first, saves, enable_checkpointing=True, logger=CSVLogger(tmp_path))
    run.fit(Net(), loader(6))
    wanted = {f"{prefix}{key}/grad_norm" for prefix in ("", "other/") for key in ("gradmon", "gradmon_epoch")}
    assert wanted <= run.callback_metrics.keys()
    assert wanted <= {key for row in rows(tmp_path) for key in row}
    states = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    assert {"GradmonCallback", "GradmonCallback prefix='other/'"} <= states.keys()
    second = both()
    trainer(*second, epochs=2).fit(Net(), loader(6), ckpt_path=str(tmp_path / "last.ckpt"))
    assert [list(each.monitor.get_all_metrics()) for each in second if each.monitor] == [[6, 7, 8, 9, 10, 11], [6, 8, 10]]


# --- acting ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [5, 7])  # in the middle, and at the end of an epoch, where schedulers of epochs move
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("setting", [Setting("sgd", "bf16", clip=oracle.CLIP), Setting("fused")], ids=str)
def test_a_skipped_step_did_not_happen_for_the_model_the_optimizer_and_the_scheduler(
    setting: Setting, interval: str, at: int
) -> None:
    without = loader(8)
    without.dataset.pop(at)
    plain, skipping = Net(setting, interval=interval), Net(setting, spike_at=at, interval=interval)
    first = trainer(setting=setting, epochs=1)
    first.fit(plain, without)
    callback = GradmonCallback(on_spike="skip")
    second = trainer(callback, setting=setting, epochs=1)
    with pytest.warns(gradmon.GradmonWarning, match=f"step {at}"):
        second.fit(skipping, loader(8))
    assert same(parameters(plain), parameters(skipping))
    optimizers = [copy.deepcopy(run.optimizers[0].state_dict()) for run in (first, second)]
    assert repr(optimizers[0]) == repr(optimizers[1])
    schedulers = [run.lr_scheduler_configs[0].scheduler.state_dict() for run in (first, second)]
    assert schedulers[0] == schedulers[1]
    assert schedulers[0]["last_epoch"] == (7 if interval == "step" else 1)
    assert callback.monitor.get_step_counts().skipped == 1


class Plateau(Net):
    """With a scheduler that Lightning moves after the callbacks have seen the end of the batch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss"}}


@pytest.mark.parametrize("at", [5, 7])
def test_a_scheduler_that_follows_a_value_does_not_know_of_a_skipped_step(at: int) -> None:
    ends = []
    for bad, callbacks in ((None, []), (at, [GradmonCallback(on_spike="skip")])):
        data, net = loader(8), Plateau(spike_at=bad)
        if bad is None:
            data.dataset.pop(at)
        else:
            data.dataset[at] = (data.dataset[at][0] * math.nan, data.dataset[at][1])  # the loss that is logged too
        run = trainer(*callbacks)
        with nullcontext() if bad is None else pytest.warns(gradmon.GradmonWarning, match=f"step {at}"):
            run.fit(net, data)
        ends.append(
            (parameters(net), run.optimizers[0].param_groups[0]["lr"], run.lr_scheduler_configs[0].scheduler.state_dict())
        )
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert ends[0][1] < 1e-2


@pytest.mark.parametrize("at", [2, 3])
def test_what_a_scheduler_does_every_so_many_batches_is_not_put_off_by_a_skip(at: int) -> None:
    class Rare(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 4}}

    run = trainer(GradmonCallback(on_spike="skip"))
    with pytest.warns(gradmon.GradmonWarning, match=f"step {at}"):
        run.fit(Rare(spike_at=at), loader(7))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5e-2


# --- other loops -------------------------------------------------------------------------------------------------------------


class Adversaries(lightning.LightningModule):
    """Two optimizers that step by turns, by hand, with a clip of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.maker, self.judge = nn.Linear(4, oracle.FEATURES), nn.Linear(oracle.FEATURES, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.maker, self.judge)]

    def training_step(self, batch: Any, index: int) -> None:
        inputs, _ = batch
        maker, judge = self.optimizers()
        made = self.maker(inputs[:, :4])
        self.toggle_optimizer(maker)
        self.manual_backward(self.judge(made).mean())
        self.clip_gradients(maker, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        self.norms = {"maker": norm(self.maker)}
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        self.manual_backward((self.judge(inputs) - self.judge(made.detach())).mean())
        self.norms["judge"] = norm(self.judge)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)


def norm(module: nn.Module) -> float:
    return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None]).norm().item()


def test_two_optimizers_by_hand_make_one_step_of_a_batch() -> None:
    seen: list[dict[str, float]] = []

    class Norms(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.norms)

    callback = Everything()
    plain, watched = Adversaries(), Adversaries()
    trainer().fit(plain, loader(6))
    trainer(callback, Norms()).fit(watched, loader(6))
    assert same(parameters(plain), parameters(watched))
    every = callback.monitor.get_all_metrics()
    assert list(every) == list(range(6))
    for values, norms in zip(every.values(), seen, strict=True):
        for part in ("maker", "judge"):
            found = math.hypot(values[f"gradient/{part}.weight/norm"], values[f"gradient/{part}.bias/norm"])
            assert found == pytest.approx(norms[part], rel=1e-6)


def test_evaluation_and_the_sanity_check_are_no_training() -> None:
    plain, watched = Everything(), Everything()
    trainer(plain).fit(Net(), loader(6))
    run = trainer(watched, num_sanity_val_steps=2, val_check_interval=2)
    run.fit(Net(), loader(6), loader(3))
    first, second = (
        {
            step: {k: v for k, v in values.items() if "overhead" not in k}
            for step, values in each.monitor.get_all_metrics().items()
        }
        for each in (plain, watched)
    )
    assert first == second
    assert "val_loss" in run.callback_metrics


def test_a_model_that_is_frozen_or_not_trained_is_left_alone() -> None:
    class Idle(Net):
        def configure_optimizers(self) -> None:
            return None

    callback = GradmonCallback()
    with pytest.warns(UserWarning, match="configure_optimizers"):
        trainer(callback).fit(Idle(), loader(2))
    assert callback.monitor.module is None

    frozen = Net()
    frozen.net[0].requires_grad_(False)
    part = Everything()
    trainer(part).fit(frozen, loader(3))
    assert "gradient/net.3.weight/norm" in part.monitor.get_step_metrics()
    assert "gradient/net.0.weight/norm" not in part.monitor.get_step_metrics()


def test_when_training_breaks_off_the_model_is_as_it_was_found_and_the_values_are_there(tmp_path: Path) -> None:
    class Broken(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 3:
                raise RuntimeError("the disk is full")

    net = Net()
    callback = GradmonCallback(log_every_n_steps=1)
    run = trainer(callback, Broken(), logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match="the disk is full"):
        run.fit(net, loader(6))
    assert list(callback.monitor.get_all_metrics()) == [0, 1, 2, 3]
    assert [row["step"] for row in rows(tmp_path) if "gradmon/grad_norm" in row] == ["0", "1", "2", "3"]
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    assert not any(getattr(module, name) for module in net.net.modules() for name in hooks)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_a_second_fit_goes_on_and_logs_to_its_own_logger_only(tmp_path: Path) -> None:
    callback, net = GradmonCallback(log_every_n_steps=1), Net()
    for name in ("first", "second"):
        trainer(callback, logger=CSVLogger(tmp_path / name)).fit(net, loader(3))
    found = [[row["step"] for row in rows(tmp_path / name) if "gradmon/grad_norm" in row] for name in ("first", "second")]
    assert found == [["0", "1", "2"], ["3", "4", "5"]]


def test_before_training_it_can_be_copied_and_pickled() -> None:
    for callback in (copy.deepcopy(GradmonCallback(every=2)), pickle.loads(pickle.dumps(GradmonCallback(every=2)))):
        assert callback.monitor.module is None
        assert callback.state_dict() == {}
        trainer(callback).fit(Net(), loader(4))
        assert list(callback.monitor.get_all_metrics()) == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_every_n_steps": -1}, "log_every_n_steps=-1 must not be negative"),
        ({"explosion_threshold": 0}, "explosion_threshold=0 must be positive, such as 1e4, or None"),
        ({"explosion_threshold": "1e4"}, "explosion_threshold must be a number, such as 1e4, or None, got '1e4'"),
        ({"track_epochs": "train/"}, "track_epochs must be True or False, got 'train/'"),
        ({"summary": "grad_norm"}, r"summary must be names of whole-model values, such as .*got 'grad_norm'"),
        ({"summary": ["grad_nrm"]}, r"summary='grad_nrm' is not one of .*did you mean grad_norm"),
        ({"prog_bar": None}, r"prog_bar must be names of whole-model values, such as .*got None"),
        ({"step_prefix": None}, "step_prefix must be a str, such as 'train/', got None"),
        ({"on_spyke": "skip"}, r"there is no argument 'on_spyke'; did you mean on_spike"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GradmonCallback(**arguments)


# --- many ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_on_two_ranks_the_numbers_are_those_of_one_that_has_all_the_data(kind: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("lightning_ranks.py")
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        kind,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=settings, timeout=200, check=False)
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("?.json"))]
    assert len(found) == 2, done.stderr

    data = oracle.batches(16)
    steps = [data[first : first + 4] for first in range(0, 16, 4)]  # two micro-batches on each of two ranks
    joined = [(torch.cat([each[0] for each in step]), torch.cat([each[1] for each in step])) for step in steps]
    setting = Setting(clip=oracle.CLIP if kind == "ddp" else None)
    expected = oracle.by_hand(_Called(nn.ModuleDict({"net": oracle.model()})), joined, setting)
    for same_parameters, values, score in found:
        assert same_parameters
        norms = {int(step): each for step, each in values.items()}
        assert oracle.assert_logged(norms, expected, rel=2e-5) > 40, "another order of float32 additions"
        if kind == "ddp":
            assert score == pytest.approx(sum(each["gradmon/grad_norm"] for each in norms.values()) / 4)
    timeless = [
        {s: {k: v for k, v in each.items() if "overhead" not in k} for s, each in values.items()} for _, values, _ in found
    ]
    assert timeless[0] == timeless[1]


# --- the loss ----------------------------------------------------------------------------------------------------------------


def _losses_by_hand(setting: Setting, batches: int) -> list[float]:
    """The mean over the micro-batches of each step, of the plain loop."""
    net = oracle.model()
    optimizer = oracle.OPTIMIZERS[setting.optimizer](net.parameters())
    losses: list[float] = []
    for number, (inputs, labels) in enumerate(oracle.batches(batches)):
        loss = oracle.loss_of(net(inputs), labels)
        (loss / setting.accumulation).backward()
        losses.append(loss.item())
        if (number + 1) % setting.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    size = setting.accumulation
    return [sum(losses[at : at + size]) / size for at in range(0, batches, size)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_loss_of_each_step_is_in_the_run(accumulation: int, tmp_path: Path) -> None:
    setting = Setting(accumulation=accumulation)
    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(callback, setting=setting).fit(Net(setting), loader(24))
    run = gradmon.load_run(tmp_path / "run")
    assert list(run.series("loss").values()) == pytest.approx(_losses_by_hand(setting, 24), rel=1e-6)
    assert list(run.series("loss")) == list(range(24 // accumulation))
    assert "loss" not in callback.monitor.get_step_metrics(), "Lightning's loggers get it from Lightning"


@pytest.mark.parametrize("name", ["loss", "train/loss"])
def test_a_loss_that_the_module_logs_is_not_doubled(name: str, tmp_path: Path) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            callback.monitor.log_scalar(name, 7.0)
            return loss

    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(callback).fit(Logs(), loader(4))
    run = gradmon.load_run(tmp_path / "run")
    assert {key for key in set(run.keys()) if "loss" in key} == {name}
    assert set(run.series(name).values()) == {7.0}


def test_manual_optimisation_without_a_loss_says_where_to_log_it(tmp_path: Path) -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(oracle.loss_of(self.net(batch[0]), batch[1]))
            optimizer.step()

    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(callback).fit(Manual(), loader(24))
    for diagnosis in (callback.monitor.diagnose(), gradmon.load_run(tmp_path / "run").diagnose()):
        assert diagnosis.unseen["loss"].startswith("return the loss from training_step(), or log it there with callback.monitor")


@pytest.mark.parametrize("fault", ["", "missing-zero-grad", "clip-after-step", "step-without-gradients"])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning", "ignore:.*returned.*None")
def test_mistakes_of_a_training_step_are_named(fault: str, by_hand: bool, tmp_path: Path) -> None:
    class Loop(Net):
        automatic_optimization = not by_hand

        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            loss = oracle.loss_of(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            if self.automatic_optimization:
                return None if fault == "step-without-gradients" else loss
            optimizer = self.optimizers()
            if fault != "missing-zero-grad":
                optimizer.zero_grad()
            if fault != "step-without-gradients":
                self.manual_backward(loss)
            optimizer.step()
            return None

        def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
            if fault != "missing-zero-grad":
                optimizer.zero_grad()

        def on_train_batch_end(self, *_: Any) -> None:
            if fault == "clip-after-step":
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(callback).fit(Loop(), loader(120))  # without a gradient, steps may wait for data
    found = [finding.rule for finding in callback.monitor.diagnose().findings if finding.severity != "info"]
    assert found[:1] == ([fault] if fault else [])


def test_each_fold_has_a_run_directory_of_its_own(tmp_path: Path) -> None:
    callback = GradmonCallback(run_dir=tmp_path / "run")
    trainer(callback).fit(Net(), loader(4))
    with pytest.warns(
        gradmon.GradmonWarning, match="several models train with one callback: the run of this one is in .*trial-2"
    ):
        trainer(callback).fit(Net(), loader(5))
    trainer(callback).fit(Net(), loader(6))
    lengths = [len(gradmon.load_run(tmp_path / "run" / name).steps) for name in ("", "trial-2", "trial-3")]
    assert lengths == [4, 5, 6]
