"""What ran on the streams of a simulated device, what has certainly finished, and what must not have been touched yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

#: How far each stream has certainly come, by stream.
Clock = dict[int, int]


class Memory:
    """The memory of a simulated tensor and of its views: who wrote to it and who read it last."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.stream, _ = timeline.here
        self.written: tuple[int, int] | None = None
        self.used: Clock = {}
        self.kept_for: set[int] = set()

    def __deepcopy__(self, memo: object) -> Memory:
        """A copy of a tensor has memory of its own."""
        return Memory(self._timeline)

    def keep_for(self, stream: int) -> None:
        """When it is released, it is not used again before ``stream`` has come as far as by then."""
        self.kept_for.add(stream)

    def touch(self, stream: int, at: int, is_written: bool) -> None:
        """An operation at this place of ``stream`` uses it."""
        self.used[stream] = at
        if is_written:
            self.written = stream, at

    def __del__(self) -> None:
        self._timeline.check_release(self)


class _HostCopy:
    """A copy to the host that has been started."""

    def __init__(self, place: tuple[int, int], host: Tensor, values: Tensor) -> None:
        self.place, self.host, self.values = place, host, values


class Timeline:
    """Streams with vector clocks: one operation precedes another if it is on the same stream, or an event between them was waited for.

    A kernel runs at once, since the host cannot look into the device's memory. What the host can see is late: a non-blocking copy leaves
    NaN in the host's memory until the host has waited for it, and its source in the host's memory must stay unchanged until then.

    Attributes:
        is_lazy: copies are late, and races are looked for.
        races: a sentence for each thing that was used too early.
        current: the stream that operations are queued on.
    """

    def __init__(self) -> None:
        self.is_lazy = False
        self.races: list[str] = []
        self._lock = threading.RLock()
        self.current = 0
        self._count = 1
        self._done: dict[int, int] = {0: 0}  # operations queued on each stream
        self._clocks: dict[int, Clock] = {0: {}}
        self._host: Clock = {}
        self._copies: list[_HostCopy] = []
        self._sources: list[tuple[tuple[int, int], Tensor, Tensor]] = []

    def be_lazy(self, is_lazy: bool) -> None:
        """Begin or end to be lazy, when everything has finished."""
        self.wait_for_all()
        self.is_lazy = is_lazy
        if is_lazy:
            self.races = []

    # --- streams ---------------------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """The number of a new stream."""
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._done[number], self._clocks[number] = 0, {}
            return number

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Use ``stream``, in all threads: autograd's thread works on the stream of the caller, or on that of the forward."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @property
    def here(self) -> tuple[int, int]:
        """The current stream, and how many operations were queued on it."""
        return self.current, self._done[self.current]

    def clock_of(self, stream: int) -> Clock:
        """What precedes the next operation on ``stream``."""
        with self._lock:
            return {**self._clocks[stream], stream: self._done[stream]}

    def wait_on(self, stream: int, clock: Clock) -> None:
        """The next operations on ``stream`` come after what ``clock`` has."""
        with self._lock:
            _advance(self._clocks[stream], clock)

    # --- operations ------------------------------------------------------------------------------------------------------------

    def queue(self, name: str, read: list[Memory], written: list[Memory]) -> None:
        """An operation that reads and writes these."""
        with self._lock:
            stream = self.current
            self._done[stream] += 1
            now = self._done[stream]
            if self.is_lazy:
                clock = dict(self._clocks[stream])
                _advance(clock, self._host)
                for memory in read:
                    if memory.written is not None and not _precedes(memory.written, stream, clock):
                        self.races.append(f"{name} on stream {stream} reads what stream {memory.written[0]} may still write")
                for memory in written:
                    early = {user for user, at in memory.used.items() if not _precedes((user, at), stream, clock)}
                    if early:
                        self.races.append(f"{name} on stream {stream} writes to what stream {min(early)} may still use")
            for memory in read:
                memory.touch(stream, now, is_written=False)
            for memory in written:
                memory.touch(stream, now, is_written=True)

    def check_release(self, memory: Memory) -> None:
        """Memory is free for the next tensor of the stream that it was allocated on."""
        if not self.is_lazy:
            return
        with self._lock:
            clock = {**self._clocks[memory.stream]}
            _advance(clock, self._host)
            for stream, at in memory.used.items():
                if stream != memory.stream and stream not in memory.kept_for and clock.get(stream, 0) < at:
                    self.races.append(f"memory of stream {memory.stream} is released while stream {stream} may still use it")

    # --- the host --------------------------------------------------------------------------------------------------------------

    def copy_to_host(self, host: Tensor, values: Tensor) -> None:
        """A non-blocking copy that was queued just now. It spoils ``host`` until :meth:`wait` was called."""
        if not self.is_lazy:
            host.copy_(values)
            return
        with self._lock:
            self._copies.append(_HostCopy(self.here, host, values.clone()))
            _spoil(host)

    def copy_from_host(self, host: Tensor) -> None:
        """A non-blocking copy of ``host`` to the device that was queued just now."""
        if self.is_lazy:
            with self._lock:
                self._sources.append((self.here, host, host.clone()))

    def wait(self, clock: Clock) -> None:
        """The host waits for what ``clock`` has."""
        with self._lock:
            _advance(self._host, clock)
            arrived = [copy for copy in self._copies if self._host.get(copy.place[0], 0) >= copy.place[1]]
            self._copies = [copy for copy in self._copies if copy not in arrived]
            for copy in arrived:
                copy.host.copy_(copy.values)
            kept = []
            for place, host, values in self._sources:
                if self._host.get(place[0], 0) < place[1]:
                    kept.append((place, host, values))
                elif not _same(host, values):
                    self.races.append("the host changed memory while it was copied to the device")
            self._sources = kept

    def awaited(self, stream: int) -> int:
        """How many operations of ``stream`` the host has waited for."""
        return self._host.get(stream, 0)

    def is_past(self, clock: Clock) -> bool:
        """Whether the host has waited for all that ``clock`` has."""
        return all(self._host.get(stream, 0) >= at for stream, at in clock.items())

    def wait_for_all(self) -> None:
        """The host waits for all streams."""
        self.wait(dict(self._done))


def _advance(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, 0), at)


def _precedes(place: tuple[int, int], stream: int, clock: Clock) -> bool:
    return place[0] == stream or clock.get(place[0], 0) >= place[1]


def _spoil(host: Tensor) -> None:
    """Fill with what cannot be taken for a value."""
    host.fill_(float("nan") if host.is_floating_point() else -1 if host.dtype.is_signed else 1)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
