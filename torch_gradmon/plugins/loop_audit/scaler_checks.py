"""Mistakes around the calls of a GradScaler: gradients clipped while they are scaled, or added to unscaled ones.

Version counters show writes before the gradients are unscaled. Values show that the writes are a clip, not an all-reduce or a
division by the loop: the norm, or the largest element, is the same in each step. They are read a few times in a training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tallies import Tallies
from .probe import Probe, is_plain

#: The number of norms that are compared, and the largest number that is read.
_COMPARED, _MOST = 3, 9
#: The tolerance for equal norms: a clip is exact up to rounding and torch's 1e-6 in the denominator.
_SAME = 1e-2


class ScalerChecks:
    """Judges the order of one optimizer's gradients and the calls of its GradScaler.

    Args:
        tallies: receive the findings.
        key: the optimizer's key there.

    Attributes:
        is_active: the scaler was called in this attempt.
        is_unscaled: it has unscaled the gradients.
    """

    def __init__(self, tallies: Tallies, key: int) -> None:
        self._tallies, self._key = tallies, key
        self._clip = ScaledClip()
        self.is_active = self.is_unscaled = self._is_scaled_since = self._is_mixed = False

    def loss_scaled(self) -> None:
        """Record that a loss was scaled."""
        self.is_active = self._is_scaled_since = True

    def accumulated_unscaled(self) -> None:
        """Record an accumulation to unscaled gradients."""
        self._is_mixed |= self._is_scaled_since

    def unscaling(self, parameter: Tensor, probe: Probe, optimizer: Optimizer) -> None:
        """Judge the probe before the scaler unscales the optimizer's gradients."""
        interval = probe.interval
        if interval.doubtful or not interval.fired or parameter.grad is not probe.gradient:
            return
        probe.look(parameter)
        if not interval.touched or self._clip.was_written(optimizer):
            self._tallies.check("clipped-while-scaled", self._key, interval.touched, probe.name)

    def unscaled(self) -> None:
        """Record that the gradients are unscaled."""
        self.is_active = self.is_unscaled = True
        self._is_scaled_since = False

    def step_ended(self, probe: Probe | None, is_alone: bool) -> None:
        """Judge the attempt after the optimizer's step, or after the scaler prevented it.

        ``is_alone``: no other optimizer is attached, for which a loss may be scaled in between.
        """
        if probe is not None and self.is_unscaled:
            is_mixed = self._is_mixed or (is_alone and self._is_scaled_since)
            self._tallies.check("backward-after-unscale", self._key, is_mixed, probe.name)
        self.end_attempt()

    def end_attempt(self) -> None:
        """Forget the scaler's calls of this attempt."""
        self.is_active = self.is_unscaled = self._is_scaled_since = self._is_mixed = False


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
