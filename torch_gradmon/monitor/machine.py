"""The step machine: from events and the phase of a step to actions. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ..core.errors import GradmonWarning, TrainingStopped

# --- Habits of one loop, learned from its steps. No tensors ---


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

    def step_opens(self, hides_forward: bool | None) -> None:
        """A step opens; ``hides_forward``: no hook saw its forward; None where its optimizer opens it, as in a step that is not monitored
        and has no hooks on gradients.
        """
        was_undecided, self.is_undecided = self.is_undecided, False
        if hides_forward is not None:
            self.hides_forward = hides_forward and not was_undecided

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


# --- What the step machine may ask for: the boundaries of steps, and measurements ---


class StepBoundaries(Protocol):
    """Opens and closes steps, and keeps their values."""

    def seal(self, step: int) -> None:
        """``step`` is about to open: nothing more can be added to the last one."""

    def rewind(self, step: int, last: int | None) -> None:
        """The run goes back from ``last`` to ``step``; None where ``step`` is the first one."""

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool) -> None:
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
            TrainingStopped: the run must stop.
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


# --- step state ---


class Phase(Enum):
    """Where in a step the loop is."""

    BETWEEN = "no step is open; logged values belong to the last one"
    FORWARD = "a forward pass opened the step, and no backward pass has ended"
    BACKWARD = "a backward pass has ended, and no optimizer has stepped"
    OPTIMIZER = "an optimizer is stepping, or raised in its step"
    STEPPED = "an optimizer has stepped, and others are still to step"
    ATTEMPTED = "all optimizers have stepped; the scaler's update or the loop ends the step"


@dataclass(slots=True)
class StepClock:
    """Numbers of steps.

    Attributes:
        step: the open step, or the last one.
        next_step: the step after it.
        ended: the last step that ended; None before the first.
        stride: the difference between the last two numbers.
        attempts: how many steps had all their optimizers called.
    """

    step: int | None = None
    next_step: int = 0
    ended: int | None = None
    stride: int = 1
    attempts: int = 0

    def open(self, step: int) -> None:
        """``step`` opens."""
        self.stride = max(1, step - self.step) if self.step is not None else 1
        self.step, self.next_step = step, step + 1

    def attempt_ended(self) -> None:
        """All optimizers of the step have been called, and it ends."""
        self.attempts += 1
        self.ended = self.step

    def continue_at(self, next_step: int) -> None:
        """The next step has this number."""
        self.next_step = next_step

    def count_from(self, attempts: int) -> None:
        """The number of steps that had all their optimizers called before."""
        self.attempts = attempts

    def drop(self) -> None:
        """The open step is forgotten: its number is that of the next one."""
        if self.step is not None:
            self.next_step = self.step
        self.step = self.ended


@dataclass(slots=True)
class StepProgress:
    """What has happened in one step. Optimizers are named by any hashable, in the order of their names in ``StepMachine.order``.

    Attributes:
        is_explicit: the loop opened the step itself.
        is_tentative: a call in evaluation mode opened it, and nothing has confirmed that it trains.
        counts_eval: calls in evaluation mode count as training in this step.
        misses_eval: they did not, and the step has turned out to train so.
        begun: optimizers that are stepping, or raised in their step.
        final: optimizers whose gradients were measured in their step, before it changed them.
        done: optimizers that have stepped, or are about to with their gradients measured.
        decided: optimizers whose closure has been called once.
        overflowed: optimizers whose step the scaler skipped.
        raised: the error that the closure of an optimizer raised.
        is_attempted: all optimizers have been called.
        is_overflowed: an optimizer did not apply its step.
        interrupted: what kept it from that, if it was no overflow: the loop left the step by an error. Else empty.
        backwards: how many backward passes have ended.
        times: how often each optimizer has stepped.
        latest: the one that stepped last.
        parameters_measured: whether the parameters were measured.
        parts: whether an optimizer did not apply its step, for each part that was set aside: from one step of an optimizer to its next.
        in_part: optimizers that have stepped since the last part was known to be one.
        is_between: no pass has followed what was set aside last.
        awaits_next: no optimizer has begun to step since then.
        backwards_before: how many backward passes had ended by then.
        joined: how many parts have turned out to belong to this step, without the last one.
    """

    is_explicit: bool = False
    is_tentative: bool = False
    counts_eval: bool = False
    misses_eval: bool = False
    begun: set[Hashable] = field(default_factory=set)
    final: set[Hashable] = field(default_factory=set)
    done: set[Hashable] = field(default_factory=set)
    decided: set[Hashable] = field(default_factory=set)
    overflowed: set[Hashable] = field(default_factory=set)
    raised: dict[Hashable, str] = field(default_factory=dict)
    is_attempted: bool = False
    is_overflowed: bool = False
    interrupted: str = ""
    backwards: int = 0
    times: dict[Hashable, int] = field(default_factory=dict)
    latest: Hashable = None
    parameters_measured: bool = False
    parts: list[bool] = field(default_factory=list)
    in_part: set[Hashable] = field(default_factory=set)
    is_between: bool = False
    awaits_next: bool = False
    backwards_before: int = 0
    joined: int = 0

    def confirm(self) -> bool:
        """The step trains. Returns whether that was open."""
        was_tentative, self.is_tentative = self.is_tentative, False
        return was_tentative

    def parameters_needed(self) -> bool:
        """Whether the parameters are still to be measured, as they are once a step."""
        were_measured, self.parameters_measured = self.parameters_measured, True
        return not were_measured

    def count_eval(self) -> None:
        """From now on calls in evaluation mode count as training in this step."""
        self.counts_eval = True

    def optimizer_overflowed(self, optimizer: Hashable) -> None:
        """The optimizer did not apply its step."""
        self.is_overflowed = True
        self.in_part.add(optimizer)

    def set_aside(self) -> None:
        """An optimizer has stepped, and what comes next may belong to another step."""
        self.parts.append(self.is_overflowed)
        self.is_overflowed, self.is_between, self.awaits_next = False, True, True
        self.backwards_before = self.backwards

    def part_began(self) -> None:
        """A pass follows what was set aside."""
        self.is_between = self.parameters_measured = False

    def next_began(self) -> bool:
        """An optimizer begins to step. Returns whether it is the first one since a part was set aside."""
        was_awaited, self.awaits_next = self.awaits_next, False
        return was_awaited

    def rejoin(self, parts: int) -> None:
        """The last ``parts`` parts belong to the same step as what came since."""
        self.is_overflowed |= any(self.parts[len(self.parts) - parts :])
        del self.parts[len(self.parts) - parts :]
        self.joined = parts - 1
        self.parameters_measured, self.is_between = True, False

    def rest(self) -> StepProgress:
        """What has happened since the last part was set aside."""
        return StepProgress(
            times=dict.fromkeys(self.in_part & self.times.keys(), 1),
            latest=self.latest,
            parameters_measured=self.parameters_measured,
            begun=self.begun,
            done=self.done & self.in_part,
            overflowed=self.overflowed & self.in_part,
            raised={optimizer: error for optimizer, error in self.raised.items() if optimizer in self.begun},
            is_attempted=self.is_attempted,
            is_overflowed=self.is_overflowed,
            backwards=self.backwards - self.backwards_before,
        )

    def optimizer_ended(self, optimizer: Hashable) -> None:
        """The optimizer has stepped."""
        self.begun.discard(optimizer)
        self.raised.pop(optimizer, None)
        self.done.add(optimizer)
        self.in_part.add(optimizer)
        self.times[optimizer] = self.times.get(optimizer, 0) + 1
        self.latest = optimizer

    def attempted_by(self, optimizer: Hashable) -> None:
        """The only optimizer has stepped."""
        self.done.add(optimizer)
        self.is_attempted = True

    @property
    def has_stepped(self) -> bool:
        """Whether any optimizer has stepped, or tried to."""
        return bool(self.is_attempted or self.begun or self.done or self.overflowed)

    @property
    def phase(self) -> Phase:
        """The phase of the open step."""
        if self.is_attempted:
            return Phase.ATTEMPTED
        if self.begun:
            return Phase.OPTIMIZER
        if self.done or self.overflowed:
            return Phase.STEPPED
        return Phase.BACKWARD if self.backwards else Phase.FORWARD


@dataclass(slots=True)
class StepState:
    """All that the step machine knows.

    Attributes:
        clock: the numbers of steps.
        progress: of the open step, else of the last one.
        patterns: habits of the loop.
        in_backward: which optimizers step within the backward pass.
        is_open: whether a step is open.
        is_manual: the loop opens and closes steps itself.
        is_driven: hooks on optimizers drive the steps that the loop does not open itself.
        is_paused: nothing is measured at the moment.
    """

    clock: StepClock = field(default_factory=StepClock)
    progress: StepProgress = field(default_factory=StepProgress)
    patterns: LoopPatterns = field(default_factory=LoopPatterns)
    in_backward: StepsInBackward = field(default_factory=StepsInBackward)
    is_open: bool = False
    is_manual: bool = False
    is_driven: bool = False
    is_paused: bool = False
    _was_idle: bool = False  # nothing else has happened in the last step, so that its progress can be that of the next one

    def follow(self) -> None:
        """Hooks on optimizers drive the steps from now on, in a loop whose habits are not known yet."""
        patterns = self.patterns
        self.patterns = LoopPatterns(
            patterns.trains_in_eval, is_undecided=patterns.is_undecided, hides_forward=patterns.hides_forward
        )
        self.in_backward, self.is_driven, self.is_manual = StepsInBackward(), True, False
        if not self.is_open:
            self.progress = StepProgress()

    def unfollow(self) -> None:
        """No hooks on optimizers are left."""
        self.is_driven = False

    def lead_by_hand(self) -> None:
        """From now on the loop opens and closes steps itself."""
        self.is_manual = True

    def pause(self, is_paused: bool) -> None:
        """Measure nothing, or go on."""
        self.is_paused = is_paused

    def open(self, step: int, is_tentative: bool) -> None:
        """``step`` opens; ``is_tentative``: by a call in evaluation mode."""
        self.clock.open(step)
        self.is_open, self.in_backward.any_now, self._was_idle = True, False, False
        self.progress = StepProgress(self.is_manual, is_tentative, is_tentative)

    def close(self) -> None:
        """The open step ends."""
        self.is_open, self.clock.ended = False, self.clock.step
        if self.progress.backwards:
            self.in_backward.is_settled = True
            self.patterns.learn(self.progress.backwards)

    def open_idle(self) -> None:
        """The next step opens in a plain loop, and nothing is measured in it."""
        self.clock.open(self.clock.next_step)
        if not self._was_idle:
            self.progress = StepProgress()
        self.is_open, self._was_idle = True, False

    def close_idle(self, optimizer: Hashable) -> None:
        """The step, in which the only optimizer has stepped, ends."""
        self.progress.begun.discard(optimizer)
        self._was_idle = not self.progress.backwards
        self.clock.attempt_ended()
        self.is_open = False

    def leave_idle(self, optimizer: Hashable) -> None:
        """No more steps are counted, and none is open: the last one was attempted, and all its optimizers have stepped."""
        self.progress.attempted_by(optimizer)
        self._was_idle = False

    def split(self) -> list[bool]:
        """The parts that were set aside are steps of their own. Returns for each whether an optimizer did not apply its step."""
        parts, self.progress = self.progress.parts, self.progress.rest()
        return parts

    def drop(self) -> bool:
        """The open step is forgotten. Returns whether it was tentative."""
        self.is_open = False
        self.clock.drop()
        return self.progress.confirm()

    def attempt(self, leads: bool) -> None:
        """All optimizers of the step have been called, or as many as the loop came to; ``leads``: hooks open and close steps."""
        if not self.progress.is_attempted:
            self.clock.attempts += 1
            counted_eval = self.progress.counts_eval or self.patterns.trains_in_eval
            self.patterns.attempt_ended(counts=leads)
            self.progress.misses_eval = self.patterns.trains_in_eval and not counted_eval
        self.progress.is_attempted = True

    def interrupt(self) -> None:
        """The open step ends before every optimizer was seen to the end of its step. One that raised did not apply it."""
        progress = self.progress
        if progress.begun and not progress.is_overflowed:
            errors = [error for optimizer, error in progress.raised.items() if optimizer in progress.begun]
            progress.interrupted = f"its closure raised {errors[-1]}" if errors else "the optimizer's step() raised"
        progress.is_overflowed |= bool(progress.begun)
        self.attempt(self.leads)

    def backward_ended(self) -> None:
        """A backward pass has ended in the open step."""
        self.progress.backwards += 1
        self.patterns.backward_since = True

    @property
    def phase(self) -> Phase:
        """Where the loop is."""
        return self.progress.phase if self.is_open else Phase.BETWEEN

    @property
    def leads(self) -> bool:
        """Whether hooks open and close steps."""
        return not (self.is_manual or self.is_paused)

    @property
    def is_plain(self) -> bool:
        """Whether hooks lead the steps, and each was a forward in training mode and an optimizer's step so far."""
        patterns = self.patterns
        is_odd = patterns.trains_in_eval or patterns.hides_forward or patterns.is_undecided or bool(self.in_backward.known)
        return self.leads and self.is_driven and not is_odd

    @property
    def is_unfinished(self) -> bool:
        """Whether no optimizer has stepped in an open step that the loop did not open itself."""
        return self.is_open and not self.progress.is_explicit and self.is_driven and not self.progress.has_stepped

    @property
    def is_interrupted(self) -> bool:
        """Whether an optimizer's step has begun in the open step, and has not returned: if nothing followed, it would not be applied."""
        return self.is_open and self.is_driven and bool(self.progress.begun)

    @property
    def next_attempt(self) -> int:
        """The number of the next step that an optimizer takes."""
        if self.is_unfinished and self.clock.step is not None:
            return self.clock.step
        return self.clock.next_step + max(len(self.progress.parts) - 1, 0)


