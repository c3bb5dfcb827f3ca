"""Opens, closes and drops steps: the part of the step machine that knows their numbers."""

from __future__ import annotations

from .step_actions import StepBoundaries
from .step_state import StepProgress, StepState


class StepCycle:
    """Opens, closes and drops steps.

    Args:
        boundaries: carries it out.
        state: what is known of the loop; changed here and in :class:`StepMachine`.
    """

    def __init__(self, boundaries: StepBoundaries, state: StepState) -> None:
        self.boundaries, self.state = boundaries, state

    def open(self, step: int, is_tentative: bool = False, hides_forward: bool = False) -> None:
        """Open ``step``; a step that is still open ends first, or is dropped if it is unfinished."""
        state, clock, patterns = self.state, self.state.clock, self.state.patterns
        if state.is_open:
            self.end_or_drop()
        was_undecided, patterns.is_undecided = patterns.is_undecided, False
        patterns.hides_forward = hides_forward and not was_undecided
        self.boundaries.seal(step)
        if clock.step is None or step <= clock.step:
            self.boundaries.rewind(step, clock.step)
        clock.stride = max(1, step - clock.step) if clock.step is not None else 1
        clock.step, clock.next_step, state.is_open, state.in_backward.any_now = step, step + 1, True, False
        state.progress = StepProgress(state.is_manual, is_tentative, is_tentative)
        self.boundaries.open(step, is_tentative=is_tentative, hides_forward=hides_forward, was_undecided=was_undecided)

    def close(self) -> None:
        """End the open step, if any."""
        state = self.state
        if not state.is_open:
            return
        state.is_open, state.clock.ended = False, state.clock.step
        if state.progress.backwards:
            state.in_backward.is_settled = True
            state.patterns.learn(state.progress.backwards)
        self.boundaries.close(is_overflowed=state.is_driven and state.progress.is_overflowed)

    def end(self) -> None:
        """End the open step, in which perhaps not every optimizer has stepped or returned."""
        if self.state.is_open and self.state.is_driven and self.state.progress.has_stepped:
            self.interrupt()
        self.close()

    def end_or_drop(self) -> None:
        """End the open step, or drop it if it is unfinished."""
        if self.state.is_unfinished:
            self.drop()
        else:
            self.end()

    def drop(self) -> None:
        """Forget the open step: its number is that of the next attempt."""
        state, clock = self.state, self.state.clock
        was_tentative, state.is_open, state.progress.is_tentative = state.progress.is_tentative, False, False
        if clock.step is not None:
            clock.next_step = clock.step
        clock.step = clock.ended
        self.boundaries.drop(was_tentative=was_tentative)

    def interrupt(self) -> None:
        """The open step ends before every optimizer was seen to the end of its step. One that raised did not apply it."""
        progress = self.state.progress
        progress.is_overflowed |= bool(progress.begun)
        self.state.clock.attempts += not progress.is_attempted
        progress.is_attempted = True

    def release(self) -> None:
        """No backward pass has followed the undecided call: what was logged since belongs to the last step."""
        if self.state.patterns.is_undecided:
            self.boundaries.release()

    def ensure_open(self, hides_forward: bool = True) -> None:
        """A backward pass or an optimizer is part of a step; where it opens one, no hook has seen the forward."""
        state = self.state
        if state.leads and not state.is_open:
            self.open(state.clock.next_step, hides_forward=hides_forward)
        elif state.progress.is_tentative:
            state.progress.is_tentative = False
            self.boundaries.confirm()

    def begin_by_hand(self, step: int) -> None:
        """The loop opens ``step``; from now on it opens and closes steps."""
        self.state.is_manual = True
        self.release()
        self.open(step)

    def finish(self) -> None:
        """The run ends, or the monitor leaves it."""
        self.release()
        self.end_or_drop()
