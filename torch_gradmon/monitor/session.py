"""One training run under watch: what happens at each moment of a step.

A session takes the values of a step along the straight line: captures measure into a :class:`StepBuffer`, one flush brings
them to the host, and the record goes to detectors, run directory and sinks. What drives it is a :class:`Follower`, or a hand.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.grad_scale import reciprocal, scale_of
from ..capture.gradients import GradientCapture
from ..capture.measurer import Measurer
from ..capture.modules.source import ActivationCapture
from ..capture.parameters import ParameterCapture
from ..core.fence import Guard, guarded
from ..core.keys import Key
from ..core.metric import Metric
from ..core.records import StepRecord
from ..core.torch_modes import rng_states, unseen
from ..monitor.pending_queue import Flights
from ..plugins.clipping.named import Clips
from ..plugins.flight_recorder import Recorder
from ..plugins.live_detail.plugin import Tuning
from ..plugins.loop_audit.plugin import Audit
from ..plugins.overhead_budget import Budget
from ..plugins.post_spike_detail import CloserLook
from ..plugins.spike_policy.plugin import Actor
from ..plugins.spike_policy.policy import Counts, View
from ..step.buffer import StepBuffer
from ..step.exchange import SILENCE, Exchange
from ..step.exchange_policy import StepExchange
from ..step.model_index import Inventory
from ..step.pending_step import Flight
from ..step.plan import SourcePlan
from ..step.planner import OF_MODULES, Planner
from .cadence import Cadence
from .follower import Follower
from .hook_schedule import Arming
from .pipeline.ledger import Ledger
from .step_values import StepValues

_GONE = "the attached optimizers are gone; call monitor.detach(), then monitor.attach() with the new ones"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)
_IN_EVAL = "the model was called in evaluation mode, as it was not before; from the next step on that counts as training"


class Session(StepValues):
    """The state of one run under watch. :class:`torch_gradmon.ModuleMonitor` is its public face."""

    def __init__(
        self,
        is_step_monitored: Callable[[int], bool],
        guard: Guard,
        planner: Planner,
        measurer: Measurer,
        ledger: Ledger,
        update_sample: int | re.Pattern[str] | None,
        budget: Budget | None,
        closer: CloserLook,
        recorder: Recorder,
        actor: Actor | None = None,
    ) -> None:
        self.recorder, self.actor = recorder, actor
        self.attempted = 0
        self._buffers_known = False  # as they were before the batch came
        self.clips = Clips(may_forget=actor is not None)
        ledger.judges.recall = recorder.spiked
        self.together = StepExchange(Exchange(measurer.ranks, guard.complaints), planner, ledger.summary, ledger.judges)
        self._stride = 1  # from one step's number to the next one's
        self.budget = budget
        self.closer = closer
        self.tuning = Tuning(planner, ledger.summary, ledger.outbox, self.together, lambda: closer.may_hang, guard.complaints)
        self.cadence = Cadence(is_step_monitored, closer, self.tuning)
        self.guard = guard
        self.planner = planner
        self.ledger = ledger
        self.audit = Audit(self, planner, guard.complaints, ledger.outbox.note)
        self.measurer = measurer
        self.gradients = GradientCapture(measurer)
        self.parameters = ParameterCapture(measurer, update_sample)
        self.activations = ActivationCapture(measurer, guard)
        self.arming = Arming(planner, self.activations)
        self._scale_by_hand()
        self.face: object = None
        self.scaler: torch.amp.GradScaler | None = None
        self.step: int | None = None
        self.next_step = 0
        self.by_hand = False
        self.open = False
        self.trains_in_eval = False  # the last step was trained in evaluation mode
        self.counts_eval = False  # calls in evaluation mode are training in the open step
        self.is_tentative = False  # and neither a backward pass nor an optimizer has followed so far
        self.is_undecided = False  # no step is open, but such a call came since the last one ended
        self._is_hidden = False  # no hook has seen the forward of the last step
        self._is_explicit = False  # the open step was begun by hand
        self._plans: dict[str, SourcePlan] = {}
        self._due: tuple[Metric, ...] = ()  # metrics of modules that the open step measures
        self._buffer: StepBuffer | None = None
        self._flights = Flights(ledger, planner.registry, guard, recorder.rest)
        self._ended: int | None = None
        self._early: StepBuffer | None = None  # logged for the step to come
        self._unseen: StepBuffer | None = None  # and from inside of a forward, which is its own if no hook sees that
        self._first_keys: frozenset[Key] = frozenset()
        self._tags: dict[str, Any] = {}
        self._undecided_tags: dict[str, Any] = {}
        self._told_ahead: set[str] = set()  # names of tags that the loop gives before a step's forward
        self._unseen_refusals: Tensor | None = None
        self._records_only = False  # the open step is not monitored, but recorded in case of a spike
        self._apart = False  # other ranks do not monitor it
        self._is_away = False  # detached, and not attached again or used by hand since

    @property
    def follower(self) -> Follower | None:
        """What drives the session; None where it is a hand."""
        return self.arming.follower

    # --- the step ------------------------------------------------------------------------------------------------------------

    def begin(self, step: int, is_tentative: bool = False, is_hidden: bool = False) -> bool:
        """Open ``step``; a step still open ends first. Returns whether it is monitored.

        Args:
            step: its number.
            is_tentative: whether a call in evaluation mode begins it, of which only a backward pass tells that it is training.
            is_hidden: whether a backward pass or an optimizer begins it, and no hook has seen the forward.
        """
        self._end_or_drop()
        self._is_hidden = is_hidden and not self.is_undecided
        came_undecided, self.is_undecided = self.is_undecided, False
        self.counts_eval = self.is_tentative = is_tentative
        self._flights.now = step
        is_tuned, knew_inputs = self.tuning.is_awake, self.activations.on_root_inputs
        if is_tuned:
            self.tuning.asked_between()
            self._change_detail(step)
        self.finish()
        self.recorder.close()
        if self.step is not None and step <= self.step:
            self._go_back(step)
        elif self.step is None:
            self.ledger.outbox.goes_back(step)  # where a run is continued
        self._stride = max(1, step - self.step) if self.step is not None else 1
        self.step, self.next_step, self.open, self._is_explicit = step, step + 1, True, self.by_hand
        if is_tuned:
            self.tuning.step_began(step, self._stride)
        self.clips.step_opened()
        if self.actor is not None:
            self.actor.step_opened(self.planner.module, [] if self.follower is None else self.follower.optimizers())
        if self.follower is not None:
            self.follower.step_opened()
        tags, self._tags = {**self._tags, **self._undecided_tags}, {}
        self._undecided_tags = {}
        monitored = self._is_monitored(step)
        self._records_only = not monitored and self._is_recorded()
        self._apart = monitored and self.cadence.wants_alone(step)
        if monitored or self._records_only:
            self._tags = tags
            self._prepare(step)
            if not (knew_inputs or is_hidden or self.by_hand) and self.activations.on_root_inputs:
                self.activations.root_inputs_missed()
            if came_undecided and is_hidden and self._buffer is not None:
                self._buffer.absent.update(((source, ""), _IN_EVAL) for source in OF_MODULES)
        else:
            self.activations.let_through(False)
            if self.arming.is_loose:
                self.arming.disarm()
        self.activations.step_began(in_eval=is_tentative)
        unseen, self._unseen = self._unseen, None
        if unseen is not None and self._buffer is not None and is_hidden:
            self._buffer.absorb(unseen)
        if not is_tentative:
            self._take_early()
        return monitored

    def confirm(self) -> None:
        """A backward pass or an optimizer follows the call in evaluation mode that began the open step: it is a step."""
        self.is_tentative = False
        self.activations.step_confirmed()
        self._take_early()

    def count_eval(self) -> None:
        """Calls in evaluation mode are training in the open step, which another call has begun."""
        self.counts_eval = True
        self.activations.count_eval()

    def _take_early(self) -> None:
        early, self._early = self._early, None
        if early is not None and self._ended is None:
            self._first_keys = early.logged
        if early is not None and self._buffer is not None:
            self._buffer.absorb(early)

    def _go_back(self, step: int) -> None:
        message = f"step {step} comes after step {self.step}; a new segment begins in the run directory"
        self.guard.complaints.add("back", message)
        self._flights.land(None, open_to_late_values=False)
        self.recorder.forget()
        if self.actor is not None:
            self.actor.goes_back()
        self.ledger.goes_back(step)
        self.ledger.outbox.goes_back(step)

    def _is_monitored(self, step: int) -> bool:
        return not self.guard.inert and self.planner.module is not None and self.cadence.wants(step)

    @property
    def may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one: no hook saw the last one's, or this is the first,
        or only its backward pass tells.
        """
        may_be = self._is_hidden or self.is_undecided or self._ended is None
        leads = self.follower is not None and not self.by_hand and torch.is_grad_enabled()
        return may_be and leads and self._is_monitored(self.next_step)

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        if self.step is not None and step <= self.step:
            is_open = self.open and step == self.step and self.takes_values and not self._records_only
            return is_open or self.has_just_monitored(step) or self.ledger.was_monitored(step) or bool(self.cadence.asked(step))
        ahead = step - self.next_step if self.step is None else (step - self.step - 1) // self._stride
        return self.cadence.foretells(step, ahead, self.open)

    def _is_recorded(self) -> bool:
        wanted = bool(self.recorder.size) or (self.actor is not None and self.follower is not None)
        return wanted and not self.guard.inert and self.planner.module is not None

    def _prepare(self, step: int) -> None:
        self.planner.refresh()
        if self.follower is not None and self.follower.groups_changed():
            self.arming.forget()
        assert self.planner.inventory is not None
        if self.planner.inventory.spread and self.measurer.ranks.count > 1:
            self.ledger.summary.all_columns = True  # on each rank, whoever has a run directory
        references = self.planner.inventory.references
        if self.planner.inventory.on_mesh:  # before anything is added up over ranks
            self.together.ranks_take_part()
        self._plans = self.planner.plans(step, self.ledger.summary, gradients_only=self._records_only)
        self._buffer = StepBuffer(step, self.guard.complaints)
        self._due = ()
        if not self._records_only:
            self._buffer.rng = rng_states() if self.ledger.outbox.stores else {}
            self._due = tuple(metric for metric in self.planner.module_metrics() if metric.due(step))
        self.gradients.measures_batches = self.planner.measures_each_batch and not self._records_only
        self.gradients.begin(self._buffer, self._plans, references, self.planner.inventory.doubtful)
        self.parameters.begin(self._buffer, self._plans, references)
        self.activations.begin(self._buffer, self._due, self.planner.inventory, self.by_hand)
        self.arming.arm(on_modules=not self._records_only)

    def rearm(self) -> None:
        """What is to be measured changed: hang what it takes, unless that has time until the next step."""
        if self.follower is None:
            return
        if not self.open and self._is_monitored(self.next_step):
            with unseen():
                self.arming.arm()
        elif self.open and self._buffer is not None and not self._records_only:
            self.arming.on_modules()  # what is due in the open step stays, but the next one needs its hooks in time

    @property
    def is_unfinished(self) -> bool:
        """Whether a step is open in which no optimizer has stepped so far. In one begun by hand, the caller says what a step is."""
        return self.open and not self._is_explicit and self.follower is not None and not self.follower.has_stepped

    def _end_or_drop(self) -> None:
        """End the open step, or drop it if it is unfinished: its number is that of the next attempt."""
        if self.is_unfinished:
            self.drop()
        else:
            self._end_now()

    def _end_now(self) -> None:
        """End the open step, in which perhaps not every optimizer has stepped, or has returned."""
        if self.open and self.follower is not None and self.follower.has_stepped:
            self.follower.interrupted()
        self.end()

    def drop(self) -> None:
        """Forget the open step. What was logged since a call in evaluation mode began it stays for the next one."""
        assert self.step is not None
        self.open, self._buffer, self._buffers_known = False, None, False
        if not self.is_tentative:
            self._tags = {}
        self.is_tentative = False
        self.next_step, self.step = self.step, self._ended
        for capture in (self.gradients, self.parameters, self.activations):
            capture.end()

    def end(self) -> None:
        """Close the open step. On CPU its record is made at once, elsewhere when its values have come."""
        if not self.open:
            return
        self.open, self.ledger.last, self._ended = False, None, self.step
        monitored = self._buffer is not None and not self._records_only
        try:
            try:
                self.tuning.look()
            finally:  # a file that is not as it should be may be a warning, and warnings errors
                self._end(monitored)
        finally:  # ranks change together, whatever failed on one of them
            if self.budget is not None and self.step is not None and not self.tuning.sets_cadence:
                self.budget.step_ended(self.step, monitored, self.guard.spent(), time.perf_counter())
            if self.tuning.is_awake:
                self.tuning.step_ended()
                self._change_detail(self.next_step)
        if self.follower is not None and not self.by_hand and self.arming.is_partial and self._is_monitored(self.next_step):
            self.arming.arm()  # the first thing seen of the next step may be its backward pass
        if self.activations.has_graphs and not self.by_hand:  # or its forward, in a compiled graph
            self.activations.let_through(self._is_monitored(self.next_step))

    def _end(self, monitored: bool) -> None:
        refused = self.follower is not None and self.follower.refused
        if not monitored:
            self._end_unmonitored(refused)
            return
        closer_ends = self.closer.step_ended()
        try:
            self._end_monitored(refused)
            if self._apart:
                self._pass_by(refused)
        finally:  # where a spike raises
            self._look_closer(closer_ends)

    def _change_detail(self, step: int) -> None:
        """Measure what a live change says from ``step`` on, the next one, where one begins or ends there."""
        if not self.tuning.is_due(step):
            return
        try:
            self.settle()  # what was measured before is told as it was measured
        finally:
            was_tuned = self.tuning.in_force is not None
            self.tuning.change(step, self._ended)
            if self.budget is not None and was_tuned != (self.tuning.in_force is not None):
                self.budget.turn(was_tuned, self.guard.spent(), time.perf_counter())
            self.arming.disarm()
            if self.activations.hangs:  # where they may not all go
                self.arming.on_modules()

    def _close(self) -> tuple[StepBuffer, Inventory, dict[str, Any]]:
        """Nothing more is measured in this step: its values, the model as it was, and what the loop said of it."""
        buffer, self._buffer = self._buffer, None
        tags, self._tags = self._tags, {}
        inventory = self.planner.inventory
        assert buffer is not None
        assert inventory is not None
        try:
            for capture in (self.gradients, self.parameters, self.activations):
                capture.end()
            if self.follower is not None:
                self.follower.step_closed()
        finally:  # whatever failed here: the other ranks wait
            may_extend = not (self._records_only or self._apart)
            self.together.run(buffer, self._plans, may_extend, takes_part=not self._apart or self._is_recorded())
            if self.together.exchange.heard is not SILENCE:
                self.tuning.is_awake = True
            self._flights.lockstep = self.together.exchange.takes_place
            if self.budget is not None and self._flights.lockstep:
                self.budget.give_up("ranks that tell each other values have to monitor the same steps")
        return buffer, inventory, tags

    def _end_unmonitored(self, refused: bool) -> None:
        if self._buffer is not None:
            buffer, inventory, tags = self._close()
            found = self.recorder.keep(buffer, self._plans, inventory, refused, tags, self._flights.oldest)
            self.ledger.fill(found)
        self._tags = {}
        if refused:
            self._flights.count_refusal()
        self._pass_by(refused)

    def _pass_by(self, refused: bool) -> None:
        """What detectors learn of a step that they do not judge."""
        if self.actor is not None and self.actor.known is not None and not refused:
            self.ledger.learn(*self.actor.known)
        judges = self.ledger.judges
        if refused or judges.refused:
            judges.ended(applied=not refused)
            if judges.looks_closer():
                self.ledger.spiked_in = self.step
                self._look_closer(False)

    def _end_monitored(self, refused: bool) -> None:
        buffer, inventory, tags = self._close()
        evaluate = self.activations.values.evaluator()
        departure = buffer.depart()
        cost, ranks = self.guard.cost(), self.measurer.ranks.count
        act = skipped = None
        if self.actor is not None:
            act, skipped = self.actor.act, self.actor.skipped
        self._flights.start(
            Flight(
                departure,
                self._plans,
                inventory,
                evaluate,
                refused,
                self._groups(),
                tags,
                cost,
                ranks,
                {} if act is None else act.context(),
                act is not None and act.skipped,
                skipped,
                tuned=self.tuning.context,
                due=self._due,
                attached=self.follower is not None,
                judged=not self._apart,
            )
        )

    def settle(self) -> None:
        """Make the record of the step that has ended, if it was not made yet. Waits for its values."""
        self._flights.land(self._ended, open_to_late_values=not self.open)

    def finish(self) -> None:
        """Nothing more can come for the step that has ended: send it out, where that need not wait or somebody wants it now."""
        if self._flights.oldest is not None:  # else there is no need to know whether anybody waits for it
            self._flights.seal()
            self._flights.land(self._ended, open_to_late_values=True, waiting=self.ledger.is_awaited(self._ended or 0))
        self.ledger.finish()
        self._look_closer(False, begins=True)

    def _look_closer(self, ends: bool, begins: bool = False) -> None:
        """Where a spike has become known, measure more in the next steps; ``ends`` where they are over.

        Ranks do so together: in the step after the next one, when all of them know.
        """
        spiked = self.ledger.spiked_in
        if spiked is None and not ends:
            return
        if self._flights.lockstep and spiked is not None and not (begins and self.step is not None and spiked < self.step):
            spiked = None
        if spiked is not None:
            self.ledger.spiked_in = None
            self.cadence.ask_again()
        if (spiked is not None and self.closer.begin()) or ends:
            self.rearm()

    def _groups(self) -> list[tuple[str, frozenset[str]]]:
        if self.follower is None or self.planner.inventory is None or self.ledger.layers.choice != "blocks":
            return []
        inventory = self.planner.inventory
        groups = [group for optimizer in self.follower.optimizers() for group in optimizer.param_groups]
        members = [frozenset(inventory.names[p] for p in inventory.positions(group["params"])) for group in groups]
        return [(f"group_{number}", names) for number, names in enumerate(members)]

    # --- acting on a spike ---------------------------------------------------------------------------------------------------

    def buffers_may_move(self) -> None:
        """The model is about to run in training mode."""
        if not self._buffers_known:
            self._remember_buffers()
            self._buffers_known = True

    def _remember_buffers(self) -> None:
        if self.actor is not None and self.planner.module is not None:
            self.actor.buffers.remember(self.planner.module, self.planner.version)

    @property
    def skips(self) -> bool:
        """Whether the step in flight, or the one that ended last, is skipped."""
        return self.actor is not None and self.actor.skips

    def decide(self, view: View) -> bool:
        """Whether an optimizer that is about to step is to change nothing; see :meth:`Actor.decide`."""
        if self.actor is None or self._buffer is None or self.paused or not self.open:
            return False
        try:
            return self.actor.decide(self._buffer, self._plans, view)
        finally:
            if self.actor.act is not None:
                self._records_only = self._apart = False  # what is done about a step is recorded, whatever the cadence
            if self.actor.skips:
                self.clips.put_back()

    @property
    def next_attempt(self) -> int:
        """The number of the next step that an optimizer takes."""
        return self.step if self.is_unfinished and self.step is not None else self.next_step

    def counts(self) -> Counts:
        """Of the steps so far, as far as their values have come."""
        summary, actor = self.ledger.summary, self.actor
        skipped, rollbacks = (0, 0) if actor is None else (actor.skipped, actor.rollbacks)
        applied, overflowed = self.attempted - summary.not_applied, summary.not_applied - skipped
        return Counts(self.attempted, applied, skipped, overflowed, summary.nonfinite, rollbacks)

    def attempt_over(self, refused: bool) -> None:
        """All optimizers have been called."""
        self.attempted += 1
        module = self.planner.module
        if self.actor is not None and self.follower is not None and module is not None and self.step is not None and self.open:
            self.actor.attempt_over(self.step, not (refused or self.actor.skips), module, self.follower.optimizers())
            if not self._buffers_known:  # of a model that is called by its parts nobody sees when that begins
                self._remember_buffers()
            self._buffers_known = False

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @guarded
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand."""
        self.by_hand, self._is_away = True, False
        self.release()
        if self.actor is not None and self.follower is None:
            message = "nothing can be done about spikes, for the optimizers are not known: call attach() besides begin_step()"
            self.guard.complaints.add("acting", message)
        return self.begin(step)

    @guarded
    def end_step(self) -> None:
        """End the step and send it out."""
        self._end_now()
        self._send_out()

    @guarded
    def _end_last(self) -> None:
        self.release()
        self._end_or_drop()
        self._send_out()

    def _send_out(self) -> None:
        self.settle()
        self.ledger.finish()

    # --- values of the step that ended ---------------------------------------------------------------------------------------

    def settle_now(self) -> StepRecord | None:
        """The record of the step that ended last, None where it was not monitored."""
        self._settle_fenced()  # does nothing inside of what is fenced already, such as on_spike
        return None if self.lost else self.ledger.last

    @property
    def lost(self) -> str:
        """Why values of the step that ended last would be stale; empty where they are not."""
        if self.follower is None or self.by_hand:
            return ""
        if self.follower.orphaned:
            return _GONE
        with unseen():
            is_stale = self.audit.is_stale(in_step=self.open and not self.follower.has_stepped)
        return _UNATTACHED if is_stale else ""

    @property
    def last_ended(self) -> int | None:
        """Number of the step that ended last; None before there was one."""
        return self._ended

    @guarded
    def recall(self) -> None:
        """Take what is recorded of the steps that followed a spike so far. Waits for the device."""
        self.ledger.fill(self.recorder.rest())

    @guarded
    def judge_now(self) -> None:
        """Make the record of the step that has ended, and judge already now what was logged since."""
        self.release()
        self.settle()
        self.ledger.judge_late()

    @guarded
    def _settle_fenced(self) -> None:
        self.release()
        self.settle()

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def follow(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]] = (),
    ) -> None:
        """Follow the loop by hooks from now on."""
        with unseen():
            self._follow(module, optimizers, scaler, wrappers)

    def _follow(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]],
    ) -> None:
        self.scaler, self.by_hand, self._is_away = scaler, False, False
        self.arming.follower = follower = Follower(self, module, optimizers, scaler, wrappers)
        self.arming.forget()
        self._remember_buffers()
        self.activations.inverse_scale, self.activations.opening = follower.inverse_scale, follower.root_called
        self.activations.part_called = follower.part_called
        self.arming.arm()  # also where the first step is not monitored: a model that will be compiled takes only the hooks that it has then
        self.guard.cost()

    def _scale_by_hand(self) -> None:
        """Without a follower, what is known of gradients inside of the model is the scaler that was named."""
        session = weakref.ref(self)

        def inverse_scale() -> Tensor | None:
            scaler = None if (alive := session()) is None else alive.scaler
            return None if (scale := scale_of(scaler)) is None else reciprocal(scale)

        self.activations.inverse_scale = inverse_scale
        self.activations.opening = self.activations.part_called = lambda _: None

    def set_reference(self, module: nn.Module | None, follows: bool) -> None:
        """Compare with ``module`` from now on; ``follows`` keeps it in the mode of the watched model."""
        reference = self.activations.reference
        if module is None:
            reference.remove()
        else:
            reference.set(module, self.planner.rename, follows)
        self.parameters.reference = {} if module is None else reference.parameters
        self.planner.changed()
        self.rearm()

    def leave(self) -> None:
        """End the step in flight, or drop it if it is unfinished, and take what is recorded."""
        self.together.leaving = True
        try:
            self._end_last()
            self.recall()
            self.recorder.forget()
            self.audit.tell()
        finally:
            self.together.leaving = False
            self.tuning.leave(self._ended)

    def detach(self) -> None:
        """End the step, send what waits, and take every hook away."""
        with unseen():
            self._detach()

    def _detach(self) -> None:
        try:
            self.leave()
        finally:
            self._is_away = True
            self.arming.disarm()
            self.activations.remove()
            self.activations.reference.forget()
            if self.follower is not None:
                self.follower.remove()
                self.arming.follower = None
                self._scale_by_hand()
            if self.actor is not None:
                self.actor.close()
            self.ledger.outbox.close()


def at_exit(session: Callable[[], Session | None], _lasting: object = None) -> None:
    """The last step goes out when the interpreter ends; of a session that is collected the outbox itself sends what is known of it."""
    if (alive := session()) is None:
        return
    try:
        alive.leave()
    finally:  # also where a spike in the last step is raised
        if alive.actor is not None:
            alive.actor.close()
        alive.ledger.outbox.close()
