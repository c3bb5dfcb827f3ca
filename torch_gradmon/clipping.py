"""Gradient clipping that measures on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import NotMeasurable
from .session import Session
from .statistics.eager import measure
from .statistics.moments import ALWAYS, Column

_COLUMNS = {1.0: Column.ABS_SUM, 2.0: Column.SQUARE_SUM}


def clip(
    session: Session, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, exact: bool
) -> Tensor:
    """Measure the gradients of ``parameters`` before and after clipping them as torch does; see ``ModuleMonitor``."""
    norm_type, max_norm = float(norm_type), float(max_norm)
    if exact and norm_type not in (1.0, 2.0, torch.inf):
        raise ValueError(f"exact=True knows the norms 1, 2 and inf, got norm_type={norm_type}; use exact=False for others")
    session.measure_before_clip(parameters)
    if exact:
        total = exact_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}, so it cannot clip them")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    else:
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    session.measure_after_clip()
    return total


def exact_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Total norm of ``gradients`` of order 1, 2 or inf: 0-d, float32 or wider, on the first gradient's device.

    Accumulated in float64; NaN or Inf where an element is. Does not synchronise.
    """
    if not gradients:
        return torch.tensor(0.0)
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
