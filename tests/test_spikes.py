"""Spike rules and detectors, alone and fed by a monitor."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector, SpikeError
from torch_gradmon.core.keys import GRADIENT, GRADIENT_BEFORE_CLIP
from torch_gradmon.core.moments import ALL_COLUMNS, Column, identity
from torch_gradmon.core.records import SpikeEvent, StatsTable
from torch_gradmon.spikes import Hampel, MedianMad
from torch_gradmon.spikes.attribution import spike_cause
from torch_gradmon.spikes.detector_set import FollowUp, GradientNormHistory, recovery_text


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
    assert _alarms([1.0] * 100 + [2.0] + [1.0] * 100) == [100]


def test_spikes_do_not_widen_what_counts_as_normal() -> None:
    values = _noise(400)
    spiked = range(50, 400, 11)
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
            self.learned: list[float] = []

        def score(self, value: float) -> float:
            return value

        def update(self, value: float) -> None:
            self.learned.append(value)

    rule = Above()
    assert _alarms([1.0, 3.0, math.nan, 2.0], SpikeDetector(rule)) == [1, 2]
    assert rule.learned == [1.0, 3.0, 2.0]


@pytest.mark.parametrize("function", [lambda value: value > 2, lambda value: None if value < 1 else value / 4])
def test_a_function_can_be_the_rule(function: Callable[[float], Any]) -> None:
    assert _alarms([0.5, 1.0, 3.0, 2.0], SpikeDetector(function)) == [2]


def test_a_signal_whose_name_ends_in_loss_has_the_preset_for_losses() -> None:
    values = _noise(200, spread=0.005)
    values[150] *= 1.2
    assert _alarms(values, SpikeDetector(signal="train/loss")) == [150]
    assert _alarms(values, SpikeDetector(signal="grad_norm")) == []


def test_a_reason_says_how_far_from_usual() -> None:
    verdict = _verdicts([1.0] * 30 + [40.0])[-1]
    assert re.fullmatch(r"grad_norm = 40 is 40 times the usual 1 \(score \d+\.?\d*, threshold 5\.5\)", verdict.reason)


# --- fed by a monitor ------------------------------------------------------------------------------------------------------------


def _take_steps(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, steps: int, factor: float) -> None:
    """The last one with a huge gradient in ``big.weight``."""
    for step in range(steps):
        x = torch.randn(16, 4)
        loss = model["small"](x).square().mean() + model["big"](x * (factor if step == steps - 1 else 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _train(steps: int, on_spike: object, factor: float = 1e4) -> ModuleMonitor:
    """A toy run whose step ``steps - 1`` has a huge gradient in ``big.weight``."""
    model = nn.ModuleDict({"small": nn.Linear(4, 4), "big": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, optimizer, on_spike=on_spike)
    _take_steps(model, optimizer, steps, factor)
    return monitor


def test_on_spike_warn_names_the_parameter_with_the_largest_share() -> None:
    with pytest.warns(GradmonWarning, match=r"step 39: grad_norm .* times the usual .*big\.weight") as caught:
        monitor = _train(40, "warn")
    assert len(caught) == 1
    assert monitor.last_record.top_gradients(1)[0][0] == "big.weight"
    assert monitor.get_step_metrics()["gradmon/spike_score"] > 6


def test_on_spike_raise_raises_when_the_step_ends() -> None:
    with pytest.raises(SpikeError, match=r"step 39: grad_norm .*big\.weight"):
        _train(40, "raise")


def test_on_spike_calls_a_function_with_the_event() -> None:
    events: list[SpikeEvent] = []
    _train(40, events.append)
    assert [(event.step, event.signal) for event in events] == [(39, "grad_norm")]
    assert events[0].score > events[0].threshold == 5.5
    assert events[0].value > 100


def test_on_spike_none_says_nothing_but_the_record_has_the_event() -> None:
    monitor = _train(40, None)
    assert monitor.get_step_metrics()["gradmon/spike_score"] > 6


def test_a_failing_on_spike_function_does_not_stop_training() -> None:
    def broken(event: SpikeEvent) -> None:
        raise KeyError("oops")

    with pytest.warns(GradmonWarning, match=r"on_spike.*KeyError"):
        assert _train(40, broken).current_step == 39


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
    with pytest.warns(GradmonWarning, match=r"step 30: loss = 50 is .* times the usual"):
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
    assert len(monitor.state_dict()["detectors"]["grad_norm"]["rule"]["near_residuals"]) == 28 - 3


# --- signals by key and by pattern ---------------------------------------------------------------------------------------------


def _toy(steps: int, *detectors: SpikeDetector, spoil: float = 1e4) -> tuple[ModuleMonitor, list[SpikeEvent]]:
    """Like :func:`_train`, with a detector of one's own; the events."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"small": nn.Linear(4, 4), "big": nn.Linear(4, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    events: list[SpikeEvent] = []
    monitor = ModuleMonitor(model, on_spike=events.append)
    monitor.add_gradient_metric("norm")
    for detector in detectors:
        monitor.add_detector(detector)
    monitor.attach(optimizer)
    _take_steps(model, optimizer, steps, spoil)
    monitor.get_step_metrics()
    return monitor, events


