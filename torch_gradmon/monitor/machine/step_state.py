"""What the step machine knows: the step's number, what has happened in it, and the habits of the loop. No tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from .loop_patterns import LoopPatterns, StepsInBackward


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

    def attempt(self) -> None:
        """All optimizers of the step have been called."""
        self.clock.attempts += not self.progress.is_attempted
        self.progress.is_attempted = True

    def interrupt(self) -> None:
        """The open step ends before every optimizer was seen to the end of its step. One that raised did not apply it."""
        progress = self.progress
        if progress.begun and not progress.is_overflowed:
            errors = [error for optimizer, error in progress.raised.items() if optimizer in progress.begun]
            progress.interrupted = f"its closure raised {errors[-1]}" if errors else "the optimizer's step() raised"
        progress.is_overflowed |= bool(progress.begun)
        self.attempt()

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
    def next_attempt(self) -> int:
        """The number of the next step that an optimizer takes."""
        if self.is_unfinished and self.clock.step is not None:
            return self.clock.step
        return self.clock.next_step + max(len(self.progress.parts) - 1, 0)
