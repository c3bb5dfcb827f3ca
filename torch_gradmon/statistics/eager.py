"""Measure tensors with stock PyTorch operations: one row of statistics per tensor, at little more than one read of memory.

On CPU, large tensors are measured block by block, so that all operations but the first find the block in a cache, and no temporary is as
large as a tensor. Small tensors are packed together first. Float32 sums run over a few hundred elements and continue in float64. If that
is not accurate enough (relative 1e-6, the std to 1e-7 of rms), the tensor is measured again in float64. If it holds NaN or Inf, a slower
method for any values is used. torch's own ``vector_norm`` is 0.16 % low at 3e7 float32 elements on CPU (pytorch issue 169237).

Values are read back to the host only for CPU tensors, where host and device share memory: sums of blocks, and the check for a second pass.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.moments import SUMMED, Column, from_columns, identity, merge
from ..core.torch_modes import no_autocast, outside_dispatch_modes
from .request import Batch, Request, accumulator_dtype, filled, flat_pair, threshold, threshold_of_squares

if TYPE_CHECKING:
    from .on_device import DeviceStatistics

#: Elements of the buffer: it fits the second-level cache while a handful of operations pass over it.
CAPACITY = 1 << 18


class Chunk:
    """Tensors that fit into the buffer together, in rows of ``run`` elements; every tensor starts a new row."""

    def __init__(self, members: slice, shapes: Sequence[torch.Size], run: int) -> None:
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
        # positions in the buffer between the end of a tensor and the next row, or None
        self.padding = torch.cat(gaps) if gaps else None

    def fill(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy all members, in order, into the flat ``buffer``, in its dtype and zero-padded."""
        views = self._views.get(id(buffer))
        if views is None:
            views = self._views[id(buffer)] = [buffer[p : p + shape.numel()].view(shape) for p, shape in self._places]
        torch._foreach_copy_(views, list(tensors))
        self.pad(buffer, 0.0)

    def pad(self, buffer: Tensor, value: float) -> None:
        if self.padding is not None:
            buffer.index_fill_(0, self.padding, value)


