"""The part of the step machine that is about the steps of optimizers: closures, wrappers, several optimizers, overflows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from ...core.errors import SpikeError
from .step_actions import StepMeasurements
from .step_cycle import StepCycle

#: An optimizer that has stepped this often in one step does not wait for the last one: critics of a GAN take 5 steps for each of the
#: generator as a rule, and a discriminator that begins later lets it take thousands. The last one may accumulate gradients over more.
_MOST_STEPS, _MOST_WITH_GRADIENTS = 10, 100


class Machine(Protocol):
    """What this part needs of the machine."""

    cycle: StepCycle
    measures: StepMeasurements
    order: list[Hashable]

    def expects_more(self) -> bool:
        """Whether the step has had fewer backward passes so far than any step before."""

    def is_last(self, optimizer: Hashable) -> bool:
        """Whether the optimizer is the last one to step."""

    def attempt_ended(self, optimizer: Hashable, in_scaler_step: bool) -> None:
        """The optimizer has stepped, or the scaler skipped it."""


class OptimizerSteps:
    """Turns events of optimizers into actions.

    Args:
        machine: that this is a part of.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.cycle, self.state, self.measures = machine.cycle, machine.cycle.state, machine.measures
        self._resting: Hashable = None  # the optimizer that the user named last, while steps go on without it
        self._accumulates = False  # it steps at last with the gradients of many steps
        self._rounds: dict[Hashable, int] = {}  # the most steps of each optimizer to one of the last
        # steps of the last one without others since, and parts of its step that may have been steps
        self._in_a_row = self._joined = 0
        self._long_round_told = False
        self._by_phases = False  # each optimizer takes several steps before another one does

    # --- which optimizers' steps make one step -----------------------------------------------------------------------------------

    def part_began(self) -> None:
        """A pass follows the step of an optimizer, in a step in which others are still to step."""
        self.state.progress.part_began()
        self.cycle.boundaries.part_began()

    def _part_ended(self, optimizer: Hashable) -> None:
        """The optimizer has stepped. If it steps again before the last one does, this was perhaps a step of its own."""
        state, progress = self.state, self.state.progress
        if len(self._machine.order) == 1 or not (state.is_open and state.leads) or progress.is_attempted:
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
                ends = self._machine.is_last(optimizer)
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
        last, times = self._machine.order[-1], self.state.progress.times
        if not self.state.leads or last in times:
            return False
        if self._by_phases or self.measures.shares_parameters(last, optimizer):
            return True
        if times[optimizer] < _MOST_STEPS:
            return False
        return not self.measures.accumulates(last) or not (self._accumulates or times[optimizer] < _MOST_WITH_GRADIENTS)

    def _go_on_without_last(self) -> None:
        """Until the last one steps, the one that stepped before ends steps, and each of its steps so far is one."""
        order, latest = self._machine.order, self.state.progress.latest
        self._resting = order[-1]
        if not self.measures.shares_parameters(self._resting, latest):
            self.measures.warn_resting(self._resting, latest)
        order.sort(key=lambda each: each == latest)
        self.cycle.split()

    def _wait_for(self, optimizer: Hashable) -> None:
        """It ends steps from now on."""
        self._machine.order.sort(key=lambda each: each == optimizer)
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

    # --- events ------------------------------------------------------------------------------------------------------------------

    def wrapper_began(self, optimizer: Hashable) -> None:
        """A wrapper around the optimizer is about to step: measure parameters before it changes anything."""
        self._end_raised(optimizer)
        if self._steps_late(optimizer):
            return
        self.cycle.ensure_open(hides_forward=None)
        self._take_turn(optimizer)
        if self.cycle.boundaries.has_values:
            self._measure_final(optimizer)
            self._parameters_before(optimizer, with_unowned=self._machine.is_last(optimizer))

    def _measure_final(self, optimizer: Hashable) -> None:
        """Measure gradients before the clip that are final only now, when the outermost optimizer begins to step."""
        progress = self.state.progress
        if self.measures.waits_for_step and optimizer not in progress.final:
            progress.final.add(optimizer)
            self.measures.measure_before_clip(progress.done, self.state.in_backward.known)

    def wrapper_ended(self, optimizer: Hashable) -> None:
        """The wrapper returned without a step of its optimizer, as one that accumulates gradients does."""
        self.measures.let_go(optimizer, with_unowned=self._machine.is_last(optimizer))

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
        if not within and len(self._machine.order) > 1:
            self._take_turn(optimizer, has_closure)
        state.progress.begun.add(optimizer)
        if not cycle.boundaries.has_values:
            return False
        turns = max(state.progress.times.values(), default=1) if not within and self._takes_turns() else 0
        measures.annotate(optimizer, turns=turns, is_first=state.patterns.is_first)
        self._explain_missing(optimizer, has_closure or within)
        self._measure_final(optimizer)
        measures.release_gradients(optimizer)
        self._parameters_before(optimizer, with_unowned=not within and self._machine.is_last(optimizer))
        if has_closure:
            return False
        if within:
            measures.explain_in_backward(optimizer)
        measures.measure_after_clip(optimizer, with_unowned=not within and self._machine.is_last(optimizer))
        is_skipped = not within and self._decide(optimizer)
        if within:
            measures.warn_in_backward()
        self.state.progress.done.add(optimizer)
        return is_skipped

    def _explain_missing(self, optimizer: Hashable, comes_later: bool) -> None:
        backwards = self.state.progress.backwards
        if not backwards and not comes_later:
            self.measures.revive_hooks(optimizer)
        if backwards and self._machine.expects_more():
            self.measures.explain_missing(
                f"this step had {backwards} backward passes where none had fewer than {self.state.patterns.fewest_backwards} before; "
                "monitor.clip_grad_norm_ measures whatever their number"
            )

    def _decide(self, optimizer: Hashable, is_overflowed: bool = False) -> bool:
        cycle, progress = self.cycle, self.state.progress
        try:
            return cycle.boundaries.decide(optimizer, progress.done, progress.overflowed, is_overflowed)
        except SpikeError:
            self.state.attempt()
            if self.state.leads:
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
        self.measures.measure_after_clip(optimizer, with_unowned=self._machine.is_last(optimizer))
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
            are_several = len(self._machine.order) > 1
            if are_several and self._machine.is_last(optimizer):
                self._round_ended(optimizer)
            self._machine.attempt_ended(optimizer, in_scaler_step)
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
        self.measures.measure_after_clip(optimizer, with_unowned=self._machine.is_last(optimizer), is_overflowed=True)
        self._decide(optimizer, is_overflowed=True)  # nothing is left to skip, but other ranks may wait
        progress.overflowed.add(optimizer)
        self._machine.attempt_ended(optimizer, in_scaler_step)
        self._part_ended(optimizer)
