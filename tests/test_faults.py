"""The fault zoo: each training has the fault that its name says, its twin has not, and the healthy ones learn."""

from __future__ import annotations

import inspect
import math

import pytest

from benchmarks.faults import FAULTS, HEALTHY, Training
from benchmarks.faults.__main__ import Nobody, main
from tests.fault_checks import ABOVE, FREE
from tests.fault_spy import mean, seen

RULES = sorted(ABOVE)
# half a second each; the others are marked slow
_LONGER = (
    "deep",
    "initialised",
    "logarithm",
    "second-loss",
    "float16",
    "distance",
    "head-replaced",
    "rate-of-1e",
    "clip-w",
    "bound-above",
    "rmsprop",
    "maximised",
)
QUICK_FAULTS = [t for t in FAULTS if t.family == "mlp" and not t.name.startswith(_LONGER)]
QUICK_HEALTHY = [t for t in HEALTHY if t.family == "mlp" and t.name.split("/")[0] in ("lbfgs", "triplets", "tanh")]

# a scheduler that is stepped after a scaler left out the first step, which is how float16 begins
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`:UserWarning"),
]


def _named(trainings: list[Training]) -> list[object]:
    return [pytest.param(training, id=training.name) for training in trainings]


def _judge(training: Training, seed: int) -> None:
    """The faulty one is above each bound and the mended one below; and what is wrong costs something, where it must."""
    faulty, end = seen(training, healed=False, seed=seed)
    mended, mended_end = seen(training, healed=True, seed=seed)
    for number, (sign, above, below) in enumerate(ABOVE[training.rule]):
        assert sign(faulty) > above, f"sign {number} of the faulty one"
        assert sign(mended) < below or below == math.inf, f"sign {number} of the mended one"
    assert math.isfinite(mended_end)
    assert not mended.first, "the mended one is finite throughout"
    if training.rule in FREE:
        return
    assert not end <= mended_end
    assert not faulty.losses[:1] or not math.isfinite(faulty.losses[0]) or faulty.losses[0] > 0


def _learns(training: Training, seed: int) -> None:
    nobody = Nobody()
    end = training.run(nobody, seed, False)
    losses = [float(loss) for loss in nobody.losses]
    assert all(math.isfinite(loss) for loss in losses)
    assert mean(losses[-20:]) < 0.75 * mean(losses[:3])
    assert end < 0.8 * mean(losses[:3])


# -- what the lists are


def test_names_are_unique_and_say_the_family():
    names = [training.name for training in [*FAULTS, *HEALTHY]]
    assert len(set(names)) == len(names)
    assert all(training.name.split("/")[1] == training.family for training in [*FAULTS, *HEALTHY])


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_two_families_one_of_them_held_back(rule):
    of_rule = [training for training in FAULTS if training.rule == rule]
    assert len({training.family for training in of_rule}) >= 2
    assert len({training.family for training in of_rule if training.held_back}) == 1
    assert len({training.family for training in of_rule if not training.held_back}) >= 1
    assert all(training.advice for training in of_rule)


def test_faults_have_known_rules_and_healthy_ones_none():
    assert {training.rule for training in FAULTS} == set(RULES)
    assert {training.rule for training in HEALTHY} == {""}
    assert not any(training.held_back for training in HEALTHY)


def test_there_are_many_healthy_ones_of_all_families():
    assert len(HEALTHY) >= 30
    assert {training.family for training in HEALTHY} >= {training.family for training in FAULTS}


def test_a_training_takes_watch_seed_and_healed():
    for training in [*FAULTS, *HEALTHY]:
        parameters = list(inspect.signature(training.run).parameters)
        assert parameters[-3:] == ["watch", "seed", "healed"], training.name


def test_the_same_seed_gives_the_same_losses_and_another_seed_others():
    def losses(seed: int) -> list[float]:
        nobody = Nobody()
        training = next(t for t in FAULTS if t.name == "two-steps/mlp")
        training.run(nobody, seed, True)
        return [float(loss) for loss in nobody.losses]

    assert losses(3) == losses(3) != losses(4)


@pytest.mark.parametrize("name", ["no-step/mlp", "clip-behind-step/mlp", "trunk-too-slow/mlp", "detached-in-forward/mlp"])
def test_faulty_and_mended_begin_with_the_same_loss(name):
    training = next(t for t in FAULTS if t.name == name)
    first = []
    for healed in (False, True):
        nobody = Nobody()
        training.run(nobody, 0, healed)
        first.append(float(nobody.losses[0]))
    assert first[0] == first[1]


def test_the_list_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["faults", "--list"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FAULTS) + len(HEALTHY)
    assert any("missing-zero-grad" in line and "held back" in line for line in lines)


def test_a_check_prints_both_twins_and_the_same_bits_with_the_monitor(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["faults", "--check", "no-step/mlp"])
    main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["faulty", "healed"]
    assert all(line.endswith("same") for line in lines)


# -- what they do


@pytest.mark.parametrize("training", _named(QUICK_FAULTS))
def test_quick_faults_are_what_they_are_called(training):
    _judge(training, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("training", _named([t for t in FAULTS if t not in QUICK_FAULTS]))
def test_faults_are_what_they_are_called(training):
    _judge(training, seed=0)


@pytest.mark.parametrize("training", _named(QUICK_HEALTHY))
def test_quick_healthy_ones_learn(training):
    _learns(training, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("training", _named([t for t in HEALTHY if t not in QUICK_HEALTHY]))
def test_healthy_ones_learn(training):
    _learns(training, seed=0)
