"""Rows of small and of large CPU tensors, which are kept as numbers and stored all at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.moments import Column
from ...statistics.dispatch import Statistics
from ...step.buffer import StepBuffer
from .small_tensors import SmallTensorBatch


class _MeasuredCall(NamedTuple):
    """What was measured in one call: the numbers of one row, rows as a tensor, or None for a row of the batch of small tensors."""

    source: str
    paths: list[str]
    columns: frozenset[Column]
    row: list[float] | Tensor | None


class HostRows:
    """The rows of one step in the order of the calls, until :meth:`flush`.

    Args:
        statistics: measures.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._buffer: StepBuffer | None = None
        self._rows: list[_MeasuredCall] = []
        self._small: SmallTensorBatch[frozenset[Column]] = SmallTensorBatch()

    def __bool__(self) -> bool:
        return len(self._rows) > 0

    def begin(self, buffer: StepBuffer) -> None:
        """Start a step; an interrupt at the end of the last one may have left rows."""
        self._buffer, self._rows = buffer, []
        self._small.drain()

    def append(self, source: str, paths: list[str], columns: frozenset[Column], rows: Tensor) -> None:
        """Add rows that were measured elsewhere."""
        self._rows.append(_MeasuredCall(source, paths, columns, rows))

    def measure(
        self, source: str, path: str, columns: frozenset[Column], tensor: Tensor, inverse_scale: Tensor | None = None
    ) -> bool:
        """Measure a CPU tensor into numbers, or add a small one to the batch. Returns False if neither is possible."""
        if inverse_scale is not None and not inverse_scale.is_cpu:
            return False
        row = self._statistics.row_of(tensor, columns, inverse_scale)
        if row is not None:
            self._rows.append(_MeasuredCall(source, [path], columns, row))
            return True
        if not self._small.takes(tensor):
            return False
        if not self._small.has_room(tensor):
            self.flush()
        self._small.put(columns, tensor, inverse_scale)
        self._rows.append(_MeasuredCall(source, [path], columns, None))
        return True

    def flush(self) -> None:
        """Store all rows in the buffer, after measuring the batch of small tensors."""
        assert self._buffer is not None
        measured, self._rows = self._rows, []
        if not measured:
            return
        waited: Iterator[list[float]] = iter(())
        together = frozenset[Column]()
        if waiting := self._small.drain():
            together = together.union(*{of for of, _ in waiting})
            waited = iter(self._statistics.measure([tensor for _, tensor in waiting], together).tolist())
        single = [call.row for call in measured if not isinstance(call.row, Tensor)]
        rows = [next(waited) if row is None else row for row in single]
        table = iter(torch.tensor(rows, dtype=torch.float64, device="cpu"))

        def alike(call: _MeasuredCall) -> tuple[str, frozenset[Column], bool]:
            return call.source, together if call.row is None else call.columns, isinstance(call.row, Tensor)

        for (source, columns, is_table), calls in groupby(measured, alike):
            if is_table:  # they may lie on several devices
                for call in calls:
                    self._buffer.merge_rows(source, call.paths, call.row, columns)  # type: ignore[arg-type]
            else:
                paths = [path for call in calls for path in call.paths]
                self._buffer.merge_rows(source, paths, list(islice(table, len(paths))), columns)
