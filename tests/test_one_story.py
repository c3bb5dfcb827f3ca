"""Whoever tells of a spike tells the same: the same number of the same layer, the same first layer, the same spike."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, SpikeDetector, load_run
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.run import read_run
from torch_gradmon.analysis.spike_report import explain
from torch_gradmon.cli.main import main
from torch_gradmon.cli.terminal.layer_table import summarize
from torch_gradmon.cli.terminal.live import LiveRun
from torch_gradmon.core.keys import GRADIENT_BEFORE_CLIP, SUMMARY, Key
from torch_gradmon.core.moments import ALL_COLUMNS, Column, identity
from torch_gradmon.core.records import SpikeEvent, StatsTable, StepRecord
from torch_gradmon.runs.writer import RunWriter
from torch_gradmon.spikes.attribution import Baseline, ParameterAttribution, spike_cause
from torch_gradmon.spikes.detector_set import GradientNormHistory
from torch_gradmon.spikes.hampel import Hampel
from torch_gradmon.spikes.signals import counted, episodes, largest, size

LAYER, FACTOR = "2.weight", 300.0
_TIMES = re.compile(r"([\w.]+) \(([\d.,e+]+) times its usual norm")


def _train(
    run_dir: Path | None,
    steps: int,
    spoiled: Iterable[int],
    layer: str = LAYER,
    factor: float = FACTOR,
    clip: float | None = None,
    scaled: Callable[[int], float] = lambda step: 1.0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.02),
    batch: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, x: x,
    **watch: Any,
) -> ModuleMonitor:
    """A training whose gradients become smaller and smaller; in the ``spoiled`` steps the gradient of one layer is too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    made = optimizer(model.parameters())
    monitor = gradmon.watch(model, made, on_spike=None, run_dir=run_dir, **watch)
    spoiled, now = set(spoiled), [0]
    model.get_parameter(layer).register_hook(lambda gradient: gradient * factor if now[0] in spoiled else gradient)
    for now[0] in range(steps):
        x = torch.randn(32, 6)
        loss = (model(batch(now[0], x)) - x.sum(1, keepdim=True)).square().mean() * scaled(now[0])
        made.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        monitor.log_scalar("loss", loss.detach())
        made.step()
    return monitor


class _Told(NamedTuple):
    layer: str
    times: str


def _only(text: str) -> _Told:
    """The first layer that a text names, and its factor."""
    found = _TIMES.search(text)
    assert found is not None, text
    return _Told(*found.groups())


def _in_table(story: str) -> _Told:
    lines = story.splitlines()
    cells = lines[next(row for row, line in enumerate(lines) if line.startswith("parameter, by suspicion")) + 1].split()
    return _Told(cells[0], cells[3])


def _everywhere(monitor: ModuleMonitor, path: Path, step: int) -> dict[str, _Told]:
    """What each outlet says of the spike of ``step``, the largest of the run."""
    found = {
        "why of the monitor": _in_table(monitor.why()),
        "diagnosis of the monitor": _only(monitor.diagnose().text(10_000)),
    }
    event = next(event for event in monitor._runtime.pipeline.history.recent().events if event.step == step)
    monitor.detach()
    run = load_run(path)
    (line,) = [spike for spike in summarize(run._reader, "x").spikes if spike.step == step]
    (suspect, *_) = run.record(step).suspects
    table = _in_table(explain(run._reader))
    assert suspect.factor == pytest.approx(float(table.times.replace(",", "")), rel=5e-3)
    return {
        **found,
        "message": _only(str(event)),
        "stored message": _only(str(next(event for event in run.spikes if event.step == step))),
        "why": table,
        "words of why": _only(explain(run._reader)),
        "summary": _only(f"{line.layer} {line.moved[line.moved.index('(') :]}"),
        "diagnosis": _only(gradmon.load_run(path).diagnose().text(10_000)),
    }


RUNS = {
    "short": (30, [20], 20),
    "long": (140, [120], 120),
    "at the start": (20, [12], 12),
    "several": (120, [40, 41, 42, 43, 44, 80, 110], None),
}


@pytest.mark.parametrize(("steps", "spoiled", "at"), RUNS.values(), ids=RUNS)
def test_all_outlets_give_one_number_and_one_first_layer(steps: int, spoiled: list[int], at: int | None, tmp_path: Path) -> None:
    monitor = _train(tmp_path, steps, spoiled)
    if at is None:
        at = largest(episodes(monitor._runtime.pipeline.history.recent().events, range(steps)), 1)[0].worst.step
    found = _everywhere(monitor, tmp_path, at)
    assert {told.layer for told in found.values()} == {LAYER}, found
    assert len(set(found.values())) == 1, found
    assert FACTOR / 5 < float(found["why"].times.replace(",", "")) < FACTOR * 5


