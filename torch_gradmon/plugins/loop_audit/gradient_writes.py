"""In-place writes to a gradient between two observations: a few reads of its values show whether they clear or clip it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .probe import Probe

#: The number of times that its values are read.
_LOOKS = 3
#: The number of times that its values have to be zero to be proof of clearing: a gradient may be zero by itself.
_DOUBTS = 9
#: The most elements whose factor shows whether a write multiplies, and its deviation in units of the precision of the gradient, and at
#: least.
_ELEMENTS, _UNITS, _EXACT = 1 << 14, 4, 1e-3


class GradientWrites:
    """The writes to the gradients of one optimizer.

    Attributes:
        is_unclear: the loop writes between two accumulations, and the kind of write is not known yet.
        clears: those writes set gradients to zero; False while the kind is not known.
        clips: those writes do neither that nor keep the mean of k micro-batches, by the factor (k - 1) / k before each.
        is_doubtful: gradients seem to be carried over from step to step, which their values have to confirm.
        stays: the values have confirmed it.
    """

    def __init__(self) -> None:
        self.is_unclear = self.clears = self.clips = self._is_settled = False
        self.is_doubtful = self.stays = False
        self._zeros = self._others = self._late = self._doubts = 0
        self._accumulated: Tensor | None = None  # the first elements after the last accumulation
        self._are_means = True  # so far

    @property
    def needs_values(self) -> bool:
        """Whether the values of gradients have to be read."""
        return self.is_unclear or self.is_doubtful

    def begin(self) -> bool:
        """Record a write. Returns whether the values must be read from now on."""
        begins = not (self.is_unclear or self._is_settled)
        self.is_unclear |= begins
        return begins

    def keep(self, probe: Probe) -> None:
        """Keep some elements of the gradient after an accumulation."""
        self._accumulated = None if probe.gradient is None else probe.gradient.flatten()[:_ELEMENTS].clone()

    def read_written(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """Read the gradient just before another one is added to it. Synchronises only if the loop has written to it."""
        gradient = parameter.grad
        if not self.is_unclear or gradient is None or gradient is not probe.gradient:
            return
        if not probe.interval.fired or gradient._version == probe.version or incoming is None:
            return
        if not bool(incoming.any()):  # where all is zero anyway, nothing follows from it
            return
        if bool(gradient.any()):
            self._others += 1
            count = probe.interval.fired
            exact = max(_EXACT, _UNITS * torch.finfo(gradient.dtype).eps)
            self._are_means &= abs(_factor(self._accumulated, gradient, exact) * (count + 1) / count - 1) < exact
        else:
            self._zeros += 1
        if self._others + self._zeros >= _LOOKS:
            self.is_unclear, self._is_settled = False, True
            self.clears = self._zeros > self._others
            self.clips = not (self.clears or self._are_means)

    def read_carried(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """Read a gradient that seems to be carried over: ``.data.zero_()`` does not change its version. Synchronises."""
        gradient, interval = parameter.grad, probe.interval
        if not self.is_doubtful or interval.fired or not interval.after_step:
            return
        if gradient is None or gradient is not probe.gradient or gradient._version != probe.version or incoming is None:
            return
        self._doubts += 1
        self.stays = bool(gradient.any())
        self.is_doubtful = not self.stays and self._doubts < _DOUBTS

    def suspect_carried(self) -> None:
        """Record that a gradient's version indicates carrying over, so that its values must be read from now on."""
        self.is_doubtful |= not (self.stays or self._doubts)

    def is_late_clip(self, dropped: Tensor) -> bool:
        """Whether a gradient that was written to after its step, then dropped, is not zero. Synchronises a few times."""
        if self._late >= _LOOKS:
            return True
        if bool(dropped.any()):
            self._late += 1
            return True
        self._late = 0
        return False


def _factor(before: Tensor | None, after: Tensor, exact: float) -> float:
    """By what a gradient was multiplied, all elements alike; NaN if it was not. Synchronises."""
    if before is None:
        return math.nan
    now = after.detach().flatten()[:_ELEMENTS].double()
    old = before.double()
    factor = (now * old).sum() / old.square().sum()
    return factor.item() if bool((now - factor * old).norm() < exact * now.norm()) else math.nan
