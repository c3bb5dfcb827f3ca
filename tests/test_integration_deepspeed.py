"""DeepSpeed, the real package, on ranks over gloo: the values of one process with all the data, and the same training."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon

from . import deepspeed_runs as runs
from .ranks import on_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def _operations() -> None:
    """DeepSpeed compiles an operation when the first ranks start. On a busy machine that takes longer than ranks may, and a build that
    was killed leaves a lock behind on which all later ones wait.
    """
    place = Path(sys.prefix) / "torch_extensions"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    for lock in place.rglob("lock"):
        lock.unlink()
    subprocess.run([sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"], check=True)


OFFLOAD = {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
#: Stage, number of ranks, and more settings.
SETTINGS: list[tuple[int, int, dict[str, Any]]] = [
    *((stage, ranks, {}) for stage in (0, 1, 2, 3) for ranks in (2, 4)),
    *((stage, 2, OFFLOAD) for stage in (1, 2, 3)),
    *((stage, 2, BF16) for stage in (0, 1, 2, 3)),
    *((stage, 2, FP16) for stage in (1, 2, 3)),
]


def _id(setting: tuple[int, int, dict[str, Any]]) -> str:
    stage, ranks, config = setting
    return f"zero{stage}-{ranks}-{next(iter(config), 'float32')}"


@pytest.mark.parametrize("setting", SETTINGS, ids=_id)
def test_values_are_those_of_one_process_and_the_engine_trains_the_same(setting: tuple[int, int, dict[str, Any]]) -> None:
    stage, ranks, config = setting
    alone = on_ranks(ranks, runs.train, stage, False, config)
    watched = on_ranks(ranks, runs.train, stage, True, config)
    for ours, theirs in zip(watched, alone, strict=True):
        for part in ("state", "masters"):
            assert ours[part].keys() == theirs[part].keys()
            for name, tensor in theirs[part].items():
                assert torch.equal(ours[part][name], tensor), name
        assert ours["norms"] == theirs["norms"]
        assert ours["warnings"] == []
        assert ours["steps"] == list(range(runs.STEPS))
    numbers = [[_without_time(values) for values in result["values"]] for result in watched]
    assert all(other == numbers[0] for other in numbers), "ranks have different values"
    is_narrow = config in (BF16, FP16)
    own = watched[0]["norms"]
    if any(own):  # DeepSpeed gives none without ZeRO in float32
        assert [values["gradmon/grad_norm"] for values in numbers[0]] == pytest.approx(own, rel=1e-5)
    state, expected = runs.plain(ranks)
    for values, true in zip(numbers[0], map(_without_time, expected), strict=True):
        assert values.keys() >= true.keys()
        where = {key: values[key] for key in true}
        if is_narrow:  # gradients of another precision
            norms = [key for key in true if key.startswith("gradient") and key.endswith("/norm")]
            assert {key: where[key] for key in norms} == pytest.approx({key: true[key] for key in norms}, rel=0.1)
        else:
            assert where == pytest.approx(true, rel=1e-5, abs=1e-8)
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(runs.MAX_NORM, rel=1e-3)
    for name, tensor in state.items():
        assert torch.allclose(watched[0]["state"][name].float(), tensor, atol=3e-2 if is_narrow else 1e-6), name


def _without_time(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if "overhead" not in key}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_overflowed_is_one_that_was_not_applied(stage: int) -> None:
    """With a scale of 2**40 the first gradients in half precision are infinite."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    first, second = on_ranks(2, runs.train, stage, True, config)
    assert first["steps"] == list(range(runs.STEPS))
    ours, theirs = ([_without_time(values) for values in each["values"]] for each in (first, second))
    assert repr(ours) == repr(theirs)  # NaN included
    assert [values["gradmon/steps_not_applied"] for values in first["values"]] == [float(step + 1) for step in range(runs.STEPS)]
    assert all(not math.isfinite(values["gradmon/grad_norm"]) for values in first["values"])


@pytest.mark.parametrize("config", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_nan_without_a_loss_scale_is_a_spike_although_the_engine_leaves_out_the_step(stage: int, config: dict[str, Any]) -> None:
    for found in on_ranks(2, runs.nan_from, stage, config):
        assert "2 grad_norm" in found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerate_needs_nothing_else(stage: int) -> None:
    for found in on_ranks(2, runs.by_accelerate, stage):
        assert found["norms"] == pytest.approx(found["true"], rel=1e-5)
        assert found["steps"] == [0, 1, 2]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_trainer_of_transformers_needs_the_callback_alone(stage: int, tmp_path: Any) -> None:
    for found in on_ranks(2, runs.by_trainer, stage, str(tmp_path)):
        assert found["same"]
        assert found["norms"] == pytest.approx(found["true"], rel=1e-5)
        assert len(found["norms"]) == 3


def test_what_does_not_belong_to_the_engine_is_refused() -> None:
    for messages in on_ranks(2, runs.refused):
        other, alone, parts, skips = messages
        assert other.startswith("ValueError: a DeepSpeed engine steps its own optimizer, not ")
        assert alone == (
            "ValueError: a DeepSpeedEngine cannot be watched: it steps by itself; call gradmon.watch(engine), which takes its model and "
            "its optimizer"
        )
        assert parts.startswith("ValueError: an optimizer under DeepSpeed cannot be followed: ")
        assert parts.endswith("gradmon.watch(engine)")
        assert skips.startswith("ValueError: on_spike= of this monitor skips or undoes steps")


def test_a_pipeline_of_deepspeed_is_refused() -> None:
    for (message,) in on_ranks(2, runs.refused_pipeline):
        assert message.startswith("ValueError: a PipelineEngine of DeepSpeed cannot be watched: each rank has some layers")


def test_a_model_that_is_no_engine_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), 0.1))
    assert monitor.module is model