# --- Opens, closes and drops steps: the part of the step machine that knows their numbers ---


class StepCycle:
    """Opens, closes and drops steps.

    Args:
        boundaries: carries it out.
        state: what is known of the loop; changed here and in :class:`StepMachine`.
    """

    def __init__(self, boundaries: StepBoundaries, state: StepState) -> None:
        self.boundaries, self.state = boundaries, state

    def open(self, step: int, is_tentative: bool = False, hides_forward: bool | None = False) -> None:
        """Open ``step``; a step that is still open ends first, or is dropped if it is unfinished. ``hides_forward``: no hook saw the
        forward; None where it is not known.
        """
        state, clock = self.state, self.state.clock
        if state.is_open:
            self.end_or_drop()
        state.patterns.step_opens(hides_forward)
        self.boundaries.seal(step)
        if clock.step is None or step <= clock.step:
            self.boundaries.rewind(step, clock.step)
        state.open(step, is_tentative)
        self.boundaries.open(step, is_tentative=is_tentative, hides_forward=bool(hides_forward))

    def close(self) -> None:
        """End the open step, if any."""
        state = self.state
        if not state.is_open:
            return
        if state.progress.parts:
            self._settle()
        state.close()
        self.boundaries.close(is_overflowed=state.is_driven and state.progress.is_overflowed)

    def end(self) -> None:
        """End the open step, in which perhaps not every optimizer has stepped or returned."""
        if self.state.is_open and self.state.is_driven and self.state.progress.has_stepped:
            self.state.interrupt()
        self.close()

    def end_or_drop(self) -> None:
        """End the open step, or drop it if it is unfinished."""
        if self.state.progress.parts:
            self._settle()
        if self.state.is_unfinished:
            self.drop()
        else:
            self.end()

    def rejoin(self, parts: int) -> None:
        """The last ``parts`` parts that were set aside belong to the same step as what came since."""
        self.state.progress.rejoin(parts)
        self.boundaries.rejoin(parts)

    def _settle(self) -> None:
        """No other optimizer steps in the open step."""
        progress = self.state.progress
        if progress.is_between or (progress.awaits_next and len(progress.parts) == 1):
            self.rejoin(1)  # a single optimizer has stepped once, and others may have been about to
        else:
            progress.in_part.clear()
        if progress.parts:
            self.split()

    def split(self) -> None:
        """The parts that were set aside are steps of their own, and what came since is the next one."""
        state, clock, error = self.state, self.state.clock, None
        for is_overflowed in state.split():
            clock.attempt_ended()
            try:
                self.boundaries.close_part(is_overflowed=is_overflowed)
                self.boundaries.seal(clock.next_step)
            except (TrainingStopped, GradmonWarning) as raised:
                error = error or raised
            clock.open(clock.next_step)
        self.boundaries.parts_closed()
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget the open step: its number is that of the next attempt."""
        self.boundaries.drop(was_tentative=self.state.drop())

    def release(self) -> None:
        """No backward pass has followed the undecided call: what was logged since belongs to the last step."""
        if self.state.patterns.is_undecided:
            self.boundaries.release()

    def ensure_open(self, hides_forward: bool | None = True) -> None:
        """A backward pass or an optimizer is part of a step; where it opens one, no hook has seen the forward."""
        state = self.state
        if not state.is_open and state.leads:
            self.open(state.clock.next_step, hides_forward=hides_forward)
        elif state.progress.is_tentative:
            state.progress.confirm()
            self.boundaries.confirm()

    def begin_by_hand(self, step: int) -> None:
        """The loop opens ``step``; from now on it opens and closes steps."""
        self.state.lead_by_hand()
        self.release()
        self.open(step)

    def finish(self) -> None:
        """The run ends, or the monitor leaves it."""
        self.release()
        self.end_or_drop()


# --- optimizer steps ---


#: An optimizer that has stepped this often in one step does not wait for the last one: critics of a GAN take 5 steps for each of the
#: generator as a rule, and a discriminator that begins later lets it take thousands. The last one may accumulate gradients over more.
_MOST_STEPS, _MOST_WITH_GRADIENTS = 10, 100


class StepMachine:
    """Infers steps from what hooks see.

    A step opens with the first training forward, backward pass or optimizer step after the last one ended. It ends when the last
    optimizer has stepped, under a GradScaler with its update. Where the loop opens steps itself, hooks only measure.

    Args:
        cycle: opens and closes steps.
        measures: measures in them.
        order: the optimizers in the order in which they step; the list changes with what is learned.
    """

    def __init__(self, cycle: StepCycle, measures: StepMeasurements, order: list[Hashable]) -> None:
        self.cycle, self.state, self.measures, self.order = cycle, cycle.state, measures, order
        self._resting: Hashable = None  # the optimizer that the user named last, while steps go on without it
        self._accumulates = False  # it steps at last with the gradients of many steps
        self._rounds: dict[Hashable, int] = {}  # the most steps of each optimizer to one of the last
        # steps of the last one without others since, and parts of its step that may have been steps
        self._in_a_row = self._joined = 0
        self._long_round_told = False
        self._by_phases = False  # each optimizer takes several steps before another one does

    # --- forward and backward ------------------------------------------------------------------------------------------------

    def may_train_in_eval(self) -> bool:
        """The model is called in evaluation mode, with gradients: whether that may be training. It may be where no step has ended
        yet, and in loops that train in that mode. Elsewhere only the backward pass shows it.
        """
        cycle, patterns, progress = self.cycle, self.state.patterns, self.state.progress
        if not self.state.leads:
            return False
        patterns.called(in_eval=True)
        if self.state.is_open:
            if patterns.trains_in_eval and not progress.backwards:
                progress.count_eval()  # a call in training mode without a backward pass has opened the step
                cycle.boundaries.count_eval()
            return progress.counts_eval
        cycle.release()
        return patterns.called_between_steps(first_step=self.state.clock.ended is None)

    def forward_began(self, in_eval: bool, in_closure: bool) -> None:
        """The model is called in training."""
        cycle, progress = self.cycle, self.state.progress
        if self.state.is_open and self.state.leads and not in_closure:
            if progress.is_attempted or progress.begun:
                self.state.interrupt()
                cycle.close()  # its end was not seen, as when the scaler is not updated
            elif progress.is_tentative and not in_eval:
                self.state.patterns.forget_eval()
                cycle.drop()
            elif self.state.in_backward.any_now and not self.awaits_others():
                self._all_stepped(in_scaler_step=False)  # as after a backward pass within re-entrant checkpoints only
            elif progress.is_between:
                self.part_began()
        if not self.state.is_open and self.state.leads:
            cycle.release()
            cycle.open(self.state.clock.next_step, is_tentative=in_eval)
        self.state.patterns.called(in_eval)

    def moves_buffers(self) -> bool:
        """The model is called in training mode: whether a step begins with what that does to its buffers."""
        return not self.state.is_open or not (self.state.leads or self.state.progress.backwards)

    def gradient_arrived(self) -> bool:
        """A backward pass has brought a gradient; whether it counts."""
        if not self.state.is_paused:
            self.cycle.ensure_open()
        return not self.state.is_paused

    def backward_ended(self, is_nested: bool, in_scaler_step: bool) -> None:
        """A backward pass is over, and may be the last one of the step: measure gradients before clipping."""
        cycle = self.cycle
        if self.state.is_paused:
            return
        cycle.ensure_open()
        if self.state.progress.is_between:
            self.part_began()
        within = self.state.in_backward
        self.state.backward_ended()
        self.measures.backward_ended()
        if not within.any_now and self.expects_more():
            return
        if not self.measures.waits_for_step:
            self.measures.measure_before_clip(self.state.progress.done, within.known)
        if within.any_now and not is_nested and not self.awaits_others():
            self._all_stepped(in_scaler_step)

    def passes_began(self) -> None:
        """All passes of the step are about to come."""
        if not self.state.is_open and self.state.leads and not self.state.is_paused:
            self.cycle.release()
            self.cycle.open(self.state.clock.next_step, is_tentative=False)

    def passes_ended(self) -> None:
        """All passes of the step are over: measure gradients, which were not final before."""
        progress = self.state.progress
        if self.state.is_open and not self.state.is_paused:
            if not progress.backwards:  # none was seen, as where hooks are called after it
                self.state.backward_ended()
            progress.final.update(self.order)
            self.measures.measure_before_clip(progress.done, self.state.in_backward.known)

    def expects_more(self) -> bool:
        """Whether the step has had fewer backward passes so far than any step before."""
        return self.state.patterns.expects_more(self.state.progress.backwards, len(self.order))

    def awaits_others(self) -> bool:
        """Whether an optimizer is still to step behind the backward pass, within which others have stepped."""
        return self.state.in_backward.awaited(self.order, self.state.progress.done, self.measures.has_gradients)

    def is_last(self, optimizer: Hashable) -> bool:
        """Whether the optimizer is the last one to step."""
        return self.order[-1] == optimizer

    def attempt_ended(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        """The optimizer has stepped, or the scaler skipped it; with the last one the attempt is over."""
        if not self.awaits_others() if self.state.in_backward.any_now else self.is_last(optimizer):
            self._all_stepped(in_scaler_step)

    def _all_stepped(self, in_scaler_step: bool) -> None:
        cycle, state = self.cycle, self.state
        if state.in_backward.any_now:
            self.measures.measure_unowned()
        leads, state.patterns.backward_since = state.leads, False
        if state.is_open and not state.progress.is_attempted:
            state.attempt(leads)
            cycle.boundaries.attempt_ended(state.progress.is_overflowed)
        else:
            state.patterns.attempt_ended(counts=leads)
        if leads and not in_scaler_step:
            cycle.close()

    def scaler_updated(self) -> None:
        """The scaler ends the attempt."""
        if self.state.is_open and self.state.progress.is_attempted and self.state.leads:
            self.cycle.close()

    # --- which optimizers' steps make one step -----------------------------------------------------------------------------------

    def part_began(self) -> None:
        """A pass follows the step of an optimizer, in a step in which others are still to step."""
        self.state.progress.part_began()
        self.cycle.boundaries.part_began()

    def _part_ended(self, optimizer: Hashable) -> None:
        """The optimizer has stepped. If it steps again before the last one does, this was perhaps a step of its own."""
        state, progress = self.state, self.state.progress
        if len(self.order) == 1 or not (state.is_open and state.leads) or progress.is_attempted:
            return
        attempts = progress.times.get(optimizer, 0) + (optimizer in progress.overflowed)
        if attempts > self._rounds.get(optimizer, 0) and not state.in_backward.any_now:
            progress.set_aside()
            self.cycle.boundaries.set_aside()

    def _take_turn(self, optimizer: Hashable, has_closure: bool = False) -> None:
        """The optimizer begins a step: in the open step with what the others did in it, or in a step of its own."""
        if optimizer == self._resting:
            self._wait_for(optimizer)
        progress = self.state.progress
        if progress.next_began():
            if has_closure and progress.is_between:
                self.part_began()  # in its closure
            if optimizer in progress.in_part and not progress.is_between:
                progress.in_part.clear()
                self.measures.let_go(optimizer, with_unowned=False)  # its update is that of its last step
            else:
                ends = self.is_last(optimizer)
                begins_anew = (
                    ends and max(progress.times.values(), default=0) > _MOST_STEPS and self.measures.was_cleared(optimizer)
                )
                self.cycle.rejoin(len(progress.parts) if ends and not begins_anew else 1)
                if begins_anew and progress.parts:
                    self.cycle.split()  # its gradients are of this part alone, and the others were steps without it
        if optimizer in progress.times and optimizer not in progress.in_part and self._is_over(optimizer):
            self._go_on_without_last()

    def _is_over(self, optimizer: Hashable) -> bool:
        """Whether an optimizer that begins another step waits no longer for the last one, which has not stepped since."""
        last, times = self.order[-1], self.state.progress.times
        if not self.state.leads or last in times:
            return False
        if self._by_phases or self.measures.shares_parameters(last, optimizer):
            return True
        if times[optimizer] < _MOST_STEPS:
            return False
        return not self.measures.accumulates(last) or not (self._accumulates or times[optimizer] < _MOST_WITH_GRADIENTS)

    def _go_on_without_last(self) -> None:
        """Until the last one steps, the one that stepped before ends steps, and each of its steps so far is one."""
        order, latest = self.order, self.state.progress.latest
        self._resting = order[-1]
        if not self.measures.shares_parameters(self._resting, latest):
            self.measures.warn_resting(self._resting, latest)
        order.sort(key=lambda each: each == latest)
        self.cycle.split()

    def _wait_for(self, optimizer: Hashable) -> None:
        """It ends steps from now on."""
        self.order.sort(key=lambda each: each == optimizer)
        self._resting, self._by_phases, self._in_a_row = None, False, 0

    def _round_ended(self, last: Hashable) -> None:
        """The last optimizer has stepped: learn how often the others step for one step of it."""
        times = {each: count for each, count in self.state.progress.times.items() if each != last}
        if times:
            self._warn_of_long_round(last, max(times.values()))
            self._rounds.update({each: max(count, self._rounds.get(each, 0)) for each, count in times.items()})
            self._in_a_row, self._joined, self._by_phases = 1, self.state.progress.joined, False
            return
        self._in_a_row += 1
        if self._in_a_row > 1 and self._resting is None and not self._by_phases:
            self._by_phases, self._rounds = True, {}
            if self._joined:
                self.measures.warn_joined(self._joined)

    def _warn_of_long_round(self, last: Hashable, count: int) -> None:
        """Tell once that the last one did not accumulate gradients over many steps by design, if it now steps for few steps of others."""
        longest = max(self._rounds.values(), default=0)
        if count <= _MOST_STEPS < longest and not self._long_round_told:
            self._long_round_told = True
            self.measures.warn_late(last, longest)

    # --- the steps of optimizers ----------------------------------------------------------------------------------------------

    def wrapper_began(self, optimizer: Hashable) -> None:
        """A wrapper around the optimizer is about to step: measure parameters before it changes anything."""
        self._end_raised(optimizer)
        if self._steps_late(optimizer):
            return
        self.cycle.ensure_open(hides_forward=None)
        self._take_turn(optimizer)
        if self.cycle.boundaries.has_values:
            self._measure_final(optimizer)
            self._parameters_before(optimizer, with_unowned=self.is_last(optimizer))

    def _measure_final(self, optimizer: Hashable) -> None:
        """Measure gradients before the clip that are final only now, when the outermost optimizer begins to step."""
        progress = self.state.progress
        if self.measures.waits_for_step and optimizer not in progress.final:
            progress.final.add(optimizer)
            self.measures.measure_before_clip(progress.done, self.state.in_backward.known)

    def wrapper_ended(self, optimizer: Hashable) -> None:
        """The wrapper returned without a step of its optimizer, as one that accumulates gradients does."""
        self.measures.let_go(optimizer, with_unowned=self.is_last(optimizer))

    def step_began(self, optimizer: Hashable, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure, which has yet to compute gradients; ``within`` a backward pass.

        Returns:
            Whether it must change nothing.
        """
        cycle, measures, state = self.cycle, self.measures, self.state
        self._end_raised(optimizer)
        state.in_backward.began(optimizer, within)
        if not has_closure and not within and not state.is_open and self._steps_late(optimizer):
            return cycle.boundaries.is_skipped
        if has_closure and state.leads and not state.is_open:
            cycle.release()  # its forward is yet to come
        cycle.ensure_open(hides_forward=None)
        if not within and len(self.order) > 1:
            self._take_turn(optimizer, has_closure)
        state.progress.begun.add(optimizer)
        if not cycle.boundaries.has_values:
            return False
        turns = max(state.progress.times.values(), default=1) if not within and self._takes_turns() else 0
        measures.annotate(optimizer, turns=turns, is_first=state.patterns.is_first)
        self._explain_missing(optimizer, has_closure or within)
        self._measure_final(optimizer)
        measures.release_gradients(optimizer)
        self._parameters_before(optimizer, with_unowned=not within and self.is_last(optimizer))
        if has_closure:
            return False
        if within:
            measures.explain_in_backward(optimizer)
        measures.measure_after_clip(optimizer, with_unowned=not within and self.is_last(optimizer))
        is_skipped = not within and self._decide(optimizer)
        if within:
            measures.warn_in_backward()
        self.state.progress.done.add(optimizer)
        return is_skipped

    def _explain_missing(self, optimizer: Hashable, comes_later: bool) -> None:
        backwards = self.state.progress.backwards
        if not backwards and not comes_later:
            self.measures.revive_hooks(optimizer)
        if backwards and self.expects_more():
            self.measures.explain_missing(
                f"this step had {backwards} backward passes where none had fewer than {self.state.patterns.fewest_backwards} before; "
                "monitor.clip_grad_norm_ measures whatever their number"
            )

    def _decide(self, optimizer: Hashable, is_overflowed: bool = False) -> bool:
        cycle, progress = self.cycle, self.state.progress
        try:
            return cycle.boundaries.decide(optimizer, progress.done, progress.overflowed, is_overflowed)
        except TrainingStopped:
            self.state.attempt(leads := self.state.leads)
            if leads:
                cycle.close()
            raise

    def _measure_parameters(self) -> bool:
        """All of them, once a step: before the first of several optimizers has changed anything. Returns whether it was now."""
        if is_first := self.state.progress.parameters_needed():
            self.measures.measure_parameters()
        return is_first

    def _parameters_before(self, optimizer: Hashable, *, with_unowned: bool) -> None:
        as_measured = self._measure_parameters()
        self.measures.hold_parameters(optimizer, with_unowned=with_unowned, as_measured=as_measured)

    def _steps_late(self, optimizer: Hashable) -> bool:
        """Whether the optimizer belongs to the step that has just ended: named before the last one, it steps after it."""
        cycle, done = self.cycle, self.state.progress.done
        others_stepped = bool(done) and optimizer not in done and self.state.progress.backwards > 0
        is_late = others_stepped and not self.state.patterns.backward_since and self.state.leads
        if is_late := is_late and not self.state.is_open and cycle.boundaries.was_monitored:
            if optimizer == self._resting:
                self._accumulates = True
            else:
                self.measures.warn_order(optimizer)
            self._wait_for(optimizer)
        return is_late

    def _takes_turns(self) -> bool:
        """Whether optimizers alternate, as in a GAN: a backward pass lies between their steps, or some pass brought gradients to one
        of them only. Parts of one model under several optimizers share every pass.
        """
        progress = self.state.progress
        if self.state.in_backward.any_now:
            return False
        if progress.done:
            return progress.backwards > self.state.patterns.backwards_at_step
        return not progress.overflowed and self.measures.gets_own_gradients()

    def closure_ended(self, optimizer: Hashable) -> bool:
        """The closure has computed gradients. Those of its last call are the optimizer's, and those of its first call decide.

        Returns:
            Whether the optimizer must change nothing.
        """
        boundaries, decided = self.cycle.boundaries, self.state.progress.decided
        self.measures.measure_after_clip(optimizer, with_unowned=self.is_last(optimizer))
        if optimizer in decided:
            return boundaries.is_skipped
        decided.add(optimizer)
        return not self.measures.writes_early(optimizer) and self._decide(optimizer)

    def closure_raised(self, optimizer: Hashable, error: str = "an error") -> None:
        """The optimizer's step is an attempt that was not applied; it is over when the next one begins."""
        self.state.progress.raised[optimizer] = error

    def _end_raised(self, optimizer: Hashable) -> None:
        """End the open step if this optimizer's closure raised in it: the next forward is in the next closure."""
        if optimizer in self.state.progress.raised and self.state.leads:
            self.state.interrupt()
            self.cycle.close()

    def step_ended(self, optimizer: Hashable, within: bool, in_scaler_step: bool) -> None:
        """The optimizer has stepped: measure the update. With the last one the step ends, under a scaler with its update."""
        progress = self.state.progress
        progress.optimizer_ended(optimizer)
        self.state.patterns.optimizer_ended(progress.backwards)
        if self.cycle.boundaries.has_values:
            self.measures.measure_update(optimizer)
        if not within:  # else the step ends with the backward pass, or with an optimizer behind it
            are_several = len(self.order) > 1
            if are_several and self.is_last(optimizer):
                self._round_ended(optimizer)
            self.attempt_ended(optimizer, in_scaler_step)
            if are_several:
                self._part_ended(optimizer)

    def step_overflowed(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        """The scaler found infinite gradients: they are measured all the same."""
        self.cycle.ensure_open(hides_forward=None)
        self._take_turn(optimizer)
        progress = self.state.progress
        progress.optimizer_overflowed(optimizer)
        self.measures.annotate(optimizer, turns=0, is_first=False)
        self._measure_final(optimizer)
        self._measure_parameters()
        self.measures.measure_after_clip(optimizer, with_unowned=self.is_last(optimizer), is_overflowed=True)
        self._decide(optimizer, is_overflowed=True)  # nothing is left to skip, but other ranks may wait
        progress.overflowed.add(optimizer)
        self.attempt_ended(optimizer, in_scaler_step)
        self._part_ended(optimizer)
