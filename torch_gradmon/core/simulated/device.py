"""The simulated device: how it is registered with torch, what it counts, and its streams and events."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .tensor import SimulatedTensor, allocated
from .timeline import Clock, Timeline

NAME = "simulated"


@dataclass
class Work:
    """What a device did.

    Attributes:
        kernels: launches by operation, views apart.
        views: operations that launch nothing, by name.
        reads: operations whose result the host waited for, by name.
        copies_to_host: bytes of each, and whether the host waited.
        copies_to_device: the same.
        waits_for_events: how often the host waited for an event or a stream that had not been waited for; only while the device is lazy.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    copies_to_host: list[tuple[int, bool]] = field(default_factory=list)
    copies_to_device: list[tuple[int, bool]] = field(default_factory=list)
    waits_for_events: int = 0

    def add_wait(self) -> None:
        """Count one in :attr:`waits_for_events`."""
        self.waits_for_events += 1

    @property
    def launches(self) -> int:
        """Number of kernels."""
        return sum(self.kernels.values())

    @property
    def waits(self) -> int:
        """How often the host waited: reads and blocking copies."""
        return sum(self.reads.values()) + sum(waits for _, waits in (*self.copies_to_host, *self.copies_to_device))


class Stream:
    """A stream of the device, with the methods of torch's streams."""

    def __init__(self, device: object = None, *, stream_id: int | None = None) -> None:
        self._timeline = simulated_device().timeline
        self.stream_id = self._timeline.new_stream() if stream_id is None else stream_id

    def wait_event(self, event: Event) -> None:
        """What is queued next comes after ``event``."""
        self._timeline.wait_on(self.stream_id, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        """What is queued next comes after what ``stream`` has by now."""
        self._timeline.wait_on(self.stream_id, self._timeline.clock_of(stream.stream_id))

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this place."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        _wait(self._timeline, self._timeline.clock_of(self.stream_id))


class Event:
    """An event of the device, with the methods of torch's events."""

    def __init__(self, device: object = None, **_: object) -> None:
        self._timeline = simulated_device().timeline
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark a place on ``stream``, by default the current one."""
        self.clock = self._timeline.clock_of(self._timeline.current if stream is None else stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        """``stream``, by default the current one, waits."""
        self._timeline.wait_on(self._timeline.current if stream is None else stream.stream_id, self.clock)

    def query(self) -> bool:
        """Whether the host need not wait. While the device is lazy, only a wait lets anything finish."""
        return not self._timeline.is_lazy or self._timeline.is_past(self.clock)

    def synchronize(self) -> None:
        """The host waits."""
        _wait(self._timeline, self.clock)


def _wait(timeline: Timeline, clock: Clock) -> None:
    if timeline.is_lazy and not timeline.is_past(clock):
        simulated_device().count_wait()
    timeline.wait(clock)


class _Module:
    """The functions of ``torch.simulated``, as other devices have them."""

    Event = Event
    Stream = Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The device draws from the generator of the CPU."""

    def current_stream(self, device: object = None) -> Any:
        return self.Stream(stream_id=simulated_device().timeline.current)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return simulated_device().timeline.on(stream.stream_id)

    def synchronize(self, device: object = None) -> None:
        simulated_device().timeline.wait_for_all()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class SimulatedDevice:
    """An accelerator that exists in Python only: ``model.to(device.torch_device)`` and the usual training loop run on it.

    Each operation runs on the CPU at once, and is counted as a kernel. While the device is :meth:`lazy` it shows what a real one would not
    forgive. Torch's optimizers and clips need ``foreach=False`` here: they choose by the exact type of a tensor.

    Attributes:
        torch_device: ``simulated:0``.
        timeline: its streams.
        work: what it did so far.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device(NAME, 0)
        self.timeline, self.work = Timeline(), Work()
        self._lock = threading.Lock()

    def count(self, name: str, kind: str) -> None:
        """One operation: a ``"kernel"``, a ``"view"`` or a ``"read"``."""
        with self._lock:
            {"kernel": self.work.kernels, "view": self.work.views, "read": self.work.reads}[kind][name] += 1

    def count_copy(self, way: str, size: int, is_async: bool) -> None:
        """One copy ``"to host"`` or ``"to device"`` of ``size`` bytes."""
        with self._lock:
            (self.work.copies_to_host if way == "to host" else self.work.copies_to_device).append((size, not is_async))

    def count_wait(self) -> None:
        """The host waited for an event."""
        with self._lock:
            self.work.add_wait()

    @contextmanager
    def counted(self) -> Iterator[Work]:
        """Count apart what the device does within the block."""
        before, self.work = self.work, Work()
        try:
            yield self.work
        finally:
            self.work = before

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Within the block nothing finishes before the host waits for it.

        Memory of a non-blocking copy to the host holds NaN until then.

        Raises:
            AssertionError: at the end of the block, with all that was used too early.
        """
        self.timeline.be_lazy(True)
        try:
            yield
            self.timeline.wait_for_all()
            assert not self.timeline.races, "; ".join(dict.fromkeys(self.timeline.races))
        finally:
            self.timeline.be_lazy(False)


_library: Any = None


@lru_cache(maxsize=1)
def simulated_device() -> SimulatedDevice:
    """The device, registered with torch once in a process.

    Raises:
        RuntimeError: this release of torch has no devices in Python, or another one is registered.
    """
    from torch.utils import backend_registration

    set_up: Callable[..., None] | None = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is None:
        raise RuntimeError(f"torch {torch.__version__} has no devices in Python; 2.10 and later have")
    set_up(NAME, backend_module=_Module())
    device = SimulatedDevice()
    global _library  # it must stay alive
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def empty(size: Sequence[int], dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        layout = memory_format or torch.contiguous_format
        return allocated(device, torch.empty(size, dtype=dtype, memory_format=layout, device="cpu"))

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
        return allocated(device, torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    _library.impl("empty.memory_format", lambda size, *_, **options: empty(size, **options), "PrivateUse1")
    _library.impl("empty_strided", lambda size, stride, *_, **options: empty_strided(size, stride, **options), "PrivateUse1")
    return device


__all__ = ["Event", "SimulatedDevice", "SimulatedTensor", "Stream", "Work", "simulated_device"]
