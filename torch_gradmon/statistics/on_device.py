"""Measure tensors on an accelerator with stock operations: few launches for many tensors.

The tensors are written one after the other into a table (one launch for each 128 of them, by ``torch.cat``), each in rows of its own, so
one operation over the rows measures all of them. The rows of a tensor are then merged in a few levels, in a fixed order, so the result has
the same bits whenever it is computed. Nothing is read back to the host.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.moments import Column, identity
from ..core.torch_modes import copied_to_device, outside_dispatch_modes, stream_number
from .request import Batch, Request, accumulator_dtype, flat_at_once, flat_pair, threshold

#: Elements of a row of the table. A tensor wastes less than one row.
RUN = 1 << 10
#: Rows of the table, which bounds the scratch memory; 4 million elements in float64 fit the cache of a large GPU.
ROWS = 1 << 12
#: Rows that are merged into one.
FAN = 1 << 6
#: The largest number of tensors in all cached layouts, and the smallest number of layouts.
_CACHED, _FEWEST = 20_000, 4
_HALVES = frozenset({torch.bfloat16, torch.float16})


class _Piece(NamedTuple):
    """Some elements of a tensor, and how many rows they fill."""

    tensor: int
    start: int
    stop: int
    rows: int


class _Table:
    """What is measured at once, with its constants on the device."""

    def __init__(self, pieces: Sequence[_Piece], device: torch.device) -> None:
        self.pieces = pieces  # what is in it
        wide = accumulator_dtype(device)
        counts: list[int] = []
        for piece in pieces:
            length = piece.stop - piece.start
            counts += [RUN] * (length // RUN) + [length % RUN] * (length % RUN > 0)
        self.counts = copied_to_device(torch.tensor(counts, dtype=wide, device="cpu"), device)  # number of elements of each row
        self.is_full = all(count == RUN for count in counts)  # all rows are
        self.zeros = torch.zeros_like(self.counts)  # zeros, highest, lowest: columns of rows without elements
        self.highest, self.lowest = self.zeros + torch.inf, self.zeros - torch.inf

    @functools.cached_property
    def padding(self) -> Tensor:
        """``[rows, RUN]``, whether there is no element: a byte for each, so only made where extremes are asked for."""
        return torch.arange(RUN, device=self.counts.device) >= self.counts.unsqueeze(1)


class _Layout:
    """How tensors of these sizes are laid out and merged; a table has one dtype."""

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.tables = [_Table(pieces, device) for pieces in _tables(sizes, dtypes)]  # together they have all elements
        places: list[list[int]] = [[] for _ in sizes]
        row = 0
        for table in self.tables:
            for piece in table.pieces:
                places[piece.tensor] += range(row, row + piece.rows)
                row += piece.rows
        in_order = places == [[number] for number in range(row)]
        # see :func:`_levels`, on the device; none if each tensor has one row, in order
        self.levels = [] if in_order else [copied_to_device(level, device) for level in _levels(places, row)]
        self.empty = identity(1, device, accumulator_dtype(device))  # the row of a tensor without elements
        self.padding = _Padding(device)


class _Padding(dict[tuple[torch.dtype, int], Tensor]):
    """Zeros by dtype and number: parts of one tensor, since each tensor that is made is a launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __missing__(self, kind: tuple[torch.dtype, int]) -> Tensor:
        dtype, length = kind
        self[kind] = torch.zeros(RUN, dtype=dtype, device=self._device) if length == RUN else self[dtype, RUN][:length]
        return self[kind]


