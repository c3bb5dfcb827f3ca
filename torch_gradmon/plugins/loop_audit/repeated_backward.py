"""Backward passes through a graph that has had one: in the same step, or in later ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from .probe import LARGEST, Probe

#: Steps in a row before values are read, and the times that these are read.
_STEPS, _LOOKS = 5, 3
#: Gradients that are compared with those of the step before.
_COMPARED = 8


class RepeatedBackward:
    """Compares gradients of one optimizer where there are more accumulations than forwards.

    Attributes:
        is_counting: the last step had more accumulations than forwards.
        needs_values: so did several, each with a forward, and gradients as they come will show whether they are of one graph.
        is_certain: they are.
    """

    def __init__(self) -> None:
        self.is_counting = self.needs_values = self.is_certain = False
        self._steps = self._same = 0
        self._is_other = False
        self._last: Sequence[Tensor] = ()

    def step_began(self, forwards: int, fired: int, optimizer: Optimizer) -> None:
        """Count the forwards and the accumulations since the last step; there were some of the latter. May synchronise, a few times."""
        self.is_counting = forwards < fired
        self._steps = self._steps + 1 if self.is_counting else 0
        is_doubtful = self._steps >= _STEPS and not self._is_other and self._same < _LOOKS
        self.needs_values = is_doubtful and forwards > 0
        if not is_doubtful:
            self._last = ()
        elif not forwards:
            self._compare(optimizer)
        self.is_certain = self.is_counting and self._same >= _LOOKS

    def _compare(self, optimizer: Optimizer) -> None:
        """Without a forward, with those of the step before. Forwards may be hidden, and a bias may have the same gradient for all inputs:
        all that are compared have to be the same.
        """
        every = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        now = [gradient for gradient in islice(every, _COMPARED) if type(gradient) is Tensor and gradient.numel() <= LARGEST]
        if not any(bool(gradient.any()) for gradient in now):
            return
        if self._last:
            self._judge(len(now) == len(self._last) and all(map(_equal, now, self._last)))
        self._last = [gradient.clone() for gradient in now]

    def read(self, probe: Probe, incoming: Tensor | None) -> None:
        """Compare the second gradient of a step with the first one. Synchronises, a few times."""
        fired = probe.interval.fired
        if not self.needs_values or fired > 1 or type(incoming) is not Tensor or not bool(incoming.any()):
            return
        if fired and self._last:
            self._judge(_equal(incoming, self._last[0]))
        self._last = [incoming.detach().clone()]
        self.needs_values = not self._is_other and self._same < _LOOKS

    def _judge(self, is_same: bool) -> None:
        self._same += is_same
        self._is_other |= not is_same


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
