"""The exact norm of many tensors together, and the exact inner product of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.errors import NotMeasurable
from ..core.moments import ALWAYS, Column, identity
from .dispatch import Statistics

#: The columns of a norm of each order, and those that decide whether float32 is accurate enough: with all of them a norm is the same to the
#: last bit, whatever else is measured.
NORM_COLUMNS = {
    1.0: ALWAYS | {Column.ABS_SUM, Column.SUM, Column.SQUARE_SUM},
    2.0: ALWAYS | {Column.SUM, Column.SQUARE_SUM},
    torch.inf: ALWAYS | {Column.ABS_SUM, Column.MIN, Column.MAX},
}


def rows_of(gradients: Sequence[Tensor], norm_type: float, statistics: Statistics) -> Tensor:
    """Rows ``[len(gradients), 8]`` with the ``NORM_COLUMNS`` of this order, on the first gradient's device. Does not synchronise.

    Raises:
        ValueError: a gradient cannot be measured.
    """
    by_device: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        by_device.setdefault(gradient.device, []).append(place)
    try:
        found = [statistics.measure([gradients[i] for i in some], NORM_COLUMNS[norm_type]) for some in by_device.values()]
    except NotMeasurable as error:
        raise ValueError(
            f"the exact norm of these gradients cannot be measured, because one is {error}; use a number for max_norm and exact=False"
        ) from error
    if len(found) <= 1:
        return found[0] if found else identity(0)
    order = {place: row for row, place in enumerate(place for some in by_device.values() for place in some)}
    return torch.cat([rows.to(gradients[0].device) for rows in found])[[order[place] for place in range(len(gradients))]]


def norm_of_rows(rows: Tensor, norm_type: float, wide: bool) -> Tensor:
    """Total norm of order 1, 2 or inf from rows ``[n, 8]`` with the ``NORM_COLUMNS`` of this order: 0-d, float32, or float64 if ``wide``.

    Accumulated in float64; NaN or Inf if any element is. Does not synchronise.
    """
    if norm_type == 1.0:
        total = rows[:, Column.ABS_SUM].sum()
    elif norm_type == 2.0:
        total = rows[:, Column.SQUARE_SUM].sum().sqrt()
    else:
        largest = torch.maximum(rows[:, Column.MAX].amax(), -rows[:, Column.MIN].amin()).clamp(min=0)
        # the extremes are of the finite part; the sum of magnitudes distinguishes NaN from Inf
        total = torch.where(rows[:, Column.NONFINITE].sum() > 0, rows[:, Column.ABS_SUM].sum(), largest)
    return total.to(torch.float64 if wide else torch.float32)
