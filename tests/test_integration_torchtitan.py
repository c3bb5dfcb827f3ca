"""torchtitan's own train step, with a pipeline, FSDP2 and tensor parallelism: the values of one process, and the same training."""

from __future__ import annotations

import pytest
import torch

from . import torchtitan_runs as runs
from .ranks import on_ranks

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.integration

#: Schedule, and degrees of the pipeline, of FSDP2 and of tensor parallelism.
SETTINGS = [
    *((schedule, 2, 1, 1) for schedule in ("GPipe", "1F1B", "Interleaved1F1B")),
    ("1F1B", 2, 2, 1),
    ("Interleaved1F1B", 2, 1, 2),
    ("1F1B", 2, 2, 2),
    ("Interleaved1F1B", 2, 2, 2),
]


@pytest.mark.parametrize(("schedule", "pipeline", "shards", "tensor"), SETTINGS)
def test_values_are_those_of_one_process_and_of_its_own_clip(schedule: str, pipeline: int, shards: int, tensor: int) -> None:
    count = pipeline * shards * tensor
    alone = on_ranks(count, runs.train, schedule, pipeline, shards, tensor, False)
    watched = on_ranks(count, runs.train, schedule, pipeline, shards, tensor, True)
    for ours, theirs in zip(watched, alone, strict=True):
        assert ours["state"].keys() == theirs["state"].keys()
        for name, parameter in theirs["state"].items():
            assert torch.equal(ours["state"][name], parameter), name
        assert (ours["norms"], ours["warnings"]) == (theirs["norms"], [])
    values = watched[0]["values"]
    assert all(other["values"] == values for other in watched), "ranks have different values"
    assert [each["gradmon/grad_norm"] for each in values] == pytest.approx(watched[0]["norms"], rel=1e-5)
    (expected,) = on_ranks(1, runs.whole, shards)
    for found, true in zip(values, expected["values"], strict=True):
        assert found.keys() == true.keys()
        # two trainings, whose float32 products round differently: by 1.1e-5 in one element on a Xeon
        assert found == pytest.approx(true, rel=3e-5, abs=5e-8)
        assert found["gradmon/grad_norm_after_clip"] == pytest.approx(runs.MAX_NORM, rel=1e-3)
