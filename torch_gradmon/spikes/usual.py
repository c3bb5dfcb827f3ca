"""The usual gradient norm of each layer, and the distance of a step from it.

This is the baseline of the default rule, :class:`torch_gradmon.spikes.Hampel`, for all layers at once: the median of the last nine
values that were not spikes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .hampel import EARLY, EARLY_SPREAD, FEWEST_RESIDUALS, FIRST, LEAST, LOG_OF_ZERO, MAD_TO_STD, NEAR, THRESHOLD


@dataclass(frozen=True)
class Baseline:
    """The usual norms of some layers. All tensors are ``[layers]``, NaN where too few steps are known.

    Attributes:
        positions: logarithms of the usual norms.
        spreads: robust standard deviations of the logarithms, with a floor that keeps rises below a factor of 1.5 from being spikes.
    """

    positions: Tensor
    spreads: Tensor

    @classmethod
    def of(cls, norms: Tensor) -> Baseline:
        """From the ``norms`` of some steps, float64 ``[steps, layers]``, NaN where a layer has none. Infinite norms are ignored."""
        if not len(norms):
            unknown = norms.new_full(norms.shape[1:], torch.nan)
            return cls(unknown, unknown)
        logs = _logs(norms)
        # move NaN to the front of each layer: a step without a gradient, as for a rarely used expert, must not take a place in the window
        logs = logs.gather(0, logs.isnan().to(torch.uint8).argsort(dim=0, stable=True))
        count = (~logs.isnan()).sum(dim=0)
        before = torch.cat([logs.new_full((NEAR, logs.shape[1]), torch.nan), logs]).unfold(0, NEAR, 1)[: len(logs)]
        is_known = (~before.isnan()).sum(dim=-1) >= FIRST
        residuals = torch.where(is_known, logs - _median(before, -1), torch.nan)
        deviations = _median((residuals - _median(residuals, 0)).abs(), 0)
        deviations = torch.where((~residuals.isnan()).sum(dim=0) >= FEWEST_RESIDUALS, deviations, 0.0)
        least = (math.log(LEAST) + EARLY / count) / THRESHOLD
        spreads = torch.maximum(MAD_TO_STD * deviations * (1 + EARLY_SPREAD / count), least)
        calm = torch.where(residuals > THRESHOLD * spreads, torch.nan, logs)
        places = (~calm.isnan()).flip(0).cumsum(0).flip(0)  # counted from the last step, which is 1
        last = torch.where(places <= NEAR, calm, torch.nan)
        enough = count >= FIRST
        return cls(torch.where(enough, _median(last, 0), torch.nan), torch.where(enough, spreads, torch.nan))

    @property
    def norms(self) -> Tensor:
        """The usual norms."""
        return torch.where(self.positions <= LOG_OF_ZERO + 1, 0.0, self.positions.exp())

    def scores(self, norms: Tensor) -> Tensor:
        """Robust standard deviations of ``norms``, ``[..., layers]``, above the baseline; NaN where it is unknown."""
        return (_logs(norms) - self.positions) / self.spreads


def _logs(norms: Tensor) -> Tensor:
    logs = torch.where(norms > 0, norms.log(), torch.where(norms == 0, LOG_OF_ZERO, torch.nan))
    return torch.where(norms.isinf(), torch.nan, logs)


def _median(values: Tensor, dim: int) -> Tensor:
    """The median without NaN; for an even count, the mean of the two middle values, as in the rule."""
    ordered, count = values.sort(dim=dim).values, (~values.isnan()).sum(dim=dim, keepdim=True)  # NaN comes last
    middle = ordered.gather(dim, (count - 1).clamp(min=0) // 2) + ordered.gather(dim, count // 2)
    return (middle / 2).squeeze(dim)