@pytest.mark.parametrize("metric", ["norm", "rms"])
def test_a_key_is_a_signal_whether_its_metric_is_shown_or_not(metric: str) -> None:
    key = f"gradient/big.weight/{metric}"
    monitor, events = _toy(40, SpikeDetector(signal=key))
    assert [(event.step, event.signal) for event in events] == [(39, key)]
    assert monitor.get_step_metrics()[f"spike_score/{key}"] == events[0].score


def test_a_pattern_watches_each_key_with_a_rule_of_its_own_and_tells_of_the_worst() -> None:
    monitor, events = _toy(40, SpikeDetector(signal=re.compile(r"^gradient/.*/norm$")))
    assert [(event.step, event.signal) for event in events] == [(39, "gradient/big.weight/norm")]
    assert "and 1 of the 3 others spike with it" in events[0].reason  # the bias
    scores = {key: value for key, value in monitor.get_step_metrics().items() if key.startswith("spike_score/")}
    assert scores.keys() == {f"spike_score/gradient/{m}.{p}/norm" for m in ("small", "big") for p in ("weight", "bias")}
    assert scores["spike_score/gradient/small.weight/norm"] < 5.5


def test_the_state_of_a_pattern_goes_through_json() -> None:
    pattern = re.compile("norm$")
    values = {"a/norm": _noise(60), "b/norm": _noise(60, seed=1)}
    values["b/norm"][50] *= 9
    steps = [{key: series[step] for key, series in values.items()} for step in range(60)]
    whole = SpikeDetector(signal=pattern)
    expected = [whole.update_all(step, each) for step, each in enumerate(steps)]
    first, second = SpikeDetector(signal=pattern), SpikeDetector(signal=pattern)
    found = [first.update_all(step, each) for step, each in enumerate(steps[:30])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.update_all(30 + step, each) for step, each in enumerate(steps[30:])]
    assert found == expected
    assert [step for step, each in enumerate(found) if each["b/norm"].is_spike] == [50]


def test_a_signal_that_never_comes_is_said_once_with_the_reason() -> None:
    with pytest.warns(GradmonWarning) as said:
        _toy(210, SpikeDetector(signal="no_such"), spoil=1)
    assert [str(w.message) for w in said if "no_such" in str(w.message)] == [
        "torch_gradmon: the spike detector of no_such has nothing to judge: no step so far has it; log it with log_scalar(), "
        "or add the metric that it is a key of"
    ]


