"""The second pass: which tensors need one, and rows that are right for any values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.moments import SUMMED, Column, identity, merge
from ..core.torch_modes import no_autocast
from .request import Batch, Request, accumulator_dtype, flat_pair

#: Outside of this range of the mean square, squares leave the range of float32.
_SAFE = (1e-30, 1e30)
#: Elements per block, which bounds the scratch memory; on CPU a block also fits the cache.
_BLOCK = 1 << 17
_PRODUCT_BLOCK = 1 << 20


def needs_precise_pass(rows: Tensor, columns: frozenset[Column]) -> tuple[list[int], list[int]]:
    """Of the rows of a first pass, on the CPU, which hold NaN or Inf, and for which others float32 is too inexact."""
    if len(rows) == 1:  # as in a hook, where a dozen calls cost more than reading the row
        (row,) = rows.tolist()
        nonfinite, imprecise = row_needs_precise_pass(row, columns)
        return ([0], []) if nonfinite else ([], [0] if imprecise else [])
    unsure, narrow = _doubts(rows, columns)
    if not bool((unsure | narrow).any()):
        return [], []
    return unsure.nonzero().flatten().tolist(), (narrow & ~unsure).nonzero().flatten().tolist()


def _doubts(rows: Tensor, columns: frozenset[Column]) -> tuple[Tensor, Tensor]:
    of = rows.unbind(1)
    extremes = Column.MIN in columns or Column.MAX in columns
    witness = rows.sum(dim=1) if extremes else rows[:, :SUMMED].sum(dim=1)
    count = of[Column.COUNT]
    nonfinite = ((witness - witness) != 0) & (count > 0)
    if Column.SQUARE_SUM not in columns:
        return nonfinite, torch.zeros_like(nonfinite)
    mean_square = of[Column.SQUARE_SUM] / count
    imprecise = (mean_square < _SAFE[0]) | (mean_square > _SAFE[1])
    if Column.ABS_SUM in columns:
        imprecise &= of[Column.ABS_SUM] != 0  # all zeros are exact in any dtype
    elif extremes:
        imprecise &= (of[Column.MIN] != 0) | (of[Column.MAX] != 0)
    if Column.SUM in columns:
        # if half of the square is in the mean, the std has up to twice the error of the sums; beyond that too much
        imprecise |= (of[Column.SUM] / count).square() > mean_square / 2
    return nonfinite, imprecise


def row_needs_precise_pass(row: Sequence[float], columns: frozenset[Column]) -> tuple[bool, bool]:
    """For one row of numbers: whether its tensor holds NaN or Inf, else whether float32 is too inexact for it."""
    count = row[Column.COUNT]
    if not count:
        return False, False
    extremes = Column.MIN in columns or Column.MAX in columns
    witness = sum(row if extremes else row[:SUMMED])
    if witness - witness != 0:
        return True, False
    if Column.SQUARE_SUM not in columns:
        return False, False
    mean_square, mean = row[Column.SQUARE_SUM] / count, row[Column.SUM] / count
    imprecise = not _SAFE[0] <= mean_square <= _SAFE[1]
    if Column.ABS_SUM in columns:
        imprecise &= row[Column.ABS_SUM] != 0
    elif extremes:
        imprecise &= row[Column.MIN] != 0 or row[Column.MAX] != 0
    return False, imprecise or (Column.SUM in columns and mean * mean > mean_square / 2)


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
                parts.append(_row(block if minus is None else block - minus[start : start + _BLOCK].to(wide), request.eps))
            rows.append(merge(torch.stack(parts)))
        return batch.add_implicit_zeros(torch.stack(rows))


def _row(block: Tensor, eps: float) -> Tensor:
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
