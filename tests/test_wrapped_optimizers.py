"""Optimizers that wrap others are followed: one step is all that the wrapper's step does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

from . import oracle, wrapping
from .loops import differences

Found = tuple[list[Tensor], list[Tensor]]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def plainly(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
    optimizer.zero_grad()
    backward(model, x)
    used = gradients(model)
    optimizer.step()
    return used


def with_closure(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
    used: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = backward(model, x)
        used[:] = gradients(model)
        return loss

    optimizer.step(closure)
    return used


def in_two_steps(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
    backward(model, x)
    optimizer.first_step(zero_grad=True)
    backward(model, x)
    used = gradients(model)
    optimizer.second_step(zero_grad=True)
    return used


def backward_and_closure(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
    used: list[Tensor] = []

    def closure() -> Tensor:
        loss = backward(model, x)
        used[:] = gradients(model)
        return loss

    backward(model, x)
    optimizer.step(closure)
    optimizer.zero_grad()
    return used


Shape = tuple[Callable[[nn.Module], Any], Callable[..., list[Tensor]]]
SHAPES: dict[str, Shape] = {
    "SAM in two steps": (lambda model: wrapping.SAM(model.parameters(), SGD, lr=0.1, momentum=0.9), in_two_steps),
    "SAM with a closure": (lambda model: wrapping.SAM(model.parameters(), Adam, lr=0.1), backward_and_closure),
    "Lookahead as in timm": (lambda model: wrapping.TimmLookahead(sgd(model)), plainly),
    "Lookahead with a closure": (lambda model: wrapping.TimmLookahead(sgd(model)), with_closure),
    "Lookahead without hooks": (lambda model: wrapping.BareLookahead(sgd(model)), plainly),
    "Lookahead with hooks": (lambda model: wrapping.HookedLookahead(sgd(model)), plainly),
    "Lookahead of SAM": (
        lambda model: wrapping.HookedLookahead(wrapping.SAM(model.parameters(), SGD, lr=0.1)),
        backward_and_closure,
    ),
    "no optimizer of torch": (lambda model: wrapping.ScheduleFree(sgd(model)), plainly),
    "as in Lightning": (lambda model: wrapping.Lightning(sgd(model)), plainly),
    "as in Lightning, with a closure": (lambda model: wrapping.Lightning(sgd(model)), with_closure),
}


def norm(tensors: list[Tensor]) -> float:
    return oracle.values(tensors)["norm"]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_is_what_the_wrapper_does(name: str, every: int) -> None:
    make, take = SHAPES[name]
    model = net()
    optimizer = make(model)
    monitor = gradmon.watch(model, optimizer, every=every, on_spike=None)
    monitor.add_gradient_metric("norm")
    monitor.add_update_metric("norm")
    for step in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        used = take(model, optimizer, batch(step))
        change = [p.detach().double() - q.double() for p, q in zip(model.parameters(), before, strict=True)]
        assert monitor.last_record.step == step
        values = monitor.get_step_metrics()
        if step % every:
            assert values == {}
            continue
        assert values["gradmon/grad_norm"] == pytest.approx(norm(used), rel=1e-6)
        assert values["gradmon/param_norm"] == pytest.approx(norm(before), rel=1e-6)
        for (parameter, _), gradient, update in zip(model.named_parameters(), used, change, strict=True):
            for source in ("gradient", "gradient_before_clip"):
                assert values[f"{source}/{parameter}/norm"] == pytest.approx(norm([gradient]), rel=1e-6)
            assert values[f"update/{parameter}/norm"] == pytest.approx(norm([update]), rel=1e-5)
        if step == 0:
            assert values["gradmon/update_norm"] == pytest.approx(norm(change), rel=1e-5)
        assert "gradmon/grad_norm_after_clip" not in values
    monitor.detach()
    assert monitor.warning_counts() == {}
    assert monitor._runtime.built_in.audit.facts() == []


@pytest.mark.parametrize("name", SHAPES)
def test_training_is_the_same_and_everything_is_left_as_it_was_found(name: str) -> None:
    make, take = SHAPES[name]
    found = []
    for watches in (False, True):
        model = net()
        optimizer = make(model)
        if watches:
            monitor = gradmon.watch(model, optimizer, preset="full", on_spike=None)
            copy.deepcopy(model)
        for step in range(5):
            take(model, optimizer, batch(step))
        if watches:
            monitor.detach()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found.append((parameters, torch.get_rng_state(), sorted(vars(optimizer))))
    assert differences(*found) == []


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["Lookahead as in timm", "Lookahead without hooks", "Lookahead with hooks"])
def test_a_scheduler_of_a_wrapper_works_and_says_nothing(name: str, order: str) -> None:
    make, take = SHAPES[name]
    model = net()
    optimizer = make(model)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    scheduler = schedule() if order == "before" else None
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_update_metric("norm")
    scheduler = scheduler or schedule()
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        take(model, optimizer, batch(step))
        scheduler.step()  # torch warns where it thinks that the optimizer has not stepped before
        values = monitor.get_step_metrics()
        change = [p.detach().double() - q.double() for p, q in zip(model.parameters(), before, strict=True)]
        assert values["update/0.weight/norm"] == pytest.approx(norm(change[:1]), rel=1e-5)
    monitor.detach()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    take(model, optimizer, batch(9))
    scheduler.step()
    assert monitor.last_record.step == 3


def test_a_wrapper_that_is_named_earlier_and_steps_last_is_known_as_such() -> None:
    model = net()
    outer, inner = wrapping.BareLookahead(sgd(model[0])), sgd(model[2])
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_gradient_metric("norm")
    monitor.add_update_metric("norm")
    monitor.attach(outer, inner)
    with pytest.warns(GradmonWarning, match="was named earlier, and steps last"):
        for step in range(4):
            model.zero_grad()
            backward(model, batch(step))
            start = [p.detach().double().clone() for p in model.parameters()]
            inner.step()
            outer.step()
            assert monitor.current_step == step
            values = monitor.get_step_metrics()
            for (name, p), before in zip(model.named_parameters(), start, strict=True):
                if step or name.startswith("2."):
                    assert values[f"gradient/{name}/norm"] == pytest.approx(float(p.grad.double().norm()), rel=1e-6)
                    assert values[f"update/{name}/norm"] == pytest.approx(float((p.detach() - before).norm()), rel=1e-5)
    monitor.detach()


def test_a_wrapper_that_leaves_steps_out_has_taken_none() -> None:
    model = net()
    optimizer = wrapping.Accumulating(sgd(model))
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_update_metric("norm")
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            used = plainly(model, optimizer, batch(step))
        change = [p.detach().double() - q.double() for p, q in zip(model.parameters(), before, strict=True)]
        assert monitor.last_record.step == step
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(norm(used), rel=1e-6)
        assert values["update/0.weight/norm"] == pytest.approx(norm(change[:1]), rel=1e-5)


def test_a_step_that_a_wrapper_leaves_out_is_not_one_that_the_scaler_refused() -> None:
    model = net()
    optimizer, scaler = wrapping.Accumulating(sgd(model)), torch.amp.GradScaler("cpu", init_scale=1.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    for call, bad in enumerate([0, 0, 0, 0, 1]):
        optimizer.zero_grad()
        scaler.scale(model(batch(call)).square().mean() * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if call:
            assert monitor.last_record.step == (call - 1) // 2 + bad
            assert monitor.get_step_metrics()["gradmon/steps_not_applied"] == bad
    monitor.detach()


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_may_know_the_wrapper(unscales: bool) -> None:
    model = net()
    optimizer = wrapping.TimmLookahead(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    monitor.add_update_metric("norm")
    for step in range(5):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(batch(step)).square().mean()
        true = norm(list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))
        scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if step != 3:
                monitor.clip_grad_norm_(true / 2)
        scaler.step(optimizer)
        scaler.update()
        assert monitor.last_record.step == step
        values = monitor.get_step_metrics()
        assert values["gradmon/steps_not_applied"] == (step >= 3)
        if step == 3:
            continue
        change = [p.detach().double() - q.double() for p, q in zip(model.parameters(), before, strict=True)]
        assert values["gradmon/grad_norm"] == pytest.approx(true, rel=1e-5)
        assert values["update/0.weight/norm"] == pytest.approx(norm(change[:1]), rel=1e-5)
        if unscales:
            assert values["gradmon/grad_norm_after_clip"] == pytest.approx(true / 2, rel=1e-5)
    assert monitor.warning_counts() == {}


def test_a_spike_is_skipped_within_a_wrapper_too() -> None:
    model = net()
    optimizer = wrapping.TimmLookahead(sgd(model))
    monitor = gradmon.watch(model, optimizer, on_spike="skip")
    for step in range(4):
        plainly(model, optimizer, batch(step))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(GradmonWarning, match="step 4"):
        plainly(model, optimizer, batch(4) * float("nan"))
        monitor.get_step_metrics()
    assert monitor.step_was_skipped
    assert all(map(torch.equal, before, model.parameters()))


def test_what_a_wrapper_writes_in_a_skipped_step_is_not_laid_at_the_door_of_the_optimizer_inside() -> None:
    model = net()
    optimizer = wrapping.HookedLookahead(sgd(model))
    gradmon.watch(model, optimizer, on_spike="skip")
    for step in range(4):
        plainly(model, optimizer, batch(step))
    with (
        pytest.warns(GradmonWarning, match="step 4"),
        pytest.warns(GradmonWarning, match="the wrapper around SGD changed parameters in a skipped step"),
    ):
        plainly(model, optimizer, batch(4) * float("nan"))


def test_a_wrapper_that_raised_is_followed_on() -> None:
    class Fails(wrapping.HookedLookahead):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = net()
    optimizer = Fails(sgd(model))
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for step in range(6):
        optimizer.fails = step == 2
        if optimizer.fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                plainly(model, optimizer, batch(step))
            continue
        used = plainly(model, optimizer, batch(step))
        assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm(used), rel=1e-6)
    assert monitor.warning_counts() == {}


def test_one_that_keeps_two_others_for_parts_of_its_parameters_is_followed_itself() -> None:
    class Both(Optimizer):
        def __init__(self, model: nn.Sequential) -> None:
            super().__init__(model.parameters(), {})
            self.matrices, self.rest = SGD([model[0].weight], lr=0.1), SGD([*list(model.parameters())[1:]], lr=0.2)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.matrices.step()
            self.rest.step()

    model = net()
    optimizer = Both(model)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        used = plainly(model, optimizer, batch(step))
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(norm(used), rel=1e-6)
        if step == 0:
            change = [p.detach().double() - q.double() for p, q in zip(model.parameters(), before, strict=True)]
            assert values["gradmon/update_norm"] == pytest.approx(norm(change), rel=1e-5)


def test_the_state_of_the_optimizer_inside_is_measured() -> None:
    model = net()
    optimizer = wrapping.SAM(model.parameters(), Adam, lr=0.1)
    monitor = ModuleMonitor(model)
    monitor.add_optimizer_metric("exp_avg_norm")
    monitor.attach(optimizer)
    in_two_steps(model, optimizer, batch(0))
    state = optimizer.base_optimizer.state[model[0].weight]["exp_avg"]
    assert monitor.get_step_metrics()["optimizer/0.weight/exp_avg_norm"] == pytest.approx(norm([state]), rel=1e-6)


def test_nothing_is_kept_alive() -> None:
    model = net()
    optimizer = wrapping.TimmLookahead(sgd(model))
    gradmon.watch(model, optimizer, on_spike=None)
    plainly(model, optimizer, batch(0))
    gone = [weakref.ref(each) for each in (model, optimizer, optimizer._base_optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
