"""FSDP1, with original and with flat parameters: the values of one process with all the data, and the same training."""

from __future__ import annotations

import pytest
import torch

from . import fsdp1_runs as runs
from .ranks import on_ranks

pytestmark = pytest.mark.ranks

#: Ranks, original parameters, how it shards, micro-batches, and whether the loop clips.
SETTINGS = [
    (2, True, "FULL_SHARD", 1, True),
    (4, True, "FULL_SHARD", 1, True),
    (2, True, "FULL_SHARD", 1, False),
    (2, True, "SHARD_GRAD_OP", 2, True),
    (2, True, "NO_SHARD", 1, True),
    (4, True, "HYBRID_SHARD", 1, True),
    (2, False, "FULL_SHARD", 1, True),
    (4, False, "FULL_SHARD", 2, True),
    (2, False, "SHARD_GRAD_OP", 2, True),
]
#: What does not depend on which layer has which elements.
WHOLE = ("grad_norm", "grad_norm_after_clip", "grad_max", "grad_nonfinite_count", "param_norm", "update_norm", "clip_fraction")


def _without_time(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if "overhead" not in key}


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel")
@pytest.mark.parametrize(("ranks", "original", "strategy", "micro", "clips"), SETTINGS)
def test_values_are_those_of_one_process_and_training_is_the_same(
    ranks: int, original: bool, strategy: str, micro: int, clips: bool
) -> None:
    alone = on_ranks(ranks, runs.train, False, original, strategy, micro, clips)
    watched = on_ranks(ranks, runs.train, True, original, strategy, micro, clips)
    for ours, theirs in zip(watched, alone, strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        for name, tensor in theirs["state"].items():
            assert torch.equal(ours["state"][name], tensor), name
        assert ours["warnings"] == []
    numbers = [[_without_time(values) for values in result["values"]] for result in watched]
    assert all(other == numbers[0] for other in numbers), "ranks have different values"
    if clips:
        assert [values["gradmon/grad_norm"] for values in numbers[0]] == pytest.approx(watched[0]["norms"], rel=1e-5)
    state, expected = runs.plain(ranks, micro, clips)
    for values, true in zip(numbers[0], map(_without_time, expected), strict=True):
        if original:
            assert values.keys() == true.keys()
        keys = [key for key in true if original or key.removeprefix("gradmon/") in WHOLE]
        assert {key: values[key] for key in keys} == pytest.approx({key: true[key] for key in keys}, rel=1e-5, abs=1e-8)
    if original:
        for name, tensor in state.items():
            assert torch.allclose(watched[0]["state"][name], tensor, atol=1e-6), name


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel")
def test_what_is_not_the_outermost_module_is_refused_and_so_is_a_clip_of_parts() -> None:
    for inner, clip in on_ranks(2, runs.refused):
        assert inner == (
            "ValueError: 2.weight is a part of a flat parameter of FSDP1 above this module: watch the outermost FullyShardedDataParallel"
        )
        assert clip.startswith(
            "ValueError: monitor.clip_grad_norm_ does not know the norm of gradients that an engine has in parts"
        )


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel")
def test_ranks_with_other_metrics_are_named_and_train_on() -> None:
    for keys, complaints in on_ranks(2, runs.unlike):
        assert "ranks:tensors" in complaints
        assert "gradmon/grad_norm" not in keys
