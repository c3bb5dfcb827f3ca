"""How rows get to a sink: what fails is tried again, and a sink that keeps failing or holds training up is given up."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import GradmonWarning, WarningLog, error_text

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


@dataclass(frozen=True)
class PendingCall:
    """A call to be made for a step; ``rows`` is 1 for a row and 0 for what is not counted as one."""

    step: int
    call: Callable[[], object]
    rows: int = 1


class Delivery:
    """Calls a sink in the thread that trains.

    What a failed call did not bring is tried again, in order, before the next one; so a sink may see a row twice.

    Args:
        name: of the sink, for messages.
        complaints: where rows that are lost are counted, under :attr:`cause`, and said once.
        kept: where else lost rows can be found, for the message.
    """

    def __init__(self, name: str, complaints: WarningLog, kept: str = "") -> None:
        self.name = name
        self.cause = complaints.unused(f"sink:{name}")
        self.dropped = False
        self._complaints = complaints
        self._kept = f"; all rows are in {kept}" if kept else ""
        self._waiting: deque[PendingCall] = deque()
        self._error: str | None = None
        self._failures = 0
        self._slow = 0
        self._returned = -SLOW
        self._said = False
        self._beside = False  # whether in a thread, where there is nobody to raise to

    def put(self, parcel: PendingCall) -> None:
        """Make the call now, or when the sink works again. Never raises."""
        if self.dropped:
            self.lose(parcel.rows)
            return
        self._waiting.append(parcel)
        started = time.perf_counter()
        self._send(self._waiting)
        self._watch(started - self._returned, time.perf_counter() - started)
        self._returned = time.perf_counter()

    def close(self) -> bool:
        """Try what waits once more. Never raises. Whether the sink is at rest now."""
        self._send(self._waiting)
        self._give_up(self._waiting)
        return True

    def lose(self, rows: int, message: str = "", error: BaseException | str | None = None) -> None:
        """Count lost rows; say the first message, and one by which the sink is dropped."""
        self._complaints.counts[self.cause] += rows
        if message and not self._said:
            self._said = True
            self._complaints.say(f"{message}{self._kept}", error)

    def _send(self, waiting: deque[PendingCall]) -> None:
        while waiting and not self.dropped:
            try:
                waiting[0].call()
            except (Exception, SystemExit) as error:
                self._failed(waiting, error)
                return
            waiting.popleft()
            self._failures = 0

    def _failed(self, waiting: deque[PendingCall], error: BaseException) -> None:
        if self._complaints.raising and not self._beside:
            raise error
        self._error = error_text(error)
        self._failures += 1
        if self._failures >= PATIENCE:
            self._drop(waiting, f"failed {PATIENCE} times in a row, first with step {waiting[0].step}, and is dropped", error)

    def _watch(self, idle: float, took: float) -> None:
        self._slow = self._slow + 1 if took > max(SLOW, idle) else 0
        if self._slow >= PATIENCE and not self.dropped:
            words = f"took {took:.1f} s for a row, longer than training since the row before, {PATIENCE} times in a row, and is dropped"
            self._drop(self._waiting, f"{words}; add_sink(..., thread=True) lets it take its time beside the training")

    def _drop(self, waiting: deque[PendingCall], words: str, error: BaseException | None = None) -> None:
        self.dropped = True
        self._said = False  # whatever was said before, this has to be
        self.lose(_taken_out(waiting), f"the sink {self.name} {words}; training goes on", error)

    def _give_up(self, waiting: deque[PendingCall]) -> None:
        if lost := _taken_out(waiting):
            self.lose(lost, f"the last {lost} row{'s' * (lost > 1)} for the sink {self.name} could not be sent", self._error)


def _taken_out(waiting: deque[PendingCall]) -> int:
    """Empties ``waiting``; how many rows there were."""
    rows = sum(parcel.rows for parcel in waiting)
    waiting.clear()
    return rows


class ThreadedDelivery(Delivery):
    """Calls a sink in a thread of its own, for which up to 1,000 rows may wait; training never waits for it but at the end."""

    def __init__(self, name: str, complaints: WarningLog, kept: str = "") -> None:
        super().__init__(name, complaints, kept)
        self._beside = True
        self._thread_name = f"torch_gradmon {name}"
        self._queue: queue.Queue[PendingCall | None] = queue.Queue(CAPACITY)
        self._thread: threading.Thread | None = None

    def put(self, parcel: PendingCall) -> None:
        """Leave the call to the thread. Never waits, never raises."""
        if self.dropped:
            self.lose(parcel.rows)
            return
        if self._thread is None or not self._thread.is_alive():
            # one that hangs keeps what it had: it must not share with another
            self._queue = queue.Queue(CAPACITY)
            arguments = (self._queue, deque[PendingCall]())
            self._thread = threading.Thread(target=self._work, args=arguments, name=self._thread_name, daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(parcel)
        except queue.Full:
            words = f"the sink {self.name} is so slow that {CAPACITY} rows wait for it; from step {parcel.step} on rows are lost"
            self.lose(parcel.rows, words)

    def close(self) -> bool:
        """Wait for what is left, for half a minute at most. Whether the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        if thread is threading.current_thread():  # in which the monitor was collected
            self._queue.put_nowait(None)
            return False
        until = time.monotonic() + _LAST
        try:
            self._queue.put(None, timeout=_LAST)
        except queue.Full:
            pass
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            left = list(self._queue.queue)
            lost = 1 + sum(parcel.rows for parcel in left if parcel is not None)  # and the one that hangs
            self.lose(lost, f"the sink {self.name} did not take its last {lost} rows within {_LAST:.0f} s")
        return not thread.is_alive()

    def _work(self, parcels: queue.Queue[PendingCall | None], waiting: deque[PendingCall]) -> None:
        while self._take(parcels.get(), waiting):
            pass  # with no parcel in hand, which would keep the sink alive for as long as no other one comes

    def _take(self, parcel: PendingCall | None, waiting: deque[PendingCall]) -> bool:
        """Whether another one may follow."""
        if parcel is None:
            return False
        if self.dropped:
            self.lose(parcel.rows)
            return True
        waiting.append(parcel)
        while waiting and not self.dropped:
            self._send(waiting)
            if waiting and not self.dropped:
                time.sleep(_PAUSE * self._failures)
        return True

    def lose(self, rows: int, message: str = "", error: BaseException | str | None = None) -> None:
        """The same; where warnings were made errors, none of them may end the thread."""
        try:
            super().lose(rows, message, error)
        except GradmonWarning:
            if threading.current_thread().name != self._thread_name:
                raise
