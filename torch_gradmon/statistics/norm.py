"""The norm of many tensors together, and the inner product of two, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import NotMeasurable
from .backend import Statistics
from .eager import CPU_BLOCK
from .moments import ALWAYS, Column
from .reading import accumulator_dtype, flat_pair

#: The columns from which a norm of this order follows, and those that decide whether float32 is wide enough: with all of them
#: a norm is the same to the last bit whatever else is measured beside it.
NORM_COLUMNS = {
    1.0: ALWAYS | {Column.ABS_SUM, Column.SUM, Column.SQUARE_SUM},
    2.0: ALWAYS | {Column.SUM, Column.SQUARE_SUM},
    torch.inf: ALWAYS | {Column.ABS_SUM, Column.MIN, Column.MAX},
}


def exact_norm(gradients: Sequence[Tensor], norm_type: float, statistics: Statistics) -> Tensor:
    """Total norm of ``gradients`` of order 1, 2 or inf: 0-d, float32 or wider, on the first gradient's device.

    Accumulated in float64; NaN or Inf where an element is. Does not synchronise.

    Raises:
        ValueError: a gradient that cannot be measured.
    """
    if not gradients:
        return torch.tensor(0.0, device="cpu")
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    try:
        found = [statistics.measure(some, NORM_COLUMNS[norm_type]) for some in by_device.values()]
    except NotMeasurable as error:
        raise ValueError(f"exact=True cannot measure {error}; use exact=False") from error
    rows = torch.cat([rows.to(gradients[0].device) for rows in found])
    return norm_of_rows(rows, norm_type, any(g.dtype in (torch.float64, torch.complex128) for g in gradients))


def norm_of_rows(rows: Tensor, norm_type: float, wide: bool) -> Tensor:
    """The same from rows ``[n, 8]`` that have the ``NORM_COLUMNS`` of this order; in float64 if ``wide``."""
    if norm_type == 1.0:
        total = rows[:, Column.ABS_SUM].sum()
    elif norm_type == 2.0:
        total = rows[:, Column.SQUARE_SUM].sum().sqrt()
    else:
        largest = torch.maximum(rows[:, Column.MAX].amax(), -rows[:, Column.MIN].amin()).clamp(min=0)
        # the extremes are those of the finite part; the sum of magnitudes tells NaN from Inf
        total = torch.where(rows[:, Column.NONFINITE].sum() > 0, rows[:, Column.ABS_SUM].sum(), largest)
    return total.to(torch.float64 if wide else torch.float32)


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Sum of ``a * b`` over all elements, accumulated in float64 block by block: 0-d, on the tensors' device. Does not synchronise."""
    with torch.no_grad():
        left, right = flat_pair(a, b)
        wide = accumulator_dtype(a.device)
        total = torch.zeros((), dtype=wide, device=a.device)
        for start in range(0, left.numel(), CPU_BLOCK):
            total += torch.dot(left[start : start + CPU_BLOCK].to(wide), right[start : start + CPU_BLOCK].to(wide))
        return total
