"""The norm of many tensors together, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import NotMeasurable
from .eager import measure
from .moments import ALWAYS, Column

_COLUMNS = {1.0: Column.ABS_SUM, 2.0: Column.SQUARE_SUM}


def exact_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Total norm of ``gradients`` of order 1, 2 or inf: 0-d, float32 or wider, on the first gradient's device.

    Accumulated in float64; NaN or Inf where an element is. Does not synchronise.
    """
    if not gradients:
        return torch.tensor(0.0, device="cpu")
    device = gradients[0].device
    columns = ALWAYS | ({_COLUMNS[norm_type]} if norm_type in _COLUMNS else {Column.SUM, Column.MIN, Column.MAX})
    try:
        rows = torch.cat([measure([gradient], columns).to(device) for gradient in gradients])
    except NotMeasurable as error:
        raise ValueError(f"exact=True cannot measure {error}; use exact=False") from error
    if norm_type == 1.0:
        total = rows[:, Column.ABS_SUM].sum()
    elif norm_type == 2.0:
        total = rows[:, Column.SQUARE_SUM].sum().sqrt()
    else:
        largest = torch.maximum(rows[:, Column.MAX].amax(), -rows[:, Column.MIN].amin()).clamp(min=0)
        # the extremes are those of the finite part; the sum tells NaN from Inf
        total = torch.where(rows[:, Column.NONFINITE].sum() > 0, rows[:, Column.SUM].sum().abs(), largest)
    return total.to(torch.float64 if any(g.dtype in (torch.float64, torch.complex128) for g in gradients) else torch.float32)
