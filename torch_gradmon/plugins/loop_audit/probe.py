"""One small parameter whose gradient shows what the loop does with gradients: when it clears, writes to and uses them.

The probe observes the gradient after each accumulation and around each step. A different object means that the gradient was
dropped. The version counter counts writes: accumulation adds 1, ``zero_grad(set_to_none=False)`` 1, ``clip_grad_norm_`` 1 whether
it clips or not, ``clip_grad_value_`` 1 or 2, ``GradScaler.unscale_`` and optimizers 0. No value is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...step.parameter_refs import FsdpParameterRef, Place

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


class Probe:
    """The state of one parameter's gradient since the last step of its optimizer.

    Args:
        name: name of the parameter.
        place: a reference to it.
        parameter: the parameter; it is not held.

    Attributes:
        gradient: the gradient at the last observation, held; None without one or if it is not plain.
        version: its version at that time.
        after_step: whether the last observation followed a step.
        fired: the number of accumulations since the step.
        has_fired: whether there was any so far.
        is_paused: there were backward passes outside training.
        doubtful: this interval allows no conclusion.
        carried: all accumulations were added to the gradient of the previous step, which the loop had not changed.
        late: the number of writes to the previous step's gradient between that step and its drop; -1 if unknown.
        dropped: that gradient, if there were any writes.
        last: the gradient at the last observation, plain or not.
        drops: the number of drops between two accumulations, with nothing else in between.
        writes: the number of intervals between two accumulations with a write.
        touched: the loop wrote to it between the last accumulation and the step.
        synced: the number of backward passes that exchanged gradients between ranks.
    """

    __slots__ = (
        "_tensor",
        "after_step",
        "carried",
        "clock",
        "doubtful",
        "dropped",
        "drops",
        "fired",
        "gradient",
        "has_fired",
        "identity",
        "is_offloaded",
        "is_paused",
        "is_sharded",
        "last",
        "late",
        "name",
        "place",
        "synced",
        "touched",
        "value_version",
        "version",
        "was_touched",
        "writes",
    )

    def __init__(self, name: str, place: Place, parameter: Tensor) -> None:
        self.name, self.place, self.identity, self._tensor = name, place, id(parameter), parameter._cdata
        self.is_sharded = type(place) is FsdpParameterRef
        # fully_shard copies gradients to the host during the backward pass, unless a hook follows their accumulation
        self.is_offloaded = isinstance(place, FsdpParameterRef) and place.is_offloaded
        self.gradient: Tensor | None = None
        self.last: Tensor | None = None
        self.dropped: Tensor | None = None
        self.has_fired = False
        self.version = self.value_version = self.clock = 0
        self._begin()

    def _begin(self) -> None:
        self.fired = self.drops = self.writes = self.synced = 0
        self.late = -1
        self.dropped = None
        self.doubtful = self.carried = self.touched = False
        self.after_step = self.was_touched = self.is_paused = False

    def forget(self) -> None:
        """Drop the history."""
        self._begin()
        self.gradient = self.last = None

    def accumulated(self, parameter: Tensor, clock: int) -> None:
        """Observe the gradient after a backward pass added to it. ``clock`` counts the steps of all optimizers."""
        gradient = parameter.grad
        self.fired += 1
        self.has_fired = True
        if self.is_sharded and self.fired > 1 and gradient is not self.last:
            self.synced = 0  # it was dropped, and the next gradient starts from zero
        if gradient is None or not is_plain(gradient):
            self._remember(gradient)
            self.doubtful, self.gradient = True, None
            return
        self.last = gradient
        before, version = self.gradient, gradient._version
        if before is not None and not self.doubtful:
            self._compare(gradient is before, before, version, parameter, clock)
        self.gradient, self.version = gradient, version
        self.clock, self.value_version = clock, parameter._version

    def _compare(self, same: bool, before: Tensor, version: int, parameter: Tensor, clock: int) -> None:
        if self.fired == 1 and self.after_step:
            self.carried = same and version == self.version + 1
            if not same and not self.was_touched:
                self.late = before._version - self.version
                self.dropped = before if self.late else None
        elif not same:
            self.carried = False
            # a loop that moves the parameter or steps in between, as sharpness-aware minimisation does, drops it on purpose
            self.drops += clock == self.clock and parameter._version == self.value_version
        elif version != self.version + 1:
            self.carried = False
            self.writes += 1

    def _remember(self, gradient: Tensor | None) -> None:
        is_held = gradient is not None and gradient.numel() <= LARGEST and not gradient.requires_grad
        self.last = gradient if is_held else None

    def was_written(self) -> bool:
        """Whether its parameter was written to since the last accumulation, according to its version."""
        parameter = self.place()
        return self.fired > 0 and parameter is not None and parameter._version != self.value_version

    def was_converted(self) -> bool:
        """Whether the parameter holds another tensor now, whose hooks never fire."""
        parameter = self.place()
        return parameter is not None and parameter._cdata != self._tensor

    def settled(self, parameter: Tensor) -> None:
        """Note the version after a backward pass: writes by DDP are not writes by the loop."""
        if self.gradient is not None and parameter.grad is self.gradient:
            self.version = self.gradient._version

    def look(self, parameter: Tensor) -> Tensor | None:
        """The gradient before the optimizer's step. Notes whether it was written to since the last accumulation."""
        gradient = parameter.grad
        if gradient is not None and gradient is self.gradient:
            self.touched |= self.fired > 0 and gradient._version != self.version
        return gradient

    def stepped(self, parameter: Tensor | None) -> None:
        """Begin an interval after a step, even a prevented one. ``parameter`` is None if the gradient cannot be followed."""
        touched = self.touched or self.doubtful
        self._begin()
        before = self.gradient
        self.last = self.gradient = None
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return
        if gradient is before or is_plain(gradient):
            self.last = self.gradient = gradient
            self.version = gradient._version
            self.after_step, self.was_touched = True, touched
        else:
            self._remember(gradient)
