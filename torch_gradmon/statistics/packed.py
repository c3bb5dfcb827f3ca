"""Statistics of many small CPU tensors at once, in one packed buffer."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ..core.moments import Column, from_columns
from ..core.torch_modes import outside_dispatch_modes
from .packing import CAPACITY, Chunk, PackedLayout
from .request import Batch, Request
from .tensor_access import threshold, threshold_of_squares

#: Tensors in all cached packing layouts.
_CACHED = 20_000

#: Some columns of a block, or of all rows of a chunk.
Columns = dict[Column, Tensor]


class Scratch:
    """CPU buffers that are reused between calls."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, use: str, dtype: torch.dtype, size: int) -> Tensor:
        """The buffer for ``use``, with ``size`` elements or more."""
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            with outside_dispatch_modes(), torch.inference_mode(False):  # the buffer is written to outside of these modes
                buffer = self._buffers[use, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer


class PackedStatistics:
    """Measures batches of small tensors. Caches packing layouts.

    Args:
        scratch: memory for the packed tensors.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._layouts: OrderedDict[tuple[object, ...], PackedLayout] = OrderedDict()

    def rows(self, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        """Rows ``[n, 8]`` of a batch of small CPU tensors, measured in ``dtype`` in rows of ``run`` elements."""
        layout = self._layout([tensor.shape for tensor in batch.values], run)
        parts = [self._of_rows(self._table(chunk, batch, request, dtype, run), chunk, request) for chunk in layout.chunks]
        columns = parts[0]
        if len(parts) > 1:
            columns = {column: torch.cat([part[column] for part in parts]) for column in columns}
        rows = from_columns(columns, layout.owners, len(batch.values))
        rows[:, Column.COUNT] = layout.counts
        if request.near_zero:
            rows[:, Column.NEAR_ZERO] -= layout.padded
        return rows

    def _layout(self, shapes: list[torch.Size], run: int) -> PackedLayout:
        key = (run, *shapes)
        layout = self._layouts.get(key)
        if layout is None:
            with outside_dispatch_modes():
                layout = self._layouts[key] = PackedLayout(shapes, run)
            while sum(map(len, self._layouts)) > _CACHED and len(self._layouts) > 1:
                self._layouts.popitem(last=False)
        else:
            self._layouts.move_to_end(key)
        return layout

    def _table(self, chunk: Chunk, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        """The chunk's tensors in rows of ``run``, zero-padded: ``[chunk.rows, run]``, in scratch memory."""
        members, size = slice(chunk.members.start, chunk.members.stop), chunk.rows * run
        buffer = self._scratch.get("packed", dtype, CAPACITY)
        values = batch.values[members]
        chunk.fill(buffer, values if request.inverse_scale is None else [request.unscaled(v) for v in values])
        if batch.minus is not None:
            other = self._scratch.get("packed minus", dtype, CAPACITY)
            chunk.fill(other, batch.minus[members])
            buffer[:size].sub_(other[:size])
        return buffer[:size].view(-1, run)

    def _of_rows(self, table: Tensor, chunk: Chunk, request: Request) -> Columns:
        """Columns of the rows of a packed chunk, each ``[chunk.rows]``."""
        found: Columns = {}
        dtype = table.dtype
        scratch = self._scratch.get("rows", dtype, CAPACITY)[: table.numel()].view(table.shape)
        if request.squares:
            found[Column.SQUARE_SUM] = torch.mul(table, table, out=scratch).sum(dim=1)
            if request.zeros_by_squares(dtype):
                found[Column.NEAR_ZERO] = scratch.le_(threshold_of_squares(request.eps)).sum(dim=1)
        if request.sums:
            found[Column.SUM] = table.sum(dim=1)
        if request.magnitudes and Column.NEAR_ZERO not in found:
            magnitude = torch.abs(table, out=scratch)
            found[Column.ABS_SUM] = magnitude.sum(dim=1)
            if request.near_zero:
                found[Column.NEAR_ZERO] = magnitude.le_(threshold(request.eps, dtype)).sum(dim=1)
        if request.extremes:
            chunk.pad(table.view(-1), torch.inf)
            found[Column.MIN] = table.amin(dim=1)
            chunk.pad(table.view(-1), -torch.inf)
            found[Column.MAX] = table.amax(dim=1)
        return found
