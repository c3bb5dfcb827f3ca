"""Whether a loss falls, whatever its noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_gradmon.analysis.diagnosis.history import learning, rank_shift, spread
from torch_gradmon.analysis.diagnosis.series import Series

pytestmark = pytest.mark.thorough


def _series(values: list[float]) -> Series:
    return Series(tuple(range(len(values))), tuple(values))


def _curve(start: float, end: float, noise: float, count: int = 200, seed: int = 0) -> Series:
    draw = random.Random(seed)
    return _series([end + (start - end) * math.exp(-5 * i / count) + draw.gauss(0, noise) for i in range(count)])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("start", "end", "noise", "state"),
    [
        (2.3, 0.3, 0.1, "falls"),
        (2.3, 1.7, 0.3, "falls"),
        (2.3, 2.3, 0.0, "flat"),
        (2.303, 2.302, 0.002, "flat"),
        (1.0, 5.0, 0.3, "rises"),
        (-1.0, -3.0, 0.2, "falls"),
        (1e-6, 1e-9, 1e-9, "falls"),
    ],
)
def test_curves_with_noise(start: float, end: float, noise: float, state: str, seed: int) -> None:
    assert learning(_curve(start, end, noise, seed=seed)).state == state


@pytest.mark.parametrize("count", [40, 200, 1000])
def test_noise_alone_is_hardly_ever_taken_for_a_trend(count: int) -> None:
    wrong = sum(learning(_curve(2.3, 2.3, 0.3, count, seed)).state != "flat" for seed in range(150))
    assert wrong <= 3, wrong


def test_too_few_losses_are_no_trend_and_those_that_are_not_finite_do_not_count() -> None:
    assert learning(_series([3.0, 2.0, 1.0])).state == "unknown"
    curve = _curve(2.3, 0.3, 0.05)
    spoiled = _series([math.nan if i % 10 == 0 else value for i, value in enumerate(curve.values)])
    assert learning(spoiled).state == "falls"
    assert learning(_series([math.nan] * 100)).state == "unknown"


def test_a_run_that_has_learned_in_its_first_steps_has_learned() -> None:
    draw = random.Random(0)
    assert learning(_series([2.3, 2.1, 1.5, 1.0, 0.7] + [0.3 + draw.gauss(0, 0.02) for _ in range(400)])).state == "falls"


@given(st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=20, max_size=60), st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_factor_changes_nothing(values: list[float], factor: float) -> None:
    assert learning(_series([value * factor for value in values])).state == learning(_series(values)).state


@pytest.mark.parametrize("count", [4, 5, 8, 10, 20, 40])
def test_the_noise_of_few_losses_is_not_too_small(count: int) -> None:
    draw = random.Random(count)
    found = [spread(_series([5 + draw.gauss(0, 1) for _ in range(count)])) for _ in range(2000)]
    assert sum(found) / len(found) == pytest.approx(1, abs=0.1)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_ranks_turn_with_the_sides(before: list[float], after: list[float]) -> None:
    shift = rank_shift(before, after)
    assert rank_shift(after, before) == pytest.approx(-shift, abs=1e-12)
    assert rank_shift([-b for b in before], [-a for a in after]) == pytest.approx(-shift, abs=1e-12)
    assert rank_shift(before, [value + 30 for value in after]) >= shift


def test_the_rank_sum_of_a_worked_example() -> None:
    # 4, 5, 6 above 1, 2, 3: all 9 pairs, against 4.5 expected, with a standard deviation of sqrt(9 * 7 / 12)
    assert rank_shift([1, 2, 3], [4, 5, 6]) == pytest.approx(4.5 / math.sqrt(5.25))
    assert rank_shift([1, 2], [1, 2]) == 0.0


@pytest.mark.parametrize(("chance", "is_worse"), [(0.0, False), (0.2, True), (5.0, False)])
def test_a_loss_that_has_fallen_far_and_ends_above_chance_has_learnt_nothing(chance: float, is_worse: bool) -> None:
    found = learning(_series([1e6 * 0.5**i + 1 + 0.01 * (i % 3) for i in range(200)]), chance=chance)
    assert found.is_worse == is_worse
    assert (found.is_stuck or found.is_worse) == is_worse


def test_a_short_run_that_still_falls_may_end_below_chance() -> None:
    falls = _series([100.0 - i for i in range(60)])
    assert not learning(falls, chance=1.0).is_worse
    assert learning(_series([100.0 - i / 10 for i in range(300)]), chance=1.0).is_worse


@pytest.mark.parametrize("at", [20, 22, 24])
@pytest.mark.parametrize("outlier", [40.0, 9.4e4])
def test_a_single_value_at_the_end_of_a_short_run_is_no_noise(outlier: float, at: int) -> None:
    falling = [4 * math.exp(-0.1 * step) * (1 + 0.05 * math.sin(7 * step)) for step in range(25)]
    falling[at] = outlier
    assert learning(_series(falling)).state == "falls"
