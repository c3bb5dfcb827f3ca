"""Pipelines of torch: every rank has the values of the whole model, those of one process, and trains the same."""

from __future__ import annotations

import pytest
import torch

from torch_gradmon.step.model_index import PartFacts, WholeModel

from . import pipeline_runs as runs
from .ranks import on_ranks

pytest.importorskip("numpy")  # with which torch sends shapes between stages
pytestmark = pytest.mark.extra

#: Schedule, what is beside it, and number of ranks. torch itself does not run GPipe over DDP, nor zero-bubble schedules beside others.
SETTINGS = [
    *((schedule, "", 2) for schedule in runs.SCHEDULES),
    *((schedule, beside, 4) for schedule in ("gpipe", "1f1b", "interleaved") for beside in ("fsdp2", "tp")),
    ("1f1b", "ddp", 4),
]


def _without_time(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if "overhead" not in key}


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "beside", "ranks"), SETTINGS)
def test_values_are_those_of_one_process_on_every_rank(schedule: str, beside: str, ranks: int) -> None:
    alone = on_ranks(ranks, runs.train, schedule, beside, False)
    watched = on_ranks(ranks, runs.train, schedule, beside, True)
    for ours, theirs in zip(watched, alone, strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor), name
        assert ours["warnings"] == []
        assert ours["missing"].keys() == watched[0]["missing"].keys()
    numbers = [[_without_time(values) for values in result["values"]] for result in watched]
    assert all(other == numbers[0] for other in numbers), "ranks have different values"
    state, expected = runs.whole(ranks // 2 if beside in ("ddp", "fsdp2") else 1)
    for values, true in zip(numbers[0], map(_without_time, expected), strict=True):
        assert values.keys() == true.keys()
        # sums of four micro-batches and of stages round otherwise
        assert values == pytest.approx(true, rel=1e-5, abs=5e-8)
    assert numbers[0][0]["gradmon/grad_norm_after_clip"] == pytest.approx(runs.MAX_NORM, rel=1e-3)
    for result in watched:
        for name, tensor in result["state"].items():
            assert torch.allclose(tensor, state[name], atol=1e-6), name


@pytest.mark.ranks
def test_what_one_rank_thaws_leaves_the_others_with_the_same_rows_and_an_evaluation_is_none_of_the_step() -> None:
    alone, watched = on_ranks(2, runs.thaw, False), on_ranks(2, runs.thaw, True)
    for ours, theirs in zip(watched, alone, strict=True):
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor), name
    assert watched[0]["values"] == watched[1]["values"]
    before, after = watched[0]["values"][1], watched[0]["values"][2]
    assert "gradient/layers.1.up.weight/norm" not in before
    assert after["gradient/layers.1.up.weight/norm"] > 0
    assert all(values["activation/layers.0.up/max"] < 10 for values in watched[0]["values"])


@pytest.mark.ranks
def test_metric_functions_are_called_where_the_tensor_is_and_every_rank_has_their_values() -> None:
    ((expected, _),) = on_ranks(1, runs.functions)
    ranks = on_ranks(2, runs.functions)
    for values, missing in ranks:
        assert values == ranks[0][0]
        assert set(missing) == {
            f"parameter/{name}/spectral" for name, tensor in runs.Model().named_parameters() if tensor.ndim == 1
        }
        for found, true in zip(values, expected, strict=True):
            assert found == pytest.approx(true, rel=1e-5, abs=5e-8)
    assert "raised RuntimeError" in ranks[0][1]["parameter/embedding.bias/spectral"]
    assert ranks[1][1]["parameter/embedding.bias/spectral"] == "no value came from the rank that has it"


@pytest.mark.ranks
def test_what_a_pipeline_cannot_do_is_refused() -> None:
    for skip, clip, stage in on_ranks(2, runs.refused):
        assert skip.startswith("ValueError: on_spike= of this monitor skips or undoes steps.")
        assert clip.startswith("ValueError: the stages of a pipeline are clipped by a norm of all of them")
        assert stage == (
            "TypeError: a PipelineStage is not measured as a whole; pass the schedule that calls it, on every rank: "
            "watch(schedule, optimizer)"
        )


