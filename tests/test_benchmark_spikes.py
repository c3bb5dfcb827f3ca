"""Spike rules are judged on the truth, by a score that counts what it says."""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spikes import run, scenarios
from benchmarks.spikes.contenders import CONTENDERS, SIGNALS, Factory, always
from benchmarks.spikes.cost import microseconds
from benchmarks.spikes.invariants import CHECKS, check, flags
from benchmarks.spikes.scenarios import (
    CLEAN,
    LEARNS,
    LENGTH,
    LOSS_SPIKE_FACTOR,
    RAMPS,
    SCENARIOS,
    SPIKE_DEVIATIONS,
    SPIKE_FACTOR,
    SPIKED,
    generate,
)
from benchmarks.spikes.scoring import Counts, score, worst
from benchmarks.spikes.table import legend, notes, table
from benchmarks.spikes.traces import DATA, Kind, Trace, groups, load
from torch_gradmon import SpikeDetector
from torch_gradmon.spikes import Verdict

pytestmark = pytest.mark.thorough

SEEDS = range(3)


class Above:
    """Flags what exceeds a number, and remembers how many values it has seen."""

    def __init__(self, threshold: float = 10.0) -> None:
        self.threshold = threshold
        self.seen = 0

    def score(self, value: float) -> float | None:
        return value

    def update(self, value: float) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class ThreeDeviations(Above):
    """Mean and standard deviation of everything so far, by Welford's recurrence."""

    def __init__(self) -> None:
        super().__init__(3.0)
        self.mean = self.squares = 0.0

    def score(self, value: float) -> float | None:
        return (value - self.mean) / math.sqrt(self.squares / (self.seen - 1)) if self.seen >= 20 else None

    def update(self, value: float) -> None:
        super().update(value)
        before = value - self.mean
        self.mean += before / self.seen
        self.squares += before * (value - self.mean)


def flagged(length: int, *steps: int) -> list[bool]:
    return [step in steps for step in range(length)]


def trace(length: int = 1000, *events: tuple[int, int], grey: frozenset[int] = frozenset()) -> Trace:
    return Trace("made up", "gnorm", (1.0,) * length, events, grey)


# the score


def test_flags_and_spikes_no_more_than_five_apart_belong_together() -> None:
    assert groups([1, 6, 12, 13, 18, 24]) == [[1, 6], [12, 13, 18], [24]]
    assert groups([]) == []


@pytest.mark.parametrize(("step", "hit"), [(399, 0), (400, 1), (403, 1), (405, 1), (406, 0)])
def test_a_hit_lies_between_the_start_and_two_samples_after_the_end(step: int, hit: int) -> None:
    found = score(trace(1000, (400, 403)), flagged(1000, step))
    assert (found.events, found.hits, found.true_alarms, found.false_alarms) == (1, hit, hit, 1 - hit)
    assert (found.recall, found.precision) == (hit, hit)
    assert found.delays == ((step - 400,) if hit else ())


def test_an_alarm_that_touches_an_event_is_true_as_a_whole() -> None:
    # one alarm before and into the event, one apart from it
    found = score(trace(1000, (400, 400)), flagged(1000, 395, 400, 410, 415))
    assert (found.true_alarms, found.false_alarms, found.hits) == (1, 1, 1)
    assert found.precision == 0.5
    assert found.false_steps == 3  # but each flag outside of the event costs a step
    assert found.delays == (0,)


def test_two_events_in_one_alarm_are_two_hits() -> None:
    found = score(trace(1000, (400, 400), (409, 409)), flagged(1000, 400, 405, 410))
    assert (found.hits, found.true_alarms, found.recall, found.precision) == (2, 1, 1.0, 1.0)
    assert found.delays == (0, 1)


def test_an_alarm_that_only_touches_grey_is_not_counted() -> None:
    grey = frozenset(range(500, 510))
    found = score(trace(1000, (400, 400), grey=grey), flagged(1000, 505, 512, 600))
    assert (found.true_alarms, found.false_alarms, found.precision) == (0, 2, 0.0)
    found = score(trace(1000, (400, 400), grey=grey), flagged(1000, 505, 510))
    assert (found.true_alarms, found.false_alarms, found.precision) == (0, 0, None)
    assert found.false_steps == 1  # sample 510 is clean all the same


