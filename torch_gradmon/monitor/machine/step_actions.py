"""What the step machine may ask for: the boundaries of steps, and measurements."""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Protocol


class StepBoundaries(Protocol):
    """Opens and closes steps, and keeps their values."""

    def seal(self, step: int) -> None:
        """``step`` is about to open: nothing more can be added to the last one."""

    def rewind(self, step: int, last: int | None) -> None:
        """The run goes back from ``last`` to ``step``; None where ``step`` is the first one."""

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool, was_undecided: bool) -> None:
        """Begin ``step``."""

    def close(self, *, is_overflowed: bool) -> None:
        """End the open step."""

    def drop(self, *, was_tentative: bool) -> None:
        """Forget the open step: its number is that of the next attempt."""

    def set_aside(self) -> None:
        """An optimizer has stepped, and others are still to step: what was measured so far may be a step of its own."""

    def part_began(self) -> None:
        """A pass follows what was set aside."""

    def rejoin(self, parts: int) -> None:
        """The last ``parts`` parts that were set aside belong to the same step as what came since."""

    def close_part(self, *, is_overflowed: bool) -> None:
        """The first part that was set aside is a step of its own: end it."""

    def parts_closed(self) -> None:
        """What came since the last part is the open step, with the number of the clock."""

    def confirm(self) -> None:
        """The open step trains, although a call in evaluation mode opened it."""

    def count_eval(self) -> None:
        """From now on calls in evaluation mode count as training in the open step."""

    def release(self) -> None:
        """What was logged since an undecided call belongs to the last step."""

    def attempt_ended(self, is_overflowed: bool) -> None:
        """All optimizers of the open step have been called."""

    @property
    def has_values(self) -> bool:
        """Whether the open step takes values."""

    @property
    def was_monitored(self) -> bool:
        """Whether the last step has values."""

    def decide(self, optimizer: Hashable, done: Set[Hashable], overflowed: Set[Hashable], is_overflowed: bool) -> bool:
        """Whether the optimizer, which is about to step, must change nothing.

        Raises:
            SpikeError: the run must stop.
        """

    @property
    def is_skipped(self) -> bool:
        """Whether the open step, or the last one, is skipped."""


class StepMeasurements(Protocol):
    """Measures in the open step; without one that takes values, nothing."""

    def backward_ended(self) -> None:
        """The model has had a backward pass in this step."""

    def measure_before_clip(self, done: Set[Hashable], in_backward: Set[Hashable]) -> None:
        """Measure gradients before clipping. Those of ``done`` optimizers count only if these step again in this step; those of
        optimizers ``in_backward`` were measured when they came.
        """

    @property
    def waits_for_step(self) -> bool:
        """Whether gradients are final only when an optimizer steps, not when a backward pass ends."""

    def measure_parameters(self) -> None:
        """Measure all parameters."""

    def hold_parameters(self, optimizer: Hashable, *, with_unowned: bool, as_measured: bool) -> None:
        """Copy the parameters that the optimizer is about to change; ``as_measured``: :meth:`measure_parameters` was just called."""

    def let_go(self, optimizer: Hashable, *, with_unowned: bool) -> None:
        """The optimizer does not step after all."""

    def release_gradients(self, optimizer: Hashable) -> None:
        """Gradients that were held for this optimizer count."""

    def measure_after_clip(self, optimizer: Hashable, *, with_unowned: bool, is_overflowed: bool = False) -> None:
        """Measure the gradients that the optimizer uses, and with the last one those that none uses."""

    def measure_unowned(self) -> None:
        """Measure the gradients that no optimizer uses."""

    def measure_update(self, optimizer: Hashable) -> None:
        """Measure what the optimizer changed."""

    def annotate(self, optimizer: Hashable, *, turns: int, is_first: bool) -> None:
        """Note facts about the optimizer that is about to step: learning rates, whether it resumes, and, if optimizers take turns, the
        most ``turns`` of one before.
        """

    def explain_missing(self, reason: str) -> None:
        """Record why gradients before clipping are missing."""

    def explain_in_backward(self, optimizer: Hashable) -> None:
        """The same, for an optimizer whose step within the backward pass was not expected."""

    def revive_hooks(self, optimizer: Hashable) -> None:
        """No backward pass was seen in this step: register hooks again if parameters were replaced."""

    def shares_parameters(self, optimizer: Hashable, other: Hashable) -> bool:
        """Whether the two have parameters in common."""

    def accumulates(self, optimizer: Hashable) -> bool:
        """Whether backward passes add to gradients of the optimizer that nothing has cleared since the last call; at first, whether it
        has gradients.
        """

    def was_cleared(self, optimizer: Hashable) -> bool:
        """Whether the gradients of the optimizer are none of those that the last call of :meth:`accumulates` has seen."""

    def has_gradients(self, optimizer: Hashable) -> bool:
        """Whether any parameter of the optimizer has a gradient."""

    def gets_own_gradients(self) -> bool:
        """Whether the optimizers got gradients from different backward passes since they last stepped."""

    def writes_early(self, optimizer: Hashable) -> bool:
        """Whether the optimizer wrote to its parameters before its closure had computed gradients."""

    def warn_order(self, optimizer: Hashable) -> None:
        """The optimizer stepped after the one that was named last; it counts as the last one from now on."""

    def warn_resting(self, resting: Hashable, latest: Hashable) -> None:
        """One optimizer rests while others step many times; until it steps, the ``latest`` of them ends steps."""

    def warn_late(self, last: Hashable, steps: int) -> None:
        """So many steps of another optimizer were taken for one, for the ``last`` one had gradients and did not step."""

    def warn_joined(self, steps: int) -> None:
        """So many steps of optimizers that take turns of several steps each were taken for one."""

    def warn_in_backward(self) -> None:
        """Nothing can be done about spikes of an optimizer that steps within the backward pass."""
