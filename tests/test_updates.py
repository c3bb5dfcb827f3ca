"""Updates are what was applied: in the parameter's own precision, of all of it or of a sample that is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_gradmon import ModuleMonitor

from .families import BY_NAME


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: p.detach().double() - before[name].double() for name, p in model.named_parameters()}


def test_in_bf16_the_update_is_what_the_rounding_left_of_it() -> None:
    """A formula from the optimizer's state says lr * update; most of that is lost where the parameter has eight bits."""
    model = BY_NAME["bf16"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_update_metric("norm")
    monitor.add_update_metric("largest", lambda change: change.abs().max())
    monitor.attach(optimizer)
    applied = _step(model, optimizer, torch.randn(8, 10).bfloat16())
    values = monitor.get_step_metrics()
    for name, change in applied.items():
        assert values[f"update/{name}/norm"] == pytest.approx(change.norm().item(), rel=1e-6)
        assert values[f"update/{name}/largest"] == pytest.approx(change.abs().max().item(), rel=1e-6)
    formula = 1e-4 * model[0].weight.numel() ** 0.5
    assert values["update/0.weight/norm"] < 0.9 * formula


def test_a_sample_of_rows_is_measured_and_named() -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, max_update_rows=4, on_metric_error="raise")
    for metric in ("norm", "ratio", "rms"):
        monitor.add_update_metric(metric)
    monitor.attach(optimizer)
    weight = model[0].weight.detach().clone()
    applied = _step(model, optimizer, torch.randn(8, 10))
    rows = [0, 5, 10, 15]  # four of sixteen, evenly spread
    change, base = applied["0.weight"][rows], weight[rows].double()
    values = monitor.get_step_metrics()
    assert values["update/0.weight/norm"] == pytest.approx(change.norm().item(), rel=1e-6)
    assert values["update/0.weight/ratio"] == pytest.approx((change.norm() / base.norm()).item(), rel=1e-6)
    assert values["update/0.weight/rms"] == pytest.approx(change.square().mean().sqrt().item(), rel=1e-6)
    assert values["update/4.bias/norm"] == pytest.approx(applied["4.bias"].norm().item(), rel=1e-6)  # three rows: all
    assert "at most 4 rows" in monitor.describe()["update/.*/ratio"]


def test_a_sample_of_layers_leaves_the_others_out_with_a_reason() -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, update_regex=r"^0\.")
    monitor.add_update_metric("norm")
    monitor.attach(optimizer)
    applied = _step(model, optimizer, torch.randn(8, 10))
    values, missing = monitor.get_step_metrics(), monitor.missing()
    assert values["update/0.weight/norm"] == pytest.approx(applied["0.weight"].norm().item(), rel=1e-6)
    assert "update_regex" in missing["update/2.weight/norm"]
    assert "update/2.weight/norm" not in values


def test_parameters_are_copied_on_every_tenth_step_only_and_let_go() -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, preset="standard")
    monitor.attach(optimizer)
    copied = []
    clone = torch.Tensor.clone
    total = sum(p.numel() for p in model.parameters())
    for _ in range(21):
        elements = [0]

        def counting(tensor: torch.Tensor, *args: Any, seen: list[int] = elements, **kwargs: Any) -> torch.Tensor:
            seen[0] += tensor.numel()
            return clone(tensor, *args, **kwargs)

        torch.Tensor.clone = counting  # type: ignore[method-assign, assignment]
        try:
            model(torch.randn(8, 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.Tensor.clone = clone  # type: ignore[method-assign]
        copied.append(elements[0] >= total)
        assert not monitor._runtime.captures.parameters._before
    assert [step for step, there in enumerate(copied) if there] == [0, 10, 20]


def test_excluded_modules_have_no_metrics_but_count_in_the_whole() -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, excluded_modules_regex=r"^2(\.|$)", preset="minimal")
    monitor.add_gradient_metric("norm")
    monitor.add_activation_metric("norm")
    monitor.attach(optimizer)
    model(torch.randn(8, 10)).square().mean().backward()
    whole = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    optimizer.step()
    values = monitor.get_step_metrics()
    assert values["gradmon/grad_norm"] == pytest.approx(whole, rel=1e-6)
    assert {key.split("/")[1] for key in values if not key.startswith("gradmon/")} == {
        *("0.weight", "0.bias", "4.weight", "4.bias"),
        *("[root module]", "0", "1", "3", "4"),
    }