def test_grey_beside_an_event_takes_no_hit_away() -> None:
    found = score(trace(1000, (400, 400), grey=frozenset({401, 402})), flagged(1000, 402))
    assert (found.hits, found.true_alarms) == (1, 1)


def test_clean_samples_are_those_after_the_warmup_that_are_neither_near_an_event_nor_grey() -> None:
    grey = frozenset({10, 401, 402, 403, 700})
    found = score(trace(1000, (400, 401), (998, 999), grey=grey), flagged(1000, 300, 500, 501, 502, 800))
    assert found.clean == 800 - 4 - 1 - 2  # 400 to 403, 700, 998 and 999
    assert (found.false_alarms, found.false_steps) == (3, 5)
    assert found.as_json()["false_alarms_per_10000"] == pytest.approx(10_000 * 3 / 793)
    assert found.as_json()["false_steps_per_10000"] == pytest.approx(10_000 * 5 / 793)


def test_false_alarms_that_begin_in_the_warmup_are_counted_apart() -> None:
    steps = flagged(1000, 0, 100, 199, 200, 210)
    found = score(trace(), steps)
    assert (found.warmup_alarms, found.false_alarms, found.false_steps, found.clean) == (3, 1, 2, 800)
    assert found.precision == 0.0  # where they count
    assert score(trace(1000, (400, 400)), flagged(1000, 50, 400)).precision == 0.5
    found = score(trace(), steps, warmup=0)
    assert (found.warmup_alarms, found.false_alarms, found.false_steps, found.clean) == (0, 4, 5, 1000)


def test_a_rule_that_never_stops_flagging_is_seen_by_its_steps_and_its_run() -> None:
    found = score(trace(1000, (400, 400)), [True] * 1000)
    assert (found.recall, found.precision, found.false_alarms) == (1.0, 1.0, 0)
    assert (found.longest_run, found.per_clean(found.false_steps)) == (1000, 10_000)
    assert score(trace(), flagged(1000, 1, 2, 3, 5, 6)).longest_run == 3


def test_nothing_to_find_and_nothing_found_have_no_rates() -> None:
    found = score(trace(), [False] * 1000)
    assert (found.recall, found.precision, found.longest_run) == (None, None, 0)
    assert score(trace(100), [False] * 100).per_clean(0) == 0


def test_there_must_be_a_flag_for_each_value() -> None:
    with pytest.raises(ValueError, match="1000 values and 999 flags"):
        score(trace(), [False] * 999)


def test_counts_of_traces_are_pooled() -> None:
    a = score(trace(1000, (400, 400)), flagged(1000, 50, 400, 401, 402, 500))
    b = score(trace(500, (300, 300), (400, 400)), flagged(500, 402))
    found = a + b
    assert found == Counts(3, 2, 2, 1, 1, 797 + 294, 1, 3, (0, 2))
    assert found.recall == pytest.approx(2 / 3)
    assert found.precision == 0.5
    assert b + a == replace(found, delays=(2, 0))


def test_the_worst_trace_has_most_missed_events_and_false_steps() -> None:
    missed, locked = Counts(events=9, hits=6), Counts(events=1, hits=1, false_steps=4)
    assert worst({"a": Counts(events=2, hits=1), "b": missed, "c": locked}) == ("c", locked)
    assert worst({"a": Counts(events=2, hits=1), "b": missed}) == ("b", missed)
    assert worst({"a": Counts(events=2, hits=2, warmup_alarms=3)}) is None
    assert worst({}) is None


# the traces


