"""A live change of detail on several ranks: together where they exchange anything, else refused with a reason, and never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_gradmon import load_run

from .detail_ranks import at_random, from_outside, judged, of_a_reset
from .ranks import on_ranks

pytestmark = pytest.mark.ranks

EVERY = 10


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Asked for before step 13, and again before step 35 for a later step, and a reset at last."""
    path = tmp_path_factory.mktemp("fsdp2")
    calls = {13: ["--every 1 --preset full --for 7"], 35: ["--every 2 --first 44"], 49: ["--reset"]}
    return on_ranks(2, from_outside, "fsdp2", str(path), EVERY, calls), path


def test_all_ranks_change_at_the_same_step_after_the_next_exchange(fsdp2: tuple[list[dict[str, Any]], Path]) -> None:
    first, second = fsdp2[0]
    assert first["monitored"] == [0, 10, 20, *range(21, 28), 30, 40, 44, 46, 48, 50]
    assert second["monitored"] == first["monitored"]
    assert first["tuned"] == second["tuned"]
    assert [step for step, tuned in enumerate(first["tuned"]) if tuned] == [*range(21, 28), 44, 46, 48, 50]
    assert first["tuned"][21] == {"every": 1, "preset": "full", "number": 1}
    assert first["tuned"][44] == {"every": 2, "number": 2}


def test_no_collective_tells_of_a_change_and_what_is_new_is_agreed_on_once(fsdp2: tuple[list[dict[str, Any]], Path]) -> None:
    for found in fsdp2[0]:
        monitored = set(found["monitored"])
        assert not any(count for step, count in enumerate(found["collectives"]) if step not in monitored)
        # the step that tells of it, and those after it, have the one exchange; where modules are measured for the first time one more is
        # gathered in two parts, and exchanged
        assert [found["collectives"][step] for step in (10, 20, 22, 23, 30, 44, 50)] == [1] * 7
        assert found["collectives"][21] == 4


def test_ranks_measure_together_what_the_change_adds(fsdp2: tuple[list[dict[str, Any]], Path]) -> None:
    first, second = fsdp2[0]
    assert [step for step, table in enumerate(first["activations"]) if table is not None] == [*range(21, 28)]
    assert first["activations"] == second["activations"]
    assert first["hooks"] == second["hooks"]
    assert all((count > 0) == (20 <= step < 27) for step, count in enumerate(first["hooks"]))
    without_score = [[key for key in keys if key != "gradmon/spike_score"] for keys in first["keys"]]
    assert without_score[30] == without_score[50] == without_score[10]
    assert set(without_score[22]) > set(without_score[10])
    assert not first["complaints"]


def test_training_is_the_same_on_each_rank_with_and_without(fsdp2: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    plain = on_ranks(2, from_outside, "fsdp2", str(tmp_path), EVERY, {})
    for found, without in zip(fsdp2[0], plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found["parameters"], without["parameters"], strict=True))
        assert without["monitored"] == [*range(0, 60, 10)]


def test_the_run_directory_tells_what_was_in_force(fsdp2: tuple[list[dict[str, Any]], Path]) -> None:
    run = load_run(fsdp2[1] / "run")
    assert run._reader.meta["tune"]["last"]["number"] == 3
    assert run._reader.meta["tune"]["last"]["since"] == 51
    assert run.record(22).context["tuned"]["preset"] == "full"
    assert "tuned" not in run.record(30).context


def test_ranks_that_exchange_nothing_refuse_with_a_reason(tmp_path: Path) -> None:
    first, second = on_ranks(2, from_outside, "ddp", str(tmp_path), EVERY, {13: ["--every 1 --preset full --for 7"]})
    assert first["monitored"] == second["monitored"] == [*range(0, 60, 10)]
    assert not any([*first["collectives"], *second["collectives"], *first["tuned"], *second["tuned"]])
    assert first["complaints"] == {"tune:ranks": 1}
    assert not second["complaints"]
    run = load_run(tmp_path / "run")
    assert "number 1 was refused: the ranks exchange nothing" in run._reader.meta["tune"]["why"]
    assert "waits" not in run._reader.meta["tune"]
    assert all(torch.equal(a, b) for a, b in zip(first["parameters"], second["parameters"], strict=True))


def test_detectors_of_ranks_that_exchange_nothing_stay_the_same() -> None:
    first, second = on_ranks(2, judged)
    assert first["state"] == second["state"]  # with on_spike="raise" and a spike between two monitored steps
    assert first["scores"] == second["scores"]
    assert all(first["scores"][step] is None for step in range(206, 255) if step % 5)


#: Those that hold each choice, and all but a few of the pairs of choices that sixteen hold.
QUICK = (0, 5, 6, 10, 11, 13, 14, 15)


@pytest.mark.parametrize("seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(16)])
def test_whatever_is_changed_when_no_rank_waits_for_another_in_vain(seed: int, tmp_path: Path) -> None:
    tuned, plain = ([*on_ranks(2, at_random, seed, str(tmp_path / str(each)), each)] for each in (True, False))
    for found, without in zip(tuned, plain, strict=True):
        told = found["told"]
        assert all(torch.equal(a, b) for a, b in zip(found["parameters"], without["parameters"], strict=True)), told
        assert found["skipped"] == without["skipped"], told
        assert not [cause for cause in found["complaints"] if cause.startswith(("internal", "plugin", "ranks"))], told
        assert not (found["always"] and "tune:ranks" in found["complaints"]), told
        assert found["hooks"] == without["hooks"], told
    first, second = tuned
    if first["always"]:
        assert first["states"] == second["states"], first["told"]
        assert first["seen"] == second["seen"], first["told"]
    if first["meets"]:
        assert first["last"] == second["last"] or first["last"] is None, first["told"]


def test_what_is_told_once_is_heeded_once() -> None:
    first, second = on_ranks(2, of_a_reset, 60, 12)
    assert first == second == [15]
