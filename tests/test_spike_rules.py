"""Spike rules against what their docstrings say, computed the naive way; and the invariants that each of them keeps or does not."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_gradmon.spikes import (
    Cusum,
    EmaZScore,
    Hampel,
    MeanStd,
    MedianMad,
    Ratio,
    RollingZScore,
    Rule,
    SpikeDetector,
    Threshold,
)
from torch_gradmon.spikes.detector import verdict_on
from torch_gradmon.spikes.hampel import SortedWindow, add_each, value_at
from torch_gradmon.spikes.rules import HampelBank

RULES: dict[str, Callable[[], Rule]] = {
    "threshold": lambda: Threshold(5.0),
    "mean_std": MeanStd,
    "rolling": lambda: RollingZScore(window=32, k=4),
    "ema": lambda: EmaZScore(warmup=10),
    "ratio": Ratio,
    "median_mad": lambda: MedianMad(window=40),
    "cusum": lambda: Cusum(span=20),
    "hampel": lambda: Hampel(window=31),
    "losses": Hampel.for_losses,
}
ADAPTIVE = [name for name in RULES if name != "threshold"]
rules = pytest.mark.parametrize("name", RULES)


def noise(count: int, seed: int = 0, spread: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0, spread)) for _ in range(count)]


def eventful(seed: int = 0) -> list[float]:
    """Noise with spikes, a burst, zeros and a lasting change of level."""
    values = noise(300, seed)
    for step, factor in ((40, 8.0), (41, 3.0), (90, 100.0), (92, 4.0), (93, 4.0), (140, 0.0), (141, 0.0)):
        values[step] *= factor
    return values[:200] + [3 * value for value in values[200:]]


def scores(rule: Rule, values: Sequence[float]) -> list[float | None]:
    found = []
    for value in values:
        found.append(rule.score(value))
        rule.update(value)
    return found


def close(found: Sequence[float | None], expected: Sequence[float | None]) -> None:
    assert [score is None for score in found] == [score is None for score in expected]
    for one, other in zip(found, expected, strict=True):
        assert one is None or one == pytest.approx(other, rel=1e-9, abs=1e-9)


# --- windows -----------------------------------------------------------------------------------------------------------------

numbers = st.lists(st.one_of(st.floats(-1e3, 1e3), st.integers(-3, 3).map(float)), min_size=1, max_size=40)


@given(numbers, st.integers(1, 12), st.integers(0, 40))
def test_a_sorted_window_has_the_medians_of_its_last_values(values: list[float], size: int, loaded: int) -> None:
    window = SortedWindow(size, values[:loaded], has_deviation=True)
    for end in range(len(values[:loaded]), len(values) + 1):
        last = values[:end][-size:]
        assert list(window) == last
        if last:
            assert window.median == statistics.median(last)
            assert window.deviation == statistics.median(abs(x - window.median) for x in last)
        add_each([(window, value) for value in values[end : end + 1]])


# --- each rule against its docstring -----------------------------------------------------------------------------------------


def naive_mean_std(values: Sequence[float]) -> list[float | None]:
    found: list[float | None] = []
    for step, value in enumerate(values):
        past = values[:step]
        found.append(None if step < 10 else (value - statistics.mean(past)) / statistics.stdev(past))
    return found


def naive_rolling(values: Sequence[float], size: int, start: int) -> list[float | None]:
    found: list[float | None] = []
    for step, value in enumerate(values):
        past = values[max(0, step - size) : step]
        found.append(None if step < start else (value - statistics.mean(past)) / statistics.stdev(past))
    return found


def test_mean_std_is_that_of_all_values_before() -> None:
    values = eventful()
    close(scores(MeanStd(), values), naive_mean_std(values))


def test_rolling_z_score_is_that_of_the_window_before() -> None:
    values = eventful()
    close(scores(RollingZScore(window=32), values), naive_rolling(values, 32, 16))


def test_ema_z_score_learns_what_zclip_would_clip_to() -> None:
    values = eventful()
    expected: list[float | None] = [None] * 10
    mean, variance = statistics.mean(values[:10]), statistics.pvariance(values[:10])
    for value in values[10:]:
        z = (value - mean) / math.sqrt(variance)
        expected.append(z)
        learned = mean + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else value
        mean = 0.97 * mean + 0.03 * learned
        variance = 0.97 * variance + 0.03 * (learned - mean) ** 2
    close(scores(EmaZScore(warmup=10), values), expected)


def test_ratio_is_to_a_moving_average_without_spikes_and_accepts_a_run_of_them() -> None:
    rule = Ratio(limit=3.0, warmup=1, accept=3)
    close(scores(rule, [1.0, 2.0, 9.0, 1.2]), [None, 2.0, 9 / 1.2, 1.0])  # 1 + 0.2 * (2 - 1)
    assert rule.baseline == pytest.approx(1.2)
    close(scores(rule, [6.0, 8.0, 7.0, 7.0]), [5.0, 8 / 1.2, 7 / 1.2, 1.0])


def test_cusum_sums_up_what_exceeds_the_allowance_over_values_of_some_time_ago() -> None:
    values = eventful()
    rule, past, total = Cusum(limit=1e9, span=20), [], 0.0
    expected: list[float | None] = []
    logs = [math.log(value) if value > 0 else -745.0 for value in values]
    for step, y in enumerate(logs):
        past = logs[max(0, step - 40) : step][:20]
        if step < 20:
            expected.append(None)
        else:
            total = max(0.0, total + (y - statistics.mean(past)) / max(statistics.stdev(past), 0.03) - 1)
            expected.append(total)
    close(scores(rule, values), expected)


def test_cusum_finds_a_drift_that_no_single_step_shows_and_begins_anew_after_the_alarm() -> None:
    generator = random.Random(5)
    values = [math.exp(0.1 * generator.gauss(0, 1) + max(0, step - 150) * 0.005) for step in range(400)]
    detector = SpikeDetector(Cusum())
    verdicts = [detector.update(step, value) for step, value in enumerate(values)]
    alarms = [step for step, verdict in enumerate(verdicts) if verdict.is_spike]
    assert alarms
    assert 160 < alarms[0] < 230
    assert verdicts[alarms[0] + 1].score is None
    assert max(verdict.score or 0 for verdict in verdicts[50:150]) < 12


def test_threshold_is_a_limit() -> None:
    assert [SpikeDetector(Threshold(5)).update(0, value).is_spike for value in (4.9, 5.0, 5.1)] == [False, False, True]


def test_median_mad_is_the_robust_z_score_of_the_logarithm() -> None:
    values = noise(51)
    logs = [math.log(value) for value in values[:50]]
    median = statistics.median(logs)
    deviation = 1.4826 * statistics.median(abs(x - median) for x in logs)
    rule = MedianMad()
    assert scores(rule, [*values[:50], 3.0])[-1] == pytest.approx((math.log(3.0) - median) / deviation)


class NaiveHampel:
    """The docstring of :class:`Hampel`, with lists and no thought of cost."""

    def __init__(self, least: float = 1.5, early: float = 9.0, window: int = 127) -> None:
        self.least, self.early, self.window = least, early, window
        self.near: list[float] = []
        self.far: list[float] = []
        self.queue: list[float] = []
        self.residuals: tuple[list[float], list[float]] = ([], [])
        self.recent: list[tuple[float, bool]] = []
        self.peaks: list[float] = []
        self.count = 0

    def part(self, y: float, normal: list[float], residuals: list[float]) -> float:
        spread = (math.log(self.least) + self.early / self.count) / 5.5
        if len(residuals) >= 5:
            last = residuals[-self.window :]
            middle = statistics.median(last)
            spread = max(spread, 1.4826 * statistics.median(abs(x - middle) for x in last) * (1 + 16 / self.count))
        return (y - statistics.median(normal)) / spread

    def step(self, value: float) -> float | None:
        y = math.log(value) if value > 0 else -745.0
        near, far = self.near[-9:], self.far[-7:]
        score = None if self.count < 8 else self.part(y, near, self.residuals[0])
        if score is not None and self.count >= 40:
            score = max(score, self.part(y, far, self.residuals[1]))
        high = score is not None and score > 5.5
        if high and sum(peak >= y - math.log(self.least) for peak in self.peaks[-self.window :]) >= 16:
            score = 5.5
        self.peaks.append(y if high else -math.inf)
        spike = score is not None and score > 5.5
        self.recent = [*self.recent, (y, spike)][-9:]
        if not spike:
            if len(near) >= 3:
                self.residuals[0].append(y - statistics.median(near))
            if len(far) >= 3:
                self.residuals[1].append(y - statistics.median(far))
            self.count += 1
            self.near.append(y)
            self.queue.append(y)
            if len(self.queue) > 7:
                self.far.append(self.queue.pop(0))
        flags = [flag for _, flag in self.recent]
        if (spike and sum(flags) >= 5) or (len(flags) == 9 and flags[0] and sum(flags) >= 3):
            level = [y for y, _ in self.recent][flags.index(True) :]
            self.near, self.far, self.queue, self.recent = list(level), list(level), [], []
        return score


@pytest.mark.parametrize("seed", range(6))
def test_hampel_does_what_its_docstring_says(seed: int) -> None:
    generator = random.Random(seed)
    values = eventful(seed)
    for step in range(0, 300, 7):
        values[step] *= generator.choice([1, 1, 1, 2, 5, 0.1])
    naive = NaiveHampel()
    close(scores(Hampel(), values), [naive.step(value) for value in values])
    losses = NaiveHampel(least=1.06, early=1.5)
    close(scores(Hampel.for_losses(), values), [losses.step(value) for value in values])


@pytest.mark.parametrize("pattern", [[10, 1, 1], [4, 1, 1, 1, 1], [0, 1], [1, 0, 0, 0]])
def test_hampel_takes_what_comes_again_and_again_for_usual(pattern: list[float]) -> None:
    values = [pattern[step % len(pattern)] * value for step, value in enumerate(noise(1000, spread=0.05))]
    values[900] = 100.0  # and still sees what is not
    naive = NaiveHampel()
    close(scores(Hampel(), values), [naive.step(value) for value in values])
    found = [step for step, spike in enumerate(flags(SpikeDetector(), values)) if spike]
    assert len(found) <= 60
    assert 900 in found


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_hampel_knows_the_noise_before_it_judges_the_first_steps(spread: float) -> None:
    """As of the gradient of a single number, whose logarithm has a deviation of one."""
    signals = [noise(15, seed, spread) for seed in range(300)]
    found = sum(any((score or 0.0) > 5.5 for score in scores(Hampel(), signal)) for signal in signals)
    assert found <= 3


def test_hampel_judges_a_signal_with_negative_values_by_differences() -> None:
    generator = random.Random(0)
    values = [-3 + 0.1 * generator.gauss(0, 1) for _ in range(200)]
    values[150] = 5.0
    detector = SpikeDetector(Hampel())
    found = [detector.update(step, value).is_spike for step, value in enumerate(values)]
    assert [step for step, spike in enumerate(found) if spike] == [150]


def test_hampel_goes_over_to_differences_at_the_first_negative_value() -> None:
    rule = Hampel()
    before = scores(rule, noise(50))
    assert rule.score(-1.0) is None
    after = scores(rule, [-1.0, *noise(50, spread=0.01)])
    assert None not in before[8:]
    assert after[:8] == [None] * 8
    assert None not in after[8:]
    assert (rule.score(30.0) or 0) > 5.5


# --- many signals at once ----------------------------------------------------------------------------------------------------


def jumpy(seed: int, steps: int) -> list[float]:
    """Noise with everything that may happen: spikes, zeros, changes of level, NaN and Inf."""
    generator = random.Random(seed)
    values = noise(steps, seed, generator.choice([0.02, 0.1, 0.3]))
    shift, factor = generator.randrange(steps), generator.choice([1.0, 2.0, 5.0])
    for step in range(steps):
        values[step] *= factor if step > shift else 1
        values[step] *= 20 if seed % 5 == 0 and step % 4 == 0 else 1
        values[step] *= generator.choice([3.0, 10.0, 100.0, 0.0, 0.01]) if generator.random() < 0.04 else 1
        values[step] = generator.choice([math.nan, math.inf]) if generator.random() < 0.01 else values[step]
    return values


def alike(found: object, expected: object) -> bool:
    """The same but for rounding: torch's logarithm differs from Python's in the last bit."""
    if expected is None:
        return found is None
    if isinstance(expected, dict):
        return isinstance(found, dict) and found.keys() == expected.keys() and all(alike(found[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(alike, found, expected))
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9) or (found != found and expected != expected)


@pytest.mark.parametrize("rule", [Hampel(), Hampel.for_losses(), Hampel(near=4, far=3, lag=2, window=6)])
def test_a_bank_gives_the_scores_and_states_of_single_rules(rule: Hampel) -> None:
    count, steps = 50, 250
    series = [jumpy(seed, steps) for seed in range(count)]
    singles, bank = [copy.deepcopy(rule) for _ in range(count)], HampelBank(rule, count)
    for step in range(steps):
        found, spikes, usual = bank.verdicts(torch.tensor([values[step] for values in series], dtype=torch.float64), learns=True)
        for signal, values in enumerate(series):
            verdict = verdict_on(singles[signal], "x", step, values[step], learns=True)
            assert alike(found[signal].item(), math.nan if verdict.score is None else verdict.score)
            assert spikes[signal].item() == verdict.is_spike
            if verdict.is_spike and verdict.usual is not None:
                assert value_at(usual[signal].item()) == pytest.approx(verdict.usual)
        if step % 40 == 7:
            states = [bank.state(signal) for signal in range(count)]
            assert alike(states, [single.state_dict() for single in singles])
            bank = HampelBank(rule, count)  # and on from what was saved
            bank.load(states)


def test_many_signals_are_judged_together_as_alone_also_where_they_come_go_and_turn_negative() -> None:
    names = [f"layer.{number}/norm" for number in range(120)]
    series = {name: jumpy(seed, 120) for seed, name in enumerate(names)}
    together = SpikeDetector(signal=re.compile("norm$"))
    alone = {name: SpikeDetector(signal=name) for name in [*names, "late/norm"]}
    for step in range(120):
        values = {name: values[step] for name, values in series.items() if (int(name.split(".")[1].split("/")[0]) + step) % 10}
        if step >= 60:
            values["late/norm"] = 1.0 + step / 1000
        if step == 90:
            values["layer.5/norm"] = -1.0
        found = together.update_all(step, values)
        assert found.keys() == values.keys()
        for name, value in values.items():
            verdict = alone[name].update(step, value)
            assert (found[name].is_spike, found[name].threshold) == (verdict.is_spike, verdict.threshold)
            assert alike(found[name].score, verdict.score)
            assert found[name].reason == verdict.reason
        assert (together._bank is not None) == (step < 90)
    assert alike(together.state_dict()["rules"], {name: alone[name].state_dict()["rule"] for name in together._rules})


# --- invariants --------------------------------------------------------------------------------------------------------------


def flags(detector: SpikeDetector, values: Sequence[float], start: int = 0) -> list[bool]:
    return [detector.update(start + step, value).is_spike for step, value in enumerate(values)]


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("factor", [1e-6, 1e5])
def test_the_scale_of_the_signal_changes_no_verdict(name: str, factor: float) -> None:
    for seed in range(5):
        values = eventful(seed)
        plain = flags(SpikeDetector(RULES[name]()), values)
        assert flags(SpikeDetector(RULES[name]()), [factor * value for value in values]) == plain


@rules
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_flagged_and_change_no_later_verdict(name: str, bad: float) -> None:
    values = eventful()
    for place in (0, 2, 30, 120):
        found = flags(SpikeDetector(RULES[name]()), [*values[:place], bad, *values[place:]])
        assert found[place]
        assert found[:place] + found[place + 1 :] == flags(SpikeDetector(RULES[name]()), values)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.08, 0.1, 0.15, 0.2])
def test_a_lasting_doubling_is_accepted_within_ten_steps_by_the_default_rule(spread: float) -> None:
    for seed in range(10):
        values = noise(300, seed, spread)
        found = flags(SpikeDetector(), values[:150] + [2 * value for value in values[150:]])
        assert not any(found[:150])
        assert not any(found[160:])


@rules
def test_what_was_saved_gives_the_same_verdicts(name: str) -> None:
    values = eventful()
    expected = scores(RULES[name](), values)
    for cut in (0, 2, 41, 42, 93, 94, 200, 204, 206):
        first, by_json, by_torch = RULES[name](), RULES[name](), RULES[name]()
        scores(by_json, noise(20, seed=9))  # what was there before is replaced
        before = scores(first, values[:cut])
        first.score(1.0)  # asked and not learned
        by_json.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        by_torch.load_state_dict(torch.load(file, weights_only=True))
        for resumed in (by_json, by_torch, copy.deepcopy(first)):
            assert before + scores(resumed, values[cut:]) == expected


@rules
def test_to_ask_for_a_score_changes_nothing(name: str) -> None:
    values, asked, plain = eventful(), RULES[name](), RULES[name]()
    for value in values:
        asked.score(7 * value)
        asked.score(value)
        assert asked.score(value) == plain.score(value)
        asked.score(0.5 * value)
        asked.update(value)
        plain.update(value)


@rules
def test_a_constant_signal_has_no_spike(name: str) -> None:
    assert not any(flags(SpikeDetector(RULES[name]()), [0.3] * 200))


# --- arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Threshold(0), ValueError, "limit must be a positive number, got 0"),
        (lambda: Threshold(math.inf), ValueError, "limit must be a positive number, got inf"),
        (lambda: MeanStd(k="3"), TypeError, "k must be a positive number, got '3'"),
        (lambda: RollingZScore(window=2.5), TypeError, "window must be a positive int, got 2.5"),
        (lambda: RollingZScore(window=0), ValueError, "window must be a positive int, got 0"),
        (lambda: EmaZScore(alpha=1.0), ValueError, "alpha=1.0 must be a number between 0 and 1, such as 0.01"),
        (lambda: Ratio(limit=1.0), ValueError, "limit must be a number above 1, got 1.0"),
        (lambda: MedianMad(window=8, warmup=9), ValueError, "warmup=9 is larger than window=8"),
        (lambda: Cusum(span=True), TypeError, "span must be a positive int, got True"),
        (lambda: Hampel(least=1), ValueError, "least must be a number above 1, got 1"),
        (lambda: Hampel(near=-1), ValueError, "near must be an int above 2, got -1"),
        (lambda: SpikeDetector(Hampel), TypeError, "rule must have the methods score and update"),
        (lambda: SpikeDetector(signal=""), ValueError, "signal must be the name of a value"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_state_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        MedianMad().load_state_dict({"values": [1.0, 2.0], "run": ["x"]})