def test_the_traces_are_all_there_with_their_labels() -> None:
    traces = {each.name: each for each in load()}
    assert len(traces) == 35
    assert {path.name.removesuffix(".csv.gz") for path in DATA.glob("*.csv.gz")} == traces.keys()
    of_kind = {kind: [each for each in traces.values() if each.kind == kind] for kind in SIGNALS}
    assert {kind: (len(found), sum(len(each.events) for each in found)) for kind, found in of_kind.items()} == {
        "gnorm": (29, 119),
        "loss": (6, 18),
    }
    assert {each.name.rpartition("_")[2] == each.kind for each in traces.values()} == {True}
    llmc = traces["llmc_gpt2_124m_gnorm"]
    assert (len(llmc.values), len(llmc.events), len(llmc.grey)) == (19_560, 28, 842)
    assert (llmc.values[0], llmc.values[-1]) == (15.37, 0.22)
    assert (3885, 3886) in llmc.events
    assert [len(traces[f"megatron_{name}_loss"].events) for name in ("mixtral8x7b_a100", "bert_a100")] == [6, 0]


def test_a_labelled_spike_stands_out() -> None:
    for each in load():
        near = {index for first, last in each.events for index in range(first - 5, last + 6)}
        for first, last in each.events:
            around = [each.values[i] for i in range(first - 60, min(last + 60, len(each.values))) if i not in near]
            factor = max(each.values[first : last + 1]) / statistics.median(around)
            assert factor > (1.5 if each.kind == "gnorm" else 1.08), (each.name, first)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_another_directory_may_hold_plain_files(tmp_path: Path, ending: str) -> None:
    write(tmp_path, "run_loss", ending)
    (found,) = load(tmp_path)
    assert found == Trace("run_loss", "loss", (1.0, 2.5, 1.0, 1.0), ((1, 1),), frozenset({0, 2, 3}))


