"""The second look: which tensors need one, and rows that are right for any values."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch, Request
from .moments import Column, identity, merge
from .reading import accumulator_dtype

#: What a first look in float32 left open.
IMPRECISE, NONFINITE = 1, 2
#: Outside of this range of the mean square, squares leave float32's range.
_SAFE = (1e-30, 1e30)
#: Elements per block, which bounds the scratch memory; on CPU it also stays in the cache.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 17, 1 << 24


def doubt(rows: Tensor, columns: frozenset[Column]) -> Tensor:
    """What a first look left open about each tensor, given its rows ``[n, 8]``: 0, ``IMPRECISE`` or ``NONFINITE``, int8 ``[n]``."""
    of = rows.unbind(1)
    witness = of[Column.SUM] + of[Column.ABS_SUM] + of[Column.SQUARE_SUM]
    extremes = Column.MIN in columns or Column.MAX in columns
    if extremes:
        witness = witness + of[Column.MIN] + of[Column.MAX]
    count = of[Column.COUNT]
    doubts = ((witness - witness) != 0).logical_and_(count > 0).to(torch.int8).mul_(NONFINITE)
    if Column.SQUARE_SUM in columns:
        mean_square = of[Column.SQUARE_SUM] / count
        imprecise = (mean_square < _SAFE[0]) | (mean_square > _SAFE[1])
        if Column.ABS_SUM in columns or Column.NEAR_ZERO in columns:
            imprecise &= of[Column.ABS_SUM] != 0  # all zero, which no dtype loses
        elif extremes:
            imprecise &= (of[Column.MIN] != 0) | (of[Column.MAX] != 0)
        if Column.SUM in columns:
            # with half of the square in the mean, the std loses up to twice what the sums lost; beyond that too much
            imprecise |= (of[Column.SUM] / count).square() > mean_square / 2
        doubts = torch.where((doubts == 0) & imprecise, IMPRECISE, doubts)
    return doubts


def closely(batch: Batch, request: Request) -> Tensor:
    """Rows ``[n, 8]`` of tensors with any values, in float64; columns that nobody asked for come along."""
    device = batch.values[0].device
    wide = accumulator_dtype(device)
    size = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    rows = []
    for index in range(len(batch.values)):
        values, minus = batch.flat(index)
        parts = [identity(1, device, wide)[0]]
        for start in range(0, values.numel(), size):
            block = request.unscaled(values[start : start + size]).to(wide)
            parts.append(_row(block if minus is None else block - minus[start : start + size].to(wide), request.eps))
        rows.append(merge(torch.stack(parts)))
    return batch.add_implicit_zeros(torch.stack(rows))


def _row(block: Tensor, eps: float) -> Tensor:
    """The row of a block: ``[8]``."""
    finite = torch.isfinite(block)
    magnitude = block.abs()
    columns = {
        Column.COUNT: torch.full_like(block[0], block.numel()),
        Column.SUM: block.sum(),
        Column.ABS_SUM: magnitude.sum(),
        Column.SQUARE_SUM: block.square().sum(),
        Column.NEAR_ZERO: (magnitude <= eps).sum(),  # false for NaN and Inf
        Column.NONFINITE: (~finite).sum(),
        Column.MIN: torch.where(finite, block, torch.inf).amin(),
        Column.MAX: torch.where(finite, block, -torch.inf).amax(),
    }
    return torch.stack([columns[column].to(block.dtype) for column in Column])
