"""Habits of one loop, learned from its steps. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

#: After this many steps the smallest number of backward passes in a step counts as known, and earlier passes are not measured.
_LEARNING = 100


@dataclass(slots=True)
class LoopPatterns:
    """Habits of one loop, learned from its steps.

    Attributes:
        trains_in_eval: the last step trained in evaluation mode.
        called_in_training: the model was called in training mode since the last attempt.
        called_in_eval: the model was called in evaluation mode since the last attempt.
        is_undecided: no step is open, and a call in evaluation mode since the last one may be the forward of the next one.
        hides_forward: no hook saw the forward of the last step.
        backward_since: a backward pass has ended since the last attempt.
        backwards_at_step: the number of backward passes before the last optimizer's step.
        is_first: no optimizer has stepped yet.
        fewest_backwards: the smallest number of backward passes in a step; None before the first step.
        steps_learned: the number of steps that this number is from.
    """

    trains_in_eval: bool = False
    called_in_training: bool = False
    called_in_eval: bool = False
    is_undecided: bool = False
    hides_forward: bool = False
    backward_since: bool = False
    backwards_at_step: int = 0
    is_first: bool = True
    fewest_backwards: int | None = None
    steps_learned: int = 0

    def step_opens(self, hides_forward: bool | None) -> bool:
        """A step opens; ``hides_forward``: no hook saw its forward; None where its optimizer opens it, as in a step that is not monitored
        and has no hooks on gradients. Returns whether a call in evaluation mode was undecided.
        """
        was_undecided, self.is_undecided = self.is_undecided, False
        if hides_forward is not None:
            self.hides_forward = hides_forward and not was_undecided
        return was_undecided

    def called(self, in_eval: bool) -> None:
        """The model was called, in this mode."""
        if in_eval:
            self.called_in_eval = True
        else:
            self.called_in_training = True

    def forget_eval(self) -> None:
        """The call in evaluation mode was no training."""
        self.called_in_eval = False

    def called_between_steps(self, first_step: bool) -> bool:
        """The model was called in evaluation mode, and no step is open. Returns whether that begins a step."""
        self.is_undecided = not (self.trains_in_eval or first_step)
        return not self.is_undecided

    def optimizer_ended(self, backwards: int) -> None:
        """An optimizer has stepped after this number of backward passes."""
        self.is_first, self.backwards_at_step = False, backwards

    def learn(self, backwards: int) -> None:
        """A step with this number of backward passes has ended."""
        self.steps_learned += 1
        self.fewest_backwards = min(backwards, self.fewest_backwards or backwards)

    def expects_more(self, backwards: int, optimizers: int) -> bool:
        """Whether the step has had fewer backward passes so far than any step before."""
        is_known = self.steps_learned >= _LEARNING and optimizers == 1
        return is_known and self.fewest_backwards is not None and backwards < self.fewest_backwards

    def attempt_ended(self, counts: bool) -> None:
        """All optimizers have been called; ``counts``: what was called since the last attempt shows the mode of training."""
        self.backward_since = False
        if counts and (self.called_in_training or self.called_in_eval):
            trains_in_eval = self.trains_in_eval or not self.called_in_training
            self.trains_in_eval = self.called_in_eval and trains_in_eval
        self.called_in_training = self.called_in_eval = False


@dataclass(slots=True)
class StepsInBackward:
    """Which optimizers step within the backward pass, each as soon as the gradients of its parameters are there.

    Attributes:
        any_now: one has done so in the open step.
        known: optimizers that do so.
        outside: optimizers that do not.
        is_settled: a whole step has been seen, so that ``known`` is complete.
    """

    any_now: bool = False
    known: set[Hashable] = field(default_factory=set)
    outside: set[Hashable] = field(default_factory=set)
    is_settled: bool = False

    def began(self, optimizer: Hashable, within: bool) -> None:
        """The optimizer is about to step, ``within`` a backward pass or outside."""
        add, drop = (self.known, self.outside) if within else (self.outside, self.known)
        self.any_now |= within
        add.add(optimizer)
        drop.discard(optimizer)

    def awaited(self, order: Iterable[Hashable], done: set[Hashable], has_gradients: Callable[[Hashable], bool]) -> bool:
        """Whether an optimizer is still to step behind the backward pass."""
        left = (each for each in order if each not in done and each not in self.known)
        return any(each in self.outside or has_gradients(each) for each in left)
