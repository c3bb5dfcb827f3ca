"""Warnings name the line of the script that was running, not one of the package or of torch, and the run that they are about."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
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


def _never_cleared(run_dir: Path | None) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with gradmon.watch(model, optimizer, run_dir=run_dir):
        for step in range(31):
            (model(torch.randn(8, 4)) * (1e8 if step == 30 else 1)).square().mean().backward()
            optimizer.step()


def test_each_run_of_a_process_has_the_warning_with_its_name(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # each text of a line once
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(_never_cleared, places))
    shown = [str(each.message) for each in caught]
    for place in places:
        for text in ("Gradients are not cleared", "step 30: grad_norm"):
            assert sum(each.startswith(f"torch_gradmon: {place}: {text}") for each in shown) == 1


def test_a_warning_of_a_monitor_without_a_run_begins_with_its_text() -> None:
    with pytest.warns(GradmonWarning) as caught:
        _never_cleared(None)
    assert all(str(each.message).startswith(("torch_gradmon: Gradients", "torch_gradmon: step 30: ")) for each in caught)


def test_a_warning_that_has_the_run_in_its_text_names_it_once(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with pytest.warns(GradmonWarning) as caught:
        _never_cleared(place)
        _never_cleared(place)
    texts = [str(each.message) for each in caught]
    assert any(text.startswith(f"torch_gradmon: the run directory {place} has a run") for text in texts)
    assert all(text.count(str(place)) == 1 for text in texts)