def _tables(sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[list[_Piece]]:
    for dtype in dict.fromkeys(dtypes):
        pieces: list[_Piece] = []
        free = ROWS
        for tensor, size in enumerate(sizes):
            start = 0 if dtypes[tensor] == dtype else size
            while start < size:
                stop = min(size, start + free * RUN)
                piece = _Piece(tensor, start, stop, -(-(stop - start) // RUN))
                pieces.append(piece)
                start, free = piece.stop, free - piece.rows
                if not free:
                    yield pieces
                    pieces, free = [], ROWS
        if pieces:
            yield pieces


def _levels(places: list[list[int]], empty: int) -> Iterator[Tensor]:
    """For each level which rows become one, ``[rows, FAN]``; the last row of each level is that of an empty tensor.

    ``places`` are the rows of each tensor, ``empty`` is the position of that row.
    """
    while True:
        fan = max(1, min(FAN, max((len(rows) for rows in places), default=1)))
        groups = [rows[i : i + fan] for rows in places for i in range(0, max(len(rows), 1), fan)]
        yield torch.tensor([[*group, *[empty] * (fan - len(group))] for group in [*groups, []]], dtype=torch.int64, device="cpu")
        if all(len(rows) <= fan for rows in places):
            return
        row, merged = 0, []
        for rows in places:
            count = max(-(-len(rows) // fan), 1)
            merged.append(list(range(row, row + count)))
            row += count
        places, empty = merged, row


class DeviceStatistics:
    """Measures batches on an accelerator. Caches layouts. Not thread-safe."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[tuple[object, ...], tuple[int, _Layout]] = OrderedDict()

    def rows(self, batch: Batch, request: Request) -> Tensor:
        """Rows ``[n, 8]`` of tensors with any values, on one device, in float64 (float32 if the device has none). Does not synchronise."""
        values, minus = batch.values, batch.minus or []
        if values[0].is_cpu:  # those of a device are flat already
            pairs = [batch.flat(index) for index in range(len(values))]
            values, minus = [value for value, _ in pairs], [other for _, other in pairs if other is not None]
        layout = self._layout(values)
        tables = [self._measured(table, layout, values, minus, request) for table in layout.tables]
        if layout.levels:
            found = torch.cat([*tables, layout.empty])
            for level in layout.levels:
                found = _merged(found, level)
            found = found[:-1]
        else:
            found = tables[0] if len(tables) == 1 else torch.cat(tables)
        return batch.add_implicit_zeros(found)

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """The inner product of each pair of tensors of one shape: ``[n]``, in float64 if the device has it. Does not synchronise."""
        flat = flat_at_once([*first, *second])
        pairs = map(flat_pair, first, second) if flat is None else zip(flat[: len(first)], flat[len(first) :], strict=True)
        ours, others = zip(*pairs, strict=True)
        layout, wide = self._layout(ours), accumulator_dtype(first[0].device)
        found = []
        for table in layout.tables:
            of = _filled(table, layout, ours, wide)
            differing = [piece for piece in table.pieces if first[piece.tensor] is not second[piece.tensor]]
            found.append(torch.linalg.vecdot(of, _filled(table, layout, others, wide) if differing else of))
        if not layout.levels:
            return torch.cat(found)
        sums = torch.cat([*found, layout.empty[:, Column.SUM]])
        for level in layout.levels:
            sums = sums.index_select(0, level.view(-1)).view(level.shape).sum(dim=1)
        return sums[:-1]

    def _layout(self, values: Sequence[Tensor]) -> _Layout:
        sizes, dtypes, device = [value.numel() for value in values], [value.dtype for value in values], values[0].device
        # its constants were written on one stream, which others need not wait for
        key = (device, stream_number(device), *sizes, *dtypes)
        if key not in self._layouts:
            with outside_dispatch_modes(), torch.inference_mode(False):
                self._layouts[key] = len(sizes), _Layout(sizes, dtypes, device)
            while sum(count for count, _ in self._layouts.values()) > _CACHED and len(self._layouts) > _FEWEST:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key][1]

    def _measured(
        self, table: _Table, layout: _Layout, values: Sequence[Tensor], minus: Sequence[Tensor], request: Request
    ) -> Tensor:
        wide = layout.empty.dtype
        of = _filled(table, layout, values)
        if request.inverse_scale is not None:
            of = request.unscaled(of)
        elif not of.is_floating_point():
            of = of.to(wide)
        elif of.dtype.itemsize == 1 or (of.dtype in _HALVES and (minus or request.near_zero)):
            of = of.float()  # a difference and a limit are exact enough there; few operations of a GPU take a dtype of 8 bits
        if minus:
            other = _filled(table, layout, minus)
            of = of - (other.to(of.dtype) if other.dtype is torch.bool else other)
        columns = dict.fromkeys(Column, table.zeros)
        columns[Column.COUNT] = table.counts
        if request.sums:
            columns[Column.SUM] = of.sum(dim=1, dtype=wide)
        if request.squares:
            # reads once what a product would write and read again
            columns[Column.SQUARE_SUM] = torch.linalg.vector_norm(of, dim=1, dtype=wide).square()
        if Column.ABS_SUM in request.columns:
            columns[Column.ABS_SUM] = torch.linalg.vector_norm(of, 1, dim=1, dtype=wide)
        if request.near_zero:
            large = torch.nn.functional.hardshrink(of, threshold(request.eps, of.dtype))
            others = torch.linalg.vector_norm(large, 0, dim=1, dtype=wide)
            columns[Column.NEAR_ZERO] = table.counts - others
        # the difference is zero for a finite element, else NaN
        columns[Column.NONFINITE] = torch.linalg.vector_norm(of - of, 0, dim=1, dtype=wide)
        columns[Column.MIN], columns[Column.MAX] = table.highest, table.lowest
        if request.extremes:
            known = of if table.is_full else of.masked_fill(table.padding, torch.nan)
            inf = torch.inf
            columns[Column.MIN] = known.nan_to_num(nan=inf, posinf=inf, neginf=inf).amin(dim=1).to(wide)
            columns[Column.MAX] = known.nan_to_num(nan=-inf, posinf=-inf, neginf=-inf).amax(dim=1).to(wide)
        return torch.stack([columns[column] for column in Column], dim=1)


def _filled(table: _Table, layout: _Layout, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The pieces of a table in rows, zero-padded, in ``dtype`` if given; a view if there is one piece without padding."""
    parts = []
    for piece in table.pieces:
        tensor = tensors[piece.tensor]
        length = piece.stop - piece.start
        parts.append(tensor if length == tensor.numel() else tensor[piece.start : piece.stop])
        if gap := piece.rows * RUN - length:
            parts.append(layout.padding[tensor.dtype, gap])
    if len({part.dtype for part in parts}) > 1:  # else torch.cat takes one launch for each part, not for 128 of them
        wide = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        parts = [part.to(wide) for part in parts]
    together = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, RUN)
    return together if dtype is None else together.to(dtype)


def _merged(rows: Tensor, level: Tensor) -> Tensor:
    picked = rows.index_select(0, level.view(-1)).view(*level.shape, -1)
    low, high = picked[..., Column.MIN].amin(dim=1, keepdim=True), picked[..., Column.MAX].amax(dim=1, keepdim=True)
    return torch.cat([picked[..., : Column.MIN].sum(dim=1), low, high], dim=1)
