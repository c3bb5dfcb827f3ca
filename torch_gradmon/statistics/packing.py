"""Pack many small tensors into one buffer, each in rows of its own, so that a few operations measure all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

#: Elements of the buffer: it fits the second-level cache while a handful of operations pass over it.
CAPACITY = 1 << 18


class Chunk:
    """Tensors that fit into the buffer together.

    Args:
        members: their positions in the packed list.
        shapes: of these tensors.
        run: length of a row; every tensor starts a new row.

    Attributes:
        rows: number of rows.
        padding: positions in the buffer between the end of a tensor and the next row, or None.
    """

    def __init__(self, members: range, shapes: Sequence[torch.Size], run: int) -> None:
        self.members = members
        self._places: list[tuple[int, torch.Size]] = []
        self._views: dict[int, list[Tensor]] = {}
        start, gaps = 0, []
        for shape in shapes:
            self._places.append((start, shape))
            end = start + shape.numel()
            start = -(-end // run) * run
            if start > end:
                gaps.append(torch.arange(end, start, device="cpu"))
        self.rows = start // run
        self.padding = torch.cat(gaps) if gaps else None

    def fill(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy all members, in order, into the flat ``buffer``, in its dtype and zero-padded."""
        views = self._views.get(id(buffer))
        if views is None:
            views = self._views[id(buffer)] = [buffer[p : p + shape.numel()].view(shape) for p, shape in self._places]
        torch._foreach_copy_(views, list(tensors))
        self.pad(buffer, 0.0)

    def pad(self, buffer: Tensor, value: float) -> None:
        """Set the padding to ``value``."""
        if self.padding is not None:
            buffer.index_fill_(0, self.padding, value)


class PackedLayout:
    """How tensors of these shapes are packed, in rows of ``run`` elements.

    Attributes:
        chunks: together they hold all tensors.
        owners: the tensor of each row, int64, or None if every tensor has exactly one row.
        counts: number of elements of each tensor, float64.
        padded: number of padding elements of each tensor, float64.
    """

    def __init__(self, shapes: Sequence[torch.Size], run: int) -> None:
        sizes = [shape.numel() for shape in shapes]
        rows = [-(-size // run) for size in sizes]
        chunk_of: list[int] = []
        filled, chunk = 0, 0
        for count in rows:
            if filled and filled + count * run > CAPACITY:
                filled, chunk = 0, chunk + 1
            filled += count * run
            chunk_of.append(chunk)
        self.chunks = []
        for _, group in groupby(range(len(shapes)), key=chunk_of.__getitem__):
            members = list(group)
            span = range(members[0], members[-1] + 1)
            self.chunks.append(Chunk(span, shapes[span.start : span.stop], run))
        counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.owners = None if set(rows) == {1} else torch.arange(len(rows), device="cpu").repeat_interleave(counts)
        self.counts = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        self.padded = counts * run - self.counts
