"""How the simulated device is registered with torch: its streams and events, and the functions of ``torch.simulated``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..torch_modes import forget_devices
from .device import NAME, SimulatedDevice
from .tensor import SimulatedTensor, copied_to_device
from .timeline import Clock, Timeline


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
        if (graph := simulated_device().graph) is not None:
            graph.refuse("a question about an event")
        return not self._timeline.is_lazy or self._timeline.is_past(self.clock)

    def synchronize(self) -> None:
        """The host waits."""
        _wait(self._timeline, self.clock)


def _wait(timeline: Timeline, clock: Clock) -> None:
    if (graph := simulated_device().graph) is not None:
        graph.refuse("a wait for an event or a stream")
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

    def is_current_stream_capturing(self) -> bool:
        return simulated_device().graph is not None

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(has_fp64=simulated_device().has_float64)

    def synchronize(self, device: object = None) -> None:
        simulated_device().timeline.wait_for_all()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


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
    forget_devices()
    device = SimulatedDevice()
    global _library  # it must stay alive
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def empty(size: Sequence[int], dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        layout = memory_format or torch.contiguous_format
        return SimulatedTensor(torch.empty(size, dtype=dtype, memory_format=layout, device="cpu"), device)

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> Tensor:
        return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        """What ``torch.tensor(..., device=)`` calls, past the type of the tensor."""
        return copied_to_device(device, target, source, non_blocking)  # type: ignore[arg-type]

    _library.impl("_copy_from", copy_from, "PrivateUse1")
    _library.impl("empty.memory_format", lambda size, *_, **options: empty(size, **options), "PrivateUse1")
    _library.impl("empty_strided", lambda size, stride, *_, **options: empty_strided(size, stride, **options), "PrivateUse1")
    return device
