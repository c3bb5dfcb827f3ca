"""Under a GradScaler: the logged gradients are the true ones, and a step that was refused is told and judged by nobody."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, load_run

from . import oracle
from .families import BY_NAME

MLP = BY_NAME["mlp"]
Scaler = torch.amp.GradScaler


def exact(model: nn.Module, scale: float = 1.0) -> float:
    return oracle.values([p.grad for p in model.parameters() if p.grad is not None])["norm"] / scale


def adamw(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=fused)


def backward(model: nn.Module, scaler: Scaler, step: int = 0, count: int = 1) -> None:
    for batch in MLP.batches(count, seed=step):
        scaler.scale(MLP.loss(model, batch) / count).backward()


either_kind = pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
either_way = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_and_clip"])


@pytest.mark.parametrize("init_scale", [2.0**12, 1000.0, 3.0e-3])
@either_way
@either_kind
def test_the_norm_is_the_unscaled_one(fused: bool, unscale: bool, init_scale: float) -> None:
    model = MLP.model()
    optimizer = adamw(model, fused)
    scaler = Scaler("cpu", init_scale=init_scale, growth_interval=2)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    for step, count in enumerate([1, 4, 2, 4, 1]):
        backward(model, scaler, step, count)
        before = exact(model, scaler.get_scale())
        if unscale:
            scaler.unscale_(optimizer)
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.03).item() == pytest.approx(before, rel=1e-6)
        after = exact(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
        assert values.get("gradmon/grad_norm_after_clip") == (pytest.approx(after, rel=1e-6) if unscale else None)
        assert values["gradmon/steps_not_applied"] == 0
        assert monitor.current_step == step


@either_kind
def test_every_layer_is_unscaled_at_every_stage_and_functions_get_unscaled_tensors(fused: bool) -> None:
    model = MLP.model()
    optimizer = adamw(model, fused)
    scaler = Scaler("cpu", init_scale=1000.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    for metric in oracle.BUILT_INS:
        monitor.add_gradient_metric(metric, stages=("local", "before_clip", "after_clip"))
    monitor.add_gradient_metric("cubes", lambda g: (g.double() ** 3).sum(), stages=("local", "before_clip", "after_clip"))
    for step in range(3):
        backward(model, scaler, step)
        true = {name: p.grad.double() / scaler.get_scale() for name, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values = monitor.get_step_metrics()
        for source in ("gradient_local", "gradient_before_clip", "gradient"):
            for name, gradient in true.items():
                oracle.check({m: values[f"{source}/{name}/{m}"] for m in oracle.BUILT_INS}, gradient, where=f"{source} {name}")
                assert values[f"{source}/{name}/cubes"] == pytest.approx((gradient**3).sum().item(), rel=1e-4, abs=1e-12)


# --- refused steps ---------------------------------------------------------------------------------------------------------------


def spoil(model: nn.Module, value: float) -> None:
    model[0].weight.grad[0, 0] = value


BAD = {3: math.inf, 4: math.nan, 20: -math.inf}


@either_way
@either_kind
def test_a_refused_step_is_told_counted_and_judged_by_no_detector(fused: bool, unscale: bool, tmp_path: Path) -> None:
    def run(bad: dict[int, float], directory: Path) -> tuple[ModuleMonitor, list[float]]:
        model = MLP.model()
        optimizer = adamw(model, fused)
        scaler = Scaler("cpu", init_scale=2.0**10)
        monitor = gradmon.watch(model, optimizer, scaler=scaler, run_dir=directory, on_spike="raise", preset="full")
        refused = []
        for step in range(30):
            backward(model, scaler, step)
            if step in bad:  # after the backward pass, where nobody but the scaler looks
                spoil(model, bad[step])
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.03)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            refused.append(monitor.get_step_metrics()["gradmon/steps_not_applied"])
            assert monitor.current_step == step
            assert ("gradmon/spike_score" in monitor.get_step_metrics()) == (
                step not in bad and step - sum(b < step for b in bad) >= 8
            )
            if step in bad:
                assert "not applied" in monitor.missing()["gradmon/spike_score"]
        monitor.detach()
        return monitor, refused

    monitor, refused = run(BAD, tmp_path / "bad")
    assert refused == [sum(bad <= step for bad in BAD) for step in range(30)]
    stored = load_run(tmp_path / "bad")
    assert [step for step in stored.steps if not stored.record(step).context["applied"]] == list(BAD)
    assert stored.steps == list(range(30))
    assert stored.spikes == []
    assert monitor.state_dict()["summary"]["not_applied"] == len(BAD)


@either_kind
def test_infinite_gradients_from_the_backward_pass_are_counted_and_not_judged(fused: bool, tmp_path: Path) -> None:
    model = MLP.model()
    optimizer = adamw(model, fused)
    scaler = Scaler("cpu", init_scale=2.0**10)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, run_dir=tmp_path, on_spike="raise")
    for step in range(4):
        loss = MLP.loss(model, MLP.batches(1)[0]) * (math.inf if step == 2 else 1.0)
        scaler.scale(loss).backward()
        bad = sum(int((~p.grad.isfinite()).sum()) for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert monitor.get_step_metrics()["gradmon/grad_nonfinite_count"] == bad
    monitor.detach()
    assert [load_run(tmp_path).record(step).context["applied"] for step in range(4)] == [True, True, False, True]


@either_kind
def test_refusals_on_steps_that_are_not_monitored_count(fused: bool) -> None:
    model = MLP.model()
    optimizer = adamw(model, fused)
    scaler = Scaler("cpu", init_scale=2.0**10)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, every=5)
    for step in range(11):
        backward(model, scaler, step)
        if step in (1, 2, 7):
            spoil(model, math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0:
            assert monitor.get_step_metrics()["gradmon/steps_not_applied"] == {0: 0, 5: 2, 10: 3}[step]
        else:
            assert monitor.get_step_metrics() == {}


def _two(fused: bool) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    return model, [adamw(model["a"], fused), adamw(model["b"], fused)]


@pytest.mark.parametrize("bad", ["a", "b"])
@either_kind
def test_two_optimizers_share_a_scaler(fused: bool, bad: str, tmp_path: Path) -> None:
    model, optimizers = _two(fused)
    scaler = Scaler("cpu", init_scale=1000.0)
    monitor = gradmon.watch(model, *optimizers, scaler=scaler, run_dir=tmp_path)
    for step in range(6):
        scaler.scale(model["b"](model["a"](torch.randn(5, 4))).square().mean()).backward()
        before = exact(model, scaler.get_scale())
        if step == 2:
            model[bad].weight.grad[0, 0] = math.inf
        if step % 2:
            scaler.unscale_(optimizers[0])  # one of them only
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        assert monitor.current_step == step
        values = monitor.get_step_metrics()
        assert values["gradmon/steps_not_applied"] == (step >= 2)
        if step != 2:
            assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
    monitor.detach()
    assert [load_run(tmp_path).record(step).context["applied"] for step in range(6)] == [True, True, False, True, True, True]


# --- the scaler itself -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))], ids=["copy", "pickle"])
def test_a_duplicate_of_a_followed_scaler_works_alone(duplicate: Callable[[Scaler], Scaler]) -> None:
    model, other = MLP.model(), MLP.model()
    optimizer, others = adamw(model), adamw(other)
    scaler = Scaler("cpu", init_scale=2.0**10, growth_interval=1)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    backward(model, scaler)
    scaler.step(optimizer)
    scaler.update()
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    before = scaler.get_scale()
    for _ in range(2):
        backward(other, twin)
        twin.step(others)
        twin.update()
    assert twin.get_scale() == 4 * before
    assert scaler.get_scale() == before
    assert monitor.current_step == 0
    assert not any("gradmon" in type(value).__module__ or "gradmon" in repr(value) for value in vars(twin).values())


def test_detach_leaves_the_scaler_as_it_was() -> None:
    model = MLP.model()
    optimizer = adamw(model)
    scaler = Scaler("cpu")
    before = set(vars(scaler))
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    assert set(vars(scaler)) - before == {"step", "update", "scale", "unscale_", "__getstate__"}
    monitor.detach()
    assert set(vars(scaler)) == before


@either_way
@either_kind
def test_a_scaler_that_was_not_passed_is_noticed_and_no_wrong_number_comes_of_it(fused: bool, unscale: bool) -> None:
    model = MLP.model()
    optimizer = adamw(model, fused)
    scaler = Scaler("cpu", init_scale=1000.0)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("norm", stages=("local", "before_clip", "after_clip"))

    def one(step: int) -> None:
        backward(model, scaler, step)
        true = {name: p.grad.double() / scaler.get_scale() for name, p in model.named_parameters()}
        before = exact(model, scaler.get_scale())
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6) if step else "gradmon/grad_norm" not in values
        for key in ("gradmon/grad_norm", "gradient_before_clip/0.weight/norm", "gradient_local/0.weight/norm"):
            assert key in values or (step == 0 and "scaler=" in monitor.missing()[key])
        for key in values:
            source, name, *_ = key.split("/")
            if source.startswith("gradient"):
                assert values[key] == pytest.approx(true[name].norm().item(), rel=1e-6), key

    with pytest.warns(GradmonWarning, match="scaler=") as told:
        one(0)
    assert len(told) == 1
    for step in range(1, 4):
        one(step)


def test_a_scaler_that_was_not_passed_and_refuses_the_first_steps_leaves_no_wrong_number() -> None:
    """No hook of the optimizer fires in a refused step, so its gradients cannot be told from true ones at once."""
    model = MLP.model()
    optimizer = adamw(model)
    scaler = Scaler("cpu", init_scale=2.0**10)
    monitor = gradmon.watch(model, optimizer)

    def one(step: int) -> tuple[float, dict[str, float]]:
        backward(model, scaler, step)
        before = exact(model, scaler.get_scale())
        if step < 2:
            spoil(model, math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return before, monitor.get_step_metrics()

    with pytest.warns(GradmonWarning, match="scaler="):
        found = [one(step) for step in range(5)]
    for before, values in found:
        assert values.get("gradmon/grad_norm", before) == pytest.approx(before, rel=1e-6)
    assert "gradmon/grad_norm" in found[-1][1]
    assert len(monitor.get_all_metrics()) in (3, 5)
    assert all(v.get("gradmon/grad_norm", 0) < 1 for v in monitor.get_all_metrics().values())


def test_a_disabled_scaler_changes_nothing() -> None:
    def norms(scaler: Any) -> list[float]:
        model = MLP.model()
        optimizer = adamw(model)
        monitor = gradmon.watch(model, optimizer, scaler=scaler)
        for step in range(3):
            loss = MLP.loss(model, MLP.batches(1, seed=step)[0])
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.03)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
            assert monitor.current_step == step
        return [values["gradmon/grad_norm"] for values in monitor.get_all_metrics().values()]

    assert norms(Scaler("cpu", enabled=False)) == norms(None)


def test_a_scaler_given_to_the_monitor_serves_a_loop_written_by_hand() -> None:
    model = MLP.model()
    optimizer = adamw(model)
    scaler = Scaler("cpu", init_scale=1000.0)
    monitor = ModuleMonitor(model, scaler=scaler, preset="minimal")
    for step, unscale in enumerate([False, True, True]):
        monitor.begin_step(step)
        backward(model, scaler, step)
        before = exact(model, scaler.get_scale())
        if unscale:
            scaler.unscale_(optimizer)
        monitor.monitor_gradients(before_clip=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.end_step()
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*GradScaler:torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("passed", [False, True])
def test_two_scalers_give_no_wrong_number(passed: bool) -> None:
    model, optimizers = _two(fused=False)
    scalers = [Scaler("cpu", init_scale=1000.0), Scaler("cpu", init_scale=64.0)]
    monitor = gradmon.watch(model, *optimizers, scaler=scalers[0] if passed else None)
    for step in range(4):
        norms = []
        for name, optimizer, scaler in zip("ab", optimizers, scalers, strict=True):
            model.zero_grad()
            scaler.scale(model["b"](model["a"](torch.randn(5, 4))).square().mean()).backward()
            norms.append(exact(model[name], scaler.get_scale()))
            scaler.step(optimizer)
            scaler.update()
        assert monitor.current_step == step
        true = math.hypot(*norms)
        assert monitor.get_step_metrics().get("gradmon/grad_norm", true) == pytest.approx(true, rel=1e-6)
        assert monitor.get_step_metrics().get("gradmon/grad_norm_after_clip", true) == pytest.approx(true, rel=1e-6)


def test_a_step_without_the_scaler_gives_no_wrong_number_and_one_warning() -> None:
    model = MLP.model()
    optimizer = adamw(model)
    scaler = Scaler("cpu", init_scale=1000.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)

    def one(step: int) -> None:
        optimizer.zero_grad()
        if step % 2:
            backward(model, scaler, step)
            true = exact(model, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        else:
            MLP.loss(model, MLP.batches(1, seed=step)[0]).backward()
            true = exact(model)
            optimizer.step()
        assert monitor.current_step == step
        values = monitor.get_step_metrics()
        assert values.get("gradmon/grad_norm", true) == pytest.approx(true, rel=1e-6)
        assert "gradmon/grad_norm" in values or "without the GradScaler" in monitor.missing()["gradmon/grad_norm"]
        assert "gradmon/grad_norm" in values or step % 2 == 0

    one(0)  # nothing was scaled yet
    one(1)
    with pytest.warns(GradmonWarning, match="stepped without the GradScaler"):
        one(2)
    for step in range(3, 7):  # a second warning would be an error
        one(step)
