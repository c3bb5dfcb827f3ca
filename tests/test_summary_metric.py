"""Whole-model values that are asked for one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.spikes import Threshold
from torch_gradmon.step.summary import DISTRIBUTION


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3), nn.LayerNorm(3))


def _train(monitor: gradmon.ModuleMonitor, model: nn.Module, steps: int = 3, scale: float = 1.0) -> list[dict[str, float]]:
    """The oracle's values of each step: all gradient elements in one float64 tensor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    expected = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(5, 6)).pow(2) * torch.tensor([1.0, 2.0, 3.0]) * scale).sum().backward()
        every = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
        finite = every[every.isfinite()]
        near = (finite.abs() <= 1e-8).double().mean().item() if len(finite) else math.nan
        expected.append({"mean": every.mean().item(), "std": every.std(correction=0).item(), "sparsity": near})
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return expected


def test_mean_standard_deviation_and_sparsity_of_all_gradient_elements() -> None:
    model = _model()
    monitor = gradmon.ModuleMonitor(model)
    for name in DISTRIBUTION:
        monitor.add_model_metric(name)
    expected = _train(monitor, model)
    for step, values in monitor.get_all_metrics().items():
        assert set(values) == {f"gradmon/{name}" for name in DISTRIBUTION}, "nothing else is shown"
        for name, view in DISTRIBUTION.items():
            size = expected[step]["std"] if view == "mean" else expected[step][view]
            assert values[f"gradmon/{name}"] == pytest.approx(expected[step][view], rel=1e-6, abs=1e-6 * size)
    assert 0 < values["gradmon/grad_sparsity"] < 1


def test_model_metric_comes_beside_a_preset_once() -> None:
    model = _model()
    monitor = gradmon.ModuleMonitor(model, preset="minimal")
    monitor.add_model_metric("grad_std")
    monitor.add_model_metric("grad_norm")  # of the preset too: shown once
    _train(monitor, model)
    shown = list(monitor.get_step_metrics())
    assert shown.count("gradmon/grad_std") == shown.count("gradmon/grad_norm") == 1
    assert "gradmon/param_norm" not in shown
    assert monitor.describe()["gradmon/grad_std"] == "population standard deviation of all gradient elements before clipping"


def test_with_gradients_that_are_not_finite_it_says_what_torch_says() -> None:
    model = nn.Linear(6, 3)  # a ReLU would let zeros through
    monitor = gradmon.ModuleMonitor(model)
    for name in DISTRIBUTION:
        monitor.add_model_metric(name)
    _train(monitor, model, steps=1, scale=math.nan)
    values = monitor.get_step_metrics()
    assert math.isnan(values["gradmon/grad_mean"])
    assert math.isnan(values["gradmon/grad_std"])
    assert "gradmon/grad_sparsity" not in values
    assert monitor.missing()["gradmon/grad_sparsity"] == "no gradient has a finite element"


def test_what_is_no_whole_model_value_is_refused() -> None:
    monitor = gradmon.ModuleMonitor(_model())
    with pytest.raises(ValueError, match=r"metric_name='grad_men' is not one of .*did you mean grad_mean, "):
        monitor.add_model_metric("grad_men")
    monitor.add_model_metric("grad_mean")
    with pytest.raises(ValueError, match="'grad_mean' was added already"):
        monitor.add_model_metric("grad_mean")


def test_a_detector_may_watch_it() -> None:
    model = _model()
    events: list[SpikeEvent] = []
    monitor = gradmon.ModuleMonitor(model, on_spike=events.append)
    monitor.add_detector(gradmon.SpikeDetector(Threshold(1e-9), signal="grad_std"))
    _train(monitor, model, steps=2)
    monitor.detach()
    assert [event.signal for event in events] == ["grad_std", "grad_std"]
