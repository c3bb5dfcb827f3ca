"""Metrics that follow from inner products: what several of them need is computed once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor
from torch_gradmon.statistics.cpp import CppStatistics
from torch_gradmon.statistics.dispatch import Statistics


@pytest.mark.parametrize("without", [(), (0,), (1, 3), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("order", [1, -1])
def test_each_pair_of_tensors_is_read_once(without: Sequence[int], order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    inner_products, products = Statistics.inner_products, CppStatistics._products

    def counted(self: Statistics, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        read.append(len(first))
        return inner_products(self, first, second)

    def counted_at_once(self: CppStatistics, entries: array[int]) -> Tensor:
        read.append(len(entries) // 4)
        return products(self, entries)

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    monitor = ModuleMonitor(model)
    metrics = ["exp_avg_norm", "grad_momentum_cosine", "exp_avg_sq_norm"][::order]
    for metric in metrics:
        monitor.add_optimizer_metric(metric)
    monitor.attach(optimizer)
    for step in range(2):
        if step == 1:
            monkeypatch.setattr(Statistics, "inner_products", counted)
            monkeypatch.setattr(CppStatistics, "_products", counted_at_once)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        parameters = list(model.parameters())
        for position in without if step == 1 else ():
            parameters[position].grad = None
        optimizer.step()
    values, missing = monitor.get_step_metrics(), monitor.missing()
    of_cosine = (2 if not without else 3 if len(without) < 6 else 0) * (6 - len(without))
    assert read == [2 * 6 + of_cosine], "two moments, for the cosine two more, and the first moments of some parameters again"
    for name, parameter in model.named_parameters():
        state, gradient = optimizer.state[parameter], parameter.grad
        first, second = state["exp_avg"].double(), state["exp_avg_sq"].double()
        assert values[f"optimizer/{name}/exp_avg_norm"] == pytest.approx(first.norm().item(), rel=1e-6)
        assert values[f"optimizer/{name}/exp_avg_sq_norm"] == pytest.approx(second.norm().item(), rel=1e-6)
        key = f"optimizer/{name}/grad_momentum_cosine"
        if gradient is None:
            assert key not in values
            assert key in missing
        else:
            cosine = torch.cosine_similarity(gradient.double().flatten(), first.flatten(), dim=0)
            assert values[key] == pytest.approx(cosine.item(), rel=1e-6)
    monitor.detach()
