"""Gradient clipping that measures on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .hand import Hand
from .statistics.norm import NORM_COLUMNS


def clip(
    hand: Hand, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, exact: bool
) -> Tensor:
    """Measure the gradients of ``parameters`` before and after clipping them as torch does; see ``ModuleMonitor``."""
    norm_type, max_norm = float(norm_type), float(max_norm)
    if exact and norm_type not in NORM_COLUMNS:
        raise ValueError(f"exact=True knows the norms 1, 2 and inf, got norm_type={norm_type}; use exact=False for others")
    if exact and norm_type != 2.0 and any(p.is_complex() for p in parameters):
        raise ValueError(
            f"exact=True knows the norm of order {norm_type} of real gradients only; use exact=False for complex ones"
        )
    if exact and hand.are_spread(parameters):
        raise ValueError(
            "exact=True cannot measure gradients that are spread over ranks; use exact=False, which clips as torch does"
        )
    hand.measure_before_clip(parameters)
    if exact:
        total = hand.exact_norm(parameters, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}, so it cannot clip them")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    else:
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    hand.measure_after_clip()
    return total
