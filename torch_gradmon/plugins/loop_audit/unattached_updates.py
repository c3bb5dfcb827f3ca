"""Loops whose optimizer does not step: another one or the loop itself updates its parameters, or nothing does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...step.model_index import Place
from ...step.ranks import is_dtensor
from .probe import Probe

#: The parameters have to change between this many backward passes in a row, beyond the usual number between two steps. Methods that
#: move the parameters within a step do so less often.
_PASSES = 5
#: The approximate number of elements of each parameter that are compared.
_COMPARED = 4096
#: The number of gradients cleared without a step that rules out a mere inspection before training.
_CLEARED = 30
#: The number of backward passes after which a few cleared sums are proof, too.
_MANY, _TWICE = 100, 2
#: The number of backward passes into one sum of gradients that would be an implausibly large batch.
_SUMMED = 1000


class UnattachedUpdates:
    """Counts backward passes since the optimizer's last step, and how often its parameters changed before one."""

    def __init__(self) -> None:
        self._places: Sequence[Place] = ()
        self.passes = self._moves = self._looks = 0
        self._most = 1  # passes between two steps so far
        self._is_certain = False
        self._samples: list[_Sample] = []

    def compare(self, places: Sequence[Place]) -> None:
        """Compare these parameters of the optimizer from now on."""
        self._places = places

    def backward_ended(self) -> bool:
        """Count a backward pass. Returns whether the parameters have changed before too many of them for a coincidence.

        No parameter is read during the usual number of passes between two steps, which in most loops is all of them: this saves a
        copy of the smaller parameters in every step. Synchronises an accelerator once soon after that, then less and less often.
        """
        self.passes += 1
        beyond = self.passes - self._most
        if beyond <= 1:
            if beyond == 1:
                self._samples = [_Sample(place) for place in self._places]
            return False
        if self._is_certain:
            return True
        moved = [sample.has_moved() for sample in self._samples]
        self._moves += any(moved)
        # version counters miss fused optimizers of an accelerator and writes to .data
        is_due = not self._moves and beyond == _PASSES * 3**self._looks
        self._looks += is_due
        if is_due or self._moves >= _PASSES - 1:
            self._is_certain = any(sample.has_changed() for sample in self._samples)
            self._moves = max(self._moves, beyond) if self._is_certain else 0
        return self._is_certain

    @property
    def has_moved(self) -> bool:
        """Whether a change of the parameters since then is known."""
        return self._moves > 0

    @property
    def has_changed(self) -> bool:
        """Whether they differ from their first samples. Synchronises."""
        return any(sample.has_changed() for sample in self._samples)

    def step_ended(self) -> None:
        """Start again after a step of the optimizer, or of another attached one with the same parameters."""
        if self.passes:
            self._most = max(self._most, self.passes)
        self.passes = self._moves = self._looks = 0
        self._is_certain, self._samples = False, []


class _Sample:
    """Some elements of one parameter, and the number of writes to it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._first = self._last = self._now()
        self._version = self._written()

    def _written(self) -> int:
        parameter = self._place()
        return -1 if parameter is None or parameter.is_inference() else parameter._version

    def _now(self) -> Tensor | None:
        if (part := local_values(self._place())) is None:
            return None
        while part.numel() > _COMPARED and part.dim():
            part = part[: _COMPARED * len(part) // part.numel()] if part.numel() < _COMPARED * len(part) else part[0]
        return part.clone()

    def has_moved(self) -> bool:
        """Whether it has changed since the last call; on accelerators, whether it was written to."""
        version, before = self._version, self._last
        self._version = self._written()
        if before is None or before.device.type != "cpu":
            return self._version != version
        self._last = self._now()
        return _differ(self._last, before)

    def has_changed(self) -> bool:
        """Whether it has changed since the beginning. Synchronises."""
        return _differ(self._now(), self._first)


def local_values(parameter: Tensor | None) -> Tensor | None:
    """The values of a parameter on this rank, detached."""
    if parameter is None:
        return None
    return parameter.to_local().detach() if is_dtensor(parameter) else parameter.detach()  # type: ignore[attr-defined]


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and not torch.equal(one, other)


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
        enough = cleared >= _CLEARED or fired >= _SUMMED or (cleared >= _TWICE and fired >= _MANY)
        if self._is_other or (not enough and cleared < _CLEARED // 3 and fired < _MANY // 2):
            return False
        if self._value is None:
            self._value = parameter.detach().clone()
        elif enough and fired >= self._next:
            self._next = 3 * fired
            # something other than the watched optimizers moves it, so the loop does train
            self._is_other = self._value.shape != parameter.shape or not torch.equal(self._value, parameter.detach())
        return enough and not self._is_other