def test_a_clipped_norm_never_takes_the_place_of_an_unclipped_one() -> None:
    model = nn.Linear(4, 1)
    monitor = ModuleMonitor(model, on_spike="raise")
    monitor.add_detector(SpikeDetector())
    with pytest.warns(GradmonWarning, match=r"grad_norm has nothing to judge: .*before_clip"):
        for step in range(8):
            monitor.begin_step(step)
            model(torch.randn(8, 4) * (1e5 if step == 7 else 1)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            monitor.monitor_gradients()  # after the clip, by hand: nothing is known of before
            monitor.end_step()
            model.zero_grad()
    assert "gradmon/spike_score" not in monitor.get_step_metrics()


# --- which layers, and what came after -------------------------------------------------------------------------------------------


def _tables(steps: int, spoil: dict[tuple[int, str], float]) -> GradientNormHistory:
    """Gradients of three parameters, noise but for the factors in ``spoil`` by step and name."""
    generator, gradients = random.Random(0), GradientNormHistory()
    for step in range(steps):
        rows = identity(3)
        for row, name in enumerate(("in", "mid", "out")):
            norm = (1 + row) * math.exp(generator.gauss(0, 0.05)) * spoil.get((step, name), 1.0)
            rows[row, Column.COUNT], rows[row, Column.SQUARE_SUM] = 10, norm**2
            rows[row, Column.NONFINITE] = 0 if math.isfinite(norm) else 2
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(("in", "mid", "out"), rows, ALL_COLUMNS)})
    return gradients


def test_suspects_are_ranked_by_when_and_how_far_each_left_its_own_normal() -> None:
    spoil = {(38, "mid"): 4.0, (39, "mid"): 8.0, (39, "in"): 100.0, (20, "out"): 50.0}
    suspects = _tables(40, spoil).suspects(39)
    assert [suspect.name for suspect in suspects] == ["mid", "in", "out"]
    assert [suspect.since for suspect in suspects] == [38, 39, None]
    mid, inner, out = suspects
    assert mid.usual == pytest.approx(2.0, rel=0.1)
    assert mid.norm / mid.usual == pytest.approx(8.0, rel=0.2)
    # the smallest spread of the default rule after 39 values, for so quiet a signal
    assert mid.score == pytest.approx(math.log(8) / ((math.log(1.5) + 9 / 39) / 5.5), rel=0.1)
    assert inner.share == pytest.approx(inner.norm**2 / (inner.norm**2 + mid.norm**2 + out.norm**2))
    assert spike_cause(suspects, 39).words.startswith("mid (")
    assert "moved first, in step 38, then in (" in spike_cause(suspects, 39).words


def test_among_equals_what_backward_reaches_first_comes_first() -> None:
    bad = {(39, name): math.nan for name in ("in", "out")}
    suspects = _tables(40, bad).suspects(39)
    assert [(suspect.name, suspect.nonfinite, suspect.share) for suspect in suspects] == [
        ("out", 2, None),
        ("in", 2, None),
        ("mid", 0, None),
    ]
    assert spike_cause(suspects, 39).words == "NaN or Inf in the gradient of out, in"


def test_where_all_rise_together_or_little_is_known_it_says_no_more_than_that() -> None:
    calm = spike_cause(_tables(40, {}).suspects(39), 39).words
    assert calm.startswith("no parameter moved by more than its own noise; the largest shares of the squared norm: out 6")
    few = _tables(3, {(2, "in"): 100.0}).suspects(2)
    assert [suspect.score for suspect in few] == [None] * 3
    words = spike_cause(few, 2).words
    assert (
        words
        == "too few steps are known to determine which parameter moved; the largest shares of the squared norm: in 100%, out 0%, mid 0%"
    )
    assert spike_cause(GradientNormHistory().suspects(0), 0).words == ""