def write(directory: Path, name: str, ending: str = ".csv", head: str = "step,value", **changes: Any) -> None:
    text = f"{head}\n10,1.0\n20,2.5\n30,1.0\n40,1\n".encode()
    (directory / f"{name}{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    (directory / "labels").mkdir(exist_ok=True)
    label = {"kind": "loss", "n": 4, "spike_index": [1], "grey_index": [[0, 0], [2, 3]], **changes}
    (directory / "labels" / f"{name}.json").write_text(json.dumps(label))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lr"}, "kind must be one of gnorm, loss, got 'lr'"),
        ({"n": 5}, "is for 5 samples, and the curve has 4"),
        ({"spike_index": [4]}, "spike outside of its curve"),
        ({"head": "iteration,value"}, "must begin with step,value"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, "run_loss", **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_directory_without_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no labels/\*\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("rule", "known", "warmup_alarms"), [(Above, (0.03, 0.44, 0.0), 5), (ThreeDeviations, (0.46, 0.24, 26.8), 3)]
)
def test_known_rules_reach_what_is_known_of_them(rule: type[Above], known: tuple[float, ...], warmup_alarms: int) -> None:
    found = run.totals({each.name: score(each, flags(always(rule), each)) for each in load() if each.kind == "gnorm"})
    reached = (round(found["recall"], 2), round(found["precision"], 2), round(found["false_alarms_per_10000"], 1))
    assert (reached, found["warmup_alarms"]) == (known, warmup_alarms)


# the scenarios


def same(a: Trace, b: Trace) -> bool:
    return repr(a) == repr(b)  # NaN is like itself here


def test_a_scenario_is_the_same_for_the_same_seed_only() -> None:
    state = random.getstate()
    for name in SCENARIOS:
        assert same(generate(name, 4), generate(name, 4))
        assert not same(replace(generate(name, 4), name=""), replace(generate(name, 5), name=""))
    assert random.getstate() == state
    # written down once, so that a change of the generator does not go unnoticed
    assert generate("small", 0).events[:3] == ((279, 279), (465, 465), (539, 539))
    assert generate("white", 0).values[0] == pytest.approx(2.943087251431164)


@pytest.fixture
def spreads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Takes the noise away, so that the levels are seen; says how much there would have been."""
    found: list[float] = []

    def quiet(rng: random.Random, levels: Sequence[float], spread: float) -> list[float]:
        found.append(spread)
        return list(levels)

    monkeypatch.setattr(scenarios, "_noisy", quiet)
    return found


@pytest.mark.parametrize("make", SPIKED, ids=lambda make: make.__name__)
def test_a_spike_stands_out_and_nothing_else_does(make: Any, spreads: list[float]) -> None:
    for seed in SEEDS:
        each = generate(make.__name__, seed)
        values, (spread, *_) = each.values, spreads
        assert len(values) == LENGTH
        assert len(each.events) >= 4
        assert not each.grey
        assert all(b[0] - a[1] > 5 for a, b in pairwise(each.events))  # no flag hits two
        inside = {index for first, last in each.events for index in range(first, last + 1)}
        assert all(0.96 < values[i] / values[i - 1] < 1.04 for i in range(1, LENGTH) if not {i, i - 1} & inside)
        for first, last in each.events:
            beside = max(values[first - 1], values[last + 1])
            raised = [values[i] / beside for i in range(first, last + 1) if math.isfinite(values[i])]
            weakest = (max if make in RAMPS else min)(raised, default=math.inf)
            assert weakest > 0.99 * (LOSS_SPIKE_FACTOR if each.kind == "loss" else SPIKE_FACTOR)
            assert math.log(weakest) > 0.99 * SPIKE_DEVIATIONS * spread


@pytest.mark.parametrize("make", [make for make in CLEAN if make is not scenarios.heavy_tailed], ids=lambda make: make.__name__)
def test_clean_signals_rise_slowly_but_where_they_are_grey(make: Any, spreads: list[float]) -> None:
    for seed in SEEDS:
        each = generate(make.__name__, seed)
        rises = [i for i in range(1, LENGTH) if each.values[i] > 1.04 * each.values[i - 1]]
        assert rises == ([min(each.grey)] if make is scenarios.level_shift else [])


def logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def test_the_noise_is_as_wide_as_they_say() -> None:
    assert statistics.stdev(logs(generate("white", 0).values)) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(logs(generate("very_noisy", 0).values)) == pytest.approx(0.3, rel=0.1)
    shift = generate("variance_shift", 0)
    first = min(shift.grey)
    assert statistics.stdev(logs(shift.values[:first])) == pytest.approx(0.05, rel=0.1)
    assert statistics.stdev(logs(shift.values[first:])) == pytest.approx(0.15, rel=0.1)


def test_heavy_tails_end_where_spikes_begin() -> None:
    for seed in range(10):
        each = generate("heavy_tailed", seed)
        values = logs(each.values)
        middle = statistics.median(values)
        robust = 1.4826 * statistics.median(abs(value - middle) for value in values)
        scores = [(value - middle) / robust for value in values]
        assert max(scores) < 9
        assert sum(score > 3 for score in scores) > 10  # normal noise has one or two
        assert {i for i, score in enumerate(scores) if score > 5.5} <= each.grey
        assert all(scores[i] > 4.5 for i in each.grey)


@pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
def test_clean_signals_have_no_spikes(make: Any) -> None:
    for seed in SEEDS:
        each = generate(make.__name__, seed)
        assert not each.events
        assert len(each.values) == LENGTH
        assert all(value > 0 and math.isfinite(value) for value in each.values)
        changes = {"level_shift", "variance_shift"}
        assert len(each.grey) == LEARNS if make.__name__ in changes else make.__name__ == "heavy_tailed" or not each.grey


def test_the_first_sample_of_a_shift_is_grey_and_the_eleventh_is_not() -> None:
    each = generate("level_shift", 0)
    first = min(each.grey)
    assert each.grey == frozenset(range(first, first + LEARNS))
    assert min(each.values[first : first + 100]) > 1.2 * statistics.median(each.values[:first])
    assert max(each.values[first - 100 : first]) < 1.5 * statistics.median(each.values[:first])


def test_ramps_grow_step_by_step_to_three_times_the_level() -> None:
    steps = {"slow_ramps": range(12, 25), "steep_ramps": range(7, 13)}
    for name, lengths in steps.items():
        for first, last in generate(name, 0).events:
            assert last - first + 1 in lengths
        each = generate(name, 1)
        for first, last in each.events:
            level = statistics.median(each.values[first - 30 : first])
            assert 2.4 < each.values[last] / level < 4.5
            assert each.values[first] / level < 1.45
            assert each.values[last + 1] / level < 1.3


def test_scenarios_are_what_they_are_called() -> None:
    assert all(value == round(value, 2) for value in generate("quantised", 0).values)
    values = generate("constant_stretches", 0).values
    assert max(values.count(value) for value in values) > 6 * 20 - 16
    assert 1e-7 < statistics.median(generate("tiny", 0).values) < 1e-6
    not_finite = generate("not_finite", 0)
    bad = {index for index, value in enumerate(not_finite.values) if not math.isfinite(value)}
    assert bad == {i for first, last in not_finite.events[::2] for i in range(first, last + 1)}
    assert max(last for _, last in generate("early", 0).events) <= 150
    burst = generate("burst", 0)
    heights = [round(burst.values[first] / burst.values[burst.events[1][0]] * 4) for first, _ in burst.events]
    assert heights == 2 * [100, 4, 4, 4, 4, 4]
    assert generate("loss_like", 0).kind == "loss"


# the invariants


class Silent(SpikeDetector):
    """Does not flag what is not finite."""

    def update(self, step: int, value: float) -> Verdict:
        verdict = super().update(step, value)
        return verdict if math.isfinite(value) else replace(verdict, is_spike=False)


class Poisoned(SpikeDetector):
    """Learns what is not finite."""

    def update(self, step: int, value: float) -> Verdict:
        if not math.isfinite(value):
            self.rule.update(value)
        return super().update(step, value)


class Locked(Above):
    """Flags what lies above the first value it saw, for ever."""

    def __init__(self) -> None:
        super().__init__(1.5)
        self.first = 0.0

    def score(self, value: float) -> float | None:
        return value / self.first if self.seen else None

    def update(self, value: float) -> None:
        super().update(value)
        self.first = self.first or value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "first": self.first}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.first = state["seen"], state["first"]


class Relative(Locked):
    """Compares with the last value: nothing of the invariants is broken."""

    def update(self, value: float) -> None:
        Above.update(self, value)
        self.first = value


class Forgetful(Relative):
    """Restores nothing."""

    def load_state_dict(self, state: Any) -> None:
        pass


class Hardening(Relative):
    """Flags nothing after a hundred values, and forgets that it did so."""

    def update(self, value: float) -> None:
        super().update(value)
        if self.seen == 100:
            self.threshold = 1e9


class Unsaved(Relative):
    """Has a state that is not for JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "first": {self.first}}


