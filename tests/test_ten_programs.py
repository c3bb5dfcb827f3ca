"""What people do most, as it should read: ten short programs, each run with the real tracker, trainer or group of ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attn(x, x, x, need_weights=False)[0])


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Block()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, scale: float = 1.0) -> Tensor:
    for _ in range(steps):
        loss = scale * model(torch.randn(2, 3, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.extra
def test_attention_norms_go_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = []
    model, optimizer = made()
    with wandb.init(mode="offline", dir=tmp_path) as run:
        log = run._log
        monkeypatch.setattr(run, "_log", lambda data, *args, **kwargs: rows.append(dict(data)) or log(data, *args, **kwargs))
        monitor = gradmon.watch(model, optimizer, log_to="wandb")
        monitor.add_gradient_metric("norm", metric_regex="attn")
        monitor.add_attention_metric("entropy")
        train(model, optimizer)
        monitor.detach()
    keys = set().union(*rows)
    assert "gradient/attn.in_proj_weight/norm" in keys
    assert any(key.startswith("attention_entropy/attn") for key in keys)
    assert "gradient/head.weight/norm" not in keys


def test_a_tracker_without_an_active_run_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    model, optimizer = made()
    with pytest.raises(ValueError, match=r"no W&B run is active: call wandb\.init"):
        gradmon.watch(model, optimizer, log_to="wandb", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="'wandbb' is none of wandb, trackio, mlflow; did you mean wandb"):
        gradmon.watch(model, optimizer, log_to="wandbb")


def test_no_tracker_is_looked_for_where_the_monitor_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    gradmon.watch(model, optimizer, log_to=None).detach()  # as on ranks that have no run
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    gradmon.watch(model, optimizer, log_to="wandb").detach()


def test_no_tracker_is_looked_for_on_a_rank_that_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    monkeypatch.setenv("RANK", "1")
    with gradmon.watch(model, optimizer, log_to="wandb") as monitor:
        monitor.add_sink("wandb").remove()


@pytest.mark.extra
def test_norms_of_a_pattern_go_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = made()
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = gradmon.watch(model, optimizer, log_to=writer)
        monitor.add_gradient_metric("norm", metric_regex=r"attn\.in")
        train(model, optimizer)
        monitor.detach()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Scalars("gradient/attn.in_proj_weight/norm")) == 3


def test_a_metric_of_ones_own() -> None:
    model, optimizer = made()
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("p99", lambda g: g.abs().flatten().quantile(0.99), metric_regex="weight")
    train(model, optimizer)
    expected = model.head.weight.grad.abs().flatten().quantile(0.99)  # type: ignore[union-attr]
    assert monitor.get_step_metrics()["gradient/head.weight/p99"] == pytest.approx(float(expected))


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_bad_steps_are_skipped_and_the_schedule_waits() -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    monitor = gradmon.watch(model, optimizer, on_spike="skip")
    moved = 0
    for step in range(40):
        train(model, optimizer, 1, 1e6 if step == 35 else 1.0)
        if not monitor.step_was_skipped:
            scheduler.step()
            moved += 1
    assert (moved, monitor.get_step_counts().skipped) == (39, 1)


def test_two_models_of_a_gan_send_to_one_sink() -> None:
    (maker, o_maker), (judge, o_judge) = made(), made()
    rows: list[dict[str, float]] = []
    one = gradmon.watch(maker, o_maker, log_to=lambda values, step: rows.append(values), prefix="G/")
    other = gradmon.watch(judge, o_judge, log_to=lambda values, step: rows.append(values), prefix="D/")
    for _ in range(2):
        train(maker, o_maker, 1)
        train(judge, o_judge, 1)
    one.detach()
    other.detach()
    keys = set().union(*rows)
    assert {"G/gradmon/grad_norm", "D/gradmon/grad_norm"} <= keys


def test_two_monitors_that_send_the_same_keys_to_one_sink_are_told() -> None:
    (maker, o_maker), (judge, o_judge) = made(), made()

    def sink(values: dict[str, float], step: int) -> None:
        """Takes rows."""

    one = gradmon.watch(maker, o_maker, log_to=sink)
    with pytest.warns(
        gradmon.GradmonWarning, match="another monitor sends the same keys to this sink: give one of the two a prefix="
    ):
        other = gradmon.watch(judge, o_judge, log_to=sink)
    other.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"prefix": "D/"}, {"log_to": lambda values, step: None}):
            gradmon.watch(judge, o_judge, **{"log_to": sink, **options}).detach()
    one.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradmon.watch(judge, o_judge, log_to=sink).detach()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.integration
def test_lightning_with_one_metric_more(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from torch_gradmon.integrations.lightning import GradmonCallback

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = made()[0]

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = GradmonCallback(layers="blocks", run_dir=tmp_path / "run")
    callback.monitor.add_gradient_metric("norm")
    trainer = lightning.Trainer(
        callbacks=[callback],
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(6, 3, 8), 2))
    assert callback.monitor.get_step_metrics()["gradient/net.head.weight/norm"] > 0
    assert len(gradmon.load_run(tmp_path / "run").series("gradient/net.head.weight/norm")) == 3


@pytest.mark.integration
def test_the_trainer_of_transformers_takes_a_callback(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from torch_gradmon.integrations.transformers import GradmonCallback

    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=11, n_positions=8)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    data = [{"input_ids": torch.arange(8) % 11, "labels": torch.arange(8) % 11}] * 24
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[GradmonCallback()]
    )
    trainer.train()
    assert any("gradmon/clip_fraction" in row for row in trainer.state.log_history)


@pytest.mark.ranks
def test_a_loss_is_merged_over_ranks(tmp_path: Path) -> None:
    import torch.multiprocessing as mp

    mp.start_processes(_rank, args=(str(tmp_path),), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
    assert (tmp_path / "loss").read_text() == "0.5"


def _rank(rank: int, place: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    model, _ = made()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    F.mse_loss(model(torch.randn(2, 3, 8)), torch.zeros(2, 3, 1)).backward()
    monitor.log_scalar("loss", float(rank), dist_reduce="mean")
    optimizer.step()
    if rank == 0:
        (Path(place) / "loss").write_text(str(monitor.get_step_metrics()["loss"]))
    monitor.detach()
    torch.distributed.destroy_process_group()


def test_a_run_is_resumed(tmp_path: Path) -> None:
    model, optimizer = made()
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "run")
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "gradmon": monitor.state_dict()}, tmp_path / "checkpoint")
    monitor.detach()

    model, optimizer = made()
    checkpoint = torch.load(tmp_path / "checkpoint")
    model.load_state_dict(checkpoint["model"])
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "run")
    monitor.load_state_dict(checkpoint["gradmon"])
    train(model, optimizer)
    monitor.detach()
    assert gradmon.load_run(tmp_path / "run").steps == list(range(6))


@pytest.mark.extra
def test_a_run_in_a_notebook(tmp_path: Path) -> None:
    for package in ("pandas", "pyarrow", "plotly"):
        pytest.importorskip(package)
    model, optimizer = made()
    with gradmon.watch(model, optimizer, run_dir=tmp_path, preset="full"):
        train(model, optimizer, 5)
    with gradmon.load_run(os.fspath(tmp_path)) as run:
        assert run.plot("norm").data
        assert len(run.to_pandas()) == 5
        assert "grad_norm" in str(run.record(3).metrics)
        print(run.diagnose(), run.why())
