"""Many small tensors in one buffer, each in rows of its own, so that a few operations measure all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

#: Elements of the buffer: it stays in the second-level cache while a handful of operations pass over it.
CAPACITY = 1 << 18


class Chunk:
    """Tensors that fit into the buffer together.

    Args:
        members: their positions in the list that is packed.
        shapes: of these tensors.
        run: length of a row; every tensor begins a new one.

    Attributes:
        rows: how many rows they take.
        padding: positions in the buffer, behind the last element of a tensor and before the next row; None for none.
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
        """Copy ``tensors``, all the members in order, into the flat ``buffer``, in its dtype, with zeros behind each."""
        views = self._views.get(id(buffer))
        if views is None:
            views = self._views[id(buffer)] = [buffer[p : p + shape.numel()].view(shape) for p, shape in self._places]
        torch._foreach_copy_(views, list(tensors))
        self.pad(buffer, 0.0)

    def pad(self, buffer: Tensor, value: float) -> None:
        """Put ``value`` behind each tensor."""
        if self.padding is not None:
            buffer.index_fill_(0, self.padding, value)


class PackedLayout:
    """How tensors of these shapes are packed, in rows of ``run`` elements.

    Attributes:
        chunks: one after the other they hold all tensors.
        owners: which tensor each row belongs to, int64, or None where every tensor has exactly one.
        counts: number of elements of each tensor, float64.
        padded: number of elements of padding of each tensor, float64.
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
