"""What a sink gets, by its filter, and how: failed calls are retried, and a sink that keeps failing or delays training is dropped."""

from __future__ import annotations

import contextlib
import inspect
import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..core.errors import GradmonWarning, WarningLog, display, error_text
from ..core.keys import compile_pattern
from ..core.records import SpikeEvent


def require(package: str, sink: object) -> None:
    """Raise ImportError unless ``package`` is installed for ``sink``."""
    if find_spec(package) is None:
        raise ImportError(f"{type(sink).__name__} needs {package}: pip install {package}")


# --- how a sink is called ---

_METHODS = ("log", "log_metrics", "log_dict")


def sender(sink: Any) -> Callable[..., object]:
    """The function of values and ``step=`` that sends them to ``sink``.

    Raises:
        TypeError: it has no such method and is not callable with these arguments.
    """
    methods: list[Callable[..., object]] = [method for name in _METHODS if callable(method := getattr(sink, name, None))]
    # an object with such a method is not meant to be called itself: a Lightning module is callable
    for function in methods or ([sink] if callable(sink) else []):
        if _takes_values_and_step(function):
            return function
    raise TypeError(
        "a sink needs a method log(dict, step=) or log_metrics(dict, step=), or must be callable as sink(dict, step=), with a parameter of "
        f"that name, as lambda values, step: ... has it; got {display(sink)}"
    )


def _takes_values_and_step(function: Callable[..., Any]) -> bool:
    for follow in (True, False):  # a decorator may declare another signature than its function has, as in SwanLab
        try:
            inspect.signature(function, follow_wrapped=follow).bind({}, step=0)
        except TypeError:
            continue
        except ValueError:  # a built-in function without a signature
            pass
        return True
    return False


def closer(sink: Any) -> Callable[[], object] | None:
    """The function that flushes and closes ``sink``, or None."""
    if callable(close := getattr(sink, "close", None)):
        return close  # type: ignore[no-any-return]
    package, save = type(sink).__module__.partition(".")[0], getattr(sink, "save", None)
    # a logger of Lightning that Trainer.fit has finalised would not write later rows by itself
    return save if package in ("lightning", "pytorch_lightning") and hasattr(sink, "log_metrics") and callable(save) else None


def name_of(sink: Any) -> str:
    """The sink's class or the function's name, for messages."""
    name: str = getattr(sink, "__name__", type(sink).__name__)
    return name


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
    ``cause``, and warns once; ``kept`` says then where all lost rows are stored as well, empty where they are not.
    """

    def __init__(self, name: str, complaints: WarningLog, kept: Callable[[], str] = str, thread: bool = False) -> None:
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
            kept = self._kept()
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


# --- the filter ---

_NORM = "gradmon/grad_norm"
#: Suffix of the key for the largest gradient norm since the last row.
LARGEST = "_max"


class FilteredSink:
    """One sink with its filter. Raises TypeError if ``sink`` is none, see :meth:`ModuleMonitor.add_sink`, ValueError for keys or every.

    Its method ``log_spike(event, text)``, if any, is called for each spike, whatever ``keys`` and ``every`` are. If ``every`` is above 1,
    each row also has the largest ``gradmon/grad_norm`` since the row before, as ``gradmon/grad_norm_max``.
    """

    def __init__(
        self,
        sink: Any,
        keys: str | re.Pattern[str] | None,
        every: int,
        complaints: WarningLog,  # gets failures, each under ``sink:{class}``
        deferred: bool = False,  # values may come one step late, so that nothing waits for the device
        thread: bool = False,
        kept: Callable[[], str] = str,  # where all lost rows are stored as well, see Delivery
        without: Container[str] = (),  # keys that are never sent; may grow
        given: Any = None,  # the object that the sink was made from
        is_on_all_ranks: bool = False,  # it gets values also on ranks that do not report
    ) -> None:
        self.keys = None if keys is None else compile_pattern(keys, "keys")
        self._without = without
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be a positive int, such as 10 for every tenth step")
        self.sink = sink
        self.every = every
        self.deferred = deferred
        self.given = sink if given is None else given
        self.is_on_all_ranks = is_on_all_ranks
        self.takes_values = bool(getattr(sink, "takes_values", True))  # one that does not look at values costs no dict
        self._log = sender(self.sink)
        self._complaints = complaints
        self._delivery = Delivery(name_of(sink), complaints, kept, thread)
        self._norm = ""  # the key of the gradient norm, once there was one
        self._largest: dict[str, float] = {}  # the largest since the last row, by the key that it gets
        self._lost = 0

    @property
    def is_of_package(self) -> bool:
        """Whether the sink is a class of this package, which holds nothing of the training."""
        return type(self.sink).__module__.startswith(__package__ or " ") and not getattr(self.sink, "is_of_script", False)

    @property
    def dropped(self) -> bool:
        """Whether the sink was given up."""
        return self._delivery.dropped

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Send the step's values. Never raises: a failing sink is retried with the next step, then dropped."""
        if self.every > 1:
            self._note_largest(values)
            if step % self.every:
                return
        keys, without = self.keys, self._without
        chosen = dict(values)
        if keys is not None or without:
            chosen = {key: value for key, value in values.items() if key not in without and (keys is None or keys.search(key))}
        chosen |= self._largest
        self._largest = {}
        self._delivery.put(PendingCall(step, partial(self._log, step=step), (chosen,)))
        lost = getattr(self.sink, "lost", 0)  # rows that the sink has kept back, and lost later
        if lost > self._lost:
            self._delivery.lose(lost - self._lost)
            self._lost = lost

    def _note_largest(self, values: Mapping[str, float]) -> None:
        if not self._norm:
            keys = (key for key in values if key.endswith(_NORM) and key not in self._without)
            self._norm = next((key for key in keys if self.keys is None or self.keys.search(key)), "")
        if (value := values.get(self._norm)) is not None:
            known = self._largest.get(self._norm + LARGEST, -math.inf)
            if not (math.isnan(known) or value <= known):
                self._largest[self._norm + LARGEST] = value  # NaN too, and it stays, so that it is seen

    def send_spike(self, event: SpikeEvent, text: str) -> None:
        """Send a spike, if the sink has a method for that. Never raises."""
        log_spike = getattr(self.sink, "log_spike", None)
        if callable(log_spike):
            self._delivery.put(PendingCall(event.step, partial(log_spike, event, text), rows=0))

    def close(self) -> None:
        """Send what waits and close the sink, if it can be closed. Never raises."""
        if not self._delivery.close():
            return  # its thread is blocked in the sink, and closing might block as well
        if (close := closer(self.sink)) is not None:
            try:
                close()
            except (Exception, SystemExit) as error:
                cause = f"{self._delivery.cause}:close"
                self._complaints.add(cause, f"the sink {name_of(self.sink)} could not be closed", error)
