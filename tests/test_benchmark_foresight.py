"""How the benchmark of early signals counts."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from benchmarks.foresight import cost
from benchmarks.foresight.families import FAMILIES, sound_rate
from benchmarks.foresight.judging import FORESIGHT, lead, row, threshold
from benchmarks.foresight.onset import onset
from benchmarks.foresight.recording import Recording, record
from benchmarks.foresight.signals import SIGNALS, Level, episodes
from benchmarks.models import Sizes

pytestmark = pytest.mark.thorough

NAME = SIGNALS[0].name


def losses(steps: int = 400, spread: float = 0.05) -> list[float]:
    """A loss that falls, with noise."""
    noise = random.Random(0)
    return [math.exp(-step / 60) + 0.5 + spread * noise.gauss(0, 1) for step in range(steps)]


def test_a_sound_loss_has_no_onset() -> None:
    assert onset(losses()) is None
    assert onset([*losses(300), 5.0, *losses(100)[-50:], 9.0, 9.0]) is None  # single losses, even at the end


@pytest.mark.parametrize("first", [120, 250, 360])
def test_the_onset_is_the_first_loss_above_normal(first: int) -> None:
    curve = losses()
    assert onset(curve[:first] + [5.0] * (400 - first)) == first
    assert onset([*curve[:first], 5.0, 6.0, math.nan]) == first
    assert onset(curve[:first] + [5.0] * 40 + curve[first:]) is None  # it comes back


def test_episodes() -> None:
    assert episodes([]) == []
    assert episodes([10, 15, 60, 120, 300]) == [10, 120, 300]


def made(sound: bool, scores: list[tuple[int, float]], at: int | None = None, **facts: Any) -> Recording:
    """A recording with the scores of one signal."""
    silent: dict[str, list[tuple[int, float]]] = {signal.name: [] for signal in SIGNALS}
    return Recording("f", False, facts.pop("seed", 0), sound, 500, at, {**silent, NAME: scores}, **facts)


def test_the_threshold_is_the_lowest_with_no_more_false_alarms_than_allowed() -> None:
    quiet = [made(True, [(step, 0.1) for step in range(150, 500, 5)]) for _ in range(30)]  # 10,500 steps: one is allowed
    loud = [made(True, [(200, 0.9), (210, 0.8), (400, 0.7)])]
    assert threshold([*quiet, *loud], NAME) == 0.7  # above it there is one episode
    assert threshold([*quiet[:20], *loud], NAME) == 0.9  # fewer steps: none is allowed
    assert threshold([made(True, [])], NAME) == math.inf
    assert threshold([made(True, [(100, 9.0), (200, 0.1)])], NAME) == 0.1  # what is before step 150 does not count


def test_a_row_counts_leads_and_false_alarms() -> None:
    recordings = [
        made(False, [(160, 0.1), (200, 0.6), (240, 0.9)], at=260, seed=0),
        made(False, [(255, 0.9)], at=260, seed=1),
        made(False, [(300, 0.9)], at=260, seed=2),
        made(False, [(200, 0.9)], at=None, seed=3),
        made(False, [(151, 0.9)], at=155, seed=4),
        made(True, [(200, 0.9), (230, 0.9), (300, 0.9)], seed=0),
        made(True, [(200, 0.9)], at=300, seed=1),
    ]
    found = row(recordings, NAME, 0.5)
    assert (found["diverging"], found["early"], found["very early"], found["median lead"]) == (3, 1, 1, 32.5)
    assert (found["false alarms"], found["sound steps"]) == (2, 350)
    assert found["missed"] == ["f seed 1", "f seed 2"]
    assert lead(recordings[2], [300]) is None
    signs = [made(False, [], at=260, signs=(100, 240))]
    assert row(signs, FORESIGHT, math.nan)["median lead"] == 20


def test_a_level_is_the_median_of_the_last_five() -> None:
    watch = Level()
    found = [watch.update(step, ("a", "b"), torch.tensor([float(step), 0.0])) for step in range(7)]
    assert found[3] is None
    assert [growth.excess for growth in found[4:] if growth is not None] == [2.0, 3.0, 4.0]


def test_families_have_names_of_their_own_and_schedules_that_begin_small() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 12
    assert not any(family.held_out for family in FAMILIES)
    for seed in range(5):
        rates = [sound_rate(seed)(step) for step in range(500)]
        assert 0 < rates[0] < 0.1
        assert max(rates) <= 1
        assert min(rates) >= 0


def test_a_recording_has_every_signal_and_the_signs() -> None:
    family = next(family for family in FAMILIES if family.name == "rate jumps/mlp")
    found = record(family, 0, sound=False, steps=260)
    assert found.steps == 260
    assert {name for name, scores in found.scores.items() if scores} >= {
        signal.name for signal in SIGNALS if "attention" not in signal.name and "Adam" not in signal.name
    }
    assert found.signs
    assert found.scores[NAME][-1][0] == 255


def test_each_set_of_signals_is_measured_where_its_cost_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "GPT_10M", Sizes(vocabulary=32, context=16, width=16, heads=2, blocks=2))
    monkeypatch.setattr(cost, "_LENGTH", 16)
    alone, *others = cost.measure(rounds=2, threads=torch.get_num_threads())
    assert [row["name"] for row in others if not row["values"] > alone["values"]] == ["`Foresight`"]  # adds no key
    assert all(math.isfinite(row["pct"]["median"]) for row in (alone, *others))
    text = cost.markdown({"rows": [alone], "rounds": 2, "threads": 1, "date": "today", "machine": cost.machine()})
    assert f"| {alone['name']} | {alone['steps']['median']:.2f} [" in text
