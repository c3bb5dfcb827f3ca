"""One small parameter whose gradient shows what the loop does with gradients: when it clears, writes to and uses them.

The probe observes the gradient after each accumulation and around each step. A different object means that the gradient was
dropped. The version counter counts writes: accumulation adds 1, ``zero_grad(set_to_none=False)`` 1, ``clip_grad_norm_`` 1 whether
it clips or not, ``clip_grad_value_`` 1 or 2, ``GradScaler.unscale_`` and optimizers 0. No value is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...step.model_index import FsdpParameterRef, Place

#: The most elements of a gradient that is held between two observations, so that the memory is negligible.
LARGEST = 2**20


def is_plain(gradient: Tensor) -> bool:
    """Whether identity and version counter of a gradient are meaningful.

    They are not for DTensors, views of a DDP bucket, sparse gradients, whose sums are new tensors, and gradients with a graph.
    """
    return (
        type(gradient) is Tensor
        and not gradient.requires_grad
        and not gradient._is_view()
        and gradient.layout is torch.strided
        and gradient.numel() <= LARGEST
    )


@dataclass(slots=True)
class Interval:
    """What happened to a gradient since the last step of its optimizer."""

    after_step: bool = False  # whether the gradient is known since a step
    was_touched: bool = False  # the loop wrote to it before that step
    fired: int = 0  # the number of accumulations
    drops: int = 0  # of drops between two accumulations, with nothing else in between
    writes: int = 0  # of intervals between two accumulations with a write, and nothing else in between
    synced: int = 0  # of backward passes that exchanged gradients between ranks
    late: int = -1  # of writes to the previous step's gradient between that step and its drop; -1 if unknown
    dropped: Tensor | None = None  # that gradient, if there were any writes
    carried: bool = False  # all accumulations were added to the previous step's gradient, which the loop had not changed
    touched: bool = False  # the loop wrote to it between the last accumulation and the step
    doubtful: bool = False  # nothing follows from this interval
    is_paused: bool = False  # there were backward passes outside training

    def accumulated(self, before: Tensor | None, is_same: bool, writes: int, is_alone: bool) -> None:
        """Count an accumulation, which was added to the gradient ``before`` if ``is_same``, after a number of other ``writes`` to it.

        ``is_alone``: since then no optimizer stepped and nothing else moved the parameter.
        """
        self.fired += 1
        if before is None or self.doubtful:
            return
        if self.fired == 1 and self.after_step:
            self.carried = is_same and not writes
            if not is_same and not self.was_touched:
                self.late, self.dropped = writes, before if writes else None
        elif not is_same:
            self.carried = False
            # a loop that moves the parameter or steps in between, as sharpness-aware minimisation does, clears it on purpose
            self.drops += is_alone
        elif writes:
            self.carried = False
            self.writes += is_alone

    def accumulated_unknown(self) -> None:
        """Count an accumulation to a gradient that cannot be followed."""
        self.fired += 1
        self.doubtful = True

    def exchanged(self) -> None:
        """Count an exchange between ranks."""
        self.synced += 1

    def sum_dropped(self) -> None:
        """Forget the exchanges of a sum that the loop has dropped; the next one starts from zero."""
        if self.fired:
            self.synced = 0

    def pause(self) -> None:
        """Record a backward pass outside training."""
        self.doubtful = self.is_paused = True

    def touch(self) -> None:
        """Record a write before the step."""
        self.touched = True

    def cleared(self, clears: bool) -> int:
        """The number of sums of gradients that were cleared. ``clears``: writes set them to zero."""
        return self.drops + (self.writes if clears else 0)


class Probe:
    """Observes one parameter's gradient.

    Args:
        name: of the parameter in findings; empty if they need none.
        place: a reference to it.
        parameter: the parameter; it is not held.

    Attributes:
        gradient: the gradient at the last observation, held; None without one or if it is not plain.
        version: its version at that time.
        interval: what happened to it since the last step of the optimizer.
        has_fired: whether there was any accumulation so far.
    """

    def __init__(self, name: str, place: Place, parameter: Tensor) -> None:
        self.name, self.place, self.identity, self._tensor = name, place, id(parameter), parameter._cdata
        self.is_sharded = type(place) is FsdpParameterRef
        self.gradient: Tensor | None = None
        self._last: Tensor | None = None  # of a sharded parameter, plain or not
        self.interval = Interval()
        self.has_fired = False
        self.version = self._value_version = self._clock = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether ``fully_shard`` copies gradients to the host during the backward pass, unless a hook follows their accumulation."""
        return isinstance(self.place, FsdpParameterRef) and self.place.is_offloaded

    def forget(self) -> None:
        """Drop the history."""
        self.interval = Interval()
        self.gradient = self._last = None

    def accumulated(self, parameter: Tensor, clock: int) -> None:
        """Observe the gradient after a backward pass added to it. ``clock`` counts the steps of all optimizers."""
        gradient, before = parameter.grad, self.gradient
        self.has_fired = True
        if self.is_sharded:
            if gradient is not self._last:
                self.interval.sum_dropped()
            self._last = _held(gradient)
        if gradient is None or not is_plain(gradient):
            self.interval.accumulated_unknown()
            self.gradient = None
            return
        is_same, value_version = gradient is before, parameter._version
        writes = 0 if before is None else before._version - self.version - is_same
        self.interval.accumulated(before, is_same, writes, clock == self._clock and value_version == self._value_version)
        self.gradient, self.version = gradient, gradient._version
        self._clock, self._value_version = clock, value_version

    def was_written(self) -> bool:
        """Whether its parameter was written to since the last accumulation, according to its version."""
        parameter = self.place()
        return self.interval.fired > 0 and parameter is not None and parameter._version != self._value_version

    def was_converted(self) -> bool:
        """Whether the parameter holds another tensor now, whose hooks never fire."""
        parameter = self.place()
        return parameter is not None and parameter._cdata != self._tensor

    def settled(self) -> None:
        """Note the version after a backward pass: writes by DDP are not writes by the loop."""
        parameter = self.place()
        if self.gradient is not None and parameter is not None and parameter.grad is self.gradient:
            self.version = self.gradient._version

    def look(self, parameter: Tensor) -> Tensor | None:
        """The gradient before the optimizer's step. Notes whether it was written to since the last accumulation."""
        gradient = parameter.grad
        if gradient is not None and gradient is self.gradient and self.interval.fired and gradient._version != self.version:
            self.interval.touch()
        return gradient

    def stepped(self, parameter: Tensor | None) -> None:
        """Begin an interval after a step, even a prevented one. ``parameter`` is None if the gradient cannot be followed."""
        gradient = None if parameter is None else parameter.grad
        if self.is_sharded:
            self._last = _held(gradient)
        if gradient is not None and (gradient is self.gradient or is_plain(gradient)):
            self.interval = Interval(True, self.interval.touched or self.interval.doubtful)
            self.gradient, self.version = gradient, gradient._version
        else:
            self.interval, self.gradient = Interval(), None


def _held(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is not None and gradient.numel() <= LARGEST and not gradient.requires_grad else None