def failed(make: Factory) -> set[str]:
    judged = [(each, flags(make, each)) for each in (generate("small", 0), generate("loss_like", 0))]
    return {name for name, failures in check(make, judged).items() if failures}


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (always(Relative), set()),
        (always(lambda: Above(0.5)), {"times 1e-6 and 1e5", "doubling accepted"}),
        (lambda kind: Silent(Relative()), {"one NaN or Inf"}),
        (lambda kind: Poisoned(Relative()), {"one NaN or Inf"}),
        (always(Locked), {"doubling accepted"}),
        (always(Forgetful), {"saved and restored"}),
        (always(Hardening), {"saved and restored"}),
        (always(Unsaved), {"saved and restored"}),
    ],
)
def test_a_rule_that_breaks_an_invariant_fails_it_and_no_other(make: Factory, broken: set[str]) -> None:
    assert failed(make) == broken


def test_what_raises_has_failed_and_the_others_are_judged() -> None:
    found = check(always(Unsaved), [])
    assert list(found) == list(CHECKS)
    assert found["saved and restored"] == ["TypeError: Object of type set is not JSON serializable"]
    assert found["doubling accepted"] == []


def test_a_doubling_may_be_flagged_for_ten_samples_and_no_longer() -> None:
    class Slow(Relative):
        steps = 10

        def update(self, value: float) -> None:
            self.run = getattr(self, "run", 0) + 1 if (self.score(value) or 0) > self.threshold else 0
            if self.run in (0, self.steps):
                super().update(value)

    class Slower(Slow):
        steps = 11

    assert check(always(Slow), [])["doubling accepted"] == []
    late = check(always(Slower), [])["doubling accepted"]
    assert len(late) == 18
    assert late[0] == "gnorm, twice the level from sample 50 on: 1 flags after 10 samples, the last after 10"


# everything together


