"""Which was spoiled first: a parameter, an output, the loss or a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.synthetic_run import history
from torch_gradmon.analysis.diagnosis import Diagnosis
from torch_gradmon.analysis.diagnosis.diagnose import diagnose_history
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.rules.nonfinite import check_nonfinite
from torch_gradmon.analysis.run import read_run

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
    monitor = gradmon.watch(net, optimizer, preset="full", run_dir=path, on_spike=None, checks=gradmon.Checks(data=False))
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
    return diagnose_history(History.of_run(read_run(path)))


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
    monitor = gradmon.watch(net, optimizer, scaler=scaler, run_dir=tmp_path, on_spike=None, checks=gradmon.Checks(data=False))
    for step in range(20):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean() * (math.inf if step < overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()
    diagnosis = diagnose_history(History.of_run(read_run(tmp_path)))
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
    monitor = gradmon.watch(net, optimizer, preset="full", on_spike=None, checks=gradmon.Checks(data=False))
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


class _Between(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b = nn.Linear(4, 8), nn.ReLU(), last
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x))
        return self.b(torch.log(y * 0) if self.is_bad else y)


class _Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(("last", "is_blamed"), [(nn.Linear(8, 1), False), (_Own(8, 1), True)])
def test_a_layer_that_cannot_make_nan_is_not_blamed(last: nn.Module, is_blamed: bool) -> None:
    model = _Between(last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, preset="full", on_spike=None, checks=gradmon.Checks(data=False))
    for step in range(20):
        model.is_bad = step == AT
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    (finding,) = [found for found in monitor.diagnose().findings if found.severity == "error"]
    assert (finding.rule, finding.where, finding.steps[0]) == ("non-finite-activation", "b", AT)
    assert ("Make its computation safe" in finding.advice) == is_blamed
    assert ("b is a Linear whose parameters are finite: what it got was not finite" in finding.cause) != is_blamed
    assert ("between act, whose output is the last finite one, and b" in finding.advice) != is_blamed


def test_steps_without_gradients_are_not_said_to_be_finite() -> None:
    rows = {"a.weight": lambda step: {"rms": 1.0, "nonfinite_count": float(step >= 30)}}
    (finding,) = check_nonfinite(history(6, every=10, parameter=rows, gradient_before_clip={"a.weight": 1.0}))
    assert finding.steps[0] == 30
    assert "gradients were finite in step 20, and later ones are not known" in finding.cause
    (finding,) = check_nonfinite(history(40, parameter=rows, gradient_before_clip={"a.weight": 1.0}))
    assert "no gradient of the step before was" in finding.cause


class _Recurrent(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.RNN(4, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 3)
        with torch.no_grad():
            nn.init.orthogonal_(self.rnn.weight_hh_l0).mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _diagnosed(net: nn.Module, steps: int = 10, burst: int | None = None) -> Diagnosis:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gradmon.watch(net, optimizer, on_spike=None, checks=gradmon.Checks(data=False))
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.randn(16, 64, 4) * (30 if step == burst else 1)), torch.randint(3, (16,)))
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    return monitor.diagnose()


def test_a_recurrence_that_explodes_at_once_is_named() -> None:
    # a rate that is too high is a consequence
    (finding,) = [found for found, _ in _diagnosed(_Recurrent(2.0)).grouped() if found.severity == "warning"]
    assert (finding.rule, finding.where.partition(".")[0]) == ("exploding-gradients", "rnn")
    assert "before any update: this RNN multiplies the signal by the same matrix in each time step" in finding.cause
    assert all(word in finding.advice for word in ("Clip the gradient norm", "orthogonal", "LSTM, GRU"))


def test_a_spike_of_a_recurrence_is_not_only_the_batch() -> None:
    (finding,) = [found for found in _diagnosed(_Recurrent(1.2), steps=20, burst=15).findings if found.rule == "spike"]
    assert "product over its time steps" in finding.advice
    assert "clip_grad_norm_" in finding.advice


def _with_bad_batch(on_spike: str | None, preset: str = "standard", check_data: bool = True) -> Diagnosis:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gradmon.watch(net, optimizer, preset=preset, on_spike=on_spike, checks=gradmon.Checks(data=check_data))
    for step in range(20):
        x = torch.randn(8, 4)
        if step == AT:
            x[3, 2] = math.nan
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
    return monitor.diagnose()


@pytest.mark.filterwarnings("ignore")
def test_nan_in_the_batch_is_a_fault_of_the_input() -> None:
    found = _with_bad_batch(None).findings
    assert [finding.rule for finding in found if finding.severity == "error"] == ["non-finite-input"]
    assert found[0].steps == (AT, AT)
    assert "on_spike='skip'" in found[0].advice


@pytest.mark.filterwarnings("ignore")
def test_nan_in_the_first_output_leads_to_the_batch() -> None:
    (found,) = (each for each in _with_bad_batch(None, "full", check_data=False).findings if each.severity == "error")
    assert (found.rule, found.where) == ("non-finite-activation", "0")
    assert "the batch" in found.cause
    assert "torch.isfinite" in found.advice
    assert "on_spike='skip'" in found.advice


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check_data", [False, True])
def test_steps_skipped_for_nan_are_information(check_data: bool) -> None:
    diagnosis = _with_bad_batch("skip", check_data=check_data)
    assert diagnosis.healthy
    (skipped,) = (finding for finding in diagnosis.findings if finding.rule == "steps-skipped")
    assert (skipped.severity, skipped.steps) == ("info", (AT, AT))
    assert skipped.cause.startswith("1 step was skipped, 12; in all of them a gradient was NaN")
    inputs = [finding.severity for finding in diagnosis.findings if finding.rule == "non-finite-input"]
    assert inputs == ["info"] * check_data


@pytest.mark.filterwarnings("ignore")
def test_nan_in_the_batch_that_a_model_fills_is_no_fault() -> None:
    class Fills(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.nan_to_num(0.0))

    net = Fills(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gradmon.watch(net, optimizer, on_spike=None)
    for _ in range(20):
        x = torch.randn(8, 4)
        x[0, 0] = math.nan
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    assert "non-finite-input" not in [finding.rule for finding in monitor.diagnose().findings]


def _game(
    path: Path, spoils: str, preset: str = "standard", turns: int = 1, apart: str = "", on_spike: str | None = None
) -> Diagnosis:
    """Of a maker and a judge, whose optimizer steps first, ``turns`` times a step; ``apart``: of the monitor of this one alone."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"maker": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), "judge": Net()})
    of_judge, of_maker = (torch.optim.Adam(parts[name].parameters(), 1e-3) for name in ("judge", "maker"))
    options: dict[str, Any] = {"preset": preset, "run_dir": path, "on_spike": on_spike, "checks": gradmon.Checks(data=False)}
    if apart:
        monitor = gradmon.watch(parts[apart], {"judge": of_judge, "maker": of_maker}[apart], **options)
    else:
        monitor = gradmon.watch(parts, of_judge, of_maker, **options)
    for step in range(20):
        for turn in range(turns):
            of_judge.zero_grad()
            parts["judge"].spoils = "gradient" if (step, turn, spoils) == (AT, 0, "judge") else ""
            made = parts["maker"](torch.randn(4, 3)).detach()
            loss = (parts["judge"](made) - parts["judge"](torch.randn(4, 4))).mean()
            loss.backward()
            of_judge.step()
            monitor.log_scalar("loss_d", loss.detach())
            parts["judge"].spoils = ""
        of_maker.zero_grad()
        loss = -parts["judge"](parts["maker"](torch.randn(4, 3))).mean()
        loss = loss * (math.nan if (step, spoils) == (AT, "loss of the maker") else 1.0)
        loss.backward()
        of_maker.step()
        monitor.log_scalar("loss_g", loss.detach())
    monitor.detach()
    return diagnose_history(History.of_run(read_run(path)))


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
@pytest.mark.parametrize("preset", ["standard", "full"])
def test_of_players_the_one_that_steps_first_is_named(preset: str, tmp_path: Path) -> None:
    finding = _game(tmp_path, "judge", preset).findings[0]
    assert (finding.rule, finding.where, finding.steps[0]) == ("non-finite-gradient", "judge.second.weight", AT)
    assert "Loss_d had no NaN" in finding.cause


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_a_spoiled_player_among_several_turns_may_be_earlier(tmp_path: Path) -> None:
    finding = _game(tmp_path, "judge", turns=3).findings[0]
    assert (finding.rule, finding.where, finding.steps[0]) == ("non-finite-loss", "", AT)
    assert "one of these stepped 3 times" in finding.cause


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_the_loss_of_the_player_that_is_spoiled_is_named(tmp_path: Path) -> None:
    finding = _game(tmp_path, "loss of the maker").findings[0]
    assert (finding.rule, finding.where, finding.steps[0]) == ("non-finite-loss", "", AT)
    assert "Loss_g came first with NaN" in finding.cause


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_a_player_watched_alone_may_be_spoiled_by_another(tmp_path: Path) -> None:
    finding = _game(tmp_path, "judge", apart="maker").findings[0]
    assert finding.rule == "non-finite-gradient"
    assert "unlike loss_g" in finding.cause


@pytest.mark.filterwarnings("always::torch_gradmon.GradmonWarning")
def test_a_spike_of_players_names_no_layer_nearest_to_a_loss(tmp_path: Path) -> None:
    with pytest.warns(gradmon.GradmonWarning, match="optimizers take turns") as seen:
        _game(tmp_path, "judge", on_spike="warn")
    assert not any("a derivative between the loss" in str(each.message) for each in seen)