def test_a_rollback_forgets_the_steps_that_are_repeated() -> None:
    gradients = _tables(40, {(step, "in"): 100.0 for step in range(20, 40)})
    again = _tables(20, {}).suspects(19)
    gradients.add(19, {GRADIENT_BEFORE_CLIP: StatsTable(("in", "mid", "out"), identity(3), ALL_COLUMNS)})
    assert gradients.suspects(39) == []
    assert len(again) == 3


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([3.0, 1.0, 1.1, 0.9, 1.0], "is back to normal since step 32 (0.9 to 1.1 until step 35, usual was 1)"),
        (
            [1.0, 1.0, 1.2, 1.0, 1.51],
            "is normal in 4 of the 5 steps to step 35, and up to 1.51 times what was usual in the other one",
        ),
        ([1.0, 1.0, 4.0, 1.0, 5.0], "is normal in 3 of the 5 steps to step 35, and up to 5 times what was usual in the others"),
        ([9.0, 8.0, 7.0, 6.0, 1.0], "is normal in 1 of the 5 steps to step 35, and up to 9 times what was usual in the others"),
        ([4.0, 3.0, 5.0, 3.0, 2.0], "is still 2 to 5 times what was usual in all of the 5 steps to step 35"),
        ([1.0, math.inf, 1.0, 1.0, 1.0], "is normal in 4 of the 5 steps to step 35, and NaN or infinite in the other one"),
        ([2.0, 2.0, math.nan, math.nan, math.nan], "is NaN or infinite in 3 of the 5 steps to step 35: it did not recover"),
    ],
)
def test_what_came_after_a_spike_is_told_once(after: list[float], words: str) -> None:
    aftermath = FollowUp()
    aftermath.cases["loss"] = [SpikeEvent(30, "loss", 9.0, 20.0, 5.5, "loss is high", usual=1.0)], []
    values = dict(zip(range(31, 60), after + [1.0] * 24, strict=True))
    said = [(step, text) for step in range(31, 60) for text in aftermath.recovered(step, {}, lambda _, step=step: values[step])]
    ((at, text),) = said
    assert at == 35
    assert text.startswith(f"after the spike of step 30 loss {words}")
    assert "usual was 1)" in text or "recover" in text


def test_a_watched_run_is_told_of_the_spike_and_of_what_came_after() -> None:
    model, x = nn.Linear(4, 1), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    gradmon.watch(model, optimizer, on_spike="warn")
    with pytest.warns(GradmonWarning) as said:
        for step in range(40):
            optimizer.zero_grad()
            (model(x).square().mean() * (1000 if step == 30 else 1)).backward()
            optimizer.step()
    spike, after = (str(warning.message) for warning in said)
    assert re.search(
        r"step 30: grad_norm = .* is 1,000 times the usual .*; both layers rose together, by 1,000 times their usual norms",
        spike,
    )
    assert re.search(r"after the spike of step 30 grad_norm is back to normal since step 31", after)


def _one(name: str, norm: float, bad: int = 0) -> StatsTable:
    row = identity(1)
    row[0, Column.COUNT], row[0, Column.SQUARE_SUM], row[0, Column.NONFINITE] = 10, norm**2, bad
    return StatsTable((name,), row, ALL_COLUMNS)


def test_a_layer_that_is_new_or_was_absent_is_no_suspect_for_that() -> None:
    gradients = GradientNormHistory()
    for step in range(40):
        names = ("old", *(("expert",) if step in (3, 20, 39) else ()), *(("new",) if step >= 37 else ()))
        rows = identity(len(names))
        rows[:, Column.COUNT], rows[:, Column.SQUARE_SUM] = 10, (100.0 if step == 39 else 1 + 0.01 * (step % 3)) ** 2
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(names, rows, ALL_COLUMNS)})
    suspects = {suspect.name: suspect for suspect in gradients.suspects(39)}
    assert suspects["old"].since == 39
    for name in ("new", "expert"):  # seen too seldom to tell
        assert suspects[name].score is suspects[name].usual is suspects[name].since is None
    assert gradients.suspects(39)[0].name == "old"


def test_a_step_without_a_gradient_is_none_in_which_the_layer_moved() -> None:
    gradients = GradientNormHistory()
    for step in range(40):
        names = ("a", "b") if step % 2 or step < 30 else ("b",)
        rows = identity(len(names))
        rows[:, Column.COUNT], rows[:, Column.SQUARE_SUM] = 10, 1.0
        if "a" in names:
            rows[0, Column.SQUARE_SUM] = 1e4 if step >= 37 else 1.0
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(names, rows, ALL_COLUMNS)})
    assert [(suspect.name, suspect.since) for suspect in gradients.suspects(39)] == [("a", 37), ("b", None)]


