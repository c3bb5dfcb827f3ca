"""Many ranks: the numbers of one process, whatever wrapper spreads the model over how many."""

from __future__ import annotations

import pytest

from .rank_runs import Setting, train
from .ranks import on_ranks

TWO = [
    *(Setting("ddp", clip=clip) for clip in ("", "torch", "monitor")),
    Setting("ddp", (("gradient_as_bucket_view", True),), clip="torch"),
    Setting("ddp", (("static_graph", True),)),
    Setting("ddp", (("find_unused_parameters", True),), extra="some"),
    Setting("ddp", micro=2),
    *(Setting("fsdp2", clip=clip) for clip in ("", "torch", "monitor")),
    Setting("fsdp2", (("mixed", True),), clip="torch"),
    Setting("fsdp2", (("offload", True),)),
    Setting("fsdp2", (("reshard_after_forward", False),)),
    Setting("fsdp2", micro=2),
    Setting("tp"),
    Setting("tp", (("sequence", True),)),
]
FOUR = [
    Setting("ddp", clip="torch"),
    Setting("fsdp2", clip="torch"),
    Setting("fsdp2", (("shape", (2, 2)),)),
    Setting("tp"),
    Setting("tp", (("with_fsdp", True),)),
    Setting("tp", (("sequence", True), ("with_fsdp", True))),
]


@pytest.mark.parametrize(("ranks", "setting"), [*((2, setting) for setting in TWO), *((4, setting) for setting in FOUR)], ids=str)
def test_each_rank_has_the_numbers_of_the_whole(ranks: int, setting: Setting) -> None:
    results = on_ranks(ranks, train, setting)
    for steps in zip(*results, strict=True):
        values = [{key: value for key, value in found.items() if key != "gradmon/overhead_pct"} for found, _ in steps]
        assert all(found == values[0] for found in values), "the ranks differ"
        expected = steps[0][1]
        per_layer = {key for key in values[0] if not key.startswith("gradmon/")}
        assert per_layer == {key for key in expected if not key.startswith("gradmon/")}
        for key, value in expected.items():
            name = key.rpartition("/")[0]
            unit = expected.get(f"{name}/l1", 0.0) if key.endswith("/mean") else 0.0
            spread = 1e-7 * expected.get(f"{name}/rms", 0.0) if key.endswith("/std") else 0.0
            assert values[0][key] == pytest.approx(value, rel=1e-6, abs=1e-6 * unit + spread + 1e-30), key
