"""Whether all ranks take part in an exchange: what each asks of the store, how long it waits, and when late ranks join."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from torch_gradmon.step import exchange
from torch_gradmon.step.exchange import Agreement, BoundedStore

PATIENCE = 0.2
EQUAL = {"every=": "1"}


class _Rank:
    """As much of :class:`Ranks` as an agreement uses."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.members = rank, count, [10 + each for each in range(count)]


class _Store:
    """Counts the requests of all ranks."""

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += name != "has_extended_api"
        return getattr(self._store, name)


class _First:
    """Number of agreements: as in processes of their own."""

    def __getitem__(self, key: object) -> int:
        return 0

    def __setitem__(self, key: object, value: int) -> None:
        pass


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    store, found = HashStore(), Counter[str]()
    monkeypatch.setattr(exchange, "_made", _First())
    monkeypatch.setattr(exchange, "PATIENCE", PATIENCE)
    monkeypatch.setattr(exchange, "store_of", lambda prefix, connected_anew: _Store(PrefixStore(prefix, store), found))
    return found


def _agreements(count: int) -> list[Agreement]:
    return [Agreement(_Rank(rank, count), "values") for rank in range(count)]  # type: ignore[arg-type]


def _ask(agreements: Iterable[Agreement], step: int, cards: Iterable[Mapping[str, str]] = ()) -> list[bool]:
    """What ranks learn that come to this step together."""
    together = list(agreements)
    cards = list(cards) or [EQUAL] * len(together)
    with ThreadPoolExecutor(len(together)) as pool:
        return list(pool.map(lambda one, card: one.ask(lambda: card, step), together, cards))


def test_ranks_that_come_together_ask_four_times_each(requests: Counter[str]) -> None:
    assert _ask(_agreements(8), 0) == [True] * 8
    assert requests.total() == 4 * 8


def test_a_rank_that_waits_asks_nothing_meanwhile(requests: Counter[str]) -> None:
    first, last = _agreements(2)
    waiting = threading.Thread(target=first.ask, args=(lambda: EQUAL, 0))
    waiting.start()
    time.sleep(PATIENCE / 2)
    assert requests == {"set": 1, "add": 1, "wait": 1}
    assert last.ask(lambda: EQUAL, 0)
    waiting.join()
    assert first.is_met


def test_a_late_rank_waits_for_nobody_and_joins_with_all(requests: Counter[str]) -> None:
    *others, late = _agreements(3)
    assert _ask(others, 0) == [False, False]
    assert all("rank 12 did not come" in one.why_not and one.is_open for one in others)
    began = time.monotonic()
    assert _ask([late], 0) == [False]
    assert time.monotonic() - began < PATIENCE / 2
    learned = [_ask([*others, late], step) for step in (1, 2, 3)]
    assert learned == [[False] * 3, [True] * 3, [True] * 3]


@pytest.mark.parametrize("comes", [1, 3, 9, 40])
def test_ranks_meet_in_one_step_whenever_one_comes(requests: Counter[str], comes: int) -> None:
    *others, late = _agreements(3)
    for step in range(comes):
        assert not any(_ask(others, step))
    since = {}
    for step in range(comes, 4 * comes + 4):
        for rank, takes_part in enumerate(_ask([*others, late], step)):
            if takes_part:
                since.setdefault(rank, step)
    assert len(since) == 3
    assert len(set(since.values())) == 1


def test_a_rank_that_never_comes_is_waited_for_once(requests: Counter[str]) -> None:
    others = _agreements(3)[:2]
    _ask(others, 0)
    requests.clear()
    began = time.monotonic()
    for step in range(1, 1000):
        assert not any(_ask(others, step))
    assert all(one.is_alone and one.may_join for one in others)
    assert requests["wait"] == 0
    assert requests.total() < 10 * 10 * len(others)  # ten calls in a thousand steps
    assert time.monotonic() - began < 5


def test_ranks_that_count_other_steps_do_not_meet(requests: Counter[str]) -> None:
    one, other = _agreements(2)
    one.ask(lambda: EQUAL, 0)
    other.ask(lambda: EQUAL, 100)
    for step in range(1, 400):
        assert not one.ask(lambda: EQUAL, step)
        assert not other.ask(lambda: EQUAL, step + 100)
    assert "count their steps differently" in (one.why_not + other.why_not)


def test_the_ranks_that_differ_are_named(requests: Counter[str]) -> None:
    agreements = _agreements(3)
    began = time.monotonic()
    assert _ask(agreements, 0, [EQUAL, {"every=": "5"}, EQUAL]) == [True] * 3
    assert time.monotonic() - began < PATIENCE  # all are there, so nobody waits
    assert [dict(one.differing) for one in agreements] == [{"every=": [11]}] * 3


def test_a_step_has_one_answer_from_its_beginning_to_its_end(requests: Counter[str]) -> None:
    one, other = _agreements(2)
    assert not one.ask(lambda: EQUAL, 0)
    other.ask(lambda: EQUAL, 0)
    _ask([one, other], 1)
    assert not one.ask(lambda: EQUAL, 1)
    assert not one.ask(lambda: EQUAL)
    assert _ask([one, other], 2) == [True, True]


def test_a_store_that_stands_still_holds_a_rank_up_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Frozen:
        def set(self, key: str, value: str) -> None:
            release.wait(20)

    monkeypatch.setattr(exchange, "store_of", lambda prefix, connected_anew: Frozen())
    monkeypatch.setattr(exchange, "STORE_LIMIT", PATIENCE)
    agreement = _agreements(2)[0]
    began = time.monotonic()
    for step in range(50):
        assert not agreement.ask(lambda: EQUAL, step)
    assert time.monotonic() - began < 10 * PATIENCE
    release.set()


def test_of_many_the_first_absent_key_is_found_in_few_requests(requests: Counter[str]) -> None:
    store, keys = BoundedStore("keys"), [str(number) for number in range(1000)]
    for number in range(1000):
        if number not in (613, 900):
            store.call("set", keys[number], "")
    requests.clear()
    assert store.first_absent(keys) == 613
    assert requests.total() <= 10


def test_a_dropped_agreement_ends_its_mark_without_a_collection(requests: Counter[str]) -> None:
    one, _ = _agreements(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_made", Counter())
        one.ask(lambda: EQUAL)  # no assert, which would keep it alive
        store = one._store
        assert store is not None
        gc.disable()
        try:
            del one
        finally:
            gc.enable()
        until = time.monotonic() + 5
        while not store.call("add", "0/ended", 0) and time.monotonic() < until:
            time.sleep(0.01)
        assert store.call("add", "0/ended", 0) == 1


def test_an_agreement_that_has_ended_marks_it_once(requests: Counter[str]) -> None:
    one, _ = _agreements(2)
    one.ask(lambda: EQUAL)  # no assert, which would keep it alive
    store = one._store
    assert store is not None
    one.end()
    del one
    gc.collect()
    time.sleep(PATIENCE)
    assert store.call("add", "0/ended", 0) == 1