def test_a_step_without_unclipped_gradients_does_not_count_once_there_were_any() -> None:
    gradients = GradientNormHistory()
    for step in range(30):
        gradients.add(step, {GRADIENT_BEFORE_CLIP: _one("a", 300.0), GRADIENT: _one("a", 1.0)})
    gradients.add(30, {GRADIENT: _one("a", 1.0)})
    assert gradients.suspects(30) == []
    gradients.add(31, {GRADIENT_BEFORE_CLIP: _one("a", 300.0)})
    (suspect,) = gradients.suspects(31)
    assert suspect.since is None
    assert suspect.usual == pytest.approx(300)


def test_what_was_clipped_before_the_first_unclipped_gradients_is_forgotten() -> None:
    gradients = GradientNormHistory()
    for step in range(30):
        gradients.add(step, {GRADIENT: _one("a", 1.0)})
    gradients.add(30, {GRADIENT_BEFORE_CLIP: _one("a", 300.0)})
    (suspect,) = gradients.suspects(30)
    assert suspect.usual is None


def test_norms_that_were_not_measured_are_not_taken_for_zero() -> None:
    gradients = GradientNormHistory()
    gradients.add(0, {GRADIENT_BEFORE_CLIP: StatsTable(("a",), identity(1), frozenset({Column.MAX}))})
    assert gradients.suspects(0) == []


def test_where_zero_is_usual_it_says_so() -> None:
    verdict = _verdicts([0.0] * 20 + [1.0])[-1]
    assert verdict.reason.startswith("grad_norm = 1 lies above normal")
    gradients = GradientNormHistory()
    for step in range(30):
        gradients.add(step, {GRADIENT_BEFORE_CLIP: _one("a", 1.0 if step == 29 else 0.0)})
    assert spike_cause(gradients.suspects(29), 29).words == "a (usually zero, 100% of the square) moved most"


class _Rule:
    threshold = 1.0

    def score(self, value: float) -> float:
        if value == 7:
            raise KeyError("oops")
        return value / 100

    def update(self, value: float) -> None:
        pass


def test_a_rule_that_fails_costs_no_record_is_said_and_is_off() -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model)
    monitor.add_detector(SpikeDetector(_Rule(), signal="mine"))
    monitor.add_detector(SpikeDetector(signal="other"))
    with pytest.warns(GradmonWarning, match=r"the spike detector of mine failed and is off.*oops") as said:
        for step in range(12):
            monitor.begin_step(step)
            monitor.log_scalars({"mine": step, "other": 1.0})
            monitor.end_step()
    assert len(said) == 1
    values = monitor.get_all_metrics()
    assert list(values) == list(range(12))
    assert [step for step in values if "spike_score/mine" in values[step]] == list(range(7))
    assert "spike_score/other" in values[11]


def test_a_rule_without_state_can_be_saved_with_the_others() -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model)
    monitor.add_detector(SpikeDetector(_Rule(), signal="mine"))
    monitor.load_state_dict(json.loads(json.dumps(monitor.state_dict())))


def test_a_rule_of_the_older_form_is_refused_at_once() -> None:
    class Older(_Rule):
        def update(self, value: float, is_spike: bool) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match=r"update of .*Older.* must take the value and nothing else"):
        SpikeDetector(Older())


def test_the_state_of_another_rule_or_of_other_sizes_is_refused() -> None:
    state = SpikeDetector(MedianMad()).state_dict()
    with pytest.raises(ValueError, match="is that of the rule MedianMad, but this detector uses Hampel"):
        SpikeDetector().load_state_dict(state)
    detector = SpikeDetector(Hampel(lag=20))
    with pytest.raises(ValueError, match=r"with the sizes .*'lag': 7.* but this one .*'lag': 20"):
        detector.load_state_dict(SpikeDetector().state_dict())


def test_a_rollback_takes_back_what_was_told_of_the_steps_that_come_again() -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model)
    monitor.add_detector(SpikeDetector(signal="loss"))

    def run(steps: range, spike: int) -> None:
        for step in steps:
            monitor.begin_step(step)
            monitor.log_scalar("loss", 50.0 if step == spike else 1.0)
            monitor.end_step()

    run(range(60), 55)
    assert monitor.why().startswith("step 55: loss")
    with pytest.warns(GradmonWarning, match="step 40 comes after step 59"):
        run(range(40, 52), 45)
    assert monitor.why().startswith("step 45: loss")
    assert list(monitor.get_all_metrics()) == list(range(52))


