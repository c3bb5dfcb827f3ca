"""Training with the heaviest monitor leaves, bit for bit, what training without one leaves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_gradmon import ModuleMonitor, RefinedCoordinateCheck
from torch_gradmon.core.keys import ATTENTION_SOURCES
from torch_gradmon.sinks import JsonlSink

from . import loops
from .families import BY_NAME

#: All that differs from step to step: a first one, one that knows the first, and one more; and where there is a scaler, its scale
#: grows, a step is refused, and one follows.
STEPS, SCALED_STEPS = 3, 5
ALL = list(loops.settings())
CHOSEN = loops.pairwise(ALL)
QUICK = [pytest.param(setting, marks=pytest.mark.thorough) if setting.compile else setting for setting in CHOSEN]
SLOW = [pytest.param(setting, marks=pytest.mark.slow) for setting in ALL if setting not in CHOSEN]


def _random(tensor: Tensor, *_: Any) -> Tensor:
    return torch.rand((), device=tensor.device) + tensor.numel()


def heaviest(directory: Path) -> loops.Watch:
    """Every source on every step, functions that draw random numbers, all outlets; a failure inside raises."""

    def watch(model: Any, optimizer: Any, scaler: Any) -> ModuleMonitor:
        monitor = ModuleMonitor(on_metric_error="raise", layers="all", run_dir=directory / "run", preset="full")
        for add in (monitor.add_gradient_metric, monitor.add_parameter_metric, monitor.add_update_metric):
            add("random", _random)
        monitor.add_gradient_metric("random_mean", _random, metric_aggregation_fn=torch.median, stages=("local",))
        monitor.add_gradient_metric("std", stages=("local",))
        monitor.add_optimizer_metric("random", lambda state: torch.rand(()))
        everywhere = ("output", "output_gradient", "input", "input_gradient")
        monitor.add_activation_metric("random", _random, metric_aggregation_fn="max", of=everywhere)
        monitor.add_activation_metric("std", of=everywhere)
        monitor.add_activation_metric("kurtosis", of=everywhere, split_calls=True)
        monitor.add_activation_metric("dead")
        monitor.add_activation_metric("saturation")
        for metric in ATTENTION_SOURCES:
            monitor.add_attention_metric(metric, heads=True)
        monitor.add_parameter_metric("std")
        monitor.add_update_metric("ratio")
        monitor.add_sink(JsonlSink(directory / "log.jsonl"))
        monitor.set_module(model)
        monitor.set_reference_module("init")
        monitor.add_activation_difference_metric("std")
        monitor.add_activation_difference_metric("random", lambda x, _: _random(x))
        if any(True for _ in model.children()):
            RefinedCoordinateCheck(monitor)
            RefinedCoordinateCheck(monitor, "random", _random)
        monitor.add_parameter_difference_metric("std")
        return monitor.attach(optimizer, scaler=scaler)

    return watch


@pytest.mark.parametrize("setting", [*QUICK, *SLOW], ids=str)
def test_training_is_the_same_bit_for_bit(setting: loops.Setting, tmp_path: Path) -> None:
    steps = SCALED_STEPS if setting.scaler else STEPS
    plain = loops.train(**dict(setting.parts()), steps=steps)
    watched = loops.train(**dict(setting.parts()), steps=steps, monitored=heaviest(tmp_path))
    assert loops.differences(plain, watched) == []
    assert (tmp_path / "log.jsonl").read_text().count("\n") == steps  # so the monitor was awake


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")  # torch's own, of what it cannot repeat
# on a GPU a scaler refuses gradients in bfloat16
@pytest.mark.parametrize("setting", [each for each in CHOSEN if not (each.scaler and each.family == "bf16")], ids=str)
def test_training_on_a_gpu_is_the_same_bit_for_bit(setting: loops.Setting, tmp_path: Path) -> None:
    steps = SCALED_STEPS if setting.scaler else STEPS
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, again = (loops.train(**dict(setting.parts()), steps=steps, device="cuda") for _ in range(2))
        watched = loops.train(**dict(setting.parts()), steps=steps, device="cuda", monitored=heaviest(tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    assert loops.differences(plain, again) == []  # without a monitor: else nothing could be said of one
    assert loops.differences(plain, watched) == []
    assert (tmp_path / "log.jsonl").read_text().count("\n") == steps


def test_the_chosen_settings_hold_every_pair_of_choices_that_can_be_had() -> None:
    """Every pair, by a count of its own: all products of two dimensions of which some setting is valid."""
    covered = set().union(*map(loops.pairs, CHOSEN))
    for (one, firsts), (other, seconds) in itertools.combinations(loops.CHOICES.items(), 2):
        for first, second in itertools.product(firsts, seconds):
            can_be_had = any(getattr(s, one) == first and getattr(s, other) == second for s in ALL)
            assert (((one, first), (other, second)) in covered) == can_be_had
    assert {s.family for s in CHOSEN} == set(BY_NAME)
    assert {s.optimizer_name for s in CHOSEN} == set(loops.OPTIMIZERS)


@pytest.mark.parametrize("number", range(len(loops.REFUSED)), ids=[message for message, _ in loops.REFUSED])
def test_what_is_left_out_torch_refuses_by_itself(number: int) -> None:
    message, applies = loops.REFUSED[number]
    products = itertools.product(*(v for k, v in loops.CHOICES.items() if k not in ("recompute", "compile")))
    alone = [s for s in (loops.Setting(*values) for values in products) if applies(s) and loops.refusals(s) == [message]]
    assert alone
    if "Sparse" in message and tuple(map(int, torch.__version__.split(".")[:2])) > (2, 13):
        pytest.skip("newer releases clip sparse gradients")
    for setting in alone:
        with pytest.raises((RuntimeError, ValueError), match=message):
            loops.train(**dict(setting.parts()), steps=1)


def test_the_comparison_sees_one_bit() -> None:
    one = loops.train(steps=2)
    for name, tensor in (("parameters", one["parameters"]["0.weight"]), ("rng", one["rng"])):
        other = loops.train(steps=2)
        spoilt = other[name]["0.weight"].detach() if name == "parameters" else other[name]
        bits = spoilt.reshape(-1).view(torch.uint8)
        bits[-1] ^= 1
        assert [where.split("/")[1] for where in loops.differences(one, other)] == [name], tensor.shape
