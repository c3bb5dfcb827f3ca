"""What reviewers asked of a gradient monitor for ignite (pytorch/ignite pull request 3624), demand by demand.

The numbers are used in the names of the tests. Demand 14 (many ranks) is for what runs on many ranks, and so is the other half of
demand 6, in ``test_skip_ranks.py``.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, SpikeDetector
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.spikes import Hampel, MeanStd, RollingZScore

from .reads import HostReads


def _noise(count: int, level: float = 1.0) -> list[float]:
    generator = random.Random(0)
    return [level * generator.lognormvariate(0, 0.1) for _ in range(count)]


def _alarms(detector: SpikeDetector, values: list[float]) -> list[int]:
    return [step for step, value in enumerate(values) if detector.update(step, value).is_spike]


@pytest.mark.parametrize("level", [1e-4, 1.0, 1e4])
def test_1_the_default_threshold_moves_with_the_signal(level: float) -> None:
    values = _noise(100, level)
    values[80] *= 5
    assert _alarms(SpikeDetector(), values) == [80]


def test_2_mean_and_k_standard_deviations_with_a_k_of_ones_own() -> None:
    values = _noise(200)
    values[150] = 1.4  # about four standard deviations of 0.1
    assert _alarms(SpikeDetector(MeanStd(k=3)), values)[-1] == 150
    assert _alarms(SpikeDetector(MeanStd(k=5)), values) == []


def test_3_count_mean_and_variance_are_all_that_is_kept() -> None:
    rule = MeanStd()
    for value in _noise(10_000):
        rule.update(value)
    assert sorted(rule.state_dict()) == ["count", "mean", "squares"]
    assert all(isinstance(value, (int, float)) for value in rule.state_dict().values())


def test_4_gradients_are_seen_before_the_optimizer_has_used_them() -> None:
    model = nn.Linear(3, 1)

    class Spoils(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # what it leaves in .grad is of no use to anybody
            found = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.zero_()
            return found

    optimizer = Spoils(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_5_a_value_is_compared_first_and_learned_afterwards() -> None:
    values = _noise(50)
    mean = sum(values) / 50
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / 49)
    detector = SpikeDetector(MeanStd())
    _alarms(detector, values)
    assert detector.update(50, 9.0).score == pytest.approx((9.0 - mean) / std)


@pytest.mark.parametrize("bad", [1e6, math.nan])
def test_6_the_batch_is_skipped_with_nothing_written_into_the_train_step(bad: float) -> None:
    models = []
    for batches in (range(20), [number for number in range(20) if number != 15]):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        monitor = gradmon.watch(model, optimizer, on_spike="skip")
        for number in batches:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            ((model(x) - 1).square().mean() * (bad if number == 15 else 1.0)).backward()
            if number == 15:
                with pytest.warns(gradmon.GradmonWarning, match="step 15: grad_norm .* skipped"):
                    optimizer.step()
            else:
                optimizer.step()
        assert monitor.get_step_counts().skipped == (15 in batches)
        monitor.detach()
        models.append(model)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("window", [0, -3, 2.5, "10", None])
def test_7_a_window_that_is_none_is_refused_in_words(window: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"window must be (a positive int|an int above 4)"):
        RollingZScore(window=window)
    with pytest.raises((TypeError, ValueError), match=r"window must be (a positive int|an int above 4)"):
        Hampel(window=window)


def test_8_while_a_rule_knows_too_little_there_is_no_score_and_no_spike() -> None:
    for rule, first in ((RollingZScore(window=20), 10), (MeanStd(warmup=10), 10), (Hampel(), 8)):
        detector = SpikeDetector(rule)
        verdicts = [detector.update(step, value) for step, value in enumerate([*_noise(first - 1), 1e6, 1.0])]
        assert [verdict.score is None for verdict in verdicts] == [True] * first + [False]
        assert not any(verdict.is_spike for verdict in verdicts)


@pytest.mark.filterwarnings("ignore:.*a GradScaler was noticed only in this step")
@pytest.mark.parametrize("named", [True, False])
def test_9_gradients_under_a_scaler_are_unscaled_wherever_it_is_kept(named: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler if named else None)
    for _ in range(2):  # the first step is where a scaler that nobody named is noticed
        grads = torch.autograd.grad(model(torch.ones(2, 3)).square().sum(), list(model.parameters()))
        expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in grads))
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_10_numbers_are_read_once_a_step_and_not_for_each_parameter() -> None:
    counts = []
    for layers in (5, 50):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = ModuleMonitor(model)
        monitor.add_gradient_metric("norm")
        monitor.attach(optimizer)
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            with HostReads() as reads:
                optimizer.step()
        assert len(monitor.get_step_metrics()) == 4 * layers  # weights and biases, before and after clipping
        counts.append(reads.counts["scalar"])
    assert counts[0] == counts[1]


def test_11_a_callback_is_called_with_the_spike_and_none_is_needed() -> None:
    events: list[SpikeEvent] = []
    for on_spike in (events.append, None):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        gradmon.watch(model, optimizer, on_spike=on_spike)
        for step in range(20):
            optimizer.zero_grad()
            (model(torch.ones(2, 3)).sum() * (100 if step == 19 else 1)).backward()
            optimizer.step()
    assert [(event.step, event.signal) for event in events] == [(19, "grad_norm")]


def test_12_a_rule_of_ones_own_takes_the_place_of_the_default_one() -> None:
    values = [1.0, 2.0, 3.0, 10.0, 3.0]
    assert _alarms(SpikeDetector(lambda value: value > 5), values) == [3]


def test_13_a_loop_that_zeroes_the_gradients_after_the_step_is_seen_all_the_same() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert monitor.get_step_metrics()["gradmon/grad_norm"] > 0


def test_13_who_asks_too_late_by_hand_is_told_so() -> None:
    model = nn.Linear(3, 1)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.begin_step(0)
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    monitor.monitor_gradients()
    monitor.end_step()
    assert monitor.get_step_metrics() == {}
    reasons = monitor.missing()
    assert len(reasons) == 4
    assert all("no gradient" in reason for reason in reasons.values())
