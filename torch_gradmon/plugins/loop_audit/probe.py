"""One small parameter, on whose gradient the hand of the loop is seen: when it is cleared, written to and used.

The gradient is looked at behind each accumulation and around each step. That it is another object tells that it was dropped, its
version counter that somebody wrote to it: accumulation counts 1, ``zero_grad(set_to_none=False)`` 1, ``clip_grad_norm_`` 1
whether it clips or not, ``clip_grad_value_`` 1 or 2, ``GradScaler.unscale_`` and optimizers none. No value is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...step.parameter_refs import FsdpParameterRef, Place

#: A gradient of so many elements at most is held from one look to the next, which nobody notices.
LARGEST = 2**20


def is_plain(gradient: Tensor) -> bool:
    """Whether identity and version counter of a gradient mean what they should: not for DTensors, for views of a bucket of DDP, for
    sparse gradients, which are added up in new ones, and where a graph was made of the gradients.
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
        name: of the parameter.
        place: where it is.
        parameter: itself; it is not held.

    Attributes:
        gradient: as it was at the last look, held; None where there was none or it is not plain.
        version: its version then.
        after_step: whether the last look was behind a step.
        fired: accumulations since the step.
        has_fired: whether there was any so far.
        is_paused: there were backward passes that are no training.
        doubtful: nothing can be said of this interval.
        carried: the first accumulation went onto the gradient of the step before, which nobody had touched, and so did the next.
        late: writes to the gradient of the step before, behind that step and until it was dropped; -1 where that is not known.
        dropped: that gradient, where there were any.
        last: the gradient at the last look, of whatever kind.
        drops: how often it was dropped between two accumulations, with nothing else in between.
        writes: how often it was written to between two accumulations.
        touched: it was written to between the last accumulation and the step.
        synced: backward passes that exchanged gradients between ranks.
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
        # fully_shard copies gradients to the host while the backward pass goes on, unless there is a hook behind their accumulation
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
        """Nothing is known of what was before."""
        self._begin()
        self.gradient = self.last = None

    def accumulated(self, parameter: Tensor, clock: int) -> None:
        """A backward pass has added to the gradient; ``clock`` counts the steps of all optimizers."""
        gradient = parameter.grad
        self.fired += 1
        self.has_fired = True
        if self.is_sharded and self.fired > 1 and gradient is not self.last:
            self.synced = 0  # it was dropped, and what comes begins anew
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
            # whoever moves the parameter or steps in between, as sharpness-aware minimisation does, means it
            self.drops += clock == self.clock and parameter._version == self.value_version
        elif version != self.version + 1:
            self.carried = False
            self.writes += 1

    def _remember(self, gradient: Tensor | None) -> None:
        is_held = gradient is not None and gradient.numel() <= LARGEST and not gradient.requires_grad
        self.last = gradient if is_held else None

    def was_written(self) -> bool:
        """Whether its parameter was written to since the last accumulation, as far as its version tells."""
        parameter = self.place()
        return self.fired > 0 and parameter is not None and parameter._version != self.value_version

    def was_converted(self) -> bool:
        """Whether another tensor is in the parameter by now, whose hooks never fire."""
        parameter = self.place()
        return parameter is not None and parameter._cdata != self._tensor

    def settled(self, parameter: Tensor) -> None:
        """The backward pass is over: whatever DDP wrote to the gradient is not the loop's hand."""
        if self.gradient is not None and parameter.grad is self.gradient:
            self.version = self.gradient._version

    def look(self, parameter: Tensor) -> Tensor | None:
        """The gradient as the optimizer finds it, and whether it was written to since it was accumulated."""
        gradient = parameter.grad
        if gradient is not None and gradient is self.gradient:
            self.touched |= self.fired > 0 and gradient._version != self.version
        return gradient

    def stepped(self, parameter: Tensor | None) -> None:
        """The optimizer has stepped, or was refused to; ``parameter`` is None where what becomes of the gradient cannot be followed."""
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
