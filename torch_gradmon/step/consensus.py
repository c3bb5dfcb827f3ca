"""Whether all ranks take part in an exchange. No rank has to answer, so none can block the others.

Ranks meet in the key-value store of ``torch.distributed``. Each leaves a card and marks its arrival; the last one to arrive compares the
cards and stores the answer, on which the others wait in one blocking call. A rank whose patience ends stores that some are absent. Either
is written by ``compare_set``, which keeps the first answer, so all ranks get the same one.

Where some are absent nobody waits again, and the ranks are called in later steps: each leaves a card with a later step in which it will
look. If all have come until the first of them looks, they meet in the last of these steps, which all know by then, and wait there as in
the beginning. So whatever a rank has seen, all enter an exchange at the same moment, or none does.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from ..core.compat import second_connection
from ..core.process import HomeProcess
from .ranks import Ranks, digest_of

#: Seconds that a rank waits for the others; usually milliseconds, since all come from the same backward pass. One that comes later joins in
#: a later step.
PATIENCE = 20.0
#: Seconds within which the store answers a request; torch's own limit holds for waits only.
STORE_LIMIT = 5.0
#: The same once this rank has arrived: the others may enter the exchange, and would wait for it as long as a collective does.
_ARRIVED_LIMIT = 600.0
#: A part of the cards: it tells where the card's writer looks for the answer.
_LOOKS = "looks"


@dataclass(frozen=True)
class Answer:
    """The answer to one call, the same on all ranks.

    Attributes:
        absent: how many ranks had not come.
        first: of them, by its number among all processes.
        differing: by the part of the cards, the ranks whose part is not that of most.
        step: the last of the steps in which ranks look for the answer.
    """

    absent: int = 0
    first: int = -1
    differing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step: int = 0


def within(limit: float, request: Callable[[], Any]) -> Any:
    """What ``request`` returns; on a thread of its own, since most requests to a store wait for ever.

    Raises:
        TimeoutError: it has not returned after ``limit`` seconds.
    """
    found: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(request())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="torch_gradmon store", daemon=True)
    thread.start()
    thread.join(limit)
    if failed:
        raise failed.pop()  # kept here, it would be in a cycle with this frame and all that called it
    if not found:
        raise TimeoutError(f"the key-value store of torch.distributed gave no answer in {limit:g} s")
    return found[0]


class BoundedStore:
    """A key-value store whose requests end in time.

    Args:
        prefix: of all keys.
        connected_anew: by a connection of its own: a client serves one request at a time, and another thread may wait for an answer.

    Raises:
        ImportError, RuntimeError, ValueError: there is no store, or none that can be used beside the training.
        TimeoutError: the store did not answer in time.
    """

    def __init__(self, prefix: str, connected_anew: bool = True) -> None:
        self._store = within(STORE_LIMIT, lambda: store_of(prefix, connected_anew))
        self._is_waiting = False

    @property
    def has_many(self) -> bool:
        """Whether it can return several values at once."""
        return bool(getattr(self._store, "has_extended_api", bool)())

    def call(self, method: str, *args: Any, limit: float | None = None) -> Any:
        """What the store's method returns; ``limit``: in seconds, by default :data:`STORE_LIMIT`.

        Raises:
            TimeoutError: no answer has come, or none has yet to the request before.
        """
        if self._is_waiting:
            raise TimeoutError("the key-value store of torch.distributed has not answered an earlier request")
        return within(STORE_LIMIT if limit is None else limit, lambda: self._asked(method, args))

    def _asked(self, method: str, args: tuple[Any, ...]) -> Any:
        self._is_waiting = True
        try:
            return getattr(self._store, method)(*args)
        finally:
            self._is_waiting = False

    def values(self, keys: Sequence[str], limit: float | None = None) -> list[bytes]:
        """The values of keys that exist."""
        if self.has_many:
            found: list[bytes] = self.call("multi_get", list(keys), limit=limit)
            return found
        return [self.call("get", key, limit=limit) for key in keys]

    def first_absent(self, keys: Sequence[str], limit: float | None = None) -> int:
        """The place of the first key that does not exist; there must be one. Takes log2 requests."""
        low, high = 0, len(keys)  # those before `low` exist; one before `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.call("check", list(keys[low:middle]), limit=limit) else (low, middle)
        return low


class Agreement:
    """Whether all ranks take part in one exchange.

    Args:
        ranks: those that should.
        what: names the exchange; ranks count the agreements of one name that each has made.

    Attributes:
        is_met: all ranks have come, and do so in each step from now on.
        is_open: ranks that were absent may still turn out to be late.
        differing: by the part of the cards, the ranks whose part is not that of most.
        why_not: a reason that names the ranks; empty before they were called, and where all take part.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._ranks, self._what = ranks, what
        self._store: BoundedStore | None = None
        self._number = 0  # of the agreement, among those of this name
        self._call = 0  # all before it were answered: some were absent
        self._looks: int | None = None  # for the answer to this call, in this step
        self._meets: int | None = None  # in this step
        self._step: int | None = None  # the last one in which this was asked
        self._is_asked = self._is_over = self._has_ended = False
        self._process = HomeProcess()
        self.is_met, self.is_open = False, True
        self.differing: Mapping[str, Sequence[int]] = {}
        self.why_not = ""

    @property
    def is_alone(self) -> bool:
        """Whether ranks were absent again when they were called, though they may still join."""
        return not (self.is_met or self.is_open)

    @property
    def may_join(self) -> bool:
        """Whether absent ranks are called again."""
        return not (self.is_met or self._is_over)

    def ask(self, card: Callable[[], Mapping[str, str]], step: int | None = None) -> bool:
        """Whether all ranks take part; the same on all of them, and the same all through a step.

        Args:
            card: what ranks should have in common, by part: a digest of each.
            step: the number of the step in flight; without one nothing changes after the first time, when this waits for the others.
        """
        if self.is_met or self._is_over or (self._is_asked and (step is None or step == self._step)):
            return self.is_met
        try:
            if not self._is_asked:
                self._is_asked = True
                self._begin(card())
            elif step is not None:
                self._go_on(card, step)
        except (RuntimeError, TimeoutError) as error:  # of the store
            self._is_over, self.is_open = True, False
            self.why_not = f"it is not known whether all ranks take part: {error}"
        self._step = step
        return self.is_met

    def end(self) -> None:
        """This rank takes part no longer. A rank that comes later begins anew with those that come then."""
        if self._store is not None and not (self.is_met or self._has_ended):
            self._has_ended = True
            _mark_ended(self._store, self._number)

    def __del__(self) -> None:
        """As :meth:`end` for a monitor that nobody detached, on a thread that nobody waits for: a collection may come at any moment."""
        if self._store is not None and not (self.is_met or self._has_ended or self._process.is_forked):
            with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
                _thread.start_new_thread(_mark_ended_quietly, (self._store, self._number))

    def _begin(self, card: Mapping[str, str]) -> None:
        prefix = f"torch_gradmon/{self._what}-{digest_of(self._ranks.members)}"
        try:
            self._store = BoundedStore(prefix)
        except (ImportError, RuntimeError, ValueError, TimeoutError):
            try:  # perhaps this rank alone has no second connection
                self._store = BoundedStore(prefix, connected_anew=False)
            except (
                ImportError,
                RuntimeError,
                ValueError,
            ):  # a private API, and some backends have no store: so it is on all ranks
                self.is_met, self.is_open = True, False
                return
        has_ended = True
        while has_ended:  # by all ranks that had come: as in an earlier training, with a monitor on some ranks only
            self._number = _made[self._what, tuple(self._ranks.members)]
            _made[self._what, tuple(self._ranks.members)] += 1
            answer = self._meet("0", card)
            if not answer.absent:
                return
            has_ended = self._store.call("add", f"{self._number}/ended", 0) >= self._ranks.count - answer.absent
        self._call = 1

    def _go_on(self, card: Callable[[], Mapping[str, str]], step: int) -> None:
        while self._meets is None:
            if self._looks is None:
                self._looks = step + (1 << self._call - 1)  # ever more seldom
                answer = self._arrive(str(self._call), {**card(), _LOOKS: str(self._looks)})
            elif step < self._looks:
                return
            else:
                answer = self._answer(str(self._call))
            if answer is None:
                return
            if answer.absent:
                self._miss(answer)
                self._call, self._looks, self.is_open = self._call + 1, None, False
            else:
                self._meets = answer.step
        if step >= self._meets and self._meet(f"{self._call} in step", card()).absent:
            # they count differently, so they cannot enter anything together
            self._is_over, self.is_open = True, False
            self.why_not = f"{self.why_not} in step {self._meets}, in which the others were: ranks count their steps differently"

    def _miss(self, answer: Answer) -> None:
        self.why_not = (
            f"rank {answer.first}{f' and {answer.absent - 1:,} more' * (answer.absent > 1)} did not come to the exchange"
        )

    def _meet(self, call: str, card: Mapping[str, str]) -> Answer:
        """Wait for the others."""
        answer = self._arrive(call, card)
        if answer is None:
            answer = self._answer(call, PATIENCE)
        if answer.absent:
            self._miss(answer)
        else:
            self.is_met, self.is_open, self.differing, self.why_not = True, False, answer.differing, ""
        return answer

    def _arrive(self, call: str, card: Mapping[str, str]) -> Answer | None:
        """Leave this rank's card. Returns the answer if this rank is the last to come."""
        assert self._store is not None
        count = self._ranks.count
        try:
            self._store.call("set", f"{self._number}/{call}/{self._ranks.rank}", json.dumps(card))
        except TimeoutError:  # not counted yet, so the answer will be that this rank is absent
            return Answer(1, self._ranks.members[self._ranks.rank])
        if self._store.call("add", f"{self._number}/{call}/here", 1, limit=_ARRIVED_LIMIT) < count:
            return None
        raw = self._store.values([f"{self._number}/{call}/{rank}" for rank in range(count)], _ARRIVED_LIMIT)
        return self._first(call, self._compared([json.loads(each) for each in raw]))

    def _compared(self, cards: Sequence[dict[str, str]]) -> Answer:
        step = max(int(card.pop(_LOOKS, 0)) for card in cards)
        differing: dict[str, list[int]] = {}
        for part in dict.fromkeys(part for card in cards for part in card):
            usual = Counter(card.get(part) for card in cards).most_common(1)[0][0]
            if others := [rank for rank, card in enumerate(cards) if card.get(part) != usual]:
                differing[part] = [self._ranks.members[rank] for rank in others]
        return Answer(differing=differing, step=step)

    def _answer(self, call: str, patience: float | None = None) -> Answer:
        """The answer to a call that this rank has come to; where there is none yet, not after ``patience``, some are absent."""
        assert self._store is not None
        key = f"{self._number}/{call}/answer"
        if patience is None:
            is_there = self._store.call("check", [key], limit=_ARRIVED_LIMIT)
        else:
            try:
                self._store.call("wait", [key], timedelta(seconds=patience), limit=_ARRIVED_LIMIT)
                is_there = True
            except (
                RuntimeError,
                ValueError,
            ):  # DistStoreError, if the wait took too long; the request below shows if it is worse
                is_there = False
        if is_there:
            return Answer(**json.loads(self._store.call("get", key, limit=_ARRIVED_LIMIT)))
        count = self._ranks.count
        absent = count - self._store.call("add", f"{self._number}/{call}/here", 0, limit=_ARRIVED_LIMIT)
        cards = [f"{self._number}/{call}/{rank}" for rank in range(count)]
        first = self._store.first_absent(cards, _ARRIVED_LIMIT) if absent else -1
        return self._first(call, Answer(max(absent, 1), self._ranks.members[first]))

    def _first(self, call: str, answer: Answer) -> Answer:
        """The first answer that any rank gives, perhaps this one."""
        assert self._store is not None
        kept = self._store.call(
            "compare_set", f"{self._number}/{call}/answer", "", json.dumps(asdict(answer)), limit=_ARRIVED_LIMIT
        )
        return Answer(**json.loads(kept))


def _mark_ended(store: BoundedStore, number: int) -> None:
    with contextlib.suppress(RuntimeError, TimeoutError):
        store.call("add", f"{number}/ended", 1)


def _mark_ended_quietly(store: BoundedStore, number: int) -> None:
    with contextlib.suppress(Exception):  # nobody is there to hear of it
        _mark_ended(store, number)


#: Number of agreements by name and ranks, in this process.
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def named(ranks: Sequence[int]) -> str:
    """``"rank 3"``, or ``"ranks 1, 2, 3 and 4 more"``."""
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:3]))}{more}"


def store_of(prefix: str, connected_anew: bool = False) -> Any:
    """The key-value store of ``torch.distributed``, below ``prefix``; ``connected_anew``: with a connection of its own.

    Raises:
        ImportError, RuntimeError, ValueError: a private name is gone, or there is no store, or none that can be connected.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = _get_default_store()
    return PrefixStore(prefix, second_connection(store) if connected_anew else store)
