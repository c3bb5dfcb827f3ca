"""What a live view says that monitoring costs is what it usually costs, and not what one step or the last few did."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.terminal.live import LiveRun, RunFollower
from torch_gradmon.core.keys import Key
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs.writer import RunWriter


def written(path: Path, costs: list[float | None]) -> Path:
    store = RunWriter(path)
    for step, cost in enumerate(costs):
        context = {} if cost is None else {"overhead_fraction": cost}
        store.log(StepRecord(step, float(step), True, {Key("", "loss", ""): 1.0}, {}, context))
    store.close()
    return path


@pytest.mark.parametrize(
    ("costs", "shown"),
    [
        ([0.066] * 9 + [0.5], 0.066),
        ([0.066] * 90 + [0.5] * 40, 0.066),  # a closer look at the end
        ([0.5, 0.45] + [0.066, None] * 20, 0.066),  # hooks were made at the beginning; a step that was recorded later has no cost
        ([0.9] * 500 + [0.066] * 600, 0.066),  # of the steps that are shown, not of the whole run
        ([None] * 5, None),
    ],
)
def test_the_overhead_is_the_median_of_what_is_shown(tmp_path: Path, costs: list[float | None], shown: float | None) -> None:
    assert LiveRun(read_run(written(tmp_path, costs)), 600).fact("overhead_fraction") == shown


@pytest.mark.extra
def test_the_live_view_calls_it_a_median(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    from torch_gradmon.cli.terminal.live_loop import Screen, frame

    follower = RunFollower(written(tmp_path, [0.066] * 90 + [0.45, 55.0] * 15), 600)
    follower.refresh()
    assert "overhead 6.6% (median)" in frame(follower, Screen(100, None), 0.0)[1].plain
    follower.close()
