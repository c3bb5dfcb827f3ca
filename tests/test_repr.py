"""What a monitor says of itself at a glance, in a notebook or a debugger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon


def test_a_monitor_says_what_it_watches_how_far_it_is_and_where_it_writes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, preset="cheap", run_dir=tmp_path / "first", on_spike=None)
    monitor.add_gradient_metric("norm")
    where = f"the run directory {str(tmp_path / 'first')!r}"
    assert repr(monitor) == f"ModuleMonitor(Sequential, 2 metrics, no step yet, {where})"
    for factor in (1.0,) * 40 + (float("nan"),):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() * factor).backward()
        optimizer.step()
    assert f"step 40, 1 of the last steps with spikes, {where})" in repr(monitor)
    monitor.set_detail(every=2, steps=10)
    model(torch.ones(2, 3)).sum().backward()
    assert "for now steps divisible by 2, for 10 steps, " in repr(monitor)
    monitor.detach()
    assert "not attached to an optimizer" in repr(monitor)


def test_a_monitor_that_is_disabled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = nn.Linear(2, 2)
    assert repr(gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))).endswith(", disabled by GRADMON_DISABLE)")


def test_one_without_an_optimizer_says_so_until_steps_begin_by_hand() -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.ModuleMonitor(model)
    assert "not attached" in repr(monitor)
    monitor.begin_step(0)
    assert repr(monitor) == "ModuleMonitor(Linear, 0 metrics, step 0)"
