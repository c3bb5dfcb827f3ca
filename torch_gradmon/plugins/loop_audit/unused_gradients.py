"""Whether a loop computes gradients and never uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from .probe import Probe

#: Gradients that were cleared with no step, from which on it is no look at gradients before the training begins any more.
_CLEARED = 30
#: Backward passes of one sum of gradients, which would be a very large batch.
_SUMMED = 1000


class Idle:
    """Looks at how long a loop goes on without a step, and whether the parameter stays as it is."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._is_other = False
        self._next = 0

    def goes_on(self, parameter: Tensor, probe: Probe, clears: bool) -> bool:
        """After a backward pass, where there was no step yet: whether this is no accident. Synchronises after the 30th, 100th, 300th
        and so on. ``clears`` tells that writes to gradients in place set them to zero.
        """
        cleared = probe.drops + (probe.writes if clears else 0)
        enough = cleared >= _CLEARED or probe.fired >= _SUMMED
        if self._is_other or (not enough and cleared < _CLEARED // 3 and probe.fired < _SUMMED // 2):
            return False
        if self._value is None:
            self._value = parameter.detach().clone()
        elif enough and probe.fired >= self._next:
            self._next = 3 * probe.fired
            # whatever moves it is none of the optimizers that are watched, but it trains
            self._is_other = self._value.shape != parameter.shape or not torch.equal(self._value, parameter.detach())
        return enough and not self._is_other
