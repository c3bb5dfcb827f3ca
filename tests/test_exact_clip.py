"""Clipping by the exact norm: the norm is that of float64, the scaling is torch's, and the statistics pass is not paid twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.moments import VIEWS

from .reads import Instrument


class _Reads(Instrument):
    """Elements read by calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(x, Tensor)]
            self.elements += sum(x.numel() for x in flat)
        return function(*args, **(kwargs or {}))


def _model(*sizes: int) -> nn.Module:
    model = nn.ParameterList(torch.randn(size) for size in sizes)
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape)
    return model


def _exact(model: nn.Module, order: float) -> float:
    flat = torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])
    return torch.linalg.vector_norm(flat, order).item()


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("monitored", [False, True])
def test_it_clips_by_the_exact_norm(order: float, monitored: bool) -> None:
    model = _model(5, 300, 400_000)
    expected = _exact(model, order)
    scaled = [p.grad * (1.0 / (expected + 1e-6)) for p in model.parameters()]
    monitor = ModuleMonitor(model)
    for metric in VIEWS:
        monitor.add_gradient_metric(metric)
    if monitored:
        monitor.begin_step(0)
    total = monitor.clip_grad_norm_(1.0, order, exact=True)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected, rel=1e-6)
    for p, wanted in zip(model.parameters(), scaled, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=0)
    if monitored:
        monitor.end_step()
        found = monitor.get_step_metrics()
        if order == 2.0:
            assert math.hypot(*(found[f"gradient_before_clip/{i}/norm"] for i in range(3))) == pytest.approx(expected, rel=1e-6)


def test_the_largest_of_both_infinities_is_infinite() -> None:
    model = _model(5)
    model[0].grad[:2] = torch.tensor([math.inf, -math.inf])
    assert ModuleMonitor(model).clip_grad_norm_(1.0, math.inf, exact=True).item() == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned_or_raised_as_torch_does(bad: float) -> None:
    model = _model(300, 70_000)
    model[1].grad[5] = bad
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.begin_step(0)
    with pytest.raises(RuntimeError, match="total norm"):
        monitor.clip_grad_norm_(1.0, error_if_nonfinite=True, exact=True)
    total = monitor.clip_grad_norm_(1.0, exact=True)
    assert math.isnan(total.item()) if math.isnan(bad) else total.item() == math.inf


def test_on_a_monitored_step_the_norm_costs_no_pass_of_its_own() -> None:
    model = _model(3_000_000, 200)
    size = sum(p.numel() for p in model.parameters())

    def reads(exact: bool, metrics: bool) -> float:
        monitor = ModuleMonitor(model)
        if metrics:
            for metric in VIEWS:
                monitor.add_gradient_metric(metric, stages=["before_clip"])
        monitor.begin_step(0)
        with _Reads() as counting:
            monitor.clip_grad_norm_(1e9, exact=exact)
        return counting.elements / size

    statistics_and_clip = reads(exact=False, metrics=True)
    assert reads(exact=True, metrics=True) <= statistics_and_clip - 0.9  # torch's clip reads once for its norm
    # without statistics: torch's one read is replaced by two, the second one for the sums that say whether float32 will do
    assert reads(exact=True, metrics=False) <= reads(exact=False, metrics=False) + 1.2


def test_gradients_changed_between_backward_and_clip_are_clipped_by_what_they_are_now() -> None:
    model = nn.Linear(300, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    model(torch.randn(4, 300)).square().sum().backward()
    model.weight.grad.data.mul_(3)  # an edit that no version counter shows
    expected = _exact(model, 2.0)
    assert monitor.clip_grad_norm_(1.0, exact=True).item() == pytest.approx(expected, rel=1e-6)
    assert _exact(model, 2.0) == pytest.approx(1.0, rel=1e-5)


def test_parameters_of_another_model_are_clipped_with_the_watched_ones() -> None:
    model, other = _model(1000), _model(70_000)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.begin_step(0)
    both = [*model.parameters(), *other.parameters()]
    expected = math.hypot(_exact(model, 2.0), _exact(other, 2.0))
    assert monitor.clip_grad_norm_(1.0, parameters=both, exact=True).item() == pytest.approx(expected, rel=1e-6)


def test_scaled_gradients_are_clipped_as_they_are() -> None:
    model = _model(1000)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes the scale
    monitor = ModuleMonitor(model, scaler=scaler)
    monitor.add_gradient_metric("norm")
    monitor.begin_step(0)
    expected = _exact(model, 2.0)
    assert monitor.clip_grad_norm_(1.0, exact=True).item() == pytest.approx(expected, rel=1e-6)


def test_a_parameter_named_twice_counts_twice_as_with_torch() -> None:
    totals = []
    for monitored in (False, True):
        model = _model(1000)
        monitor = ModuleMonitor(model)
        monitor.add_gradient_metric("norm")
        if monitored:
            monitor.begin_step(0)
        expected = math.sqrt(2) * _exact(model, 2.0)
        totals.append(monitor.clip_grad_norm_(1.0, parameters=[*model.parameters()] * 2, exact=True).item())
        assert totals[-1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_norm_is_the_same_to_the_last_bit_whatever_is_measured(order: float) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        model = _model(300, 70_000, 40_000)
        for parameter in model.parameters():
            parameter.grad = torch.rand(parameter.shape) * 0.2 + 1.0  # a mean far from zero, for which float32 is too narrow
        found = set()
        for metric, monitored in (("std", True), ("std", False), ("norm", True), ("l1_norm", True), ("max", True)):
            monitor = ModuleMonitor(model)
            monitor.add_gradient_metric(metric)
            if monitored:
                monitor.begin_step(0)
            found.add(monitor.clip_grad_norm_(1e9, order, exact=True).item())
        assert len(found) == 1


@pytest.mark.parametrize("order", [1.0, math.inf])
def test_complex_gradients_have_no_exact_norm_of_these_orders(order: float) -> None:
    model = nn.ParameterList([torch.ones(3, dtype=torch.complex64)])
    model[0].grad = torch.full((3,), 3 + 4j)
    with pytest.raises(ValueError, match="use exact=False for complex"):
        ModuleMonitor(model).clip_grad_norm_(1.0, order, exact=True)
    assert ModuleMonitor(model).clip_grad_norm_(1.0, exact=True).item() == pytest.approx(math.sqrt(75))
