"""Ranks that should be equal: what makes them differ is named, with the tensor and the rank, and what is sound is silent."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore, distributed_c10d

import torch_gradmon as gradmon
from torch_gradmon.plugins.replica_check import Board, Streak, range_of, ranks_apart
from torch_gradmon.statistics import cpp
from torch_gradmon.step import exchange

from . import replica_runs as runs
from . import replica_sound as sound
from .ranks import on_ranks

pytestmark = pytest.mark.ranks

#: Fault, number of ranks, how the model is wrapped, rule, the tensor or number, and the first step.
FAULTS: list[tuple[Callable[..., None], int, Callable[..., runs.Training], dict[str, Any], str, str, int]] = [
    (runs.bypassed, 2, runs.ddp, {}, "ranks-not-synchronised", "up.weight", 0),
    (runs.bypassed, 4, runs.ddp, {}, "ranks-not-synchronised", "up.weight", 0),
    (runs.bypassed_every_second_step, 2, runs.ddp, {}, "ranks-not-synchronised", "up.weight", 1),
    (runs.no_sync_left_on, 2, runs.ddp, {}, "ranks-not-synchronised", "up.weight", 0),
    (runs.gradient_ulp, 2, runs.ddp, {}, "ranks-not-synchronised", "down.weight", runs.FOUND_BY),
    (runs.gradient_flip, 2, runs.ddp, {}, "ranks-not-synchronised", "down.weight", runs.AT),
    (runs.gradient_flip, 4, runs.ddp, {}, "ranks-not-synchronised", "down.weight", runs.AT),
    (runs.lost_transfer, 2, runs.ddp, {}, "ranks-not-synchronised", "up.weight", runs.AT),
    (runs.other_clip, 2, runs.ddp, {}, "ranks-not-synchronised", "up.weight", runs.AT),
    (runs.weight_flip, 2, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.weight_flip, 4, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.weight_ulp, 2, runs.ddp, {}, "ranks-diverged", "down.bias", runs.AT),
    (runs.momentum_flip, 2, runs.ddp, {}, "ranks-diverged", "down.weight/exp_avg", runs.AT + 1),
    (runs.lost_state, 2, runs.ddp, {}, "ranks-diverged", "up.weight/exp_avg", runs.AT + 1),
    (runs.own_rate, 4, runs.ddp, {}, "ranks-diverged", "learning rate of group 0", runs.AT),
    (runs.own_decay, 2, runs.ddp, {}, "ranks-diverged", "up.weight", 1),
    (runs.own_betas, 2, runs.ddp, {}, "ranks-diverged", "up.weight/exp_avg", 1),
    (runs.other_checkpoint, 2, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.swapped_rows, 2, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.nothing, 2, runs.by_hand, {"own_seed": True}, "ranks-diverged", "up.weight", 0),
    (runs.weight_flip, 2, runs.by_hand, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.gradient_flip, 2, runs.by_hand, {}, "ranks-not-synchronised", "down.weight", runs.AT),
    (runs.in_a_closure, 2, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.overflowed_when_due, 2, runs.ddp, {}, "ranks-diverged", "up.weight", runs.AT),
    (runs.other_frozen_part, 2, runs.ddp, {}, "ranks-diverged", "frozen", 0),
    (runs.weight_flip_of_averages, 2, runs.local_sgd, {}, "ranks-diverged", "up.weight", runs.FOUND_BY),
    (runs.weight_flip, 4, runs.hsdp, {}, "ranks-diverged", "up.weight", runs.FOUND_BY),
    (runs.momentum_flip, 4, runs.hsdp, {}, "ranks-diverged", "down.weight/exp_avg", runs.FOUND_BY),
    (runs.lost_transfer, 4, runs.hsdp, {}, "ranks-not-synchronised", "up.weight", runs.FOUND_BY),
    (runs.drifting_norm, 2, runs.tensor_parallel, {}, "ranks-diverged", "norm.weight", runs.AT),
    (runs.drifting_norm, 4, runs.tensor_parallel, {}, "ranks-diverged", "norm.weight", runs.AT),
    (runs.lost_broadcast, 2, runs.ddp, {}, "ranks-diverged", "scale", runs.FOUND_BY),
    (runs.own_scale, 2, runs.scaled, {}, "ranks-diverged", "scale of the GradScaler", runs.AT + 1),
]
#: So little that it is lost where statistics are rounded: stock operations sum in float32, and the state shows it one step later.
_SLIGHT = (runs.gradient_flip, runs.own_betas, runs.swapped_rows)
_ROUNDED = cpp.found()[0] is None
_IDS = [f"{fault.__name__}-{make.__name__}-{count}" for fault, count, make, *_ in FAULTS]


@pytest.mark.parametrize(("fault", "count", "make", "made_with", "rule", "name", "first"), FAULTS, ids=_IDS)
def test_a_fault_is_named_within_one_interval(
    fault: Callable[..., None],
    count: int,
    make: Callable[..., runs.Training],
    made_with: dict[str, Any],
    rule: str,
    name: str,
    first: int,
) -> None:
    results = on_ranks(count, runs.train, make, fault, {}, made_with)
    for result in results:
        (fact,) = result["facts"]
        if _ROUNDED and fault in _SLIGHT:
            assert fact["rule"].startswith("ranks-")
            assert first <= fact["first"] <= runs.FOUND_BY
            continue
        assert (fact["rule"], fact["where"], fact["first"]) == (rule, [name], first)
        # of two ranks that differ, either may be the odd one
        evidence = fact["evidence"]
        is_certain = evidence["ranks like it"] < evidence["ranks like the other"]
        assert evidence["rank"] == 1 or (not is_certain and evidence["unlike rank"] == 1)
        # what no optimizer has is compared once
        assert fact["last"] >= runs.FOUND_BY or name == "frozen"
        ((shown, where, _),) = result["findings"]
        assert (shown, where) == (rule, name)
    # the first rank warns, once
    assert [len(result["warnings"]) for result in results] == [1] + [0] * (count - 1)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (runs.ddp, 2),
        (runs.ddp, 4),
        (runs.by_hand, 2),
        (runs.hsdp, 4),
        (runs.tensor_parallel, 2),
        (runs.plain_parts, 4),
        (runs.scaled, 2),
    ],
)
def test_sound_trainings_are_silent(make: Callable[..., runs.Training], count: int) -> None:
    for result in on_ranks(count, runs.train, make, runs.nothing, {}, {}):
        assert result == {"facts": [], "findings": [], "warnings": []}


def test_the_same_batches_on_all_ranks_are_named() -> None:
    for result in on_ranks(2, runs.train, runs.ddp, runs.same_batches, {}, {}):
        (fact,) = result["facts"]
        assert (fact["rule"], fact["first"], fact["evidence"]) == ("same-batches-on-all-ranks", runs.EVERY, {"ranks": 2.0})


def test_two_models_with_equal_names_are_compared_each_within_its_group() -> None:
    results = on_ranks(4, runs.train, runs.group_of_two, runs.weight_flip, {}, {})
    assert [[(fact["rule"], fact["where"], fact["first"]) for fact in result["facts"]] for result in results] == [
        [("ranks-diverged", ["up.weight"], runs.AT)],
        [("ranks-diverged", ["up.weight"], runs.AT)],
        [],
        [],
    ]
    assert "rank 1 is unlike rank 0 in up.weight from step 11 on, and either may be the wrong one" in results[0]["warnings"][0]


@pytest.mark.skipif(_ROUNDED, reason="no kernel: stock operations round the bit away")
@pytest.mark.parametrize(("recorded", "first"), [(0, runs.FOUND_BY), (30, runs.AT)])
def test_the_flight_recorder_has_the_step_that_was_not_monitored(recorded: int, first: int) -> None:
    options = {"every": 100, "spike_capture": gradmon.SpikeCapture(before=recorded)}
    for result in on_ranks(2, runs.train, runs.ddp, runs.gradient_flip, options, {}):
        (fact,) = result["facts"]
        # the gradient itself is gone by the check, and only the recorder has had it
        assert (fact["rule"], fact["first"]) == ("ranks-not-synchronised" if recorded else "ranks-diverged", first)
        assert not recorded or fact["where"] == ["down.weight"]


def test_monitor_made_before_the_process_group_compares_ranks() -> None:
    for found in on_ranks(2, runs.train_with_an_early_monitor):
        ((rule, where),) = found
        assert (rule, where) == ("ranks-diverged", "up.weight")


def test_parts_of_a_model_are_compared_with_their_copies() -> None:
    results = on_ranks(4, runs.train, runs.plain_parts, runs.flip_of_a_part, {}, {})
    for result in results:
        (fact,) = result["facts"]
        assert (fact["rule"], fact["where"], fact["first"]) == ("ranks-diverged", ["up.weight"], runs.AT)
        assert {fact["evidence"]["rank"], fact["evidence"]["unlike rank"]} == {0.0, 2.0}


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_whose_losses_are_far_from_all_others_is_named_after_three_checks(count: int) -> None:
    results = on_ranks(count, runs.train_apart, 6.0, 24)
    for result in results:
        facts = {fact["where"][0]: fact for fact in result["facts"]}
        # the loss, and the norm of the gradient of its own batches, by one rule: the first is shown
        assert [*facts] == ["loss"]
        assert {fact["rule"] for fact in facts.values()} == {"one-rank-apart"}
        assert facts["loss"]["evidence"]["rank"] == 1.0
        assert facts["loss"]["evidence"]["median there"] > 10 * facts["loss"]["evidence"]["median elsewhere"]
        assert (facts["loss"]["first"], facts["loss"]["last"]) == (24, 96)
        assert result["findings"] == [("one-rank-apart", "loss", "warning")]
    (message,) = results[0]["warnings"]
    assert "loss of rank 1: " in message
    assert "in steps 24 to 72" in message


def test_ranks_with_data_of_one_kind_or_a_loss_that_is_merged_are_not_apart() -> None:
    alike = {"facts": [], "findings": [], "warnings": []}
    assert on_ranks(2, runs.train_apart, 1.0, 24) == [alike] * 2


def test_autocorrelated_losses_are_apart_in_single_checks_only() -> None:
    draws, once, named = random.Random(0), 0, 0
    for _ in range(40):
        level, streaks = [draws.gauss(0, 1) for _ in range(2)], dict[str, Streak]()
        for check in range(10):
            values: list[list[float]] = [[] for _ in level]
            for _ in range(100):
                level = [0.99 * each + 0.141 * draws.gauss(0, 1) for each in level]
                for of, each in zip(values, level, strict=True):
                    of.append(each + 0.3 * draws.gauss(0, 1))
            ranges = {rank: {"loss": each} for rank, of in enumerate(values) if (each := range_of(of)) is not None}
            assert len(ranges) == 2
            named += len(ranks_apart(100 * check, ranges, streaks, range(2)))
            once += "loss" in streaks
    assert once
    assert not named


@pytest.mark.parametrize(
    "options", [{}, {"checks": gradmon.Checks(replicas_every=2 * runs.EVERY)}], ids=["without", "other options"]
)
def test_it_is_said_that_ranks_are_not_compared_and_nothing_warns(options: dict[str, Any]) -> None:
    first, _ = on_ranks(2, runs.train_beside_none, options)
    ((rule, severity, evidence),) = first["findings"]
    assert (rule, severity) == ("ranks-not-compared", "info")
    assert evidence == {"times seen": 1.0, "ranks without an answer": 1.0, "the first of them": 1.0, "ranks": 2.0}
    assert not [text for text in first["warnings"] if "gradmon" in text]


def _keeps_alive(rank: int) -> bool:
    training = runs.ddp(rank)
    monitor = gradmon.watch(training.model, training.optimizer, checks=gradmon.Checks(replicas_every=runs.EVERY))
    reference = weakref.ref(training.model)
    training.model = training.forward = training.inner  # the last references to the wrapper
    gc.collect()
    is_alive = reference() is not None
    monitor.detach()
    return is_alive


def test_the_check_does_not_keep_the_wrapper_alive() -> None:
    assert on_ranks(2, _keeps_alive) == [False, False]


def test_a_resumed_run_is_compared_at_once() -> None:
    results = on_ranks(2, runs.train, runs.by_hand, runs.nothing, {"start_step": 1001}, {"own_seed": True})
    assert [[(fact["rule"], fact["first"]) for fact in result["facts"]] for result in results] == [[("ranks-diverged", 1001)]] * 2


@pytest.mark.parametrize("program", ["reduces_itself", "own_state"])
def test_optimizers_that_exchange_or_share_out_by_themselves_are_sound(program: str) -> None:
    for found in on_ranks(2, sound.run_all, [program]):
        assert found == {program: []}


def test_in_a_sound_run_each_rank_leaves_one_digest_a_check_however_many_tensors_there_are() -> None:
    first, other = on_ranks(2, sound.run_counted)
    checks = 1 + sound.STEPS // runs.EVERY
    # the first rank also leaves that there is no question
    assert [name for name, _ in first] == ["digests", "question"] * checks
    assert [name for name, _ in other] == ["digests"] * checks
    assert all(size < 250 for _, size in (*first, *other))


def test_a_rank_without_a_monitor_stops_nobody_and_nothing_is_found() -> None:
    assert on_ranks(2, sound.run_one_sided) == [[], []]


def test_a_wait_of_another_thread_on_the_store_does_not_hold_up_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", server.port, 1, is_master=False)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: PrefixStore("default_pg", client))
    board, began = Board("subject", 0, 1), threading.Event()

    def wait() -> None:
        began.set()
        client.wait(["never"], timedelta(seconds=20))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    began.wait()
    board.put("digests", {"step": 3})
    assert board.read("digests", [0], 3) == {0: {"step": 3}}
    assert waiter.is_alive()
    server.set("never", "now")  # lets the thread go
    waiter.join()


@pytest.mark.parametrize("count", [2, 4])
def test_sound_programs_of_all_kinds_are_silent(count: int) -> None:
    names = [*sound.PROGRAMS] if count == 2 else [*list(sound.PROGRAMS)[::4], *sound.WITH_COPIES]
    for found in on_ranks(count, sound.run_all, names, limit=300.0):
        assert found == {name: [] for name in names}


def test_one_silent_rank_is_found_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = HashStore(), list[str]()

    class Counting(PrefixStore):
        def check(self, keys: list[str]) -> bool:
            asked.append("check")
            return super().check(keys)

        def add(self, key: str, amount: int) -> int:
            asked.append("add")
            return super().add(key, amount)

    monkeypatch.setattr(exchange, "store_of", lambda prefix, connected_anew: Counting(prefix, store))
    boards = [Board("subject", rank, 64) for rank in range(64)]
    for rank, board in enumerate(boards):
        board.has_changed()
        if rank != 41:
            for step in range(3):
                board.put("digests", {"step": step})
    asked.clear()
    assert boards[0].silent("digests") == (1, 41)
    assert asked == ["add"] + ["check"] * 6
    boards[41].put("digests", {"step": 2})
    asked.clear()
    assert boards[0].silent("digests") == (0, -1)
    assert asked == ["add"]


def _beside_none(rank: int) -> int:
    """How often this rank asks which ranks are silent; the last one has no monitor."""
    asked = 0

    def silent(board: Board, name: str) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return 1, 2

    training = runs.ddp(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "silent", silent)
        monitor = (
            gradmon.watch(training.model, training.optimizer, checks=gradmon.Checks(replicas_every=runs.EVERY))
            if rank < 2
            else None
        )
        for _ in range(60):
            training.optimizer.zero_grad()
            training.model(torch.randn(4, 6)).square().mean().backward()
            training.optimizer.step()
        if monitor is not None:
            monitor.detach()
    return asked


def test_only_the_first_rank_asks_which_are_silent() -> None:
    first, *others = on_ranks(4, _beside_none)
    assert first
    assert others == [0, 0, 0]


def _after_the_end_of_another(rank: int) -> tuple[list[str], dict[str, int]]:
    """The connection to the store is lost while ranks wait for a verdict."""
    training = runs.ddp(rank)
    monitor = gradmon.watch(training.model, training.optimizer, checks=gradmon.Checks(replicas_every=runs.EVERY))

    def lost(*args: Any) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    with warnings.catch_warnings(record=True) as warned, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(Board, "has_changed", lost)
        for _ in range(3):
            training.optimizer.zero_grad()
            training.model(torch.randn(4, 6)).square().mean().backward()
            training.optimizer.step()
    complaints = monitor.warning_counts()
    monitor.detach()
    return [str(each.message) for each in warned], complaints


def test_a_store_whose_process_has_ended_is_no_failure() -> None:
    for said, complaints in on_ranks(2, _after_the_end_of_another):
        assert not [text for text in said if "gradmon" in text]
        assert not complaints
