"""Whether gradients are clipped while they are still multiplied by the scale of a GradScaler.

That somebody wrote to them before they were unscaled is told by version counters. That it was a clip, and nobody's own all-reduce or
division, is told by values: the norm, or the largest element, is the same in each step. They are read a few times in a training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from .probe import is_plain

#: So many norms are compared, and so many are looked at before nothing more is.
_COMPARED, _MOST = 3, 9
#: A clip leaves its bound up to rounding and torch's 1e-6 in the denominator.
_SAME = 1e-2


class ScaledClip:
    """Norms of scaled gradients that somebody has written to, of one optimizer."""

    def __init__(self) -> None:
        self._norms: list[tuple[float, float]] = []
        self._looks = 0
        self._is_clip = False

    def was_written(self, optimizer: Optimizer) -> bool:
        """Whether it is a clip, as far as is known by now. Synchronises the device, a few times in all."""
        if self._is_clip or self._looks >= _MOST:
            return self._is_clip
        self._looks += 1
        found = _norm_and_largest(optimizer)
        if all(map(math.isfinite, found)):  # steps that overflow tell nothing
            self._norms = [*self._norms[1 - _COMPARED :], found]
        if len(self._norms) == _COMPARED:
            self._is_clip = any(
                max(values) > 0 and min(values) > (1 - _SAME) * max(values) for values in zip(*self._norms, strict=True)
            )
        return self._is_clip


def _norm_and_largest(optimizer: Optimizer) -> tuple[float, float]:
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # whatever their size, unlike probes
    gradients: list[Tensor] = [g for g in found if type(g) is Tensor and g.layout is torch.strided and not g.requires_grad]
    if not gradients or not any(map(is_plain, gradients)):
        return math.nan, math.nan
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    largest = [torch.linalg.vector_norm(g, math.inf) for g in gradients if g.numel()]
    return float(torch.stack([x.to(norms[0].device, torch.float64) for x in norms]).norm()), max(map(float, largest))