@pytest.mark.extra
@pytest.mark.parametrize("spoiled", [[60], [30, 31, 32, 60]])
def test_the_report_gives_the_same_number(spoiled: list[int], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from torch_gradmon.analysis.report.page import content

    _train(tmp_path, 70, spoiled).detach()
    with closing(load_run(tmp_path)) as run:
        page = content(run._reader, "x", lambda: None)
        why = _only(explain(run._reader))
        spikes = episodes(run.spikes, run.steps)
    (finding,) = [finding for finding in page["findings"] if finding["rule"] == "spike"]
    assert _only(finding["cause"]) == why
    assert why in [_only(line) for line in page["events"]]
    assert len(page["events"]) == len(spikes)
    assert ["spikes", counted(spikes)] in page["facts"]
    assert page["spikes"] == counted(spikes)


def test_the_live_view_names_the_same_layers_in_the_same_order(tmp_path: Path) -> None:
    _train(tmp_path, 90, [80]).detach()
    for window in (600, 70):  # a short one looks back farther than what it shows
        with closing(load_run(tmp_path)) as run:
            assert LiveRun(run._reader, window).suspects(4) == (80, run.record(80).suspects[:4])


def test_a_detector_of_all_layers_tells_of_the_layer_that_comes_first_in_all_lists(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir=tmp_path)
    monitor.add_detector(SpikeDetector(signal=re.compile("^gradient_before_clip/.*/norm$")))
    step, factors = [0], {"0.weight": 20.0, "1.bias": 60.0, "2.weight": 500.0}
    for name, factor in factors.items():
        small = 1e-6 if name == "2.weight" else 1.0  # it holds nothing of the square, and rises most of all
        model.get_parameter(name).register_hook(
            lambda gradient, factor=factor, small=small: gradient * small * (factor if step[0] == 40 else 1.0)
        )
    for step[0] in range(50):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    (event,) = [event for event in monitor._runtime.pipeline.history.recent().events if event.signal != "grad_norm"]
    monitor.detach()
    run = load_run(tmp_path)
    first = run.record(40).suspects[0]
    assert event.signal == f"{GRADIENT_BEFORE_CLIP}/{first.name}/norm"
    assert first.name != "2.weight"
    assert event.value / event.usual == pytest.approx(first.factor, rel=1e-6)
    assert "and 2 of the 5 others spike with it" in event.reason


def test_what_is_usual_is_what_the_rule_of_the_detector_takes_for_it(tmp_path: Path) -> None:
    monitor = _train(tmp_path, 90, [30, 31, 80])
    detector = SpikeDetector(signal=f"{GRADIENT_BEFORE_CLIP}/{LAYER}/norm")
    run = load_run(tmp_path)
    judged = {step: detector.update(step, value) for step, value in run.series(detector.name).items()}
    for step in (30, 31, 80):
        (suspect,) = [each for each in run.record(step).suspects if each.name == LAYER]
        assert judged[step].usual == pytest.approx(suspect.usual, rel=1e-9)
    monitor.detach()


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("count", [3, 4, 20, 63])
def test_usual_norms_are_the_baseline_of_the_default_rule(count: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(count)
    norms = (noise * torch.randn(count, 50, dtype=torch.float64, generator=generator)).exp()
    norms[:, 25:] *= torch.linspace(3.0, 1.0, count, dtype=torch.float64)[:, None]
    norms[count // 2, ::2] *= 1e4  # a spike among them, from which on the rest of the row tells
    usual = Baseline.of(norms)
    for column, values in enumerate(norms.T.tolist()):
        rule = Hampel()
        for value in values:
            rule.update(value)
        assert usual.norms[column].item() == pytest.approx(rule.baseline, rel=1e-9)


def test_absent_gradients_take_no_place_among_the_last_ones() -> None:
    norms = torch.full((40, 2), torch.nan, dtype=torch.float64)
    norms[:, 0], norms[5::5, 1] = 1.0, torch.arange(1.0, 8.0, dtype=torch.float64)
    assert Baseline.of(norms).norms.tolist() == pytest.approx([1.0, 4.0])
    assert Baseline.of(norms[:2]).norms.isnan().all()
    assert Baseline.of(norms[:0]).norms.isnan().all()


# --- all together ----------------------------------------------------------------------------------------------------------------------


def _made(monitor: ModuleMonitor, step: int) -> Any:
    return spike_cause(monitor._runtime.pipeline.history.recent().suspects(step), step)


_OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.02), "adam": lambda p: torch.optim.Adam(p, lr=0.003)}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", _OPTIMIZERS.values(), ids=_OPTIMIZERS)
def test_a_loss_times_100_is_blamed_on_no_layer(optimizer: Any, clip: float | None, tmp_path: Path) -> None:
    monitor = _train(tmp_path, 60, [], scaled=lambda step: 100.0 if step == 50 else 1.0, optimizer=optimizer, clip=clip)
    monitor._runtime.settle_now()
    made = _made(monitor, 50)
    assert (made.layer, made.is_common) == ("", True)
    assert made.did.startswith("all 3 layers rose together, by ")
    low, high = map(float, re.findall(r"[\d.]+", made.did.partition("by ")[2])[:2])
    assert 30 < low <= high < 300
    assert "which points to the batch, the loss or the update before, and to no single layer" in made.words
    (finding,) = [finding for finding in monitor.diagnose().findings if finding.rule == "spike"]
    assert finding.where == ""
    assert made.words in finding.cause
    assert "Look at the batch and the loss of this step" in finding.advice
    assert made.did in monitor.why(50)
    assert "of 6 as usual" not in monitor.why(50)
    monitor.detach()
    (spike,) = summarize(read_run(tmp_path), "x").spikes
    assert (spike.layer, spike.moved) == ("", made.did)


@pytest.mark.parametrize(
    ("usual", "words"),
    [
        (4.36, "and to no single layer: b.weight has 95% of the squared norm, and usually 95%"),
        (0.9, "before; b.weight has 95% of"),
    ],
)
def test_a_large_share_beside_a_common_rise_is_explained(usual: float, words: str) -> None:
    quiet = [ParameterAttribution(f"a.{place}.weight", 2.0, 0.5, 3.0, 0.0125, None, 0, place) for place in range(4)]
    loud = ParameterAttribution("b.weight", 17.44, usual, 3.0, 0.95, None, 0, 4)
    made = spike_cause([*quiet, loud], 9)
    assert made.is_common
    assert words in made.words
    assert ("no single layer" in made.words) == (usual > 1)


def test_a_batch_of_outliers_is_blamed_on_no_layer() -> None:
    monitor = _train(None, 60, [], batch=lambda step, x: 30 * x if step == 50 else x)
    monitor._runtime.settle_now()
    made = _made(monitor, 50)
    assert (made.layer, made.is_common) == ("", True)
    assert "3 layers rose together" in made.did


@pytest.mark.parametrize("layer", ["0.weight", "2.weight", "2.bias", "4.weight"])
@pytest.mark.parametrize("steps", [12, 60])
def test_one_layer_that_is_spoiled_is_named(layer: str, steps: int) -> None:
    monitor = _train(None, steps + 3, [steps], layer=layer, factor=1000.0)
    monitor._runtime.settle_now()
    made = _made(monitor, steps)
    assert (made.layer, made.is_common) == (layer, False)
    assert made.words.startswith(f"{layer} (")
    assert made.words.endswith("moved most")


def _suspects(factors: dict[str, float], scores: float = 20.0) -> list[ParameterAttribution]:
    """Layers that rose by these factors, from 1; those from 1.5 on in this step, 39."""
    gradients = GradientNormHistory()
    for step in range(40):
        rows = identity(len(factors))
        rows[:, Column.COUNT] = 10
        now = [factor if step == 39 else 1 + 0.01 * (step % 3) for factor in factors.values()]
        rows[:, Column.SQUARE_SUM] = torch.tensor(now, dtype=torch.float64) ** 2
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(tuple(factors), rows, ALL_COLUMNS)})
    return gradients.suspects(39)


