"""Rows of tensors on accelerators, which are copied in one launch each and measured many at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.accelerator import current_stream, on_stream, spare_memory, stream_number
from ...core.errors import WarningLog
from ...core.moments import Column
from ...statistics.dispatch import Statistics
from ...step.buffer import StepBuffer
from ..metric_functions import unscaled

#: Bytes of the largest tensor that is copied for stock operations: a larger one keeps a device busy for longer than its launches take.
LARGEST = 4 << 20
#: Bytes of all copies that wait for them on one stream.
CAPACITY = 16 << 20
#: For a kernel of ours, which takes half a millisecond of the host for one tensor or for a hundred (seen on an H200), copies may take all
#: spare memory, and a single one this part of it.
_FOURTH = 4


@dataclass
class _Waiting:
    """Copies that were made on one stream, with what was asked of them."""

    stream: Any
    nbytes: int = 0
    copies: list[Tensor] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)
    columns: frozenset[Column] = frozenset()

    def add(self, copy: Tensor, place: tuple[str, str], columns: frozenset[Column]) -> None:
        """One more copy, by source and path."""
        self.copies.append(copy)
        self.paths.append(place)
        self.columns |= columns
        self.nbytes += copy.nbytes


class DeviceRows:
    """Copies of tensors until :meth:`flush`, or until they fill the memory that they may take.

    Args:
        statistics: measures.
        buffer: takes the rows.
        complaints: gets failures.
    """

    def __init__(self, statistics: Statistics, buffer: StepBuffer, complaints: WarningLog) -> None:
        self._statistics, self._buffer, self._complaints = statistics, buffer, complaints
        self._failed: set[tuple[str, str]] = set()
        self._waiting: dict[tuple[torch.device, object], _Waiting] = {}

    def measure(self, source: str, path: str, columns: frozenset[Column], tensor: Tensor, inverse_scale: Tensor | None) -> bool:
        """Copy a dense tensor of an accelerator, times ``inverse_scale``, to be measured with others. Returns whether it was."""
        device = tensor.device
        if tensor.layout is not torch.strided or tensor.is_complex():
            return False
        largest, capacity = LARGEST, CAPACITY
        if self._statistics.has_kernel(device):
            capacity = max(CAPACITY, spare_memory(device))
            largest = capacity // _FOURTH
        if tensor.nbytes > largest:
            return False
        place = device, stream_number(device)
        if (waiting := self._waiting.get(place)) is not None and waiting.nbytes + tensor.nbytes > capacity:
            self._flush(self._waiting.pop(place), device)
            waiting = None
        if waiting is None:
            waiting = self._waiting[place] = _Waiting(current_stream(device))
        self._buffer.expect_row(source, path)
        waiting.add(tensor.clone() if inverse_scale is None else unscaled(tensor, inverse_scale), (source, path), columns)
        return True

    def flush(self) -> None:
        """Measure all copies, and store their rows in the buffer."""
        waiting, self._waiting = self._waiting, {}
        for (device, _), copies in waiting.items():
            self._flush(copies, device)

    def _flush(self, waiting: _Waiting, device: torch.device) -> None:
        paths = [place for place in waiting.paths if place not in self._failed]
        try:
            with on_stream(waiting.stream, device):
                rows = self._statistics.measure(waiting.copies, waiting.columns)
                found: dict[str, tuple[list[str], list[Tensor]]] = {}
                for place, row in zip(waiting.paths, rows.unbind(), strict=True):
                    if place not in self._failed:
                        names, own = found.setdefault(place[0], ([], []))
                        names.append(place[1])
                        own.append(row)
                for source, (names, own) in found.items():
                    self._buffer.merge_rows(source, names, own, waiting.columns)
        except Exception as error:  # a part of the micro-batches must not be taken for all
            self._complaints.add("activations", f"the activations of {len(paths)} calls could not be measured", error)
            for source, path in paths:
                self._buffer.drop_parts(source, path)
                self._buffer.absent[source, path] = f"it could not be measured: {type(error).__name__}"
            self._failed.update(paths)
