"""A NaN whose origin was not measured is not blamed on what was: the finding names what to measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def _finding(preset: str, logs: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), Log(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, preset=preset, on_spike=None)
    for step in range(30):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4) * (-1e4 if step == 20 else 1)).square().mean()
        loss.backward()
        optimizer.step()
        if logs:
            monitor.log_scalar("loss", loss.detach())
    return next(finding for finding in monitor.diagnose().findings if finding.rule.startswith("non-finite"))


def test_with_outputs_it_names_the_module() -> None:
    assert _finding("full", logs=True).rule == "non-finite-activation"


def test_without_outputs_it_claims_nothing_about_them() -> None:
    finding = _finding("standard", logs=True)
    assert finding.rule == "non-finite-loss"
    assert "outputs of modules were not measured" in finding.cause
    assert "preset='full'" in finding.advice


def test_without_the_loss_either_it_asks_for_both() -> None:
    finding = _finding("standard", logs=False)
    assert finding.rule == "non-finite-gradient"
    assert "neither the loss nor outputs" in finding.cause
    assert "log_scalar" in finding.advice
    assert "preset='full'" in finding.advice
