"""Where a program runs: on a GPU, on the simulated device, or on the CPU. What waits for the device there, and how it is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from torch_gradmon import testing

from .reads import Instrument


@dataclass
class Seen:
    """What happened between device and host.

    Attributes:
        waits: how often the host waited for an event that had not happened.
        copies: to the host.
        unpinned: of these, into memory that is not pinned: on a GPU they wait, which torch's sync debug mode does not notice.
    """

    waits: int = 0
    copies: int = 0
    unpinned: int = 0


class _CopiesToHost(Instrument):
    """Counts copies from a GPU to the host."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and not result.is_cuda
            and any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        ):
            self._seen.copies += 1
            self._seen.unpinned += not result.is_pinned()
        return result


class Place:
    """A device for programs.

    Attributes:
        at: the device.
        functions: ``torch.cuda``, or the same of another device.
        foreach: argument of torch's optimizers and clips, which choose by the exact type of a tensor.
    """

    def __init__(self, kind: str) -> None:
        self._device = testing.simulated_device() if kind == "simulated" else None
        self.at = torch.device(kind) if self._device is None else self._device.torch_device
        self.functions = torch.get_device_module(self.at)
        self.foreach = None if self._device is None else False

    def synchronize(self) -> None:
        """Wait for the device."""
        self.functions.synchronize()

    def strict(self) -> AbstractContextManager[None]:
        """On the simulated device nothing finishes before it is awaited, and what is used too early is an error at the end."""
        return nullcontext() if self._device is None else self._device.lazy()

    @contextmanager
    def undisturbed(self) -> Iterator[Seen]:
        """An operation that waits for the device is an error; waits for events are counted."""
        seen = Seen()
        with self._counted_events(seen), self._on_gpu(seen) if self._device is None else self._on_simulated(seen):
            yield seen

    @contextmanager
    def _counted_events(self, seen: Seen) -> Iterator[None]:
        kind = self.functions.Event
        synchronize = kind.synchronize

        def counting(event: Any) -> None:
            seen.waits += not event.query()
            synchronize(event)

        kind.synchronize = counting
        try:
            yield
        finally:
            kind.synchronize = synchronize

    @contextmanager
    def _on_gpu(self, seen: Seen) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with _CopiesToHost(seen):
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def _on_simulated(self, seen: Seen) -> Iterator[None]:
        assert self._device is not None
        with self._device.counted() as work:
            yield
        seen.copies += len(work.copies_to_host)
        assert work.waits == 0, f"{work.waits} operations waited for the device"

    # --- graphs ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a side stream, where CUDA needs what is captured later to run first. On the simulated device where it is."""
        if self._device is not None:
            yield
            return
        main, side = self.functions.current_stream(), self.functions.Stream()
        side.wait_stream(main)
        with self.functions.stream(side):
            yield
        main.wait_stream(side)

    def captured(self) -> AbstractContextManager[Any]:
        """Capture the block into a graph that has ``replay()``."""
        return self._captured_on_gpu() if self._device is None else self._device.captured()

    @contextmanager
    def _captured_on_gpu(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
