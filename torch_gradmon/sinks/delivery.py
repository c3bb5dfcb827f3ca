"""Deliver rows to a sink: failed calls are retried, and a sink that keeps failing or delays training is dropped."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..core.errors import GradmonWarning, WarningLog, error_text

# --- Optional packages behind sinks ---


def require(package: str, sink: object) -> None:
    """Raise ImportError unless ``package`` is installed for ``sink``."""
    if find_spec(package) is None:
        raise ImportError(f"{type(sink).__name__} needs {package}: pip install {package}")


# --- Unique names for trackers that restrict length or characters ---


class KeyRewriter:
    """Gives each key a unique name of ``longest`` characters at most; ``clean`` may map two keys to one name."""

    def __init__(self, longest: int, clean: Callable[[str], str] = str) -> None:
        self._longest, self._clean = longest, clean
        self._names: dict[str, str] = {}  # by key
        self._taken: set[str] = set()

    def __call__(self, key: str) -> str:
        """The name for ``key``, always the same."""
        if key not in self._names:
            name = start = self._clean(key)
            number = zlib.crc32(key.encode())
            while len(name) > self._longest or name in self._taken:
                mark = f"_{number:08x}"
                name = start[: self._longest - len(mark)] + mark
                number = (number + 1) % 2**32
            self._names[key] = name
            self._taken.add(name)
        return self._names[key]


# --- delivery ---


class Outbox:
    """Items that wait, ``most`` of them, and a daemon thread that begins with the first and calls ``take`` with each.

    ``take`` also gets the event that :meth:`close` sets, from which on there is no time for a pause.
    """

    def __init__(self, name: str, most: int, take: Callable[[Any, threading.Event], None]) -> None:
        self._name, self._most, self._take = name, most, take
        self._thread: threading.Thread | None = None

    def put(self, item: Any) -> None:
        """Raises queue.Full, and RuntimeError where no thread can begin, as while the interpreter ends. Never waits."""
        if self._thread is None or not self._thread.is_alive():
            # a blocked thread keeps its queue: two threads must not share one
            self._queue, self._ending = queue.Queue[Any](self._most), threading.Event()
            thread = threading.Thread(target=self._work, args=(self._queue, self._ending), name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._queue.put_nowait(item)

    @property
    def is_own_thread(self) -> bool:
        """Whether the thread asks."""
        return threading.current_thread().name == self._name

    def close(self, seconds: float) -> list[Any] | None:
        """Wait for what waits, for so long at most. Returns what is left if the thread is blocked, None in it, where nobody can wait."""
        thread, self._thread = self._thread, None
        if thread is None:
            return []
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if thread is threading.current_thread():
            return None
        thread.join(seconds)
        return [*self._queue.queue] if thread.is_alive() else []

    def _work(self, items: queue.Queue[Any], ending: threading.Event) -> None:
        while self._took(items.get(), ending) and not (ending.is_set() and items.empty()):
            pass  # no local variable holds an item here: it would keep its sink alive until the next one comes

    def _took(self, item: Any, ending: threading.Event) -> bool:
        if item is not None:
            self._take(item, ending)
        return item is not None


#: Consecutive failures after which a sink is dropped.
PATIENCE = 3
#: A call delays training if it takes longer than this, in seconds, and longer than the time since the last call.
SLOW = 0.5
#: Rows that may wait for a thread.
CAPACITY = 1000
#: Seconds before a thread retries, times the number of failures.
_PAUSE = 0.5
#: Seconds that closing waits for a thread.
_LAST = 30.0


class PendingCall(NamedTuple):
    """A call to make for a step; ``rows`` is 1 for a row and 0 for a call that does not count as one."""

    step: int
    call: Callable[..., object]
    values: tuple[dict[str, float], ...] = ()  # a copy of each is an argument, since a sink may change it and fail
    rows: int = 1


class Delivery:
    """Calls a sink, in the training thread or in a thread of its own, for which training waits at the end only.

    A failed call is retried before the next one, in order; so a sink may get a row twice. ``complaints`` counts lost rows under
    ``cause``, and warns once; the text of ``kept`` says by then where all lost rows are stored as well, empty where they are not.
    """

    def __init__(self, name: str, complaints: WarningLog, kept: object = "", thread: bool = False) -> None:
        self.name = name
        self.cause = complaints.new_cause(f"sink:{name}")
        self.dropped = False
        self._complaints = complaints
        self._kept = kept
        self._waiting: deque[PendingCall] = deque()
        self._error: str | None = None
        self._failures = self._slow = 0
        self._returned = -SLOW
        self._warned = False
        self._outbox = Outbox(f"torch_gradmon {name}", CAPACITY, self._send_queued) if thread else None

    def put(self, pending: PendingCall) -> None:
        """Make the call now, or when the sink works again, or queue it for the thread. Never raises."""
        if self.dropped:
            self.lose(pending.rows)
        elif self._outbox is None:
            self._waiting.append(pending)
            started = time.perf_counter()
            self._send(self._waiting)
            idle, took = started - self._returned, time.perf_counter() - started
            self._slow = self._slow + 1 if took > max(SLOW, idle) else 0
            if self._slow >= PATIENCE and not self.dropped:
                words = f"took {took:.1f} s for a row, longer than training since the row before, {PATIENCE} times in a row, and is dropped"
                self._drop(self._waiting, f"{words}; add_sink(..., thread=True) calls it in a thread of its own")
            self._returned = time.perf_counter()
        else:
            try:
                self._outbox.put(pending)
            except queue.Full:
                words = (
                    f"the sink {self.name} is so slow that {CAPACITY} rows wait for it; from step {pending.step} on rows are lost"
                )
                self.lose(pending.rows, words)

    def close(self) -> bool:
        """Retry what waits once, or wait for the thread, for half a minute at most. Never raises. Returns whether no call is running."""
        if self._outbox is None:
            self._send(self._waiting)
            if lost := _clear(self._waiting):
                self.lose(lost, f"the last {lost} row{'s' * (lost > 1)} for the sink {self.name} could not be sent", self._error)
            return True
        left = self._outbox.close(_LAST)
        if left:
            lost = 1 + sum(pending.rows for pending in left if pending is not None)  # and the one that blocks
            self.lose(lost, f"the sink {self.name} did not take its last {lost} rows within {_LAST:.0f} s")
        return left == []

    def lose(self, rows: int, message: str = "", error: BaseException | str | None = None) -> None:
        """Count lost rows; warn with the first message, and with that of dropping the sink."""
        self._complaints.counts[self.cause] += rows
        if message and not self._warned:
            self._warned = True
            kept = str(self._kept)
            try:
                self._complaints.warn(f"{message}; all rows are in {kept}" if kept else message, error)
            except GradmonWarning:  # a warning that was made an error must not end the thread
                if self._outbox is None or not self._outbox.is_own_thread:
                    raise

    def _send(self, waiting: deque[PendingCall]) -> None:
        while waiting and not self.dropped:
            try:
                waiting[0].call(*map(dict, waiting[0].values))
            except (Exception, SystemExit) as error:
                self._failed(waiting, error)
                return
            waiting.popleft()
            self._failures = 0

    def _send_queued(self, pending: PendingCall, ending: threading.Event) -> None:
        if self.dropped:
            self.lose(pending.rows)
            return
        waiting = deque([pending])
        self._send(waiting)
        while waiting and not self.dropped:
            time.sleep(_PAUSE * self._failures)
            self._send(waiting)

    def _failed(self, waiting: deque[PendingCall], error: BaseException) -> None:
        if self._complaints.raising and self._outbox is None:  # else no caller could catch it
            raise error
        self._error = error_text(error)
        self._failures += 1
        if self._failures >= PATIENCE:
            self._drop(waiting, f"failed {PATIENCE} times in a row, first with step {waiting[0].step}, and is dropped", error)

    def _drop(self, waiting: deque[PendingCall], words: str, error: BaseException | None = None) -> None:
        self.dropped = True
        self._warned = False  # this warning must come, whatever came before
        self.lose(_clear(waiting), f"the sink {self.name} {words}; training continues", error)


def _clear(waiting: deque[PendingCall]) -> int:
    """Empty ``waiting``; return the number of its rows."""
    rows = sum(pending.rows for pending in waiting)
    waiting.clear()
    return rows
