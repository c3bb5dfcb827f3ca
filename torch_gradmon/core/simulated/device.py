"""The simulated device: what it counts, when it is lazy, and when it captures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .graph import SimulatedGraph
from .timeline import Timeline

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


class SimulatedDevice:
    """An accelerator that exists in Python only: ``model.to(device.torch_device)`` and the usual training loop run on it.

    Each operation runs on the CPU at once, and is counted as a kernel. While the device is :meth:`lazy` it shows what a real one would not
    forgive. Torch's optimizers and clips need ``foreach=False`` here: they choose by the exact type of a tensor.

    Attributes:
        torch_device: ``simulated:0``.
        timeline: its streams.
        work: what it did so far.
        graph: the one that is captured, or None.
        has_float64: whether operations may be in float64; to be set before the first tensor is made.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device(NAME, 0)
        self.timeline, self.work = Timeline(), Work()
        self.graph: SimulatedGraph | None = None
        self.has_float64 = True
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> SimulatedDevice:
        """Copies of tensors are on the same device."""
        return self

    def count(self, name: str, kind: str, launches: int = 1) -> None:
        """One operation: a ``"kernel"`` of this number of launches, a ``"view"`` or a ``"read"``."""
        with self._lock:
            {"kernel": self.work.kernels, "view": self.work.views, "read": self.work.reads}[kind][name] += launches

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

    @contextmanager
    def captured(self) -> Iterator[SimulatedGraph]:
        """Capture the work of the block into a graph instead of doing it.

        Raises:
            RuntimeError: the block waited for the device, or copied from or to the host.
        """
        graph = self.graph = SimulatedGraph()
        try:
            yield graph
        finally:
            self.graph = None
            graph.end()
