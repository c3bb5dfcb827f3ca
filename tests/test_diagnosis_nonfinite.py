"""Which was spoiled first: a parameter, an output, the loss or a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.synthetic_run import history
from torch_gradmon.analysis.diagnosis import Diagnosis
from torch_gradmon.analysis.diagnosis.diagnose import diagnose_history
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.rules.nonfinite import check_nonfinite

AT = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.spoils = ""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x * (math.inf if self.spoils == "activation" else 1)))
        y = self.second(y)
        return y + (torch.zeros_like(y) * y).sqrt() if self.spoils == "gradient" else y


def _diagnosis(path: Path, spoils: str, act: Callable[[Net, torch.optim.Optimizer], None] | None = None) -> Diagnosis:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gradmon.watch(net, optimizer, preset="full", run_dir=path, on_spike=None, check_data=False)
    for step in range(20):
        net.spoils = spoils if step == AT else ""
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean()
        loss = loss * (math.nan if net.spoils == "loss" else 1.0)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        if step == AT and spoils == "parameter":
            with torch.no_grad():
                net.first.weight[0, 0] = math.nan
    monitor.detach()
    return diagnose_history(History.of_run(gradmon.load_run(path)))


@pytest.mark.parametrize(
    ("spoils", "where", "step"),
    [("activation", "first", AT), ("loss", "", AT), ("gradient", "second.weight", AT), ("parameter", "first.weight", AT + 1)],
)
def test_the_first_that_is_spoiled_is_named_and_nothing_else(spoils: str, where: str, step: int, tmp_path: Path) -> None:
    (finding,) = _diagnosis(tmp_path, spoils).findings
    assert finding.rule == f"non-finite-{spoils}"
    assert (finding.severity, finding.where, finding.steps) == ("error", where, (step, 19))


def test_a_sound_run_has_no_finding(tmp_path: Path) -> None:
    diagnosis = _diagnosis(tmp_path, "nothing")
    assert diagnosis.findings == ()
    assert diagnosis.unseen == {}


@pytest.mark.parametrize(("overflows", "found"), [(10, False), (20, True)])
def test_a_scaler_that_looks_for_its_scale_is_sound_and_one_that_never_finds_it_is_not(
    overflows: int, found: bool, tmp_path: Path
) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    monitor = gradmon.watch(net, optimizer, scaler=scaler, run_dir=tmp_path, on_spike=None, check_data=False)
    for step in range(20):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean() * (math.inf if step < overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()
    diagnosis = diagnose_history(History.of_run(gradmon.load_run(tmp_path)))
    assert [finding.rule for finding in diagnosis.findings] == ["non-finite-gradient"] * found


def test_steps_that_a_policy_skips_are_no_scaler_that_never_finds_its_scale() -> None:
    found = []
    for context in ({}, {"skipped": "a spike of grad_norm"}):
        found.append(check_nonfinite(history(30, applied=lambda step: step < 5, context=lambda step, told=context: told)))
    (refused,), none = found
    assert (refused.rule, refused.steps, refused.evidence) == (
        "non-finite-gradient",
        (5, 29),
        {"overflowed steps in a row": 25.0},
    )
    assert none == []


@pytest.mark.parametrize(("reaches_loss", "expected"), [(False, []), (True, ["non-finite-activation"])])
def test_logits_that_are_masked_are_no_fault_as_long_as_what_follows_is_finite(reaches_loss: bool, expected: list[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Threshold(math.inf, -math.inf) if reaches_loss else _Mask())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gradmon.watch(net, optimizer, preset="full", on_spike=None, check_data=False)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.ones(2, 4)), torch.tensor([0, 1]))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    assert [finding.rule for finding in monitor.diagnose().findings if finding.severity == "error"] == expected


class _Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.tensor([False, False, True]), -math.inf)
