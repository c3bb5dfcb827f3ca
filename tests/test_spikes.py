"""Spike rules and detectors, alone and fed by a monitor."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector, SpikeError
from torch_gradmon.record import Event
from torch_gradmon.spikes import MedianMad


def _noise(count: int, seed: int = 0, level: float = 1.0, spread: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [level * math.exp(generator.gauss(0, spread)) for _ in range(count)]


def _verdicts(values: list[float], detector: SpikeDetector | None = None, start: int = 0) -> list:
    detector = detector or SpikeDetector()
    return [detector.update(start + step, value) for step, value in enumerate(values)]


def _alarms(values: list[float], detector: SpikeDetector | None = None) -> list[int]:
    return [step for step, verdict in enumerate(_verdicts(values, detector)) if verdict.is_spike]


def test_single_spikes_are_found_and_nothing_else() -> None:
    values = _noise(400)
    for step in (60, 61, 150, 399):
        values[step] *= 10
    assert _alarms(values) == [60, 61, 150, 399]


def test_a_score_is_the_robust_z_score_of_the_logarithm() -> None:
    values = _noise(50)
    logs = sorted(math.log(v) for v in values)
    median = (logs[24] + logs[25]) / 2
    distances = sorted(abs(x - median) for x in logs)
    deviation = 1.4826 * (distances[24] + distances[25]) / 2
    detector = SpikeDetector()
    _verdicts(values, detector)
    verdict = detector.update(50, 3.0)
    assert verdict.score == pytest.approx((math.log(3.0) - median) / deviation)
    assert verdict.threshold == 6.0
    assert verdict.is_spike == (verdict.score > 6.0)


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e5, 1e30])
def test_the_scale_of_the_signal_changes_no_verdict(factor: float) -> None:
    values = _noise(200)
    values[100] *= 8
    plain, scaled = _verdicts(values), _verdicts([v * factor for v in values])
    assert [v.is_spike for v in scaled] == [v.is_spike for v in plain]
    for a, b in zip(plain, scaled, strict=True):
        assert b.score == (a.score if a.score is None else pytest.approx(a.score, abs=1e-6))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_told_and_change_no_later_verdict(bad: float) -> None:
    values = _noise(200)
    values[150] *= 10
    with_bad = [*values[:50], bad, *values[50:140], bad, bad, bad, bad, bad, bad, *values[140:]]
    verdicts = _verdicts(with_bad)
    assert [v for v, x in zip(verdicts, with_bad, strict=True) if math.isfinite(x)] == _verdicts(values)
    told = [v for v, x in zip(verdicts, with_bad, strict=True) if not math.isfinite(x)]
    assert all(v.is_spike and v.score == math.inf and str(bad) in v.reason for v in told)


def test_nan_is_told_also_while_the_rule_warms_up() -> None:
    assert SpikeDetector().update(0, math.nan).is_spike
    assert SpikeDetector().update(0, 1.0).score is None


@pytest.mark.parametrize("factor", [2.0, 10.0, 1000.0])
def test_a_lasting_shift_of_level_is_accepted_within_ten_steps(factor: float) -> None:
    values = _noise(100, spread=0.02) + _noise(200, seed=1, level=factor, spread=0.02)
    alarms = _alarms(values)
    assert alarms
    assert all(100 <= step < 110 for step in alarms)
    values[250] *= 10  # and on the new level it still sees
    assert 250 in _alarms(values)


def test_what_lies_low_is_no_spike() -> None:
    assert _alarms([*_noise(60), 1e-9, 0.0, *_noise(30, seed=2)]) == []


def test_the_decay_of_the_first_steps_gives_no_alarm() -> None:
    generator = random.Random(3)
    decay = [(0.3 + 14.7 * math.exp(-step / 40)) * math.exp(generator.gauss(0, 0.1)) for step in range(400)]
    assert _alarms(decay) == []


def test_a_constant_signal_stays_quiet_and_a_small_wobble_on_it_too() -> None:
    assert _alarms([1.0] * 100 + [1.02] + [1.0] * 100) == []
    assert _alarms([1.0] * 100 + [1.5] + [1.0] * 100) == [100]


def test_spikes_do_not_widen_what_counts_as_normal() -> None:
    values = _noise(400)
    spiked = range(50, 400, 7)
    for step in spiked:
        values[step] *= 10
    assert _alarms(values) == list(spiked)


def test_the_state_goes_through_json_and_gives_the_same_verdicts() -> None:
    values = _noise(300)
    for step in (90, 99, 100, 200):
        values[step] *= 20
    whole = _verdicts(values)
    for cut in (0, 10, 50, 100, 101, 201):
        first, second = SpikeDetector(), SpikeDetector()
        before = _verdicts(values[:cut], first)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert before + _verdicts(values[cut:], second, cut) == whole


def test_a_rule_of_ones_own_decides() -> None:
    class Above:
        threshold = 2.0

        def __init__(self) -> None:
            self.learned: list[tuple[float, bool]] = []

        def score(self, value: float) -> float:
            return value

        def update(self, value: float, is_spike: bool) -> None:
            self.learned.append((value, is_spike))

    rule = Above()
    assert _alarms([1.0, 3.0, math.nan, 2.0], SpikeDetector(rule)) == [1, 2]
    assert rule.learned == [(1.0, False), (3.0, True), (2.0, False)]


# --- fed by a monitor ------------------------------------------------------------------------------------------------------------


def _train(steps: int, on_spike: object, factor: float = 1e4) -> ModuleMonitor:
    """A toy run whose step ``steps - 1`` has a huge gradient in ``big.weight``."""
    model = nn.ModuleDict({"small": nn.Linear(4, 4), "big": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, optimizer, on_spike=on_spike)
    for step in range(steps):
        x = torch.randn(16, 4)
        loss = model["small"](x).square().mean() + model["big"](x * (factor if step == steps - 1 else 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return monitor


def test_on_spike_warn_names_the_parameter_with_the_largest_share() -> None:
    with pytest.warns(GradmonWarning, match=r"step 39: grad_norm .*above normal.*big\.weight") as caught:
        monitor = _train(40, "warn")
    assert len(caught) == 1
    assert monitor.top_parameters(1)[0][0] == "big.weight"
    assert monitor.get_step_metrics()["gradmon/spike_score"] > 6


def test_on_spike_raise_raises_when_the_step_ends() -> None:
    with pytest.raises(SpikeError, match=r"step 39: grad_norm .*big\.weight"):
        _train(40, "raise")


def test_on_spike_calls_a_function_with_the_event() -> None:
    events: list[Event] = []
    _train(40, events.append)
    assert [(event.step, event.signal) for event in events] == [(39, "grad_norm")]
    assert events[0].score > events[0].threshold == 6.0
    assert events[0].value > 100


def test_on_spike_none_says_nothing_but_the_record_has_the_event() -> None:
    monitor = _train(40, None)
    assert monitor.get_step_metrics()["gradmon/spike_score"] > 6


def test_a_failing_on_spike_function_does_not_stop_training() -> None:
    def broken(event: Event) -> None:
        raise KeyError("oops")

    with pytest.warns(GradmonWarning, match=r"on_spike.*KeyError"):
        assert _train(40, broken).step == 39


def test_a_nan_gradient_is_told_with_the_layers_that_have_it() -> None:
    with pytest.warns(GradmonWarning, match=r"step 29: grad_norm is (nan|inf).*big\.weight"):
        _train(30, "warn", factor=math.inf)


def test_a_detector_follows_a_scalar_that_was_logged_by_hand() -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, on_spike="warn")
    monitor.add_detector(SpikeDetector(MedianMad(warmup=8), signal="loss"))
    for step, value in enumerate(_noise(30)):
        monitor.begin_step(step)
        monitor.log_scalar("loss", value)
        monitor.end_step()
    monitor.begin_step(30)
    monitor.log_scalar("loss", 50.0)
    with pytest.warns(GradmonWarning, match=r"step 30: loss = 50 lies .* above normal"):
        monitor.end_step()


def test_a_step_that_was_not_applied_teaches_the_detector_nothing() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike="raise")
    for step in range(30):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean() * (math.inf if step in (5, 25) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.get_step_metrics()["gradmon/steps_not_applied"] == 2
    assert len(monitor.state_dict()["detectors"]["grad_norm"]["rule"]["values"]) == 28
