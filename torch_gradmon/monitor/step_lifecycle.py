"""Opens and closes steps: what is measured in them, what ranks exchange, and where the record goes."""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Any

from torch import Tensor

from ..core.fence import Fence
from ..core.torch_modes import outside_dispatch_modes, rng_states
from ..step.active_step import ActiveStep, Mode, RecordedStep
from ..step.buffer import StepBuffer
from ..step.exchange_policy import ExchangePolicy
from ..step.model_index import ModelIndex
from ..step.pending_step import PendingStep
from ..step.planner import OF_MODULES, Planner
from .cadence import Cadence
from .captures import Captures
from .hook_schedule import HookSchedule
from .pending_queue import Flights
from .step_state import StepState
from .value_log import ValueLog

_IN_EVAL = "the model was called in evaluation mode, as it was not before; from the next step on that counts as training"


class StepLifecycle:
    """Carries out what the step machine says about the boundaries of steps.

    Args:
        state: of the step machine.
        planner: knows the model, and what is to be measured.
        captures: measure.
        exchange: merges values over ranks.
        queue: the steps whose values are on their way, and the records.
        hooks: which hooks are registered.
        cadence: which steps are monitored.
        values: what the loop logs.
        fence: where failures are reported.

    Attributes:
        active: the open step, or the last one; None before the first.
    """

    def __init__(
        self,
        state: StepState,
        planner: Planner,
        captures: Captures,
        exchange: ExchangePolicy,
        queue: Flights,
        hooks: HookSchedule,
        cadence: Cadence,
        values: ValueLog,
        fence: Fence,
    ) -> None:
        self.state, self.planner, self.captures, self.exchange = state, planner, captures, exchange
        self.queue, self.hooks, self.cadence, self.values, self.fence = queue, hooks, cadence, values, fence
        self.plugins = cadence.plugins
        self.active: ActiveStep | None = None

    @property
    def number(self) -> int | None:
        """The number of the open step, or of the last one."""
        return None if self.active is None else self.active.number

    @property
    def has_values(self) -> bool:
        """Whether a step is open that takes values."""
        return self.active is not None and self.active.buffer is not None

    @property
    def is_skipped(self) -> bool:
        """Whether the open step, or the last one, is skipped."""
        return self.active is not None and self.active.is_skipped

    @property
    def was_monitored(self) -> bool:
        """Whether the last step has values, complete or on their way."""
        return self.queue.ledger.last is not None or self.is_pending(self.state.clock.ended)

    def is_pending(self, step: int | None) -> bool:
        """Whether ``step`` is the last one that was monitored, and its values are on their way."""
        return self.queue.newest(step) is not None

    # --- facts of the open step ----------------------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Add a fact, a number or a 0-d tensor, to the context of the open step's record."""
        buffer = None if self.active is None else self.active.buffer
        if buffer is not None:
            if isinstance(value, Tensor) and value.numel() == 1:
                buffer.noted[name] = value.detach().clone()
            elif isinstance(value, (int, float)):
                buffer.noted[name] = value

    def explain(self, source: str, reason: str) -> None:
        """Say why ``source`` has no values in the open step."""
        if self.active is not None and self.active.buffer is not None:
            self.active.buffer.absent[source, ""] = reason

    # --- opening -------------------------------------------------------------------------------------------------------------

    def seal(self, step: int) -> None:
        """``step`` is about to open: nothing more can be added to the last one."""
        self.queue.now = step
        self.captures.had_root_inputs = self.captures.modules.on_root_inputs
        is_idle = self.active is not None and self.active.mode is Mode.IDLE
        self.plugins.call("before_step", step, is_idle=is_idle)
        self.finish()
        self.plugins.call("on_sealed", step, is_idle=is_idle)

    def finish(self) -> None:
        """Publish the last step's record if it is ready or a consumer is waiting for it."""
        if self.queue.oldest is not None:  # else there is no need to know whether anybody waits for it
            self.queue.seal()
            ended = self.state.clock.ended
            self.queue.land(ended, open_to_late_values=True, waiting=self.queue.ledger.is_awaited(ended or 0))
        self.queue.ledger.finish()

    def rewind(self, step: int, last: int | None) -> None:
        """The run goes back from ``last`` to ``step``; or begins, in a run directory that may have later steps."""
        if last is not None:
            message = f"step {step} comes after step {last}; a new segment begins in the run directory"
            self.fence.complaints.add("back", message)
            self.queue.land(None, open_to_late_values=False)
            self.plugins.call("on_rewind", step)
            self.queue.ledger.goes_back(step)
        self.queue.ledger.outbox.goes_back(step)

    def open(self, step: int, *, is_tentative: bool, hides_forward: bool, was_undecided: bool) -> None:
        """Begin ``step``."""
        active = self.active = ActiveStep(step, self.state.clock.stride)
        tags = self.values.late.tags.begin()
        modules = self.captures.modules
        if self.would_measure(step):
            active.mode = Mode.MONITORED
        elif self.planner.module is not None and not self.fence.inert and self.plugins.requires_gradients:
            active.mode = Mode.RECORDED
        self.plugins.call("on_step_open", active, is_idle=active.mode is Mode.IDLE)
        if active.mode is Mode.IDLE:
            modules.let_through(False)
            if not self.hooks.is_bare:
                self.hooks.uninstall()
        else:
            self.values.late.tags.current = tags
            self._prepare(active)
            if not (self.captures.had_root_inputs or hides_forward or self.state.is_manual) and modules.on_root_inputs:
                modules.root_inputs_missed()
            if was_undecided and hides_forward and active.buffer is not None:
                active.buffer.absent.update(((source, ""), _IN_EVAL) for source in OF_MODULES)
        modules.step_began(in_eval=is_tentative)
        self.values.step_opened(active.buffer, active.is_monitored, hides_forward)
        if not is_tentative:
            self.values.take_early()

    def would_measure(self, step: int) -> bool:
        """Whether ``step`` is monitored if it comes next."""
        return not self.fence.inert and self.planner.module is not None and self.cadence.wants(step)

    def _prepare(self, active: ActiveStep) -> None:
        planner = self.planner
        planner.refresh()
        self.hooks.check_groups()
        assert planner.inventory is not None
        if planner.inventory.spread and self.exchange.exchange.ranks.count > 1:
            self.queue.ledger.summary.all_columns = True  # on each rank, whoever has a run directory
        if planner.inventory.on_mesh:  # before anything is added up over ranks
            self.exchange.ranks_take_part()
        is_monitored = active.mode is Mode.MONITORED
        active.plans = planner.plans(active.number, self.queue.ledger.summary, gradients_only=not is_monitored)
        active.buffer = StepBuffer(active.number, self.fence.complaints)
        if is_monitored:
            active.buffer.rng = rng_states() if self.queue.ledger.outbox.stores else {}
            active.due = tuple(metric for metric in planner.module_metrics() if metric.due(active.number))
        self.captures.begin(active, planner, by_hand=self.state.is_manual)
        self.hooks.install(on_modules=is_monitored)

    def confirm(self) -> None:
        """The open step trains, although a call in evaluation mode opened it."""
        self.captures.modules.step_confirmed()
        self.values.take_early()

    def count_eval(self) -> None:
        """From now on calls in evaluation mode count as training in the open step."""
        self.captures.modules.count_eval()

    def release(self) -> None:
        """What was logged since an undecided call belongs to the last step."""
        self.values.release()

    # --- the end of an attempt -----------------------------------------------------------------------------------------------

    def decide(self, optimizer: Hashable, done: Set[Hashable], overflowed: Set[Hashable], is_overflowed: bool) -> bool:
        """Whether the optimizer, which is about to step, must change nothing.

        Raises:
            SpikeError: a plugin says that the run must stop.
        """
        active, loop = self.active, self.hooks.loop
        if active is None or active.buffer is None or loop is None or self.captures.modules.paused:
            return False
        if not self.plugins.has("before_optimizer_step"):
            return False
        context = loop.context_of(optimizer, done, overflowed, is_overflowed)
        try:
            self.plugins.call("before_optimizer_step", active, context)
        finally:
            if active.is_skipped:
                self.plugins.call("on_skip", active)
        if context.is_stale and not active.is_skipped:
            loop.accept_leftovers()
        return active.is_skipped

    def attempt_ended(self, is_overflowed: bool) -> None:
        """All optimizers of the open step have been called."""
        if self.active is not None and self.plugins.has("after_attempt"):
            self.plugins.call("after_attempt", self.active, not (is_overflowed or self.active.is_skipped))

    # --- closing -------------------------------------------------------------------------------------------------------------

    def drop(self, *, was_tentative: bool) -> None:
        """Forget the open step: its number is that of the next attempt."""
        if self.active is not None:
            self.active.buffer = self.values.buffer = None
        self.plugins.call("on_drop")
        if not was_tentative:
            self.values.late.tags.current = {}
        self.captures.end()

    def close(self, *, is_overflowed: bool) -> None:
        """End the open step. On a CPU its record is made at once, elsewhere when its values have come."""
        active = self.active
        if active is None:
            return
        active.is_overflowed, self.queue.ledger.last = is_overflowed, None
        try:
            try:
                self.plugins.call("on_step_closing", active, is_idle=active.mode is Mode.IDLE)
            finally:  # where warnings are errors
                if active.is_monitored:
                    self._close_monitored(active)
                else:
                    self._close_unmonitored(active)
        finally:  # ranks change together, whatever failed on one of them
            self.plugins.call("on_step_closed", active, is_idle=active.mode is Mode.IDLE)
        self._prepare_next()

    def _prepare_next(self) -> None:
        if self.state.is_manual:
            return
        step = self.state.clock.next_step
        if self.hooks.loop is not None and self.hooks.is_partial and self.would_measure(step):
            self.hooks.install()  # the first thing seen of the next step may be its backward pass
        if self.captures.modules.has_graphs:  # or its forward, in a compiled graph
            self.captures.modules.let_through(self.would_measure(step))

    def _take(self, active: ActiveStep) -> tuple[StepBuffer, ModelIndex, dict[str, Any]]:
        """Nothing more is measured in this step: its values, the model as it was, and what the loop said of it."""
        buffer, active.buffer, self.values.buffer = active.buffer, None, None
        inventory = self.planner.inventory
        assert buffer is not None
        assert inventory is not None
        try:
            self.captures.end()
        finally:  # collective: the other ranks wait, whatever failed here
            self.exchange.run(buffer, active.plans, may_extend=active.mode is Mode.MONITORED)
            self.queue.lockstep = self.exchange.exchange.takes_place
        return buffer, inventory, self.values.late.tags.take()

    def _close_unmonitored(self, active: ActiveStep) -> None:
        if active.buffer is not None:
            buffer, inventory, tags = self._take(active)
            recorded = RecordedStep(active, buffer, inventory, tags, self.queue.oldest)
        else:
            recorded = RecordedStep(active)
            self.values.late.tags.current = {}
        self.plugins.call("on_unmonitored_step", recorded, is_idle=active.mode is Mode.IDLE)
        if active.is_overflowed:
            self.queue.count_refusal()
        if self.queue.ledger.pass_by(active.is_overflowed):
            self.plugins.call("on_alert", active.number)

    def _close_monitored(self, active: ActiveStep) -> None:
        buffer, inventory, tags = self._take(active)
        evaluate = self.captures.modules.values.evaluator()
        readback = buffer.depart()
        self.plugins.call("annotate", active)
        self.queue.start(
            PendingStep(
                readback,
                active,
                inventory,
                evaluate,
                self.hooks.groups(),
                tags,
                self.fence.cost(),
                self.exchange.exchange.ranks.count,
                attached=self.hooks.loop is not None,
            )
        )

    def replan(self, drop_hooks: bool) -> None:
        """What is measured changed: register the hooks for it now, or leave that to the next step where there is time."""
        if drop_hooks:
            self.hooks.uninstall()
            if self.captures.modules.hangs:  # where they may not all go
                self.hooks.on_modules()
        elif self.hooks.loop is not None:
            if self.has_values and self.active is not None and self.active.mode is Mode.MONITORED:
                self.hooks.on_modules()  # what is due in the open step stays, but the next one needs its hooks in time
            elif not self.state.is_open and self.would_measure(self.state.clock.next_step):
                with outside_dispatch_modes():
                    self.hooks.install()
