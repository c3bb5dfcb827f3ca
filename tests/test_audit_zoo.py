"""The audit names each mistake of the zoo's loops, and says nothing of the mended ones."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from benchmarks.faults import FAULTS, HEALTHY, Training
from torch_gradmon.core.loop_mistakes import MISTAKES

pytestmark = pytest.mark.thorough

OF_LOOPS = [t for t in FAULTS if t.rule in MISTAKES]
#: Of each rule the quickest one here.
QUICK = {t.rule: t for t in reversed(OF_LOOPS) if not t.held_back}
#: Healthy ones that come close to a mistake, and are quick.
CLOSE = (
    "sharpness-aware/mlp",
    "zeros-kept/autoencoder",
    "adversarial/gan",
    "unfrozen-by-and-by/mlp",
    "closure/cnn",
    "sharded/mlp",
)


#: So many steps of a training show all that the audit warns of; slow tests go on to its end.
ENOUGH = 60


class _Enough(Exception):
    """The training has had its steps."""


class _Front:
    """What a loop has of its monitor; it ends the loop after a while."""

    def __init__(self, monitor: gradmon.ModuleMonitor, steps: float) -> None:
        self.no_monitor = monitor.no_monitor
        self._monitor, self._left = monitor, steps

    def log_scalar(self, name: str, value: Any) -> None:
        if self._left == 0:
            raise _Enough
        self._left -= 1
        self._monitor.log_scalar(name, value)


def _seen(training: Training, healed: bool, steps: float) -> tuple[gradmon.ModuleMonitor, list[str]]:
    """The monitor behind the training, and what the audit warned of."""
    monitors = []

    def watch(model: Any, *optimizers: Any, scaler: Any = None) -> _Front:
        monitors.append(gradmon.watch(model, *optimizers, scaler=scaler, preset="minimal", on_spike=None))
        return _Front(monitors[-1], steps)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(_Enough):
            training.run(watch, 0, healed)
    said = {f"{mistake.cause} (": rule for rule, mistake in MISTAKES.items()}
    told = [rule for words, rule in said.items() for w in caught if f"torch_gradmon: {words}" in str(w.message)]
    assert sorted(told) == sorted(c.removeprefix("audit:") for c in monitors[-1].warning_counts() if c.startswith("audit:"))
    monitors[-1].detach()
    return monitors[-1], told


def _names(trainings: Any) -> list[Any]:
    return [pytest.param(training, id=training.name) for training in trainings]


def _judge(training: Training, steps: float) -> None:
    mistake = MISTAKES[training.rule]
    monitor, told = _seen(training, healed=False, steps=steps)
    found = monitor.diagnose().findings
    assert training.rule in [finding.rule for finding in found[:2]]
    assert [f.rule for f in found if f.rule in MISTAKES and f.severity != "info"] == [training.rule] * (
        mistake.severity != "info"
    )
    finding = next(finding for finding in found if finding.rule == training.rule)
    assert finding.severity == ("error" if training.name.startswith("head-replaced") else mistake.severity)
    assert finding.weight >= 90
    assert told == [training.rule] * mistake.warns
    mended, told = _seen(training, healed=True, steps=steps)
    assert not [finding for finding in mended.diagnose().findings if finding.rule in MISTAKES]
    assert not told


@pytest.mark.parametrize("training", _names(QUICK.values()))
def test_a_mistake_is_named_and_its_mended_twin_is_not(training: Training) -> None:
    _judge(training, ENOUGH)


@pytest.mark.slow
@pytest.mark.parametrize("training", _names(t for t in OF_LOOPS if t not in QUICK.values()))
def test_so_it_is_in_other_families(training: Training) -> None:
    _judge(training, math.inf)


def test_each_mistake_has_a_training() -> None:
    # that takes two optimizers and more than 100 steps, and has its training among the tests of alarms
    assert {*QUICK, "optimizer-never-steps"} == set(MISTAKES)


def _silent(training: Training, steps: float) -> None:
    monitor, told = _seen(training, healed=False, steps=steps)
    assert not told
    assert not [f for f in monitor.diagnose().findings if f.rule in MISTAKES and f.severity != "info"]


@pytest.mark.parametrize("training", _names(t for t in HEALTHY if t.name in CLOSE))
def test_healthy_loops_that_look_odd_have_no_mistake(training: Training) -> None:
    _silent(training, ENOUGH)


@pytest.mark.slow
@pytest.mark.parametrize("training", _names([t for t in HEALTHY if t.name not in CLOSE]))
def test_healthy_loops_have_no_mistake(training: Training) -> None:
    _silent(training, math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("training", _names([t for t in FAULTS if t.rule not in MISTAKES]))
def test_a_fault_of_another_kind_is_no_mistake_of_the_loop(training: Training) -> None:
    _silent(training, math.inf)


@pytest.mark.parametrize("steps", [2, math.inf])
def test_models_under_ddp_are_freed_before_their_process_group(steps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []
    destroy = torch.distributed.destroy_process_group

    def destroyed() -> None:
        alive.append([model for model in models if model() is not None])
        destroy()

    models: list[weakref.ref[nn.Module]] = []
    original = nn.parallel.DistributedDataParallel.__init__

    def made(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        models.append(weakref.ref(self))
        original(self, *args, **kwargs)

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", made)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroyed)
    _seen(QUICK["sync-every-micro-batch"], healed=False, steps=steps)
    assert len(models) == 1
    assert alive == [[]]
