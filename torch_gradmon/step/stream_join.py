"""Values of one step that were computed on several streams of a device, brought together on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.accelerator import current_stream, keep_for_current_stream, stream_number


class StreamJoin:
    """The streams on which values were computed, such as those of a model whose branches run side by side.

    The current stream waits for them on the device, never the host.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], Any] = {}

    def note(self, device: torch.device) -> None:
        """A value was computed on the current stream of ``device``."""
        number = stream_number(device)
        if number is not None and (device, number) not in self._streams and (stream := current_stream(device)) is not None:
            self._streams[device, number] = stream

    def join(self, values: Callable[[], Iterable[Tensor]]) -> None:
        """Let the current streams wait for all others, and keep the memory of ``values`` until the current ones have read it."""
        streams, self._streams = self._streams, {}
        here = {device: stream_number(device) for device, _ in streams}
        others = [(device, stream) for (device, number), stream in streams.items() if here[device] != number]
        for device, stream in others:
            current_stream(device).wait_stream(stream)
        elsewhere = {device for device, _ in others}
        if elsewhere:
            for value in values():
                if value.device in elsewhere:
                    keep_for_current_stream(value)  # else the next tensor of its own stream may get this memory early
        for device in here:
            self.note(device)
