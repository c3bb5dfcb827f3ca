"""What a diagnosis makes of the fault zoo: each fault is named by its own rule, and nothing is said of what is sound.

The twin of a faulty training differs in the one line that the advice names; that nothing is found in it shows that the advice heals.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, HEALTHY, Training
from benchmarks.faults.judging import FIRST, UNSEEN, Outcome, counts, judged, main, table, wrong

pytestmark = pytest.mark.thorough

# one of each theme that takes a second; rules alone are those of test_diagnosis_rules.py
QUICK = [
    "initialised-with-randn/mlp",
    "detached-in-forward/mlp",
    "bias-far-below-zero/mlp",
    "float16-without-scaler/mlp",
    "logarithm-of-negative/mlp",
    "rate-of-1/mlp",
]
SOUND = ["plain-adamw/cnn", "triplets/mlp"]


def _named(trainings: list[Training]) -> list[object]:
    return [pytest.param(training, id=training.name) for training in trainings]


def _judge(training: Training, seed: int) -> None:
    faulty = judged(training.name, seed, twin=False)
    assert faulty.named, faulty.found
    mended = judged(training.name, seed, twin=True)
    assert not mended.alarms, mended.found
    assert not faulty.unseen + mended.unseen


def _is_sound(training: Training, seed: int) -> None:
    outcome = judged(training.name, seed, twin=False)
    assert not outcome.alarms, outcome.found
    assert not outcome.unseen


@pytest.mark.parametrize("training", _named([t for t in FAULTS if t.name in QUICK]))
def test_quick_faults_are_named_and_their_advice_heals(training: Training) -> None:
    _judge(training, seed=0)


@pytest.mark.parametrize("training", _named([t for t in HEALTHY if t.name in SOUND]))
def test_quick_sound_trainings_have_no_warning(training: Training) -> None:
    _is_sound(training, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("training", _named(FAULTS))
def test_faults_are_named_and_their_advice_heals(training: Training, seed: int) -> None:
    _judge(training, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("training", _named(HEALTHY))
def test_sound_trainings_have_no_warning(training: Training, seed: int) -> None:
    _is_sound(training, seed)


def test_the_names_of_quick_ones_are_those_of_the_zoo() -> None:
    assert {*QUICK, *SOUND} <= {training.name for training in (*FAULTS, *HEALTHY)}


def test_the_documentation_explains_each_rule() -> None:
    text = (Path(__file__).parent.parent / "docs" / "guide" / "diagnosis.md").read_text(encoding="utf-8")
    for rule in {training.rule for training in (*FAULTS, *UNSEEN) if training.rule}:
        assert f"`{rule}`" in text, rule


# --- how it is counted -------------------------------------------------------------------------------------------------------


def _outcome(rule: str, *found: tuple[str, str], twin: bool = False, held_back: bool = False) -> Outcome:
    return Outcome("some/mlp", rule, held_back, twin, 0, (tuple(found),))


def test_a_fault_counts_as_named_among_the_first_two_findings() -> None:
    findings = [("warning", "a"), ("info", "b"), ("info", "c")]
    assert [_outcome(rule, *findings).place for rule in ("a", "b", "c", "d")] == [0, 1, 2, None]
    assert [_outcome(rule, *findings).named for rule in ("a", "b", "c", "d")] == [True, True, False, False]
    assert FIRST == 2


def test_of_several_monitors_one_has_to_name_it() -> None:
    outcome = Outcome("some/gan", "a", False, False, 0, ((("warning", "b"), ("info", "c"), ("info", "a")), (("info", "a"),)))
    assert outcome.place == 0


def test_an_alarm_is_what_warns_where_nothing_should() -> None:
    assert _outcome("", ("info", "b"), ("warning", "a"), ("error", "c")).alarms == ["a", "c"]
    assert _outcome("a", ("warning", "b")).alarms == []


def test_the_table_counts_what_was_tuned_on_and_held_back_apart() -> None:
    outcomes = [
        _outcome("a", ("warning", "a")),
        _outcome("a", ("warning", "b"), ("info", "a")),
        _outcome("a", ("warning", "b")),
        _outcome("a", held_back=True),
        _outcome("", ("warning", "b"), twin=True),
        _outcome(""),
    ]
    assert list(table(counts(outcomes)))[2:] == [
        "| `a` | 2 of 3 | 0 of 1 | 0 | 1 of 4 | 0 |",
        "| `b` | 0 | 0 | 0 | 0 | 1 |",
        "| all | 2 of 3 | 0 of 1 | 0 | 1 of 4 | 1 of 2 |",
    ]
    assert len(wrong(outcomes)) == 3


@pytest.mark.extra
def test_a_part_of_the_zoo_is_judged_and_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["judging", "rate-of-1/mlp", "--seeds", "0", "--jobs", "1"])
    main()
    out = capsys.readouterr().out
    assert "learning-rate-high" in out
    assert "2 trainings, preset full" in out
