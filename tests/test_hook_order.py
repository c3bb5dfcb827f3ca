"""Hooks of others on an optimizer's step, registered before or after the monitor's: the values are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

LIMIT = 0.01


def _clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], LIMIT)


def _decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


class _Loop:
    """A loop of one layer whose gradient norms are far above the limit."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.1, **options})

    def watch(self) -> ModuleMonitor:
        monitor = ModuleMonitor(self.model, on_metric_error="raise", preset="standard")
        monitor.add_gradient_metric("norm", metric_regex="weight", stages=("before_clip", "after_clip"))
        monitor.add_update_metric("norm", metric_regex="weight")
        return monitor.attach(self.optimizer)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        (3 * self.model(torch.randn(8, 4))).square().mean().backward()

    def norm(self) -> float:
        return float(self.model.weight.grad.double().norm())


def _check(loop: _Loop, monitor: ModuleMonitor, steps: int, between: Callable[[], None] = lambda: None) -> None:
    for step in range(steps):
        loop.backward()
        before = loop.norm()
        if not step:
            between()
        start = loop.model.weight.detach().double().clone()
        loop.optimizer.step()
        values = monitor.get_step_metrics()
        assert values["gradient_before_clip/weight/norm"] == pytest.approx(before, rel=1e-6)
        assert values["gradient/weight/norm"] == pytest.approx(loop.norm(), rel=1e-6)
        assert loop.norm() < LIMIT < before
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(LIMIT, rel=1e-3)
        assert values["gradmon/clip_fraction"] == 1
        change = (loop.model.weight.detach().double() - start).norm()
        assert values["update/weight/norm"] == pytest.approx(float(change), rel=1e-5)


@pytest.mark.parametrize("when", ["before watch", "after watch", "between backward and step", "twice"])
def test_a_clip_in_a_hook_before_the_step_is_seen_whenever_it_was_registered(when: str) -> None:
    loop = _Loop()
    if when in ("before watch", "twice"):
        loop.optimizer.register_step_pre_hook(_clip)
    monitor = loop.watch()
    if when in ("after watch", "twice"):
        loop.optimizer.register_step_pre_hook(_clip)

    def between() -> None:
        if when == "between backward and step":
            loop.optimizer.register_step_pre_hook(_clip)

    _check(loop, monitor, 3, between)
    monitor.detach()


def test_hooks_come_and_go() -> None:
    loop = _Loop()
    monitor = loop.watch()
    handles = [loop.optimizer.register_step_pre_hook(_clip) for _ in range(3)]
    _check(loop, monitor, 2)
    for handle in handles[:2]:
        handle.remove()
    handles.append(loop.optimizer.register_step_pre_hook(_clip))
    _check(loop, monitor, 2)
    for handle in handles[2:]:
        handle.remove()
    loop.backward()
    unclipped = loop.norm()
    loop.optimizer.step()
    assert monitor.get_step_metrics()["gradient/weight/norm"] == pytest.approx(unclipped, rel=1e-6)
    monitor.detach()
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("register", ["before watch", "after watch"])
def test_what_a_hook_after_the_step_writes_is_no_update(register: str) -> None:
    loop = _Loop(weight_decay=0.1)
    if register == "before watch":
        loop.optimizer.register_step_post_hook(_decay)
    monitor = loop.watch()
    if register == "after watch":
        loop.optimizer.register_step_post_hook(_decay)
    for _ in range(2):
        loop.backward()
        gradient = loop.model.weight.grad.double() + 0.1 * loop.model.weight.detach().double()
        loop.optimizer.step()
        assert monitor.get_step_metrics()["update/weight/norm"] == pytest.approx(0.1 * float(gradient.norm()), rel=1e-5)
    monitor.detach()


@pytest.mark.parametrize("register", ["before watch", "after watch"])
def test_what_a_hook_before_the_step_writes_to_parameters_is_no_update(register: str) -> None:
    loop = _Loop()
    if register == "before watch":
        loop.optimizer.register_step_pre_hook(_decay)
    monitor = loop.watch()
    if register == "after watch":
        loop.optimizer.register_step_pre_hook(_decay)
    for _ in range(2):
        loop.backward()
        norm = loop.norm()
        loop.optimizer.step()
        assert monitor.get_step_metrics()["update/weight/norm"] == pytest.approx(0.1 * norm, rel=1e-5)
    monitor.detach()


def test_a_hook_that_passes_other_arguments_keeps_them() -> None:
    loop = _Loop(torch.optim.LBFGS, max_iter=2)
    calls: list[str] = []

    def closure(name: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            calls.append(name)
            loop.backward()
            return torch.ones(())

        return run

    monitor = gradmon.watch(loop.model, loop.optimizer, on_spike=None)
    loop.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], closure("theirs")), {}))
    for _ in range(2):
        loop.optimizer.step(closure("ours"))
        assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0
    assert set(calls) == {"theirs"}
    monitor.detach()


