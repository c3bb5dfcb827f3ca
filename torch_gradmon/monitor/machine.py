"""The step machine: from events and the phase of a step to actions. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import GradmonWarning, TrainingStopped

# --- What is known of the loop. Optimizers are named by any hashable ---


@dataclass(slots=True)
class LoopPatterns:
    """Habits of one loop, learned from its steps."""

    trains_in_eval: bool = False  # as the last step did
    called_in_training: bool = False  # since the last attempt
    called_in_eval: bool = False
    is_undecided: bool = False  # no step is open, and a call in evaluation mode may be the forward of the next one
    hides_forward: bool = False  # no hook saw the forward of the last step
    backward_since: bool = False  # the last attempt
    backwards_at_step: int = 0  # backward passes before the last optimizer's step
    is_first: bool = True  # no optimizer has stepped yet
    fewest_backwards: int | None = None  # in a step
    steps_learned: int = 0  # that this number is from

    def attempt_ended(self, counts: bool) -> None:
        """All optimizers have been called; ``counts``: what was called since the last attempt shows the mode of training."""
        if counts and (self.called_in_training or self.called_in_eval):
            trains_in_eval = self.trains_in_eval or not self.called_in_training
            self.trains_in_eval = self.called_in_eval and trains_in_eval
        self.called_in_training = self.called_in_eval = False


@dataclass(slots=True)
class StepsInBackward:
    """Which optimizers step within the backward pass, each as soon as the gradients of its parameters are there."""

    any_now: bool = False  # in the open step
    known: set[Hashable] = field(default_factory=set)
    outside: set[Hashable] = field(default_factory=set)  # those that do not
    is_settled: bool = False  # a whole step has been seen, so that ``known`` is complete
    quiet: set[int] = field(default_factory=set)  # backward passes that have begun, and in which no optimizer steps


@dataclass(slots=True)
class StepProgress:
    """What has happened in one step."""

    is_explicit: bool = False  # the loop opened the step itself
    is_tentative: bool = False  # a call in evaluation mode opened it, and nothing has confirmed that it trains
    counts_eval: bool = False  # calls in evaluation mode count as training
    misses_eval: bool = False  # they did not, and the step has turned out to train so
    begun: set[Hashable] = field(default_factory=set)  # optimizers that are stepping, or raised in their step
    final: set[Hashable] = field(default_factory=set)  # whose gradients were measured in their step, before it changed them
    done: set[Hashable] = field(default_factory=set)  # that have stepped, or are about to with their gradients measured
    decided: set[Hashable] = field(default_factory=set)  # whose closure has been called once
    overflowed: set[Hashable] = field(default_factory=set)  # whose step the scaler skipped
    raised: dict[Hashable, str] = field(default_factory=dict)  # the errors of their closures
    is_attempted: bool = False  # all optimizers have been called
    is_overflowed: bool = False  # an optimizer did not apply its step
    interrupted: str = ""  # what kept it from that, if it was no overflow: the loop left the step by an error
    backwards: int = 0  # backward passes that have ended
    times: dict[Hashable, int] = field(default_factory=dict)  # how often each optimizer has stepped
    latest: Hashable = None  # the one that stepped last
    parameters_measured: bool = False
    # from one step of an optimizer to its next: whether an optimizer did not apply its step, for each part that was set aside
    parts: list[bool] = field(default_factory=list)
    in_part: set[Hashable] = field(default_factory=set)  # that have stepped since the last part was known to be one
    is_between: bool = False  # no pass has followed what was set aside last
    awaits_next: bool = False  # no optimizer has begun to step since then
    backwards_before: int = 0  # those that had ended by then
    joined: int = 0  # parts that have turned out to belong to this step, without the last one

    def set_aside(self) -> None:
        """An optimizer has stepped, and what comes next may belong to another step."""
        self.parts.append(self.is_overflowed)
        self.is_overflowed, self.is_between, self.awaits_next = False, True, True
        self.backwards_before = self.backwards

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

    @property
    def has_stepped(self) -> bool:
        return bool(self.is_attempted or self.begun or self.done or self.overflowed)


@dataclass(slots=True)
class StepState:
    """All that the step machine knows, of the open step or of the last one."""

    step: int | None = None  # the open one, or the last one
    next_step: int = 0
    ended: int | None = None  # the last one that ended
    stride: int = 1  # the difference between the last two numbers
    attempts: int = 0  # steps that had all their optimizers called
    progress: StepProgress = field(default_factory=StepProgress)
    patterns: LoopPatterns = field(default_factory=LoopPatterns)
    in_backward: StepsInBackward = field(default_factory=StepsInBackward)
    is_open: bool = False
    is_manual: bool = False  # the loop opens and closes steps itself
    is_driven: bool = False  # hooks on optimizers drive the steps that the loop does not open itself
    is_paused: bool = False  # nothing is measured at the moment
    _was_idle: bool = False  # nothing else has happened in the last step, so that its progress can be that of the next one

    def follow(self) -> None:
        """Hooks on optimizers drive the steps from now on, in a loop whose habits are not known yet."""
        before = self.patterns
        self.patterns = LoopPatterns(before.trains_in_eval, is_undecided=before.is_undecided, hides_forward=before.hides_forward)
        self.in_backward, self.is_driven, self.is_manual = StepsInBackward(), True, False
        if not self.is_open:
            self.progress = StepProgress()

    def count(self, step: int) -> None:
        self.stride = max(1, step - self.step) if self.step is not None else 1
        self.step, self.next_step = step, step + 1

    def open(self, step: int, is_tentative: bool) -> None:
        """``step`` opens; ``is_tentative``: by a call in evaluation mode."""
        self.count(step)
        self.is_open, self.in_backward.any_now, self._was_idle = True, False, False
        self.progress = StepProgress(self.is_manual, is_tentative, is_tentative)

    def close(self) -> None:
        self.is_open, self.ended = False, self.step
        if backwards := self.progress.backwards:
            self.in_backward.is_settled = True
            self.patterns.steps_learned += 1
            self.patterns.fewest_backwards = min(backwards, self.patterns.fewest_backwards or backwards)

    def open_idle(self) -> None:
        """The next step opens in a plain loop, and nothing is measured in it."""
        self.count(self.next_step)
        if not self._was_idle:
            self.progress = StepProgress()
        self.is_open, self._was_idle = True, False

    def close_idle(self, optimizer: Hashable) -> None:
        self.progress.begun.discard(optimizer)
        self._was_idle = not self.progress.backwards
        self.attempts += 1
        self.ended, self.is_open = self.step, False

    def leave_idle(self, optimizer: Hashable) -> None:
        """No more steps are counted, and none is open: the last one was attempted, and all its optimizers have stepped."""
        self.progress.done.add(optimizer)
        self.progress.is_attempted, self._was_idle = True, False

    def attempt(self) -> None:
        """All optimizers of the step have been called, or as many as the loop came to."""
        progress, patterns = self.progress, self.patterns
        if not progress.is_attempted:
            self.attempts += 1
            counted_eval = progress.counts_eval or patterns.trains_in_eval
            patterns.attempt_ended(counts=self.leads)
            progress.misses_eval = patterns.trains_in_eval and not counted_eval
        progress.is_attempted = True

    def interrupt(self) -> None:
        """The open step ends before every optimizer was seen to the end of its step. One that raised did not apply it."""
        progress = self.progress
        if progress.begun and not progress.is_overflowed:
            errors = [error for optimizer, error in progress.raised.items() if optimizer in progress.begun]
            progress.interrupted = f"its closure raised {errors[-1]}" if errors else "the optimizer's step() raised"
        progress.is_overflowed |= bool(progress.begun)
        self.attempt()

    def count_backward(self) -> None:
        self.progress.backwards += 1
        self.patterns.backward_since = True

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
        if self.is_unfinished and self.step is not None:
            return self.step
        return self.next_step + max(len(self.progress.parts) - 1, 0)


# --- Opens, closes and drops steps: what is there without a followed loop, too ---


class StepCycle:
    """Opens, closes and drops steps. ``boundaries`` carries it out: a :class:`~torch_gradmon.monitor.steps.StepLifecycle`, or a test's."""

    def __init__(self, boundaries: Any, state: StepState) -> None:
        self.boundaries, self.state = boundaries, state

    def open(self, step: int, is_tentative: bool = False, hides_forward: bool | None = False) -> None:
        """Open ``step``; a step that is still open ends first, or is dropped if it is unfinished. ``hides_forward``: no hook saw the
        forward; None where its optimizer opens it, as in a step that is not monitored and has no hooks on gradients.
        """
        state = self.state
        if state.is_open:
            self.end_or_drop()
        was_undecided, state.patterns.is_undecided = state.patterns.is_undecided, False
        if hides_forward is not None:
            state.patterns.hides_forward = hides_forward and not was_undecided
        self.boundaries.seal(step)
        if state.step is None or step <= state.step:
            self.boundaries.rewind(step, state.step)
        state.open(step, is_tentative)
        self.boundaries.open(step, is_tentative=is_tentative, hides_forward=bool(hides_forward))

    def close(self) -> None:
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
        state, error = self.state, None
        parts, state.progress = state.progress.parts, state.progress.rest()
        for is_overflowed in parts:
            state.attempts += 1
            state.ended = state.step
            try:
                self.boundaries.close_part(is_overflowed=is_overflowed)
                self.boundaries.seal(state.next_step)
            except (TrainingStopped, GradmonWarning) as raised:
                error = error or raised
            state.count(state.next_step)
        self.boundaries.parts_closed()
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget the open step: its number is that of the next attempt."""
        state = self.state
        state.is_open, was_tentative = False, state.progress.is_tentative
        if state.step is not None:
            state.next_step = state.step
        state.step, state.progress.is_tentative = state.ended, False
        self.boundaries.drop(was_tentative=was_tentative)

    def release(self) -> None:
        """No backward pass has followed the undecided call: what was logged since belongs to the last step."""
        if self.state.patterns.is_undecided:
            self.boundaries.release()

    def ensure_open(self, hides_forward: bool | None = True) -> None:
        """A backward pass or an optimizer is part of a step; where it opens one, no hook has seen the forward."""
        state = self.state
        if not state.is_open and state.leads:
            self.open(state.next_step, hides_forward=hides_forward)
        elif state.progress.is_tentative:
            state.progress.is_tentative = False
            self.boundaries.confirm()

    def begin_by_hand(self, step: int) -> None:
        """The loop opens ``step``; from now on it opens and closes steps."""
        self.state.is_manual = True
        self.release()
        self.open(step)

    def finish(self) -> None:
        self.release()
        self.end_or_drop()


# --- Infers steps from the events of a followed loop ---


#: After this many steps the smallest number of backward passes in a step counts as known, and earlier passes are not measured.
_LEARNING = 100
#: An optimizer that has stepped this often in one step does not wait for the last one: critics of a GAN take 5 steps for each of the
#: generator as a rule, and a discriminator that begins later lets it take thousands. The last one may accumulate gradients over more.
_MOST_STEPS, _MOST_WITH_GRADIENTS = 10, 100


class StepMachine(StepCycle):
    """Infers steps from what hooks see.

    A step opens with the first training forward, backward pass or optimizer step after the last one ended. It ends when the last
    optimizer has stepped, under a GradScaler with its update. Where the loop opens steps itself, hooks only measure.

    ``measures`` is a :class:`~torch_gradmon.monitor.runtime.FollowedLoop`; ``order`` has the optimizers in the order in which they step,
    and changes with what is learned.
    """

    def __init__(self, boundaries: Any, state: StepState, measures: Any, order: list[Hashable]) -> None:
        super().__init__(boundaries, state)
        self.measures, self.order = measures, order
        self.resting: Hashable = None  # the optimizer that the user named last, while steps go on without it
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
        state, patterns, progress = self.state, self.state.patterns, self.state.progress
        if not state.leads:
            return False
        patterns.called_in_eval = True
        if state.is_open:
            if patterns.trains_in_eval and not progress.backwards:
                progress.counts_eval = True  # a call in training mode without a backward pass has opened the step
                self.boundaries.count_eval()
            return progress.counts_eval
        self.release()
        patterns.is_undecided = not (patterns.trains_in_eval or state.ended is None)
        return not patterns.is_undecided

    def forward_began(self, in_eval: bool, in_closure: bool) -> None:
        state, progress = self.state, self.state.progress
        if state.is_open and state.leads and not in_closure:
            if progress.is_attempted or progress.begun:
                state.interrupt()
                self.close()  # its end was not seen, as when the scaler is not updated
            elif progress.is_tentative and not in_eval:
                state.patterns.called_in_eval = False  # that call was no training
                self.drop()
            elif state.in_backward.any_now and not self.awaits_others():
                self._all_stepped(in_scaler_step=False)  # as after a backward pass within re-entrant checkpoints only
            elif progress.is_between:
                self._part_began()
        self.passes_began(in_eval)
        if in_eval:
            state.patterns.called_in_eval = True
        else:
            state.patterns.called_in_training = True

    def passes_began(self, in_eval: bool = False) -> None:
        if not self.state.is_open and self.state.leads:
            self.release()
            self.open(self.state.next_step, is_tentative=in_eval)

    def moves_buffers(self) -> bool:
        """The model is called in training mode: whether a step begins with what that does to its buffers."""
        return not self.state.is_open or not (self.state.leads or self.state.progress.backwards)

    def gradient_arrived(self) -> bool:
        if not self.state.is_paused:
            self.ensure_open()
        return not self.state.is_paused

    def backward_ended(self, is_nested: bool, in_scaler_step: bool) -> None:
        """A backward pass is over, and may be the last one of the step: measure gradients before clipping."""
        state, within = self.state, self.state.in_backward
        if state.is_paused:
            return
        self.ensure_open()
        if state.progress.is_between:
            self._part_began()
        state.count_backward()
        self.measures.pass_ended()
        if not within.any_now and self.expects_more():
            return
        if not self.measures.waits_for_step:
            self.measures.measure_before_clip()
        if within.any_now and not is_nested and not self.awaits_others():
            self._all_stepped(in_scaler_step)

    def passes_ended(self) -> None:
        """All passes of the step are over: measure gradients, which were not final before."""
        progress = self.state.progress
        if self.state.is_open and not self.state.is_paused:
            if not progress.backwards:  # none was seen, as where hooks are called after it
                self.state.count_backward()
            progress.final.update(self.order)
            self.measures.measure_before_clip()

    def expects_more(self) -> bool:
        """Whether the step has had fewer backward passes so far than any step before."""
        patterns = self.state.patterns
        is_known = patterns.steps_learned >= _LEARNING and len(self.order) == 1
        return is_known and self.state.progress.backwards < (patterns.fewest_backwards or 0)

    def awaits_others(self) -> bool:
        """Whether an optimizer is still to step behind the backward pass, within which others have stepped."""
        within, done = self.state.in_backward, self.state.progress.done
        left = [each for each in self.order if each not in done and each not in within.known]
        return any(each in within.outside or self.measures.has_gradients(each) for each in left)

    def _ends_attempt(self, optimizer: Hashable) -> bool:
        """The optimizer has stepped, or the scaler skipped it: whether all have."""
        return not self.awaits_others() if self.state.in_backward.any_now else self.order[-1] == optimizer

    def _all_stepped(self, in_scaler_step: bool) -> None:
        state, leads = self.state, self.state.leads
        if state.in_backward.any_now:
            self.measures.measure_unowned()
        state.patterns.backward_since = False
        if state.is_open and not state.progress.is_attempted:
            state.attempt()
            self.boundaries.attempt_ended(state.progress.is_overflowed)
        else:
            state.patterns.attempt_ended(counts=leads)
        if leads and not in_scaler_step:
            self.close()

    def scaler_updated(self) -> None:
        if self.state.is_open and self.state.progress.is_attempted and self.state.leads:
            self.close()

    # --- which optimizers' steps make one step -----------------------------------------------------------------------------------

    def _part_began(self) -> None:
        """A pass follows the step of an optimizer, in a step in which others are still to step."""
        self.state.progress.is_between = self.state.progress.parameters_measured = False
        self.boundaries.part_began()

    def part_ended(self, optimizer: Hashable) -> None:
        """The optimizer has stepped. If it steps again before the last one does, this was perhaps a step of its own."""
        state, progress = self.state, self.state.progress
        if len(self.order) == 1 or not (state.is_open and state.leads) or progress.is_attempted:
            return
        attempts = progress.times.get(optimizer, 0) + (optimizer in progress.overflowed)
        if attempts > self._rounds.get(optimizer, 0) and not state.in_backward.any_now:
            progress.set_aside()
            self.boundaries.set_aside()

    def _take_turn(self, optimizer: Hashable, has_closure: bool = False) -> None:
        """The optimizer begins a step: in the open step with what the others did in it, or in a step of its own."""
        if optimizer == self.resting:
            self._wait_for(optimizer)
        progress = self.state.progress
        if progress.awaits_next:
            progress.awaits_next = False
            if has_closure and progress.is_between:
                self._part_began()  # in its closure
            if optimizer in progress.in_part and not progress.is_between:
                progress.in_part.clear()
                self.measures.let_go(optimizer, with_unowned=False)  # its update is that of its last step
            else:
                ends = self.order[-1] == optimizer
                begins_anew = (
                    ends and max(progress.times.values(), default=0) > _MOST_STEPS and self.measures.was_cleared(optimizer)
                )
                self.rejoin(len(progress.parts) if ends and not begins_anew else 1)
                if begins_anew and progress.parts:
                    self.split()  # its gradients are of this part alone, and the others were steps without it
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
        self.resting = order[-1]
        if not self.measures.shares_parameters(self.resting, latest):
            self.measures.warn_order("resting", 0, self.resting, latest)
        order.sort(key=lambda each: each == latest)
        self.split()

    def _wait_for(self, optimizer: Hashable) -> None:
        self.order.sort(key=lambda each: each == optimizer)
        self.resting, self._by_phases, self._in_a_row = None, False, 0

    def round_ended(self, last: Hashable) -> None:
        """The last optimizer has stepped: learn how often the others step for one step of it."""
        times = {each: count for each, count in self.state.progress.times.items() if each != last}
        if times:
            # tell once that the last one did not accumulate gradients over many steps by design, if it now steps for few of others
            longest = max(self._rounds.values(), default=0)
            if max(times.values()) <= _MOST_STEPS < longest and not self._long_round_told:
                self._long_round_told = True
                self.measures.warn_order("late", longest, last)
            self._rounds.update({each: max(count, self._rounds.get(each, 0)) for each, count in times.items()})
            self._in_a_row, self._joined, self._by_phases = 1, self.state.progress.joined, False
            return
        self._in_a_row += 1
        if self._in_a_row > 1 and self.resting is None and not self._by_phases:
            self._by_phases, self._rounds = True, {}
            if self._joined:
                self.measures.warn_order("joined", self._joined + 1)

    # --- the steps of optimizers ----------------------------------------------------------------------------------------------

    def wrapper_began(self, optimizer: Hashable) -> None:
        """A wrapper around the optimizer is about to step: measure parameters before it changes anything."""
        self._end_raised(optimizer)
        if self._steps_late(optimizer):
            return
        self.ensure_open(hides_forward=None)
        self._take_turn(optimizer)
        if self.boundaries.has_values:
            self._measure_final(optimizer)
            with_unowned = self.order[-1] == optimizer
            self.measures.hold_parameters(optimizer, with_unowned=with_unowned, as_measured=self._measure_parameters())

    def _measure_final(self, optimizer: Hashable) -> None:
        """Measure gradients before the clip that are final only now, when the outermost optimizer begins to step."""
        progress = self.state.progress
        if self.measures.waits_for_step and optimizer not in progress.final:
            progress.final.add(optimizer)
            self.measures.measure_before_clip()

    def wrapper_ended(self, optimizer: Hashable) -> None:
        """The wrapper returned without a step of its optimizer, as one that accumulates gradients does."""
        self.measures.let_go(optimizer, with_unowned=self.order[-1] == optimizer)

    def step_began(self, optimizer: Hashable, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure, which has yet to compute gradients; ``within`` a backward pass.

        Returns:
            Whether it must change nothing.
        """
        measures, state = self.measures, self.state
        if state.progress.raised:
            self._end_raised(optimizer)
        here, elsewhere = state.in_backward.outside, state.in_backward.known
        if within:
            here, elsewhere, state.in_backward.any_now = elsewhere, here, True
            state.in_backward.quiet.clear()
        here.add(optimizer)
        elsewhere.discard(optimizer)
        if not has_closure and not within and not state.is_open and self._steps_late(optimizer):
            return bool(self.boundaries.is_skipped)
        if has_closure and state.leads and not state.is_open:
            self.release()  # its forward is yet to come
        self.ensure_open(hides_forward=None)
        if not within and len(self.order) > 1:
            self._take_turn(optimizer, has_closure)
        state.progress.begun.add(optimizer)
        if not self.boundaries.has_values:
            return False
        with_unowned = not within and self.order[-1] == optimizer
        measures.annotate(optimizer, turns=0 if within else self.turns(), is_first=state.patterns.is_first)
        self._explain_missing(optimizer, has_closure or within)
        self._measure_final(optimizer)
        measures.release_gradients(optimizer)
        measures.hold_parameters(optimizer, with_unowned=with_unowned, as_measured=self._measure_parameters())
        if has_closure:
            return False
        if within:
            measures.explain_in_backward(optimizer)
        measures.measure_after_clip(optimizer, with_unowned=with_unowned)
        is_skipped = not within and self.decide(optimizer)
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

    def decide(self, optimizer: Hashable, is_overflowed: bool = False) -> bool:
        try:
            return bool(self.boundaries.decide(optimizer, is_overflowed))
        except TrainingStopped:
            self.state.attempt()
            if self.state.leads:
                self.close()
            raise

    def _measure_parameters(self) -> bool:
        """All of them, once a step: before the first of several optimizers has changed anything. Returns whether it was now."""
        progress = self.state.progress
        were_measured, progress.parameters_measured = progress.parameters_measured, True
        if not were_measured:
            self.measures.measure_parameters()
        return not were_measured

    def _steps_late(self, optimizer: Hashable) -> bool:
        """Whether the optimizer belongs to the step that has just ended: named before the last one, it steps after it."""
        state, progress = self.state, self.state.progress
        others_stepped = bool(progress.done) and optimizer not in progress.done and progress.backwards > 0
        is_late = others_stepped and not state.patterns.backward_since and state.leads and not state.is_open
        if is_late := is_late and self.boundaries.was_monitored:
            if optimizer == self.resting:
                self._accumulates = True
            else:
                self.measures.warn_order("last", 0, optimizer)
            self._wait_for(optimizer)
        return is_late

    def turns(self) -> int:
        """The most steps that one optimizer has taken so far where they alternate, as in a GAN: a backward pass lies between their steps,
        or some pass brought gradients to one of them only. Else 0: parts of one model under several optimizers share every pass.
        """
        progress = self.state.progress
        if self.state.in_backward.any_now:
            return 0
        if progress.done:
            alternate = progress.backwards > self.state.patterns.backwards_at_step
        else:
            alternate = len(self.order) > 1 and not progress.overflowed and bool(self.measures.gets_own_gradients())
        return max(progress.times.values(), default=1) if alternate else 0

    def closure_ended(self, optimizer: Hashable) -> bool:
        """The closure has computed gradients. Those of its last call are the optimizer's, and those of its first call decide.

        Returns:
            Whether the optimizer must change nothing.
        """
        decided = self.state.progress.decided
        self.measures.measure_after_clip(optimizer, with_unowned=self.order[-1] == optimizer)
        if optimizer in decided:
            return bool(self.boundaries.is_skipped)
        decided.add(optimizer)
        return not self.measures.writes_early(optimizer) and self.decide(optimizer)

    def closure_raised(self, optimizer: Hashable, error: str = "an error") -> None:
        """The optimizer's step is an attempt that was not applied; it is over when the next one begins."""
        self.state.progress.raised[optimizer] = error

    def _end_raised(self, optimizer: Hashable) -> None:
        """End the open step if this optimizer's closure raised in it: the next forward is in the next closure."""
        if optimizer in self.state.progress.raised and self.state.leads:
            self.state.interrupt()
            self.close()

    def step_ended(self, optimizer: Hashable, within: bool, in_scaler_step: bool) -> None:
        """The optimizer has stepped: measure the update. With the last one the step ends, under a scaler with its update."""
        state, progress = self.state, self.state.progress
        progress.begun.discard(optimizer)
        progress.raised.pop(optimizer, None)
        progress.done.add(optimizer)
        progress.in_part.add(optimizer)
        progress.times[optimizer] = progress.times.get(optimizer, 0) + 1
        progress.latest = optimizer
        state.patterns.is_first, state.patterns.backwards_at_step = False, progress.backwards
        if self.boundaries.has_values:
            self.measures.measure_update(optimizer)
        if not within:  # else the step ends with the backward pass, or with an optimizer behind it
            are_several = len(self.order) > 1
            if are_several and self.order[-1] == optimizer:
                self.round_ended(optimizer)
            if self._ends_attempt(optimizer):
                self._all_stepped(in_scaler_step)
            if are_several:
                self.part_ended(optimizer)

    def step_overflowed(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        """The scaler found infinite gradients: they are measured all the same."""
        self.ensure_open(hides_forward=None)
        self._take_turn(optimizer)
        progress = self.state.progress
        progress.is_overflowed = True
        progress.in_part.add(optimizer)
        self.measures.annotate(optimizer, turns=0, is_first=False)
        self._measure_final(optimizer)
        self._measure_parameters()
        self.measures.measure_after_clip(optimizer, with_unowned=self.order[-1] == optimizer, is_overflowed=True)
        self.decide(optimizer, is_overflowed=True)  # nothing is left to skip, but other ranks may wait
        progress.overflowed.add(optimizer)
        if self._ends_attempt(optimizer):
            self._all_stepped(in_scaler_step)
        self.part_ended(optimizer)