def test_what_rose_up_to_a_layer_began_there() -> None:
    rose = {"0.weight": 900.0, "0.bias": 1000.0, "1.weight": 1100.0, "1.bias": 1050.0, "2.weight": 1.0, "2.bias": 1.1}
    suspects = _suspects(rose)
    made = spike_cause(suspects, 39)
    assert made.layer == suspects[0].name == "1.bias"
    assert made.words == (
        "1.bias, where it began: 4 of 6 parameters rose together, by 891 to 1,089 times their usual norms, and none of the others is "
        "nearer to the loss"
    )
    unlike = {**rose, "0.weight": 10.0, "0.bias": 30_000.0, "1.weight": 10.0}
    for other in ({**rose, "2.bias": 20.0}, {**rose, "0.bias": 1.0}, unlike):
        assert "began" not in spike_cause(_suspects(other), 39).words
    few = {
        "0.weight": 100.0,
        "0.bias": 100.0,
        "1.weight": 100.0,
        "1.bias": 1.0,
    }  # of one module, so that nothing is nearer to the loss
    assert "began" not in spike_cause(_suspects(few), 39).words


def test_unlike_factors_are_no_common_cause() -> None:
    made = spike_cause(_suspects({"a": 50.0, "b": 300.0, "c": 10_000.0, "d": 1.0}), 39)
    assert (made.layer, made.is_common) == ("c", False)