def test_a_hook_that_raises_stays_registered_and_the_loop_goes_on() -> None:
    loop = _Loop()
    monitor = loop.watch()
    raises = [True]

    def fails(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if raises.pop() if raises else False:
            raise ValueError("theirs")
        _clip(optimizer)

    loop.optimizer.register_step_pre_hook(fails)
    loop.backward()
    with pytest.raises(ValueError, match="theirs"):
        loop.optimizer.step()
    assert list(loop.optimizer._optimizer_step_pre_hooks.values())[-1] is fails
    _check(loop, monitor, 2)
    monitor.detach()


@pytest.mark.parametrize("monitors", [1, 2])
def test_a_hook_that_raises_before_the_last_one_costs_no_step(monitors: int) -> None:
    loop = _Loop()
    watching = [loop.watch() for _ in range(monitors)]
    raises = [True]

    def fails(*_: Any) -> None:
        if raises.pop() if raises else False:
            raise ValueError("theirs")

    hooks = [fails, _clip]
    for hook in hooks:
        loop.optimizer.register_step_pre_hook(hook)
    loop.backward()
    with pytest.raises(ValueError, match="theirs"):
        loop.optimizer.step()
    for step in range(3):
        loop.backward()
        loop.optimizer.step()
        assert list(loop.optimizer._optimizer_step_pre_hooks.values())[monitors:] == hooks
        for monitor in watching:
            assert monitor.current_step == step
            values = monitor.get_step_metrics()
            assert values["gradient/weight/norm"] == pytest.approx(loop.norm(), rel=1e-6)
            assert values["gradmon/steps_not_applied"] == 0
    for monitor in watching:
        monitor.detach()


@pytest.mark.parametrize("register", ["before watch", "after watch"])
@pytest.mark.parametrize("when", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_takes_itself_away_does_so_as_without_a_monitor(register: str, when: str) -> None:
    """The hooks are being iterated over, and torch allows that of the last one only."""
    loop = _Loop()
    calls: list[int] = []

    def add(last: int) -> None:
        def once(*_: Any) -> None:
            calls.append(last)
            if calls.count(last) == last:
                handle.remove()

        handle = getattr(loop.optimizer, when)(once)

    if register == "before watch":
        add(1)
    monitor = loop.watch()
    if register == "after watch":
        add(3)
    for _ in range(5):
        loop.backward()
        loop.optimizer.step()
        assert monitor.get_step_metrics()["gradient/weight/norm"] == pytest.approx(loop.norm(), rel=1e-6)
    assert calls == ([1] if register == "before watch" else [3, 3, 3])
    monitor.detach()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # the compiler's own, when it is imported
def test_a_hook_on_a_compiled_step_is_traced_without_the_monitor() -> None:
    loop = _Loop()
    monitor = loop.watch()
    loop.optimizer.register_step_pre_hook(_clip)
    step = torch.compile(loop.optimizer.step, backend="eager")
    for _ in range(3):
        loop.backward()
        step()
        assert monitor.get_step_metrics()["gradient/weight/norm"] == pytest.approx(loop.norm(), rel=1e-6)
    monitor.detach()
    torch.compiler.reset()


def test_two_monitors_and_a_hook_behind_both() -> None:
    loop = _Loop()
    first, second = loop.watch(), ModuleMonitor(loop.model, on_metric_error="raise")
    second.add_gradient_metric("norm")
    second.attach(loop.optimizer)
    loop.optimizer.register_step_pre_hook(_clip)
    for _ in range(2):
        loop.backward()
        loop.optimizer.step()
        for monitor in (first, second):
            assert monitor.get_step_metrics()["gradient/weight/norm"] == pytest.approx(loop.norm(), rel=1e-6)
    for monitor in (first, second):
        monitor.detach()


def test_a_clip_in_a_hook_is_seen_by_what_acts_on_spikes() -> None:
    """What is decided on is the gradient before clipping, and a skipped step holds back what the hook has clipped."""
    loop = _Loop()
    monitor = gradmon.watch(loop.model, loop.optimizer, on_spike="skip")
    loop.optimizer.register_step_pre_hook(_clip)
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
        assert monitor.get_step_metrics()["gradmon/grad_norm_after_clip"] == pytest.approx(LIMIT, rel=1e-3)
    loop.backward()
    loop.model.weight.grad.fill_(float("nan"))
    start = loop.model.weight.detach().clone()
    with pytest.warns(gradmon.GradmonWarning, match="NaN or infinite before the optimizer's step; skipped"):
        loop.optimizer.step()
    assert monitor.step_was_skipped
    assert loop.model.weight.equal(start)
    monitor.detach()
