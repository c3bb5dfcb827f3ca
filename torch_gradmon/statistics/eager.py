"""Measure tensors with stock PyTorch operations: one row of statistics per tensor, at little more than one read of memory.

On CPU a large tensor is looked at block by block, so that all operations but the first find the block in a cache, and nothing
as large as a tensor is ever made; small tensors are packed together first. Float32 sums run over some hundred elements and go
on in float64. Where that is not enough for what is promised (relative 1e-6, the std to 1e-7 of rms) the tensor is measured
again in float64, and where it holds NaN or Inf a slower way, right for any values, takes its place. torch's own ``vector_norm``
is 0.16 % low at 3e7 float32 elements on CPU (pytorch issue 169237).

Nothing here reads a value back to the host, except of CPU tensors, where host and device are the same memory: sums of their
blocks, and what asks for a second look.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ..core.moments import ALL_COLUMNS, SUMMED, Column, from_columns, identity
from ..core.torch_modes import no_autocast, outside_dispatch_modes
from .packing import CAPACITY, Chunk, PackedLayout
from .precise import measure_precisely, needs_precise_pass, row_needs_precise_pass
from .request import Batch, Request
from .tensor_access import NARROW, is_plain, threshold, threshold_of_squares

#: Elements per block and thread on CPU: 4 MB of float32 beside as much scratch, which the third-level cache holds.
#: Smaller blocks cost more in calls than they save in cache misses.
CPU_BLOCK = 1 << 20
#: Up to so many elements a tensor is packed: then copying it costs less than a dozen calls for it alone.
SMALL = 1 << 17
#: The same for float64: what many rows add up to would be too rough for the std of a constant, which is the root of an error.
SMALL_WIDE = 1 << 13
#: Up to so many a tensor is measured in float64 at once: where elements are few their mean is large, which float32 is too narrow for.
TINY = 1 << 2
#: Length of the rows of packed tensors.
ROW = 1 << 7
#: Squares of a block are summed in float32 over so many elements; each halving of it halves the error of a constant tensor.
RUN = 1 << 8
DEFAULT_EPS = 1e-8
#: Tensors in all packing plans that are kept.
_KEPT = 20_000

#: What was seen of a block, or of all rows of a chunk: some of the columns.
Look = dict[Column, Tensor]


def measure(
    tensors: Sequence[Tensor],
    columns: frozenset[Column] = ALL_COLUMNS,
    *,
    eps: float = DEFAULT_EPS,
    inverse_scale: Tensor | None = None,
    minus: Sequence[Tensor] | None = None,
) -> Tensor:
    """:meth:`EagerStatistics.measure`, once."""
    return EagerStatistics().measure(tensors, columns, eps=eps, inverse_scale=inverse_scale, minus=minus)


class EagerStatistics:
    """Measures lists of tensors. Keeps scratch memory (some megabytes) and packing plans between calls.

    Not to be called by two threads at once.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self._layouts: OrderedDict[tuple[object, ...], PackedLayout] = OrderedDict()
        self._request = Request(frozenset(), 0.0, None)

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column] = ALL_COLUMNS,
        *,
        eps: float = DEFAULT_EPS,
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Statistics of each tensor.

        Args:
            tensors: on one device; any floating, integer or complex dtype, dense or sparse, any strides, any size. Complex
                tensors count as twice as many real numbers; a sparse tensor counts its implicit zeros.
            columns: what is needed; the others hold their identity, or what came along. COUNT and NONFINITE are always exact.
            eps: an element counts as near zero when ``|x| <= eps``.
            inverse_scale: 0-d tensor; each tensor is multiplied by it first, in float32 as ``GradScaler.unscale_`` does.
            minus: tensors to subtract, of the same shapes; the difference is rounded once, to float32 (float64 for float64).

        Returns:
            ``[len(tensors), 8]`` on the tensors' device, float64 (float32 where the device has none). Does not synchronise.

        Raises:
            NotMeasurable: a tensor without readable local values (meta, nested, sharded, inside a functorch transform).
        """
        if not tensors:
            return identity(0)
        device = tensors[0].device
        request = Request(columns, eps, inverse_scale)
        # contexts only where they change anything: entering them costs as much as looking at a small tensor
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            batch = Batch.read(tensors, minus)
            if torch.is_autocast_enabled(device.type):
                with no_autocast(device.type):
                    return self._measure(batch, request, device)
            return self._measure(batch, request, device)

    def _measure(self, batch: Batch, request: Request, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return measure_precisely(batch, request)
        rows = self._first_look(batch, request)
        # float64 costs twice as much and a close look four times: only where the first look asks for it
        closer, wider = needs_precise_pass(rows, request.columns)
        if some := [i for i in wider if not _is_wide(batch, i)]:
            rows[some] = self._first_look(batch.take(some, widened=True), request)
        if closer:
            rows[closer] = measure_precisely(batch.take(closer), request)
        return rows

    def _first_look(self, batch: Batch, request: Request) -> Tensor:
        """Rows of tensors whose elements are all finite; the others show it by a sum or an extreme that is not."""
        # by the tensor alone: whatever it is measured together with, its row is the same to the last bit
        sizes = [tensor.numel() for tensor in batch.values]
        groups: dict[tuple[torch.dtype, int], list[int]] = {}
        if min(sizes) > TINY and max(sizes) <= SMALL and not any(batch.wide):
            groups[torch.float32, ROW] = []  # many small tensors, for which a loop would be much of the cost
        else:
            for index, size in enumerate(sizes):
                wide = _is_wide(batch, index)
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
        return self._packed(batch, request, dtype, run) if run else self._by_block(batch, request, dtype)

    # --- small tensors ---------------------------------------------------------------------------------------------------------

    def _packed(self, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        layout = self._layout([tensor.shape for tensor in batch.values], run)
        looks = [self._look_at_rows(self._table(chunk, batch, request, dtype, run), chunk, request) for chunk in layout.chunks]
        columns = looks[0]
        if len(looks) > 1:
            columns = {column: torch.cat([look[column] for look in looks]) for column in columns}
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
            while sum(map(len, self._layouts)) > _KEPT and len(self._layouts) > 1:
                self._layouts.popitem(last=False)
        else:
            self._layouts.move_to_end(key)
        return layout

    def _table(self, chunk: Chunk, batch: Batch, request: Request, dtype: torch.dtype, run: int) -> Tensor:
        """The chunk's tensors in rows of ``run``, with zeros behind each: ``[chunk.rows, run]``, in scratch memory."""
        members, size = slice(chunk.members.start, chunk.members.stop), chunk.rows * run
        buffer = self._buffer("packed", dtype, CAPACITY)
        values = batch.values[members]
        chunk.fill(buffer, values if request.inverse_scale is None else [request.unscaled(v) for v in values])
        if batch.minus is not None:
            other = self._buffer("packed minus", dtype, CAPACITY)
            chunk.fill(other, batch.minus[members])
            buffer[:size].sub_(other[:size])
        return buffer[:size].view(-1, run)

    def _look_at_rows(self, table: Tensor, chunk: Chunk, request: Request) -> Look:
        """Columns of the rows of a packed chunk, each ``[chunk.rows]``."""
        found: Look = {}
        dtype = table.dtype
        scratch = self._buffer("rows", dtype, CAPACITY)[: table.numel()].view(table.shape)
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

    # --- large tensors -------------------------------------------------------------------------------------------------------------

    def row_of(
        self, tensor: Tensor, columns: frozenset[Column], eps: float, inverse_scale: Tensor | None = None
    ) -> list[float] | None:
        """The row of one large CPU tensor as numbers, with as few calls as can be: for hooks, which have one tensor at a time.

        Returns:
            Eight numbers, the same as of :meth:`measure`; None where that has to be asked.
        """
        if tensor.numel() <= SMALL or tensor.dtype not in NARROW or not is_plain(tensor) or not tensor.is_contiguous():
            return None
        request = self._request
        if inverse_scale is not None:
            request = Request(columns, eps, inverse_scale)
        elif request.columns != columns or request.eps != eps:
            request = self._request = Request(columns, eps, None)
        row = self._row(tensor.detach().view(-1), None, request, torch.float32)
        return None if any(row_needs_precise_pass(row, columns)) else row

    def _by_block(self, batch: Batch, request: Request, dtype: torch.dtype) -> Tensor:
        rows = [self._row(*batch.flat(index), request, dtype) for index in range(len(batch.values))]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def _row(self, values: Tensor, minus: Tensor | None, request: Request, dtype: torch.dtype) -> list[float]:
        row = [0.0] * SUMMED + [math.inf, -math.inf]
        for block in self._blocks(values, minus, request, dtype):
            row[Column.COUNT] += block.numel()
            # on the host, where these few numbers cost less than the calls that would merge them as tensors
            for column, value in self._look(block, request).items():
                number: float = value.item()
                if column < SUMMED:
                    row[column] += number
                elif number != number or (number < row[column] if column is Column.MIN else number > row[column]):
                    row[column] = number  # NaN, once there, compares as neither
        return row

    def _blocks(self, values: Tensor, minus: Tensor | None, request: Request, dtype: torch.dtype) -> Iterator[Tensor]:
        """Runs of a tensor's numbers in ``dtype``: its own memory where nothing has to be done to them."""
        size = _even_share(values.numel(), CPU_BLOCK * _threads())
        for start in range(0, values.numel(), size):
            block = request.unscaled(values[start : start + size])
            if minus is not None or block.dtype != dtype:
                block = self._buffer("block", dtype, size)[: block.numel()].copy_(block)
            if minus is not None:
                block.sub_(minus[start : start + size].to(dtype))
            yield block

    def _look(self, block: Tensor, request: Request) -> Look:
        """Columns of a block, each 0-d. What computes most comes first, and hides the reads from memory."""
        found: Look = {}
        wide = block.dtype == torch.float64
        table, rest = (block, None) if wide else _runs(block)
        if request.zeros_by_squares(block.dtype):
            size = block.numel()
            squares = torch.mul(block, block, out=self._buffer("magnitude", block.dtype, size)[:size])
            found[Column.SQUARE_SUM] = _sum(*_runs(squares))
            limit = threshold_of_squares(request.eps)
            if not squares.amin().item() > limit:  # most tensors have none, and this is half of what counting takes
                found[Column.NEAR_ZERO] = squares.le_(limit).sum()
        elif request.squares:
            found[Column.SQUARE_SUM] = table.square().sum() if wide else _sum_of_squares(table, rest)
        if request.extremes:
            # aminmax is one call, and slower than the two
            found[Column.MIN] = block.amin()
            found[Column.MAX] = block.amax()
        if request.sums:
            found[Column.SUM] = table.sum() if wide else _sum(table, rest)
        if request.magnitudes and not request.zeros_by_squares(block.dtype):
            size = block.numel()
            magnitude = torch.abs(block, out=self._buffer("magnitude", block.dtype, size)[:size])
            found[Column.ABS_SUM] = magnitude.sum() if wide else _sum(*_runs(magnitude))
            if request.near_zero:
                # in place and in floating point: into a boolean tensor the comparison costs several times as much
                found[Column.NEAR_ZERO] = magnitude.le_(threshold(request.eps, block.dtype)).sum()
        return found

    def _buffer(self, use: str, dtype: torch.dtype, size: int) -> Tensor:
        buffer = self._scratch.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            with outside_dispatch_modes(), torch.inference_mode(False):  # it will be written to outside of these modes
                buffer = self._scratch[use, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer


def _is_wide(batch: Batch, index: int) -> bool:
    return batch.wide[index] or batch.values[index].numel() <= TINY


def _threads() -> int:
    # beyond that blocks would be large beside any cache, and counts of them no longer exact in float32
    return min(torch.get_num_threads(), 8)


def _even_share(length: int, size: int) -> int:
    """Length of the parts of about ``size``, a multiple of RUN, into which ``length`` is cut: no part is a small rest."""
    parts = max(1, round(length / size))
    return max(RUN, -(-length // (parts * RUN)) * RUN)


def _runs(block: Tensor) -> tuple[Tensor, Tensor | None]:
    """The block in rows of RUN, and what is left over."""
    whole = block.numel() // RUN * RUN
    return (block.view(-1, RUN), None) if whole == block.numel() else (block[:whole].view(-1, RUN), block[whole:])


def _sum(table: Tensor, rest: Tensor | None) -> Tensor:
    """In float64 but for runs of RUN elements, so that what float32 loses stays below 1e-6 of the magnitudes whatever they are."""
    total = table.sum(dim=1).double().sum()
    return total if rest is None else total + rest.sum()


def _sum_of_squares(table: Tensor, rest: Tensor | None) -> Tensor:
    """The same for squares. In long float32 sums, as in torch's norms, the error grows with the length."""
    norms = torch.linalg.vector_norm(table, dim=1)
    if rest is not None:
        norms = torch.cat([norms, torch.linalg.vector_norm(rest).unsqueeze(0)])
    wide = norms.double()
    return torch.dot(wide, wide)