@pytest.mark.ranks
def test_patterns_see_the_names_of_the_whole_model_and_blocks_and_groups_are_those_of_all_stages() -> None:
    (alone,) = on_ranks(1, runs.options)
    for ours in on_ranks(2, runs.options):
        assert ours["warned"] == alone["warned"] == []
        assert ours["overlap"] == alone["overlap"]
        assert "is already registered for 'layers.3.down'" in ours["overlap"][0]
        assert ours["left"] == set(), "methods of the schedule are still wrapped"
        assert {name: ours["kinds"].get(name) for name in alone["kinds"]} == alone["kinds"]
        assert [set().union(*(of for of in ours["trains"][at::2])) for at in (0, 1)] == alone["trains"]
        assert set(ours["missing"].values()) == {"exclude= (excluded_modules_regex=) leaves it out"}
        for values, expected in zip(ours["values"], alone["values"], strict=True):
            assert values.keys() == expected.keys()
            assert values == pytest.approx(expected, rel=1e-5, abs=5e-8)
    keys = alone["values"][0]
    assert {
        "gradient_before_clip/layers.2/norm",
        "gradient_before_clip/group_1/norm",
        "gradient/layers.3.up.weight/norm",
    } <= keys.keys()
    assert "gradient/layers.2.up.weight/norm" not in keys


@pytest.mark.ranks
def test_a_frozen_stage_needs_an_optimizer_that_ends_its_steps() -> None:
    (refused, first), (_, second) = on_ranks(2, runs.frozen)
    assert refused[0].startswith("ValueError: the stages of this rank are frozen and have no optimizer")
    assert first == second
    assert first["gradient/head.weight/norm"] > 0


@pytest.mark.ranks
def test_a_weight_that_two_stages_of_a_rank_share_counts_once() -> None:
    first, second = on_ranks(2, runs.tied)
    assert first == second
    found, missing = first
    assert not [key for key in missing if key.startswith("gradient/")]
    for values, norm in found:
        assert values["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert "gradient/layers.0.up.weight/norm" in values
        assert "gradient/layers.3.up.weight/norm" not in values


@pytest.mark.ranks
def test_a_second_monitor_of_a_schedule_replaces_the_first() -> None:
    for warned, steps in on_ranks(2, runs.again):
        assert len(warned) == 1
        assert "this Model was watched already: the earlier monitor is detached after step 1" in warned[0]
        assert steps == [1, 1]


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["metric", "cadence"])
def test_ranks_with_other_metrics_or_steps_are_named_and_train_on(what: str) -> None:
    for keys, complaints in on_ranks(2, runs.unlike, what):
        assert "ranks:tensors" in complaints
        assert "gradmon/grad_norm" not in keys


def _fact(stage: int, name: str) -> PartFacts:
    return PartFacts(stage, name, (2, 3), "torch.float32", True, 3, 0)


def test_names_that_several_stages_have_begin_with_the_stage() -> None:
    parts = [[_fact(0, "0.weight"), _fact(2, "0.weight")], [_fact(1, "0.weight"), _fact(1, "1.weight")]]
    whole = WholeModel(parts, [4, 6])
    assert list(whole.facts) == ["stage0.0.weight", "stage1.0.weight", "stage1.1.weight", "stage2.0.weight"]
    assert whole.homes == {"stage0.0.weight": 4, "stage1.0.weight": 6, "stage1.1.weight": 6, "stage2.0.weight": 4}


def test_copies_of_a_stage_are_one_and_belong_to_the_first_rank_that_has_them() -> None:
    whole = WholeModel([[_fact(1, "b")], [_fact(0, "a")], [_fact(1, "b")]], [0, 1, 2])
    assert (list(whole.facts), whole.homes, whole.has_prefix) == (["a", "b"], {"a": 1, "b": 0}, False)
