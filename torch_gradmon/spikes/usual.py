"""What is usual of a layer's gradient, and how far a step lies from that: all that is said of a layer and a spike rests on it.

It is what the default rule, :class:`torch_gradmon.spikes.Hampel`, takes for usual, worked out for all layers at once from the norms
of some steps: the median of the last nine values that were no spikes themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .hampel import EARLY, EARLY_SPREAD, FEWEST_RESIDUALS, FIRST, LEAST, LOG_OF_ZERO, MAD_TO_STD, NEAR, THRESHOLD


@dataclass(frozen=True)
class Usual:
    """What is usual of some layers after the steps that it was made of. All ``[layers]``, NaN where too little is known.

    Attributes:
        positions: logarithms of the usual norms.
        spreads: robust standard deviations of the logarithms, at least what makes a rise to 1.5 times the usual no spike.
    """

    positions: Tensor
    spreads: Tensor

    @classmethod
    def of(cls, norms: Tensor) -> Usual:
        """Of the ``norms`` of some steps, float64 ``[steps, layers]``; NaN where a layer has none. What is infinite does not count."""
        if not len(norms):
            unknown = norms.new_full(norms.shape[1:], torch.nan)
            return cls(unknown, unknown)
        logs = _logs(norms)
        # by layer, so that steps without a gradient, as of an expert that few batches reach, take no places
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
        places = (~calm.isnan()).flip(0).cumsum(0).flip(0)  # from the last one, which is 1
        last = torch.where(places <= NEAR, calm, torch.nan)
        enough = count >= FIRST
        return cls(torch.where(enough, _median(last, 0), torch.nan), torch.where(enough, spreads, torch.nan))

    @property
    def norms(self) -> Tensor:
        """The usual norms."""
        return torch.where(self.positions <= LOG_OF_ZERO + 1, 0.0, self.positions.exp())

    def scores(self, norms: Tensor) -> Tensor:
        """How far ``norms``, ``[..., layers]``, lie above it, in robust standard deviations; NaN where that is not known."""
        return (_logs(norms) - self.positions) / self.spreads


def _logs(norms: Tensor) -> Tensor:
    logs = torch.where(norms > 0, norms.log(), torch.where(norms == 0, LOG_OF_ZERO, torch.nan))
    return torch.where(norms.isinf(), torch.nan, logs)


def _median(values: Tensor, dim: int) -> Tensor:
    """Without NaN; of an even number of values the mean of the two in the middle, as the rule has it."""
    ordered, count = values.sort(dim=dim).values, (~values.isnan()).sum(dim=dim, keepdim=True)  # NaN comes last
    middle = ordered.gather(dim, (count - 1).clamp(min=0) // 2) + ordered.gather(dim, count // 2)
    return (middle / 2).squeeze(dim)
