"""Never one rank alone: a step is skipped, stopped or taken back on all ranks, whichever of them saw the spike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_gradmon import Skip

from .ranks import on_ranks
from .skip_ranks import (
    POISONED,
    collectives,
    disagreeing,
    poisoned,
    refused_by_one,
    stopped,
    went_back,
    with_a_failing_rule,
    with_other_snapshots,
)

pytestmark = pytest.mark.ranks

EXPECTED = [step in POISONED for step in range(8)]


@pytest.mark.parametrize("how", ["loss", "large", "gradient", "logged", "rule"])
@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp2"])
def test_what_one_rank_sees_all_skip(wrap: str, how: str) -> None:
    found = on_ranks(2, poisoned, wrap, how)
    for rank, (flags, is_same, reasons) in enumerate(found):
        assert flags == EXPECTED, f"rank {rank}"
        assert is_same
        assert all(bool(reason) == bad for reason, bad in zip(reasons, EXPECTED, strict=True))
    assert found[0][2] == found[1][2]  # and tell the same
    if how == "gradient" and wrap == "plain":
        assert found[0][2][POISONED[0]] == "rank 1: 1 elements of the gradients are NaN or infinite"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_all_stop_in_the_same_step_with_nothing_changed(wrap: str) -> None:
    assert on_ranks(2, stopped, wrap) == [(5, True)] * 2


@pytest.mark.parametrize("policy", [Skip(), "warn"])
def test_a_rule_that_fails_on_one_rank_changes_nothing_of_what_ranks_exchange(policy: Any) -> None:
    first, second = on_ranks(2, with_a_failing_rule, policy)
    assert first[0] == second[0] == [step == 5 and policy != "warn" for step in range(8)]
    assert second[1]["detector:loss"] == 1
    assert "detector:loss" not in first[1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_one_ranks_scaler_refuses_is_skipped_by_the_others(fused: bool) -> None:
    first, second = on_ranks(2, refused_by_one, "ddp", fused)
    assert first[0] == [False, False, True, False, False]
    assert first[1]
    assert second[1]
    assert first[2] == second[2] == (5, 4, 1, 0)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_all_go_back_together(wrap: str, on_disk: bool, tmp_path: Path) -> None:
    assert on_ranks(2, went_back, wrap, str(tmp_path) if on_disk else "", False) == [([10], True)] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_one_rank_has_lost_is_gone_back_to_by_none(tmp_path: Path) -> None:
    """The step is skipped then, on all ranks."""
    found = on_ranks(2, went_back, "ddp", str(tmp_path), True)
    assert [went for went, _ in found] == [[], []]


@pytest.mark.parametrize(("what", "expected"), [("taking", [5]), ("other", [10]), ("directory", [10])])
def test_where_snapshots_differ_all_go_back_to_one_that_all_have(what: str, expected: list[int], tmp_path: Path) -> None:
    assert on_ranks(2, with_other_snapshots, what, str(tmp_path)) == [(expected, True)] * 2


@pytest.mark.parametrize("how", ["none", "warns", "otherwise"])
def test_where_not_all_would_skip_none_does_and_nobody_hangs(how: str) -> None:
    first, second = on_ranks(2, disagreeing, how)
    assert first[0] == second[0] == [False] * 4
    assert first[1]["ranks:decisions"] == 1


@pytest.mark.parametrize(("wrap", "expected"), [("ddp", [1, 1, 1, 1, 3, 1]), ("fsdp2", [3, 3, 3, 3, 5, 3])])
def test_a_decision_costs_one_small_collective_and_where_gradients_are_spread_another(wrap: str, expected: list[int]) -> None:
    """Two more where there is a spike, to tell each other why."""
    base = on_ranks(2, collectives, wrap, None)[0]
    calls = on_ranks(2, collectives, wrap, Skip())[0]
    own = [after - before for before, after in zip(base, calls, strict=True)]
    assert own == [{"ddp": 1, "fsdp2": 2}[wrap] + (2 if step == 4 else 0) for step in range(6)]