def test_a_late_value_of_a_pattern_is_judged_too() -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, on_spike=None)
    monitor.add_detector(SpikeDetector(signal=re.compile("loss$")))
    for step in range(40):
        monitor.begin_step(step)
        monitor.log_scalar("train_loss", 1.0)
        monitor._runtime.cycle.close()
        monitor.log_scalar("val_loss", 30.0 if step == 39 else 1.0)
        monitor.end_step()
    assert [event.signal for event in monitor._runtime.pipeline.history.recent().events] == ["val_loss"]


def test_a_loss_that_stays_higher_is_not_called_back_to_normal() -> None:
    event = SpikeEvent(30, "loss", 2.8, 9.0, 5.5, "", usual=2.0)
    assert "is still 1.4 to 1.41 times what was usual in all of the 2 steps" in recovery_text([event], [(31, 2.8), (32, 2.81)])
    assert "is back to normal since step 32" in recovery_text([event], [(31, 2.8), (32, 2.1)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_spike_soon_after_gradients_that_are_not_finite_is_told(bad: float) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    events: list[SpikeEvent] = []
    monitor = gradmon.watch(model, optimizer, on_spike=events.append)
    for step in range(8):
        optimizer.zero_grad()
        factor = bad if step in (0, 1) else 100.0 if step == 6 else 1.0
        (model(torch.ones(8, 4)).square().mean() * factor).backward()
        optimizer.step()
    assert 6 in [event.step for event in events]
    assert not monitor.warning_counts()
    assert sorted(monitor.get_all_metrics()) == list(range(8))


def test_a_judge_that_fails_costs_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.spikes.attribution.spike_cause", lambda *_: 1 / 0)
    with pytest.warns(GradmonWarning, match="step 39 could not be judged"):
        monitor, events = _toy(40, SpikeDetector(signal="gradmon/grad_norm"))
    assert sorted(monitor.get_all_metrics()) == list(range(40))
    assert monitor.warning_counts() == {"internal:judge": 1}
    assert not events


@pytest.mark.parametrize("way", ["json", "torch"])
def test_a_run_that_was_stopped_and_resumed_gives_the_same_verdicts(way: str, tmp_path: Path) -> None:
    def monitored(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
        monitor = gradmon.watch(model, optimizer, on_spike=None)
        monitor.add_detector(SpikeDetector(signal="loss"))
        monitor.add_detector(SpikeDetector(MedianMad(), signal="update_norm"))
        monitor.add_detector(SpikeDetector(signal=re.compile(r"^gradient_before_clip/.*/max$")))
        return monitor

    def step(monitor: ModuleMonitor, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, float]:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean() * (1 + 30 * (number in (44, 75)))
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss)
        optimizer.step()
        return {key: value for key, value in monitor.get_step_metrics().items() if "overhead" not in key}

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    model, optimizer = fresh()
    through = monitored(model, optimizer)
    expected = [step(through, model, optimizer, number) for number in range(90)]

    model, optimizer = fresh()
    first = monitored(model, optimizer)
    found = [step(first, model, optimizer, number) for number in range(46)]
    state = first.state_dict()
    first.detach()
    if way == "json":
        state = json.loads(json.dumps(state))
    else:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    second = monitored(model, optimizer)
    second.load_state_dict(state)
    found += [step(second, model, optimizer, number) for number in range(46, 90)]
    assert [sorted(values) for values in found] == [sorted(values) for values in expected]
    for values, others in zip(found, expected, strict=True):
        assert values == pytest.approx(others, rel=1e-12, abs=1e-12)
    # of the layers' history only what came since is known, so that their words may differ
    events = [
        replace(event, where="") for monitor in (first, second) for event in monitor._runtime.pipeline.history.recent().events
    ]
    assert events == [replace(event, where="") for event in through._runtime.pipeline.history.recent().events]
    assert {event.step for event in events} >= {44, 75}