class PackedLayout:
    """How tensors of these shapes are packed, in rows of ``run`` elements."""

    def __init__(self, shapes: Sequence[torch.Size], run: int) -> None:
        sizes = [shape.numel() for shape in shapes]
        rows = [-(-size // run) for size in sizes]
        spans = [slice(places[0], places[-1] + 1) for places in filled([count * run for count in rows], CAPACITY)]
        self.chunks = [Chunk(span, shapes[span], run) for span in spans]  # together they hold all tensors
        counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
        # the tensor of each row, int64, or None if every tensor has exactly one row
        self.owners = None if set(rows) == {1} else torch.arange(len(rows), device="cpu").repeat_interleave(counts)
        self.counts = torch.tensor(sizes, dtype=torch.float64, device="cpu")  # number of elements of each tensor, float64
        self.padded = counts * run - self.counts  # number of padding elements of each tensor, float64


#: Tensors in all cached packing layouts.
_CACHED = 20_000

#: Some columns of a block, or of all rows of a chunk.
Columns = dict[Column, Tensor]


#: Elements per block and thread on CPU: 4 MB of float32 and as much scratch, which fit the third-level cache.
#: Smaller blocks cost more in calls than they save in cache misses.
CPU_BLOCK = 1 << 20
#: Largest tensor that is packed: up to here, copying costs less than a dozen calls for one tensor.
SMALL = 1 << 17
#: The same for float64: sums over many rows would be too inexact for the std of a constant, which is the root of an error.
SMALL_WIDE = 1 << 13
#: Largest tensor that is measured in float64 at once: few elements have a large mean, for which float32 is too inexact.
TINY = 1 << 2
#: Length of the rows of packed tensors.
ROW = 1 << 7
#: Squares of a block are summed in float32 over runs of this length; halving it halves the error of a constant tensor.
RUN = 1 << 8


class EagerStatistics:
    """Measures lists of tensors. Keeps scratch memory (some megabytes) and packing layouts between calls. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._layouts: OrderedDict[tuple[object, ...], PackedLayout] = OrderedDict()

    @cached_property
    def on_device(self) -> DeviceStatistics:
        from .on_device import DeviceStatistics

        return DeviceStatistics()

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        """Statistics of each tensor: ``[len(tensors), 8]`` on their device, float64 (float32 if it has none). Does not synchronise.

        All are on one device, of any floating, integer or complex dtype, dense or sparse, any strides, any size. Complex tensors count as
        twice as many real numbers; a sparse tensor counts its implicit zeros. ``minus``: tensors of the same shapes to subtract; the
        difference is rounded once, to float32 (float64 for float64). NotMeasurable for a tensor without readable local values (meta,
        nested, sharded, inside a functorch transform).
        """
        if not tensors:
            return identity(0)
        device = tensors[0].device
        # contexts are entered only if they change anything: that costs as much as measuring a small tensor
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            batch = Batch.read(tensors, minus)
            with no_autocast(device.type) if torch.is_autocast_enabled(device.type) else nullcontext():
                return self._measure(batch, request, device)

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """The sum of ``a * b`` of each pair of tensors, all on one device: ``[n]``, in float64 if it has it. Does not synchronise."""
        with torch.no_grad():
            if not first[0].is_cpu:
                return self.on_device.inner_products(first, second)
            return torch.stack([inner_product(a, b) for a, b in zip(first, second, strict=True)])

    def _measure(self, batch: Batch, request: Request, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return self.on_device.rows(batch, request)
        rows = self._first_pass(batch, request)
        # float64 costs twice as much and the precise pass four times, so only tensors that need it get it
        closer, wider = needs_precise_pass(rows.tolist(), request.columns)
        if some := [i for i in wider if not batch.wide[i] and batch.values[i].numel() > TINY]:
            rows[some] = self._first_pass(batch.take(some, widened=True), request)
        if closer:
            rows[closer] = measure_precisely(batch.take(closer), request)
        return rows

    def _first_pass(self, batch: Batch, request: Request) -> Tensor:
        """Rows of tensors with finite elements; a non-finite element makes a sum or an extreme non-finite."""
        # groups depend on each tensor alone, so its row is the same to the last bit in any batch
        sizes = [tensor.numel() for tensor in batch.values]
        groups: dict[tuple[torch.dtype, int], list[int]] = {}
        if min(sizes) > TINY and max(sizes) <= SMALL and not any(batch.wide):
            groups[torch.float32, ROW] = []  # the common case, without a loop over many small tensors
        else:
            for index, size in enumerate(sizes):
                wide = batch.wide[index] or size <= TINY
                row = TINY if size <= TINY else ROW if size <= (SMALL_WIDE if wide else SMALL) else 0
                groups.setdefault((torch.float64 if wide else torch.float32, row), []).append(index)
        if len(groups) == 1:
            rows = self._group(batch, request, *next(iter(groups)))
        else:
            rows = identity(len(batch.values))
            for kind, members in groups.items():
                rows[members] = self._group(batch.take(members), request, *kind)
        return batch.add_implicit_zeros(rows)

    def _group(self, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        if run:
            return self._packed(batch, request, dtype, run)
        rows = [self._row(*batch.flat(index), request, dtype) for index in range(len(batch.values))]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def _scratch(self, use: str, dtype: torch.dtype, size: int = CAPACITY) -> Tensor:
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            with outside_dispatch_modes(), torch.inference_mode(False):  # the buffer is written to outside of these modes
                buffer = self._buffers[use, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer

    # --- many small tensors, packed in one buffer ---

    def _packed(self, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
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
        if key not in self._layouts:
            with outside_dispatch_modes():
                self._layouts[key] = PackedLayout(shapes, run)
            while sum(map(len, self._layouts)) > _CACHED and len(self._layouts) > 1:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _table(self, chunk: Chunk, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        """The chunk's tensors in rows of ``run``, zero-padded: ``[chunk.rows, run]``, in scratch memory."""
        size, buffer = chunk.rows * run, self._scratch("packed", dtype)
        values = batch.values[chunk.members]
        chunk.fill(buffer, values if request.inverse_scale is None else [request.unscaled(v) for v in values])
        if batch.minus is not None:
            other = self._scratch("packed minus", dtype)
            chunk.fill(other, batch.minus[chunk.members])
            buffer[:size].sub_(other[:size])
        return buffer[:size].view(-1, run)

    def _of_rows(self, table: Tensor, chunk: Chunk, request: Request) -> Columns:
        found: Columns = {}
        dtype = table.dtype
        scratch = self._scratch("rows", dtype)[: table.numel()].view(table.shape)
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

    # --- one large tensor, block by block ---

    def _row(self, values: Tensor, minus: Tensor | None, request: Request, dtype: torch.dtype) -> list[float]:
        row = [0.0] * SUMMED + [math.inf, -math.inf]
        for block in self._blocks(values, minus, request, dtype):
            row[Column.COUNT] += block.numel()
            # these few numbers are merged on the host, which costs less than merging tensors
            for column, value in self._of_block(block, request).items():
                number: float = value.item()
                if column < SUMMED:
                    row[column] += number
                elif number != number or (number < row[column] if column is Column.MIN else number > row[column]):
                    row[column] = number  # a NaN stays: comparisons with it are false
        return row

    def _blocks(self, values: Tensor, minus: Tensor | None, request: Request, dtype: torch.dtype) -> Iterator[Tensor]:
        """Blocks of a tensor's numbers in ``dtype``: views of its own memory if nothing has to be done to them."""
        # about as long as the caches take, a multiple of RUN, without a small remainder
        threads = min(torch.get_num_threads(), 8)  # with more, blocks would exceed any cache, and counts be inexact in float32
        parts = max(1, round(values.numel() / (CPU_BLOCK * threads)))
        size = max(RUN, -(-values.numel() // (parts * RUN)) * RUN)
        for start in range(0, values.numel(), size):
            block = request.unscaled(values[start : start + size])
            if minus is not None or block.dtype != dtype:
                block = self._scratch("block", dtype, size)[: block.numel()].copy_(block)
            if minus is not None:
                block.sub_(minus[start : start + size].to(dtype))
            yield block

    def _of_block(self, block: Tensor, request: Request) -> Columns:
        """Columns of a block, each 0-d. The operation with most arithmetic comes first and hides the reads from memory."""
        found: Columns = {}
        size, wide = block.numel(), block.dtype == torch.float64
        table, rest = (block, None) if wide else _runs(block)
        if request.zeros_by_squares(block.dtype):
            squares = torch.mul(block, block, out=self._scratch("magnitude", block.dtype, size)[:size])
            found[Column.SQUARE_SUM] = _sum(*_runs(squares))
            limit = threshold_of_squares(request.eps)
            if not squares.amin().item() > limit:  # most tensors have no near-zero element, and the check costs half of counting
                found[Column.NEAR_ZERO] = squares.le_(limit).sum()
        elif request.squares:
            found[Column.SQUARE_SUM] = table.square().sum() if wide else _sum_of_squares(table, rest)
        if request.extremes:
            # two calls are faster than aminmax
            found[Column.MIN] = block.amin()
            found[Column.MAX] = block.amax()
        if request.sums:
            found[Column.SUM] = table.sum() if wide else _sum(table, rest)
        if request.magnitudes and not request.zeros_by_squares(block.dtype):
            magnitude = torch.abs(block, out=self._scratch("magnitude", block.dtype, size)[:size])
            found[Column.ABS_SUM] = magnitude.sum() if wide else _sum(*_runs(magnitude))
            if request.near_zero:
                # in place and in floating point: a comparison into a boolean tensor costs several times as much
                found[Column.NEAR_ZERO] = magnitude.le_(threshold(request.eps, block.dtype)).sum()
        return found


def _runs(block: Tensor) -> tuple[Tensor, Tensor | None]:
    whole = block.numel() // RUN * RUN
    return (block.view(-1, RUN), None) if whole == block.numel() else (block[:whole].view(-1, RUN), block[whole:])


def _sum(table: Tensor, rest: Tensor | None) -> Tensor:
    """The sum in float64 of runs summed in float32: the error of float32 stays below 1e-6 of the magnitudes."""
    total = table.sum(dim=1).double().sum()
    return total if rest is None else total + rest.sum()


def _sum_of_squares(table: Tensor, rest: Tensor | None) -> Tensor:
    """The same for squares. The error of long float32 sums, as in torch's norms, grows with the length."""
    norms = torch.linalg.vector_norm(table, dim=1)
    if rest is not None:
        norms = torch.cat([norms, torch.linalg.vector_norm(rest).unsqueeze(0)])
    wide = norms.double()
    return torch.dot(wide, wide)


# --- The second pass: which tensors need one, and rows that are right for any values; and inner products ---

#: Outside of this range of the mean square, squares leave the range of float32.
_SAFE = (1e-30, 1e30)
#: Elements per block, which bounds the scratch memory; on CPU a block also fits the cache.
_BLOCK = 1 << 17
_PRODUCT_BLOCK = 1 << 20


def needs_precise_pass(rows: Sequence[Sequence[float]], columns: frozenset[Column]) -> tuple[list[int], list[int]]:
    """Of the rows of a first pass, as numbers, which hold NaN or Inf, and for which others float32 is too inexact."""
    extremes = Column.MIN in columns or Column.MAX in columns
    squares, magnitudes, sums = (column in columns for column in (Column.SQUARE_SUM, Column.ABS_SUM, Column.SUM))
    nonfinite, imprecise = [], []
    for place, row in enumerate(rows):
        count, total, absolute, square, _, _, low, high = row
        witness = sum(row if extremes else row[:SUMMED])
        if not count:
            continue
        if witness - witness != 0:
            nonfinite.append(place)
        elif squares:
            mean_square, mean = square / count, total / count
            # all zeros are exact in any dtype
            some = absolute != 0 if magnitudes else not extremes or low != 0 or high != 0
            # if half of the square is in the mean, the std has up to twice the error of the sums; beyond that too much
            if (some and not _SAFE[0] <= mean_square <= _SAFE[1]) or (sums and mean * mean > mean_square / 2):
                imprecise.append(place)
    return nonfinite, imprecise


def measure_precisely(batch: Batch, request: Request) -> Tensor:
    """Rows ``[n, 8]`` of tensors with any values, in float64, with all columns."""
    device = batch.values[0].device
    wide = accumulator_dtype(device)
    rows = []
    with torch.no_grad(), no_autocast(device.type):
        for index in range(len(batch.values)):
            values, minus = batch.flat(index)
            parts = [identity(1, device, wide)[0]]
            for start in range(0, values.numel(), _BLOCK):
                block = request.unscaled(values[start : start + _BLOCK]).to(wide)
                parts.append(_row_of_any(block if minus is None else block - minus[start : start + _BLOCK].to(wide), request.eps))
            rows.append(merge(torch.stack(parts)))
        return batch.add_implicit_zeros(torch.stack(rows))


def _row_of_any(block: Tensor, eps: float) -> Tensor:
    """The row of a block: ``[8]``. All in floating point: boolean tensors of this size cost several times as much on CPU."""
    inf = torch.inf
    # replace non-finite elements by values that the extremes ignore
    above = torch.nan_to_num(block, nan=inf, posinf=inf, neginf=inf)
    below = torch.nan_to_num(block, nan=-inf, posinf=-inf, neginf=-inf)
    smallest, largest = above.amin(), below.amax()
    magnitude = above.abs_()
    columns = {
        Column.COUNT: torch.full_like(block[0], block.numel()),
        Column.SUM: block.sum(),
        Column.ABS_SUM: torch.abs(block, out=below).sum(),
        Column.SQUARE_SUM: torch.square(block, out=below).sum(),
        Column.NONFINITE: torch.eq(magnitude, inf, out=below).sum(),
        Column.NEAR_ZERO: magnitude.le_(eps).sum(),
        Column.MIN: smallest,
        Column.MAX: largest,
    }
    return torch.stack([columns[column] for column in Column])


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Sum of ``a * b`` over all elements, accumulated in float64 block by block: 0-d, on the tensors' device. Does not synchronise."""
    return _sum_of_blocks(a, b, torch.dot)


def sum_of_squared_ratios(a: Tensor, b: Tensor, divisor: float | Tensor, least: float) -> Tensor:
    """Sum of ``a^2 / max(b / divisor, least)`` over all elements, as in :func:`inner_product`."""
    return _sum_of_blocks(a, b, lambda x, y: (x.square() / (y / divisor).clamp(min=least)).sum())


def _sum_of_blocks(a: Tensor, b: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        left, right = flat_pair(a, b)
        wide = accumulator_dtype(a.device)
        total = torch.zeros((), dtype=wide, device=a.device)
        for start in range(0, left.numel(), _PRODUCT_BLOCK):
            total += of(left[start : start + _PRODUCT_BLOCK].to(wide), right[start : start + _PRODUCT_BLOCK].to(wide))
        return total