def test_a_layer_that_holds_next_to_nothing_has_not_made_the_spike() -> None:
    gradients = GradientNormHistory()
    for step in range(40):
        rows = identity(3)
        rows[:, Column.COUNT] = 10
        rows[:, Column.SQUARE_SUM] = torch.tensor([1e-5, 1.0, 1.0] if step < 39 else [0.1, 40.0, 1.0], dtype=torch.float64) ** 2
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(("small", "large", "calm"), rows, ALL_COLUMNS)})
    assert [suspect.name for suspect in gradients.suspects(39)] == ["large", "small", "calm"]


def test_nan_in_all_parameters_is_blamed_on_none(tmp_path: Path) -> None:
    _train(
        tmp_path, 30, [], scaled=lambda step: math.nan if step == 25 else 1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    ).detach()
    (spike,) = summarize(read_run(tmp_path), "x").spikes
    assert (spike.layer, spike.moved) == ("", "all 6 parameters have NaN or Inf")


# --- spikes in a row ---------------------------------------------------------------------------------------------------------------------


def _event(step: int, value: float, signal: str = "grad_norm") -> SpikeEvent:
    return SpikeEvent(step, signal, value, 9.0, 5.5, f"{signal} = {value:g}", usual=1.0)


def test_steps_in_a_row_are_one_spike_with_its_first_worst_and_last_step() -> None:
    events = [_event(3, 4.0), *(_event(step, value) for step, value in ((10, 5.0), (11, 50.0), (12, 2.0))), _event(14, 3.0)]
    events.insert(2, _event(10, 7.0, "loss"))
    found = episodes(events, range(20))
    assert [(each.first, each.worst.step, each.last) for each in found] == [(3, 3, 3), (10, 11, 12), (14, 14, 14)]
    assert [each.when for each in found] == ["step 3", "steps 10 to 12", "step 14"]
    assert counted(found) == "3 in 5 steps"
    assert counted(found[:1]) == "1"
    assert [each.first for each in largest(found, 2)] == [3, 10]
    assert largest(found, 1)[0].of_worst == [events[3]]
    # with a step between that was monitored and calm, they are two; where it was not monitored, one
    assert len(episodes([_event(10, 5.0), _event(20, 5.0)], [0, 10, 15, 20])) == 2
    assert len(episodes([_event(10, 5.0), _event(20, 5.0)], [0, 10, 20])) == 1
    assert episodes([_event(10, 5.0)], [9, 11]) == []


def test_a_spike_is_as_large_as_its_factor_and_what_is_not_finite_is_largest() -> None:
    events = [_event(1, 2.5), _event(2, 50.0), _event(3, 3.0), _event(4, math.nan)]
    assert sorted(events, key=size) == [events[0], events[2], events[1], events[3]]
    assert size(SpikeEvent(0, "x", 3.0, 11.0, 5.5, "")) == 2.0  # the rule does not say what is usual


def test_the_largest_spike_is_told_of_by_default_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {**dict.fromkeys(range(40, 45), 20.0), 60: 400.0, 80: 12.0}
    _train(tmp_path, 90, [], scaled=lambda step: factors.get(step, 1.0), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)).detach()
    assert main(["why", str(tmp_path)]) == 0
    story = capsys.readouterr().out
    assert story.startswith("step 60: grad_norm = ")
    assert story.rstrip().endswith("other spikes: steps 40 to 44, step 80")
    assert "gradmon diagnose" not in story
    summary = summarize(read_run(tmp_path), "x")
    assert [(spike.first, spike.last) for spike in summary.spikes] == [(40, 44), (60, 60), (80, 80)]
    assert summary.to_dict()["spikes_in_all"] == 3
    assert summary.to_dict()["steps_with_spikes"] == 7
    (finding,) = [finding for finding in gradmon.load_run(tmp_path).diagnose().findings if finding.rule == "spike"]
    assert finding.steps == (60, 60)
    assert "There were 2 other spikes, none larger." in finding.cause


