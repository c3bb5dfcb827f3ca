"""What a diagnosis looks at, and how it speaks."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis import diagnosis
from torch_gradmon.analysis.diagnosis import Diagnosis, Finding
from torch_gradmon.analysis.diagnosis.findings import CONSEQUENCES
from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.analysis.diagnosis.series import Series
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import ALL_COLUMNS
from torch_gradmon.core.records import Severity, SpikeEvent, StatsTable, StepRecord
from torch_gradmon.core.validation import subsample_steps
from torch_gradmon.monitor.records import RecordHistory
from torch_gradmon.spikes.detector_set import SuspectHistory


def _finding(rule: str = "always-clipped", severity: str = "warning", weight: float = 0.0, step: int = 3) -> Finding:
    return Finding(rule, severity, "h.0", (step, 9), {"share": 0.98}, "Every step is clipped.", "Raise max_norm.", weight)  # type: ignore[arg-type]


def _run(path: Path, steps: int = 30) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (math.nan if step == 20 else 1)
        loss.backward()
        monitor.log_scalar("train/loss", loss.detach())
        if step == 20:
            optimizer.zero_grad()
        optimizer.step()
    monitor.detach()
    return model


# --- history -----------------------------------------------------------------------------------------------------------------


def test_a_history_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    model = _run(tmp_path)
    run = gradmon.load_run(tmp_path)
    history = History.of_run(run._reader)
    assert history.steps == list(range(30))
    assert history.span == (0, 29)
    norms = history.series("grad_norm")
    assert dict(zip(norms.steps, norms.values, strict=True)) == pytest.approx(run.series("gradmon/grad_norm"), nan_ok=True)
    assert math.isnan(history.loss.values[20])
    assert len(history.loss.finite) == 29
    matrix = history.matrix("gradient_before_clip", "rms")
    assert matrix is not None
    assert matrix.names == tuple(name for name, _ in model.named_parameters())
    column = matrix.column("2.weight")
    assert 20 not in column.steps, "it is NaN there"
    expected = {s: v for s, v in run.series("gradient_before_clip/2.weight/rms").items() if not math.isnan(v)}
    assert dict(zip(column.steps, column.values, strict=True)) == pytest.approx(expected)
    assert history.sizes("parameter") == {"0.weight": 32, "0.bias": 8, "2.weight": 8, "2.bias": 1}
    assert not history.matrix("optimizer", "rms")
    assert {event.step for event in history.events} == {20}


def test_a_long_run_is_thinned_and_keeps_its_ends_and_its_spikes(tmp_path: Path) -> None:
    _run(tmp_path, steps=60)
    history = History.of_run(read_run(tmp_path), most=24)
    assert len(history.records) <= 24
    assert {0, 1, 2, 58, 59, 19, 20, 21} <= set(history.steps)


def test_a_loss_that_is_logged_seldom_is_still_looked_at(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, preset="minimal", run_dir=tmp_path, on_spike=None)
    for step in range(1300):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if step % 25 == 0:
            monitor.log_scalar("train/loss", loss.detach())
        optimizer.step()
    live, read = monitor._runtime.pipeline.history.sampled(), History.of_run(read_run(tmp_path), most=100)
    assert len(live) < 1000
    assert len(History(live).loss) == 52
    assert len(read.records) <= 100
    assert len(read.loss) >= 40  # 4 would be met by chance
    monitor.detach()


@given(
    steps=st.lists(st.integers(0, 10_000), unique=True, min_size=1, max_size=600).map(sorted),
    around=st.lists(st.integers(0, 10_000), max_size=50),
    most=st.integers(40, 200),
)
def test_thinning_chooses_from_the_steps_and_no_more_than_asked_for(steps: list[int], around: list[int], most: int) -> None:
    chosen = subsample_steps(steps, around, most)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(steps)
    assert len(chosen) <= most
    assert len(steps) > most or chosen == steps
    assert {steps[0], steps[-1]} <= set(chosen)


def test_parts_and_medians() -> None:
    series = Series(tuple(range(8)), (5.0, 1.0, math.nan, 3.0, 2.0, math.inf, 9.0, 8.0))
    assert series.part(0.75, 1).values == (9.0, 8.0)
    assert series.part(0, 0.25).values == (5.0, 1.0)
    assert series.since(6).steps == (6, 7)
    assert series.finite.median == 3.0, "the lower one of six"
    assert math.isnan(Series((), ()).median)
    assert len(Series((), ()).part(0, 1)) == 0
    assert Series((4,), (1.0,)).part(0.9, 1).values == (1.0,)


# --- findings ----------------------------------------------------------------------------------------------------------------


def test_findings_are_ranked_by_severity_then_weight_then_time() -> None:
    findings = [
        _finding("a", "info"),
        _finding("b", "warning", 1.0),
        _finding("c", "error", step=5),
        _finding("d", "error", step=2),
        _finding("e", "warning", 2.0),
    ]
    diagnosis = Diagnosis.of(findings, (0, 9), {})
    assert [finding.rule for finding in diagnosis.findings] == ["d", "c", "e", "b", "a"]
    assert not diagnosis.healthy
    assert diagnosis.exit_code == 1
    assert Diagnosis.of(findings[:1], (0, 9), {}).exit_code == 0


def test_it_speaks_in_plain_words() -> None:
    text = str(Diagnosis.of([_finding(), *(_finding("dead-units", "info", step=s) for s in range(5))], (0, 9), {}))
    assert text.startswith("1 warning, 5 info in steps 0 to 9\n\nWARNING always-clipped in h.0 (steps 3 to 9)\n")
    assert "        Every step is clipped. [share 0.98]\n        -> Raise max_norm." in text
    assert text.endswith("and 2 more of dead-units")
    assert str(Diagnosis.of([], (0, 9), {})) == "Nothing found in steps 0 to 9."
    assert str(Diagnosis.of([], None, {})) == "Nothing to diagnose: no monitored step yet."


def test_signs_stand_behind_what_they_may_come_of() -> None:
    findings = [
        _finding("learning-rate-high", weight=3),
        _finding("dead-units", weight=2),
        _finding("no-gradient", weight=1.5),
        _finding("loss-plateau", "info"),
    ]
    text = str(Diagnosis.of(findings, (0, 9), {}))
    assert "3 warnings, 1 info" in text
    assert "Possible consequences: dead-units in h.0, loss-plateau in h.0." in text
    assert text.count("-> Raise max_norm.") == 2
    assert text.index("Possible consequences") < text.index("WARNING no-gradient")
    of_errors = str(Diagnosis.of([findings[0], _finding("loss-plateau", "error")], (0, 9), {}))
    assert "Possible consequences" not in of_errors, "what is graver stands by itself"
    spikes = [
        _finding("learning-rate-high", weight=3, step=5),
        *(replace(_finding("spike"), steps=steps) for steps in ((2, 4), (6, 6))),
    ]
    grouped = [(cause.steps, [sign.steps for sign in signs]) for cause, signs in Diagnosis.of(spikes, (0, 9), {}).grouped()]
    assert grouped == [((5, 9), [(6, 6)]), ((2, 4), [])], "what was over before is no consequence"


def test_a_cause_ranks_before_its_consequences_whatever_their_weights() -> None:
    def found(rule: str, weight: float, severity: Severity = "warning") -> Finding:
        return Finding(rule, severity, "", (0, 9), {}, "Why.", "What to do.", weight)

    for cause in ("learning-rate-low", "frozen", "low-precision-underflow"):
        told = Diagnosis.of([found("loss-at-chance", 62.0), found(cause, 1.0)], (0, 9), {})
        assert [finding.rule for finding in told.findings] == [cause, "loss-at-chance"]
    graver = Diagnosis.of([found("loss-at-chance", 62.0), found("learning-rate-low", 80.0, "info")], (0, 9), {})
    assert graver.findings[0].severity == "warning", "severity comes first"
    mutual = Diagnosis.of([found("learning-rate-high", 85.0), found("exploding-gradients", 85.2)], (0, 9), {})
    assert mutual.findings[0].rule == "exploding-gradients", "each may cause the other"


def test_consequences_are_of_rules_that_there_are() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in Path(diagnosis.__file__).parent.glob("*.py") if path.stem != "consequences"
    )
    for rule in {*CONSEQUENCES, *(sign for signs in CONSEQUENCES.values() for sign in signs)}:
        assert f'"{rule}"' in source, rule
        assert rule not in CONSEQUENCES.get(rule, ())


def test_without_a_step_nothing_is_said_of_rules_and_where_it_is_switched_off_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fresh() -> gradmon.ModuleMonitor:
        model = nn.Linear(2, 2)
        return gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert str(fresh().diagnose()) == "Nothing to diagnose: no monitored step yet."
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    assert "GRADMON_DISABLE is set" in str(fresh().diagnose())


def test_without_a_monitored_step_the_reason_is_that_of_missing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, every=lambda step: step > 100)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    told = monitor.diagnose()
    assert told.unseen == {"everything": "step 0 was not monitored"}
    assert told.unseen["everything"] in monitor.missing().values()
    assert str(told).splitlines()[0] == "Nothing to diagnose: no monitored step yet."


def test_the_first_line_counts_causes_and_consequences() -> None:
    causes = [_finding("learning-rate-high", weight=9.0), _finding("always-clipped", "info", weight=8.0)]
    findings = [*causes, _finding("loss-plateau"), _finding("dead-units")]
    told = str(Diagnosis.of(findings, (0, 9), {}))
    assert told.splitlines()[0] == "3 warnings, 1 info in steps 0 to 9: 1 cause, 3 consequences"
    alone = str(Diagnosis.of(causes[:1], (0, 9), {}))
    assert alone.splitlines()[0] == "1 warning in steps 0 to 9"


def test_it_turns_into_json_whatever_the_numbers() -> None:
    finding = Finding("non-finite-loss", "error", "", (4, 4), {"loss": math.nan, "steps": 1.0}, "It is NaN.", "Look.")
    found = json.loads(Diagnosis.of([finding], (0, 4), {"dead-units": "no activations were measured"}).to_json())
    assert found["healthy"] is False
    assert found["findings"][0]["evidence"] == {"loss": "nan", "steps": 1.0}
    assert found["findings"][0]["steps"] == [4, 4]
    assert found["unseen"] == {"dead-units": "no activations were measured"}


# --- what a monitor remembers ------------------------------------------------------------------------------------------------


def _record(step: int, parameters: int = 3, spikes: bool = False) -> StepRecord:
    table = StatsTable(
        tuple(map(str, range(parameters))), torch.full((parameters, 8), float(step), dtype=torch.float64), ALL_COLUMNS
    )
    events = (SpikeEvent(step, "loss", 1.0, 9.0, 5.0, "high"),) if spikes else ()
    return StepRecord(step, 0.0, True, {}, {"gradient": table}, events=events)


def test_a_memory_is_bounded_by_number_and_by_bytes_and_keeps_ends_and_spikes() -> None:
    memory = RecordHistory(1, SuspectHistory(), most=100)
    for step in range(5000):
        memory.keep(_record(step, spikes=step == 70))
        assert len(memory.sampled()) < 200
    steps = [record.step for record in memory.sampled()]
    assert {0, 1, 70, 4999} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 300, "no part of the run is forgotten"
    assert float(memory.sampled()[0].tables["gradient"].rows[0, 0]) == 0.0
    heavy = RecordHistory(1, SuspectHistory(), budget=60 * 1000 * 64)
    for step in range(500):
        heavy.keep(_record(step, parameters=1000))
    assert len(heavy.sampled()) < 120


def test_a_memory_takes_a_step_again_and_forgets_a_branch() -> None:
    memory = RecordHistory(1, SuspectHistory())
    for step in (0, 1, 2, 2, 3):
        memory.keep(_record(step))
    assert [record.step for record in memory.sampled()] == [0, 1, 2, 3]
    memory.rewind(2)
    assert [record.step for record in memory.sampled()] == [0, 1]


# --- the loss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (["loss"], "loss"),
        (["train/loss", "val/loss"], "train/loss"),
        (["val_loss", "train_loss_step"], "train_loss_step"),
        (["Loss/train", "Loss/val"], "Loss/train"),
        (["loss", "train/loss"], "loss"),
        (["kl_loss", "train_loss", "dev/loss"], "train_loss"),
        (["kl_loss", "total_loss"], "total_loss"),
        (["kl_loss"], "kl_loss"),
        (["eval/loss"], None),
        (["lossy", "gloss", "loss_of_face"], None),
    ],
)
def test_which_of_the_logged_values_is_the_loss(keys: list[str], chosen: str | None) -> None:
    records = [
        StepRecord(step, 0.0, True, {Key("", key, ""): float(place) for place, key in enumerate(keys)}) for step in range(3)
    ]
    assert History(records).loss.values == (() if chosen is None else (float(keys.index(chosen)),) * 3)


@pytest.mark.parametrize(
    ("logged", "backward", "players", "is_known"),
    [
        (4.71, 4.71, 1, True),
        (4.71, 4.5, 1, False),
        (4.71, 4.71, 2, False),
        (1.0, 1.0, 1, False),
        (math.nan, math.nan, 1, False),
        (math.inf, math.inf, 1, True),
    ],
)
def test_a_logged_value_that_went_backward_is_the_loss(logged: float, backward: float, players: int, is_known: bool) -> None:
    records = [StepRecord(step, 0.0, True, {Key("", "nll", ""): logged, Key("", "epoch", ""): 1.0}) for step in range(3)]
    groups = [{"number": number, "settings": {}, "parameters": []} for number in range(players)]
    run = History(records, known_chance={"step": 0.0, "went backward": backward}, groups=groups)
    assert run.loss.values == ((logged,) * 3 if is_known else ())


class _WithLoss(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 1), how

    def forward(self, x: torch.Tensor) -> object:
        y = self.inner(x)
        loss = y.square().mean()
        return {"number": loss, "dict": {"loss": loss, "logits": y}, "tuple": (loss, y), "output": y}[self.how]


def _loss_in(out: object, how: str) -> torch.Tensor:
    if how == "output":
        return out.square().mean()  # type: ignore[attr-defined]
    return out if how == "number" else out["loss" if how == "dict" else 0]  # type: ignore[index, return-value]


@pytest.mark.parametrize(
    ("how", "batch", "known"),
    [("number", 3, True), ("dict", 3, True), ("tuple", 3, True), ("output", 3, False), ("output", 1, False)],
)
def test_a_loss_that_nobody_logs_is_what_the_model_returns(how: str, batch: int, known: bool) -> None:
    torch.manual_seed(0)
    model = _WithLoss(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, preset="full", on_spike=None)
    losses = []
    for _ in range(5):
        out = model(torch.ones(batch, 4))
        loss = _loss_in(out, how)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    monitor.get_step_metrics()
    found = History(monitor._runtime.pipeline.history.sampled()).loss
    assert list(found.values) == (pytest.approx(losses) if known else [])


def test_what_could_not_be_judged_is_said() -> None:
    told = str(Diagnosis.of([], (0, 9), {"units": "activations were not measured: preset='full'"}))
    assert told.splitlines() == [
        "Nothing found in steps 0 to 9.",
        "",
        "Not judged: units (activations were not measured: preset='full')",
    ]
