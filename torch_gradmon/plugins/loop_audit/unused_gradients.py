"""Loops that compute gradients and never use them."""

from __future__ import annotations

import torch
from torch import Tensor

from .probe import Probe

#: The number of gradients cleared without a step that rules out a mere inspection before training.
_CLEARED = 30
#: The number of backward passes into one sum of gradients that would be an implausibly large batch.
_SUMMED = 1000


class UnusedGradients:
    """Detects a loop that runs backward passes without a step while the parameter does not change."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._is_other = False
        self._next = 0

    def are_certain(self, parameter: Tensor, probe: Probe, clears: bool) -> bool:
        """Whether the loop still has no step after too many backward passes for a coincidence.

        ``clears``: in-place writes to gradients set them to zero. Synchronises after the 30th, 100th, 300th pass and so on.
        """
        fired, cleared = probe.interval.fired, probe.interval.cleared(clears)
        enough = cleared >= _CLEARED or fired >= _SUMMED
        if self._is_other or (not enough and cleared < _CLEARED // 3 and fired < _SUMMED // 2):
            return False
        if self._value is None:
            self._value = parameter.detach().clone()
        elif enough and fired >= self._next:
            self._next = 3 * fired
            # something other than the watched optimizers moves it, so the loop does train
            self._is_other = self._value.shape != parameter.shape or not torch.equal(self._value, parameter.detach())
        return enough and not self._is_other