def small_result(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    kinds: list[Kind] = []

    def by_kind(kind: Kind) -> SpikeDetector:
        kinds.append(kind)
        return SpikeDetector(Above(2.2 if kind == "loss" else 1e9))

    monkeypatch.setattr(run, "CONTENDERS", {"By kind": by_kind, "Always": always(lambda: Above(-1.0))})
    write(tmp_path, "run_loss")
    run.main(["--traces", str(tmp_path), "--seeds", "1", "--out", str(tmp_path / "out.json"), *words])
    assert set(kinds) == {"gnorm", "loss"}
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


def test_all_contenders_are_judged_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = small_result(tmp_path, ["--held-out", "1000"], monkeypatch)
    assert (result["first_seed"], result["seeds"], result["directory"]) == (1000, 1, tmp_path.name)
    assert result["traces"]["loss"] == {"count": 1, "samples": 4, "events": 1}
    one, every = result["contenders"].values()
    assert (one["loss"]["recall"], one["loss"]["precision"], one["gnorm"]["recall"]) == (1.0, 1.0, None)
    assert one["traces"]["run_loss"]["hits"] == 1
    assert every["scenarios"]["white"]["false_steps"] == LENGTH  # nothing is left out as a warm-up
    assert every["scenarios"]["small"]["events"] == one["scenarios"]["small"]["events"] == 8
    assert one["scenarios"]["small"]["recall"] == 0
    assert one["cost_us"]["median"] > 0
    printed = capsys.readouterr().out
    assert "\n".join([*table(result), "", *notes(result), *legend(result)]) in printed
    rows = {line[:38].strip(): line[38:].split() for line in printed.splitlines() if line.startswith("  ")}
    assert rows["recall"] == ["1.00", "1.00"]
    assert rows["white"] == ["0/0", "1/1200"]
    assert rows["small"] == ["0.00", "+", "0", "1.00", "+", "0"]
    assert rows["slow_ramps"] == ["-", "0,", "0"]
    assert rows["doubling accepted"] == ["passed", "FAILED"]
    assert "Always, doubling accepted: 18 failures, such as gnorm" in printed
    assert "seeds 1000 to 1000" in printed
    assert "gnorm: " not in printed.partition("clean scenarios")[0]  # there are none


def test_the_delays_of_ramps_are_median_and_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = small_result(tmp_path, [], monkeypatch)
    result["contenders"]["By kind"]["scenarios"]["steep_ramps"] |= Counts(delays=(1, 2, 9, 3)).as_json()
    *_, (_, *cells) = (line.split() for line in table(result) if "steep_ramps" in line)
    assert cells == ["2.5,", "9", "0,", "0"]


def test_only_the_usual_signals_change_the_kept_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], Path, range]] = []

    def measure(contenders: Any, directory: Path, seeds: range) -> dict[str, Any]:
        asked.append((list(contenders), directory, seeds))
        return {"anything": 1}

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    for part in ("table", "notes", "legend"):
        monkeypatch.setattr(run, part, lambda result: [])
    for words in (["--held-out", "1000"], ["--seeds", "2"], ["--traces", str(tmp_path)]):
        run.main(words)
    assert not list(tmp_path.iterdir())
    run.main([])
    assert json.loads((tmp_path / "spikes.json").read_text()) == {"anything": 1}
    everybody = list(CONTENDERS)
    assert asked == [
        (everybody, DATA, range(1000, 1005)),
        (everybody, DATA, range(2)),
        (everybody, tmp_path, range(5)),
        (everybody, DATA, range(5)),
    ]
    with pytest.raises(SystemExit):
        run.main(["--seeds", "0"])


def test_every_contender_makes_fresh_detectors_of_both_kinds() -> None:
    for make in CONTENDERS.values():
        for kind in SIGNALS:
            first, second = make(kind), make(kind)
            assert first.rule is not second.rule


def test_a_cost_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def update() -> None:
        nonlocal now
        now += 3e-6

    monkeypatch.setattr("benchmarks.spikes.cost.time.perf_counter", lambda: now)
    found = microseconds(update, batch=10, batches=4)
    assert found["median"] == pytest.approx(3)
    assert found["count"] == 4
