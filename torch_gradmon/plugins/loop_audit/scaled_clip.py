"""Whether gradients are clipped while they are still multiplied by the scale of a GradScaler.

Version counters show writes before the gradients are unscaled. Values show that the writes are a clip, not an all-reduce or a
division by the loop: the norm, or the largest element, is the same in each step. They are read a few times in a training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from .probe import is_plain

#: The number of norms that are compared, and the largest number that is read.
_COMPARED, _MOST = 3, 9
#: The tolerance for equal norms: a clip is exact up to rounding and torch's 1e-6 in the denominator.
_SAME = 1e-2


class ScaledClip:
    """Norms of one optimizer's scaled gradients after the loop has written to them."""

    def __init__(self) -> None:
        self._norms: list[tuple[float, float]] = []
        self._looks = 0
        self._is_clip = False

    def was_written(self, optimizer: Optimizer) -> bool:
        """Whether the writes are known to be a clip. Synchronises the device a few times in total."""
        if self._is_clip or self._looks >= _MOST:
            return self._is_clip
        self._looks += 1
        found = _norm_and_largest(optimizer)
        if all(map(math.isfinite, found)):  # steps that overflow are no evidence
            self._norms = [*self._norms[1 - _COMPARED :], found]
        if len(self._norms) == _COMPARED:
            self._is_clip = any(
                max(values) > 0 and min(values) > (1 - _SAME) * max(values) for values in zip(*self._norms, strict=True)
            )
        return self._is_clip


def _norm_and_largest(optimizer: Optimizer) -> tuple[float, float]:
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # of any size, unlike probes
    gradients: list[Tensor] = [g for g in found if type(g) is Tensor and g.layout is torch.strided and not g.requires_grad]
    if not gradients or not any(map(is_plain, gradients)):
        return math.nan, math.nan
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    largest = [torch.linalg.vector_norm(g, math.inf) for g in gradients if g.numel()]
    return float(torch.stack([x.to(norms[0].device, torch.float64) for x in norms]).norm()), max(map(float, largest))
