"""Which moment of a loop means what: from events and the phase of the step to actions.

The machine holds no tensors and imports no torch, so that its table can be tested without a training. Events come in as method
calls, actions go out as calls of :class:`StepBoundaries` and :class:`StepMeasurements`, which never call back.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..core.errors import SpikeError
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
    """

    def __init__(self, cycle: StepCycle, measures: StepMeasurements, order: list[Hashable]) -> None:
        self.cycle, self.state, self.measures, self.order = cycle, cycle.state, measures, order

    # --- forward and backward ------------------------------------------------------------------------------------------------

    def may_train_in_eval(self) -> bool:
        """The model is called in evaluation mode, with gradients: whether that may be training. It may be where no step has ended
        yet, and in loops that train in that mode. Elsewhere only the backward pass shows it.
        """
        cycle, patterns, progress = self.cycle, self.state.patterns, self.state.progress
        if not self.state.leads:
            return False
        patterns.called_in_eval = True
        if self.state.is_open:
            if patterns.trains_in_eval and not progress.backwards:
                progress.counts_eval = True  # a call in training mode without a backward pass has opened the step
                cycle.boundaries.count_eval()
            return progress.counts_eval
        cycle.release()
        patterns.is_undecided = not patterns.trains_in_eval and self.state.clock.ended is not None
        return not patterns.is_undecided

    def forward_began(self, in_eval: bool, in_closure: bool) -> None:
        """The model is called in training."""
        cycle, progress = self.cycle, self.state.progress
        if self.state.is_open and self.state.leads and not in_closure:
            if progress.is_attempted or progress.begun:
                cycle.interrupt()
                cycle.close()  # its end was not seen, as when the scaler is not updated
            elif progress.is_tentative and not in_eval:
                self.state.patterns.called_in_eval = False
                cycle.drop()
            elif self.state.in_backward.any_now and not self.awaits_others():
                self._all_stepped(in_scaler_step=False)  # as after a backward pass within re-entrant checkpoints only
        if not self.state.is_open and self.state.leads:
            cycle.release()
            cycle.open(self.state.clock.next_step, is_tentative=in_eval)
        self.state.patterns.called_in_training |= not in_eval

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
        within = self.state.in_backward
        self.state.progress.backwards += 1
        self.state.patterns.backward_since = True
        self.measures.backward_ended()
        if not within.any_now and self._expects_more():
            return
        self.measures.measure_before_clip(self.state.progress.done, within.known)
        if within.any_now and not is_nested and not self.awaits_others():
            self._all_stepped(in_scaler_step)

    def _expects_more(self) -> bool:
        return self.state.patterns.expects_more(self.state.progress.backwards, len(self.order))

    def awaits_others(self) -> bool:
        """Whether an optimizer is still to step behind the backward pass, within which others have stepped."""
        return self.state.in_backward.awaited(self.order, self.state.progress.done, self.measures.has_gradients)

    # --- optimizers ----------------------------------------------------------------------------------------------------------

    def wrapper_began(self, optimizer: Hashable) -> None:
        """A wrapper around the optimizer is about to step: measure parameters before it changes anything."""
        self._end_raised(optimizer)
        if self._steps_late(optimizer):
            return
        self.cycle.ensure_open(hides_forward=False)
        if self.cycle.boundaries.has_values:
            self._measure_parameters()
            self.measures.hold_parameters(optimizer, with_unowned=self._is_last(optimizer))

    def wrapper_ended(self, optimizer: Hashable) -> None:
        """The wrapper returned without a step of its optimizer, as one that accumulates gradients does."""
        self.measures.let_go(optimizer, with_unowned=self._is_last(optimizer))

    def step_began(self, optimizer: Hashable, has_closure: bool, within: bool) -> bool:
        """The optimizer is about to step, or to call its closure, which has yet to compute gradients; ``within`` a backward pass.

        Returns:
            Whether it must change nothing.
        """
        cycle, measures = self.cycle, self.measures
        self._end_raised(optimizer)
        self.state.in_backward.began(optimizer, within)
        if not has_closure and not within and self._steps_late(optimizer):
            return cycle.boundaries.is_skipped
        if has_closure and self.state.leads and not self.state.is_open:
            cycle.release()  # its forward is yet to come
        cycle.ensure_open(hides_forward=False)
        self.state.progress.begun.add(optimizer)
        if not cycle.boundaries.has_values:
            return False
        measures.annotate(optimizer, by_turns=not within and self._takes_turns(), is_first=self.state.patterns.is_first)
        self._explain_missing(optimizer, has_closure or within)
        measures.release_gradients(optimizer)
        self._measure_parameters()
        measures.hold_parameters(optimizer, with_unowned=not within and self._is_last(optimizer))
        if has_closure:
            return False
        if within:
            measures.explain_in_backward(optimizer)
        measures.measure_after_clip(optimizer, with_unowned=not within and self._is_last(optimizer))
        is_skipped = not within and self._decide(optimizer)
        if within:
            measures.warn_in_backward()
        self.state.progress.done.add(optimizer)
        return is_skipped

    def _explain_missing(self, optimizer: Hashable, comes_later: bool) -> None:
        backwards = self.state.progress.backwards
        if not backwards and not comes_later:
            self.measures.revive_hooks(optimizer)
        if backwards and self._expects_more():
            self.measures.explain_missing(
                f"this step had {backwards} backward passes where none had fewer than {self.state.patterns.fewest_backwards} before; "
                "monitor.clip_grad_norm_ measures whatever their number"
            )

    def _decide(self, optimizer: Hashable, is_overflowed: bool = False) -> bool:
        cycle, progress = self.cycle, self.state.progress
        try:
            return cycle.boundaries.decide(optimizer, progress.done, progress.overflowed, is_overflowed)
        except SpikeError:
            progress.is_attempted = True
            self.state.clock.attempts += 1
            if self.state.leads:
                cycle.close()
            raise

    def _measure_parameters(self) -> None:
        """All of them, once a step: before the first of several optimizers has changed anything."""
        if not self.state.progress.parameters_measured:
            self.state.progress.parameters_measured = True
            self.measures.measure_parameters()

    def _steps_late(self, optimizer: Hashable) -> bool:
        """Whether the optimizer belongs to the step that has just ended: named before the last one, it steps after it."""
        cycle, done = self.cycle, self.state.progress.done
        others_stepped = bool(done) and optimizer not in done and self.state.progress.backwards > 0
        is_late = others_stepped and not self.state.patterns.backward_since and self.state.leads
        if is_late := is_late and not self.state.is_open and cycle.boundaries.was_monitored:
            self.order.sort(key=lambda each: each == optimizer)
            self.measures.warn_order(optimizer)
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

    def _is_last(self, optimizer: Hashable) -> bool:
        return self.order[-1] == optimizer

    def closure_ended(self, optimizer: Hashable) -> bool:
        """The closure has computed gradients. Those of its last call are the optimizer's, and those of its first call decide.

        Returns:
            Whether the optimizer must change nothing.
        """
        boundaries, decided = self.cycle.boundaries, self.state.progress.decided
        self.measures.measure_after_clip(optimizer, with_unowned=self._is_last(optimizer))
        if optimizer in decided:
            return boundaries.is_skipped
        decided.add(optimizer)
        return not self.measures.writes_early(optimizer) and self._decide(optimizer)

    def closure_raised(self, optimizer: Hashable) -> None:
        """The optimizer's step is an attempt that was not applied; it is over when the next one begins."""
        self.state.progress.raised.add(optimizer)

    def _end_raised(self, optimizer: Hashable) -> None:
        """End the open step if this optimizer's closure raised in it: the next forward is in the next closure."""
        if optimizer in self.state.progress.raised and self.state.leads:
            self.cycle.interrupt()
            self.cycle.close()

    def step_ended(self, optimizer: Hashable, within: bool, in_scaler_step: bool) -> None:
        """The optimizer has stepped: measure the update. With the last one the step ends, under a scaler with its update."""
        progress = self.state.progress
        progress.begun.discard(optimizer)
        progress.raised.discard(optimizer)
        progress.done.add(optimizer)
        self.state.patterns.is_first = False
        self.state.patterns.backwards_at_step = progress.backwards
        if self.cycle.boundaries.has_values:
            self.measures.measure_update(optimizer)
        if not within:  # else the step ends with the backward pass, or with an optimizer behind it
            self._attempt_ended(optimizer, in_scaler_step)

    def step_overflowed(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        """The scaler found infinite gradients: they are measured all the same."""
        self.cycle.ensure_open(hides_forward=False)
        progress = self.state.progress
        progress.is_overflowed = True
        self.measures.annotate(optimizer, by_turns=False, is_first=False)
        self._measure_parameters()
        self.measures.measure_after_clip(optimizer, with_unowned=self._is_last(optimizer), is_overflowed=True)
        self._decide(optimizer, is_overflowed=True)  # nothing is left to skip, but other ranks may wait
        progress.overflowed.add(optimizer)
        self._attempt_ended(optimizer, in_scaler_step)

    def _attempt_ended(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        if not self.awaits_others() if self.state.in_backward.any_now else self._is_last(optimizer):
            self._all_stepped(in_scaler_step)

    def _all_stepped(self, in_scaler_step: bool) -> None:
        cycle = self.cycle
        if self.state.in_backward.any_now:
            self.measures.measure_unowned()
        if self.state.is_open and not self.state.progress.is_attempted:
            self.state.clock.attempts += 1
            cycle.boundaries.attempt_ended(self.state.progress.is_overflowed)
        self.state.progress.is_attempted = True
        self.state.patterns.attempt_ended(counts=self.state.leads)
        if self.state.leads and not in_scaler_step:
            cycle.close()

    def scaler_updated(self) -> None:
        """The scaler ends the attempt."""
        if self.state.is_open and self.state.progress.is_attempted and self.state.leads:
            self.cycle.close()
