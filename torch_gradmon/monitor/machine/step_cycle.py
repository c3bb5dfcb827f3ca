"""Opens, closes and drops steps: the part of the step machine that knows their numbers."""

from __future__ import annotations

from ...core.errors import GradmonWarning, SpikeError
from .step_actions import StepBoundaries
from .step_state import StepState


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
        was_undecided = state.patterns.step_opens(hides_forward)
        self.boundaries.seal(step)
        if clock.step is None or step <= clock.step:
            self.boundaries.rewind(step, clock.step)
        state.open(step, is_tentative)
        self.boundaries.open(step, is_tentative=is_tentative, hides_forward=bool(hides_forward), was_undecided=was_undecided)

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
            except (SpikeError, GradmonWarning) as raised:
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
