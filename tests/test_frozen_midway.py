"""Layers that are frozen or thawed in the middle of a run: whole-model values are of what is trained in each step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn

from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.core.moments import SQUARES, Column
from torch_gradmon.core.records import StatsTable
from torch_gradmon.step.summary import update_values

STEPS = 24


def _stepped(optimizer: torch.optim.Optimizer, warns: bool) -> None:
    expected = pytest.warns(GradmonWarning, match="still move") if warns else contextlib.nullcontext()
    with expected:
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("thaw", [None, 14])
@pytest.mark.parametrize("options", [{"momentum": 0.9, "weight_decay": 0.01}, {}], ids=["momentum", "plain"])
def test_a_layer_counts_while_it_is_trained(set_to_none: bool, thaw: int | None, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **options)
    monitor = ModuleMonitor(model, on_metric_error="raise", preset="standard")
    monitor.attach(optimizer)
    for step in range(STEPS):
        if step == 6:
            model[2].requires_grad_(False)
        if step == thaw:
            model[2].requires_grad_(True)
        model(torch.randn(16, 4)).square().mean().backward()
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        _stepped(optimizer, step == 8 and bool(options) and not set_to_none)
        optimizer.zero_grad(set_to_none=set_to_none)
        values = monitor.get_step_metrics()
        after = {name: p.detach().double() for name, p in model.named_parameters()}

        def norm(tensors: list[torch.Tensor]) -> float:
            return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())

        param_norm = norm([before[name] for name in trained])
        assert values["gradmon/param_norm"] == pytest.approx(param_norm, rel=1e-6), step
        if step % 10 == 0:
            update_norm = norm([after[name] - before[name] for name in trained])
            assert values["gradmon/update_norm"] == pytest.approx(update_norm, rel=1e-4), step
            assert values["gradmon/update_ratio"] == pytest.approx(update_norm / param_norm, rel=1e-4), step
            ratios = [float((after[n] - before[n]).norm() / before[n].norm()) for n in trained if before[n].dim() > 1]
            low, high = torch.quantile(torch.tensor(ratios, dtype=torch.float64), torch.tensor([0.1, 0.9]).double()).tolist()
            assert values["gradmon/update_ratio_p10"] == pytest.approx(low, rel=1e-4), step
            assert values["gradmon/update_ratio_p90"] == pytest.approx(high, rel=1e-4), step
    monitor.detach()


def test_a_layer_frozen_within_an_open_step_is_no_part_of_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = ModuleMonitor(model, on_metric_error="raise", preset="standard").attach(optimizer)
    for step in range(4):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.zero_grad()  # this batch is left out, so that the step goes on
        model[0].requires_grad_(step % 2 == 1)
        model(torch.randn(16, 4)).square().mean().backward()
        trained = [p.detach().double().flatten() for p in model.parameters() if p.requires_grad]
        norm = torch.cat(trained).norm().item()
        optimizer.step()
        optimizer.zero_grad()
        assert monitor.get_step_metrics()["gradmon/param_norm"] == pytest.approx(norm, rel=1e-6)
        model[0].requires_grad_(step != 2)
    assert monitor.current_step == 3


@pytest.mark.parametrize("odd", [None, 0.0, torch.inf, torch.nan])
def test_percentiles_of_the_update_ratio_have_the_bits_of_torch(odd: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 120):
        names = tuple(map(str, range(count)))
        before, after = torch.rand(2, count, 8, generator=generator, dtype=torch.float64)
        if odd is not None:
            after[count // 2, Column.SQUARE_SUM] = odd
        found = update_values(StatsTable(names, after, SQUARES), StatsTable(names, before, SQUARES), set(names), {})
        squares = (table[:, Column.SQUARE_SUM].tolist() for table in (after, before))
        ratios = torch.tensor([math.sqrt(new / old) for new, old in zip(*squares, strict=True)], dtype=torch.float64)
        expected = torch.quantile(ratios, torch.tensor([0.1, 0.9], dtype=torch.float64))
        torch.testing.assert_close(
            [found["update_ratio_p10"], found["update_ratio_p90"]], expected.tolist(), rtol=0, atol=0, equal_nan=True
        )
