"""Warnings name the line of the script that was running, not one of the package or of torch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning


def _where(caught: list[warnings.WarningMessage], text: str) -> set[str]:
    ours = [each for each in caught if issubclass(each.category, GradmonWarning) and text in str(each.message)]
    assert ours, [str(each.message) for each in caught]
    return {each.filename for each in ours}


def test_a_spike_is_reported_at_the_line_of_the_loop() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    monitor = gradmon.watch(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(60):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) * (1e4 if step == 50 else 1)).square().mean().backward()
            optimizer.step()
        monitor.detach()
    assert _where(caught, "step 50") == {__file__}


def test_a_failure_within_backward_is_reported_at_the_line_that_called_it() -> None:
    def broken(tensor: Tensor) -> Tensor:
        raise ValueError("no")

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_gradient_metric("broken", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    monitor.detach()
    assert _where(caught, "broken") == {__file__}


def test_a_pattern_without_a_match_is_reported_at_its_line() -> None:
    monitor = gradmon.ModuleMonitor()
    monitor.set_module(nn.Linear(4, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor.add_gradient_metric("mean", metric_regex="no_such_layer")
    assert _where(caught, "no_such_layer") == {__file__}