def test_a_row_is_one_story_with_one_end(tmp_path: Path) -> None:
    factors = dict(zip(range(40, 44), (5.0, 60.0, 20.0, 5.0), strict=True))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monitor = _train(
            tmp_path, 60, [], scaled=lambda step: factors.get(step, 1.0), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
        )
        monitor.detach()
    assert not said
    story = explain(read_run(tmp_path))
    assert story.startswith("step 41: ")
    assert "one spike of 4 steps in a row, 40 to 43\n" in story
    assert "after the spike of steps 40 to 43 grad_norm is back to normal since step 44" in story
    assert "one spike of 4 steps in a row, 40 to 43, the largest in step 41" in explain(read_run(tmp_path), 43)
    # the worst step has its words though it is not the first one, and what comes after it need not say them again
    where = {event.step: bool(event.where) for event in load_run(tmp_path).spikes if event.signal == "grad_norm"}
    assert where == {40: True, 41: True, 42: False, 43: False}


@pytest.mark.parametrize(
    ("length", "end"), [(1, None), (3, None), (20, "the spike that began in step 40 continues, grad_norm is nan")]
)
def test_what_came_after_a_row_is_said_once_it_is_over(length: int, end: str | None) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradmon.watch(model, optimizer)
    bad = math.nan if length > 9 else 50.0
    with pytest.warns(gradmon.GradmonWarning) as said:
        for step in range(70):
            optimizer.zero_grad()
            (model(torch.ones(8, 4)).square().mean() * (bad if 40 <= step < 40 + length else 1.0)).backward()
            optimizer.step()
    after = [str(each.message) for each in said if "after the spike" in str(each.message) or "continues, " in str(each.message)]
    when = "step 40" if length == 1 else f"steps 40 to {39 + length}"
    (text,) = after
    assert (end or f"after the spike of {when} grad_norm is back to normal since step {40 + length}") in text


def test_a_monitor_remembers_the_largest_spike_of_a_long_training() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_spike=None, history=50, preset="minimal")
    monitor.attach(optimizer)
    for step in range(200):
        optimizer.zero_grad()
        factor = 500.0 if step == 60 else 20.0 if step % 50 == 49 and step > 60 else 1.0
        (model(torch.ones(4, 2)).square().mean() * factor).backward()
        optimizer.step()
    assert monitor.why().startswith("step 60: grad_norm")
    (finding,) = [finding for finding in monitor.diagnose().findings if finding.rule == "spike"]
    assert finding.steps == (60, 60)
    assert "monitor.why(60)" in finding.advice
    monitor.why(60)


def test_the_largest_of_many_spikes_is_among_the_steps_that_a_diagnosis_looks_at(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(600):
        value = 900.0 if step == 580 else 20.0 if step % 3 == 0 else 1.0
        values = {Key(SUMMARY, "", "grad_norm"): value}
        store.log(StepRecord(step, float(step), step != 580, values, events=(_event(step, value),) if value > 1 else ()))
    store.close()
    with closing(load_run(tmp_path)) as run:
        history = History.of_run(run._reader, most=100)
    assert len(history.steps) <= 100
    assert 580 in history.steps
    assert len(history.spikes) == 200  # steps 579 and 580 are one
    (finding,) = [finding for finding in gradmon.load_run(tmp_path).diagnose().findings if finding.rule == "spike"]
    assert finding.steps == (579, 580)
    assert "There were 199 other spikes, none larger." in finding.cause
    assert "The step was not applied" in finding.advice


def test_a_layer_that_moved_before_all_others_is_named_with_them() -> None:
    gradients, names = GradientNormHistory(), ("a.weight", "b.weight", "c.weight")
    for step in range(40):
        rows = identity(3)
        rows[:, Column.COUNT] = 10
        factors = {38: (1.0, 30.0, 1.0), 39: (50.0, 60.0, 55.0)}.get(step, (1.0, 1.0, 1.0))
        rows[:, Column.SQUARE_SUM] = torch.tensor(factors, dtype=torch.float64) ** 2
        gradients.add(step, {GRADIENT_BEFORE_CLIP: StatsTable(names, rows, ALL_COLUMNS)})
    made = spike_cause(gradients.suspects(39), 39)
    assert made.words.startswith(
        "b.weight (60 times its usual norm, 39% of the square) moved first, in step 38; all 3 layers rose"
    )
    assert made.words.endswith("which points to the batch, the loss or the update before")
