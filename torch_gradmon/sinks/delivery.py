"""How rows get to a sink: what fails is tried again, and a sink that keeps failing or holds training up is given up."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from ..errors import Complaints

#: Failures in a row after which a sink is dropped.
PATIENCE = 3
#: Seconds above which a call holds training up, where it also takes longer than what was done since the last one.
SLOW = 0.5
#: Rows that may wait for a thread.
CAPACITY = 1000
#: Seconds that a thread waits before it tries again, times the number of failures.
_PAUSE = 0.5
#: Seconds that closing waits for what a thread has still to send.
_LAST = 30.0

Parcel = tuple[int, Callable[[], object]]


class Delivery:
    """Calls a sink in the thread that trains.

    What a failed call did not bring is tried again, in order, before the next one; so a sink may see a row twice.

    Args:
        name: of the sink, for messages.
        complaints: where what is lost is counted, under ``sink:{name}``, and said once.
        kept: where else lost rows can be found, for the message.
    """

    def __init__(self, name: str, complaints: Complaints, kept: str = "") -> None:
        self.name = name
        self.dropped = False
        self._complaints = complaints
        self._cause = complaints.unused(f"sink:{name}")
        self._kept = f"; all rows are in {kept}" if kept else ""
        self._waiting: deque[Parcel] = deque()
        self._failures = 0
        self._slow = 0
        self._returned = -SLOW

    def put(self, step: int, call: Callable[[], object]) -> None:
        """Make ``call`` for ``step``, now or when the sink works again. Never raises."""
        if self.dropped:
            self._lose(1)
            return
        self._waiting.append((step, call))
        started = time.perf_counter()
        self._send()
        self._watch(started - self._returned, time.perf_counter() - started)
        self._returned = time.perf_counter()

    def close(self) -> None:
        """Try what waits once more. Never raises."""
        self._send()
        if self._waiting and not self.dropped:
            lost = len(self._waiting)
            self._waiting.clear()
            self._lose(lost, f"the last {lost} rows for the sink {self.name} could not be sent{self._kept}")

    def _send(self) -> None:
        while self._waiting and not self.dropped:
            step, call = self._waiting[0]
            try:
                call()
            except Exception as error:
                self._failed(step, error)
                return
            self._waiting.popleft()
            self._failures = 0

    def _failed(self, step: int, error: Exception) -> None:
        if self._complaints.raising:
            raise error
        self._failures += 1
        if self._failures >= PATIENCE:
            self._drop(
                f"the sink {self.name} failed {PATIENCE} times in a row, first with step {step}, and is dropped; "
                f"training goes on{self._kept}",
                error,
            )

    def _watch(self, idle: float, took: float) -> None:
        self._slow = self._slow + 1 if took > max(SLOW, idle) else 0
        if self._slow >= PATIENCE and not self.dropped:
            self._drop(
                f"the sink {self.name} took {took:.1f} s for a row, longer than training since the row before, "
                f"{PATIENCE} times in a row, and is dropped{self._kept}; "
                "add_sink(..., thread=True) lets it take its time beside the training"
            )

    def _drop(self, message: str, error: Exception | None = None) -> None:
        self.dropped = True
        lost = len(self._waiting)
        self._waiting.clear()
        self._lose(lost, message, error)

    def _lose(self, rows: int, message: str = "", error: Exception | None = None) -> None:
        said = self._complaints.counts[self._cause] > 0
        self._complaints.counts[self._cause] += rows
        if message and not said:
            self._complaints.say(message, error)


class ThreadedDelivery(Delivery):
    """Calls a sink in a thread of its own, for which up to 1,000 rows may wait; training never waits for it but at the end."""

    def __init__(self, name: str, complaints: Complaints, kept: str = "") -> None:
        super().__init__(name, complaints, kept)
        self._queue: queue.Queue[Parcel | None] = queue.Queue(CAPACITY)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def put(self, step: int, call: Callable[[], object]) -> None:
        """Leave ``call`` to the thread. Never waits, never raises."""
        if self.dropped:
            self._lose(1)
            return
        if self._thread is None or not self._thread.is_alive():
            self._closing.clear()
            self._thread = threading.Thread(target=self._work, name=f"torch_gradmon {self.name}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((step, call))
        except queue.Full:
            self._lose(
                1,
                f"the sink {self.name} is so slow that {CAPACITY} rows wait for it; from step {step} on rows are lost{self._kept}",
            )

    def close(self) -> None:
        """Wait for what is left, for half a minute at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        try:
            self._queue.put(None, timeout=_LAST)
            thread.join(_LAST)
        except queue.Full:
            pass
        lost = self._queue.qsize()
        if thread.is_alive() and lost:
            self._lose(lost, f"the sink {self.name} did not take its last {lost} rows within {_LAST:.0f} s{self._kept}")

    def _work(self) -> None:
        while (parcel := self._queue.get()) is not None:
            if self.dropped:
                self._lose(1)
                continue
            self._waiting.append(parcel)
            while self._waiting and not self.dropped:
                self._send()
                if self._waiting and not self.dropped:
                    self._closing.wait(_PAUSE * self._failures)
