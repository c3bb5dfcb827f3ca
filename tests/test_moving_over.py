"""The page on moving over: beside the real packages, on one and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

pytestmark = pytest.mark.extra


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def _batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6)
    return x, x.square().mean(dim=1, keepdim=True)


# --- torch-module-monitor ----------------------------------------------------------------------------------------------------------


def _seed_loop(module: Any, pattern: str) -> list[dict[str, float]]:
    """The loop of its README, with the class of whichever package."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = module.ModuleMonitor(monitor_step_fn=lambda step: step % 2 == 0)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), r"[02]")
    monitor.add_parameter_metric("norm", lambda x: x.norm(), pattern)
    monitor.add_gradient_metric("norm", lambda x: x.norm(), pattern)
    found = []
    for step in range(4):
        monitor.begin_step(step)
        optimizer.zero_grad()
        for _ in range(2):
            x, y = _batch()
            nn.functional.mse_loss(model(x), y).backward()
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        optimizer.step()
        monitor.end_step()
        found.append({key: float(value) for key, value in monitor.get_step_metrics().items()} if step % 2 == 0 else {})
    return found


def test_arguments_of_torch_module_monitor_are_accepted() -> None:
    monitor = gradmon.ModuleMonitor(lambda step: step % 2 == 0, logger=print, cpu_offload=True)
    model = _model()
    monitor.set_module(model)
    monitor.add_activation_metric("mean")
    assert [monitor.begin_step(step) for step in (1, 2)] == [False, True]
    monitor.monitor_activations("0", torch.full((3,), 2.0))
    monitor.monitor_activations("0", torch.full((3,), 9.0), is_reference=True)
    monitor.end_step()
    assert monitor.get_step_metrics()["activation/0/mean"] == 2.0


def test_after_changing_the_import_the_loop_gives_the_same_keys_and_values() -> None:
    theirs = pytest.importorskip("torch_module_monitor")
    for ours_row, their_row in zip(_seed_loop(gradmon, ".*weight"), _seed_loop(theirs, ".*weight"), strict=True):
        assert ours_row == pytest.approx(their_row, rel=1e-5)
    assert len(_seed_loop(gradmon, ".*weight")[0]) == 2 + 2 + 2


def test_a_pattern_is_searched_where_theirs_matches_from_the_start() -> None:
    theirs = pytest.importorskip("torch_module_monitor")
    pattern = "0.weight|bias"  # with no match at the first parameter, theirs raises
    ours, other = _seed_loop(gradmon, pattern)[0], _seed_loop(theirs, pattern)[0]
    in_ours, in_theirs = ({key for key in row if key.startswith("gradient/")} for row in (ours, other))
    assert in_theirs == {"gradient/0.weight/norm"}
    assert in_ours == {"gradient/0.weight/norm", "gradient/0.bias/norm", "gradient/2.bias/norm"}
    assert _seed_loop(gradmon, f"^(?:{pattern})")[0].keys() == other.keys()  # what keeps the old meaning


# --- wandb.watch -------------------------------------------------------------------------------------------------------------------


def test_in_the_place_of_wandb_watch_one_histogram_of_what_the_optimizer_used(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from .wandb_files import history

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with wandb.init(project="tests", dir=tmp_path) as run:
        run.watch(model, log="gradients", log_freq=1)
        monitor = gradmon.watch(model, optimizer, scaler=scaler)
        monitor.add_gradient_metric("log2_histogram", stages=("after_clip",))
        monitor.add_sink(run)
        for _ in range(2):  # micro-batches
            x, y = _batch()
            scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
        scaler.unscale_(optimizer)
        used = model[0].weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        monitor.detach()
        run.unwatch(model)
        run.log({"loss": 0.0})
    row: dict[str, Any] = {}
    for each in history(tmp_path):
        row.update(each)
    theirs, their_edges = row["gradients/0.weight.values"], row["gradients/0.weight.bins"]
    ours, our_edges = row["gradient/0.weight/log2_histogram.values"], row["gradient/0.weight/log2_histogram.bins"]
    assert sum(theirs) == sum(ours) + row.get("gradient/0.weight/log2_histogram.zero", 0) == used.numel()
    largest = used.abs().max().item()
    top = max(edge for edge, count in zip(our_edges, ours, strict=False) if count)
    assert 2**top <= largest < 2 ** (top + 1)
    assert max(map(abs, their_edges)) > 100 * largest  # one micro-batch, and still scaled


# --- Lightning and the hand-written loop --------------------------------------------------------------------------------------------


def _one_step_watched() -> tuple[nn.Module, gradmon.ModuleMonitor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm", stages=("before_clip",))
    x, y = _batch()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    monitor.detach()
    return model, monitor


def test_the_norms_are_those_of_lightnings_grad_norm() -> None:
    utilities = pytest.importorskip("lightning.pytorch.utilities")
    model, monitor = _one_step_watched()
    theirs = {key: float(value) for key, value in utilities.grad_norm(model, norm_type=2).items()}
    (values,) = monitor.get_all_metrics().values()
    assert values["gradmon/grad_norm"] == pytest.approx(theirs.pop("grad_2.0_norm_total"), rel=1e-6)
    ours = {key: value for key, value in values.items() if key.startswith("gradient_before_clip/")}
    named = {f"gradient_before_clip/{key.removeprefix('grad_2.0_norm/')}/norm": value for key, value in theirs.items()}
    assert ours == pytest.approx(named, rel=1e-6)


def test_the_values_are_those_of_the_loop_by_hand() -> None:
    model, monitor = _one_step_watched()
    by_hand = {f"gradient_before_clip/{name}/norm": p.grad.norm().item() for name, p in model.named_parameters()}
    (values,) = monitor.get_all_metrics().values()
    assert {key: value for key, value in values.items() if key in by_hand} == pytest.approx(by_hand, rel=1e-6)
    assert values["gradmon/grad_norm"] == pytest.approx(sum(value**2 for value in by_hand.values()) ** 0.5, rel=1e-6)
