"""Which moment of a loop means what: from events and the phase of the step to actions.

The machine holds no tensors and imports no torch, so that its table can be tested without a training. Events come in as method
calls, actions go out as calls of :class:`StepBoundaries` and :class:`StepMeasurements`, which never call back.
"""

from __future__ import annotations

from collections.abc import Hashable

from .optimizer_steps import OptimizerSteps
from .step_actions import StepMeasurements
from .step_cycle import StepCycle


class StepMachine:
    """Infers steps from what hooks see.

    A step opens with the first training forward, backward pass or optimizer step after the last one ended. It ends when the last
    optimizer has stepped, under a GradScaler with its update. Where the loop opens steps itself, hooks only measure.

    Args:
        cycle: opens and closes steps.
        measures: measures in them.
        order: the optimizers in the order in which they step; the list changes with what is learned.

    Attributes:
        optimizers: the part of the machine that is about the steps of optimizers.
    """

    def __init__(self, cycle: StepCycle, measures: StepMeasurements, order: list[Hashable]) -> None:
        self.cycle, self.state, self.measures, self.order = cycle, cycle.state, measures, order
        self.optimizers = OptimizerSteps(self)

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
                self.optimizers.part_began()
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
            self.optimizers.part_began()
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
        if state.is_open and not state.progress.is_attempted:
            state.attempt()
            cycle.boundaries.attempt_ended(state.progress.is_overflowed)
        leads = state.leads
        state.patterns.attempt_ended(counts=leads)
        if leads and not in_scaler_step:
            cycle.close()

    def scaler_updated(self) -> None:
        """The scaler ends the attempt."""
        if self.state.is_open and self.state.progress.is_attempted and self.state.leads:
            self.cycle.close()
