"""What is measured in a step, and which hooks that takes."""

from __future__ import annotations

from torch import Tensor

from ...core.fence import Fence
from ...core.torch_modes import outside_dispatch_modes, rng_states
from ...step.active_step import IDLE, ActiveStep, Mode
from ...step.buffer import StepBuffer
from ...step.exchange import ExchangePolicy
from ...step.planner import Planner
from ..machine.step_machine import StepState
from ..pipeline.record_pipeline import RecordFactory
from .cadence import Cadence
from .captures import Captures
from .hook_schedule import HookSchedule

MODEL_GONE = (
    "the watched model is gone: keep a reference to it, or, if only its parts are called, watch an nn.ModuleDict of them, which the "
    "optimizers keep"
)


class StepPlanning:
    """Prepares steps that take values, and the hooks for them.

    Args:
        state: of the step machine.
        planner: knows the model and the requested metrics.
        captures: measure tensors.
        exchange: merges values over ranks.
        factory: makes records, and knows what they need.
        hooks: which hooks are registered.
        cadence: which steps are monitored.
        fence: where failures are reported.
    """

    def __init__(
        self,
        state: StepState,
        planner: Planner,
        captures: Captures,
        exchange: ExchangePolicy,
        factory: RecordFactory,
        hooks: HookSchedule,
        cadence: Cadence,
        fence: Fence,
    ) -> None:
        self.state, self.planner, self.captures, self.exchange = state, planner, captures, exchange
        self.factory, self.hooks, self.cadence, self.fence = factory, hooks, cadence, fence

    def would_measure(self, step: int) -> bool:
        """Whether ``step`` is monitored if it comes next."""
        return not self.fence.inert and self.planner.module is not None and self.cadence.wants(step)

    def mode_of(self, step: int) -> Mode:
        """What is measured in ``step``, which is about to begin."""
        if self.fence.inert or self.planner.module is None:
            if self.planner.has_lost_model:
                self.fence.complaints.add("model", f"{MODEL_GONE}; nothing is measured any more")
            return IDLE
        if self.cadence.wants(step):
            return Mode.MONITORED
        return Mode.RECORDED if self.cadence.plugins.requires_gradients else IDLE

    def prepare(self, active: ActiveStep) -> None:
        """The step takes values: plan it, and begin it in all sources."""
        planner = self.planner
        planner.refresh()
        self.hooks.check_groups()
        assert planner.inventory is not None
        if planner.inventory.spread and self.exchange.exchange.ranks.count > 1:
            self.factory.summary.choice.store_all_columns()  # on each rank, with or without a run directory
        if planner.inventory.spread:  # before anything is added up over ranks
            self.exchange.ranks_take_part(active.number)
        is_monitored = active.mode is Mode.MONITORED
        active.plans = planner.plans(active.number, self.factory.summary, gradients_only=not is_monitored)
        active.buffer = StepBuffer(active.number, self.fence.complaints)
        if is_monitored:
            active.buffer.rng = self.random_states()
            active.due = tuple(metric for metric in planner.module_metrics() if metric.due(active.number))
        self.captures.begin(active, planner, by_hand=self.state.is_manual)
        self.hooks.install(on_modules=is_monitored)

    def random_states(self) -> dict[str, Tensor]:
        """The states of the random generators, where they are stored."""
        return rng_states() if self.factory.is_stored else {}

    def prepare_next(self, may_rest: bool) -> None:
        """A step has closed: register the hooks that the next one needs before anything is seen of it. ``may_rest``: no value is on its
        way, and no plugin watches.
        """
        if self.state.is_manual:
            return
        step = self.state.clock.next_step
        if self.hooks.loop is not None and self.hooks.is_partial and self.would_measure(step):
            self.hooks.install()  # the first thing seen of the next step may be its backward pass
        if self.captures.modules.hooks.graphs.has_graphs:  # or its forward, in a compiled graph
            self.captures.modules.set_recording(self.would_measure(step))
        elif (
            may_rest
            and self.state.is_plain
            and step - 1 == self.state.clock.step
            and (steps := self.cadence.idle_ahead(step)) > 0
        ):
            self.hooks.rest(steps)

    def replan(self, active: ActiveStep | None, drop_hooks: bool) -> None:
        """What is measured changed: register the hooks for it now, or leave that to the next step where there is time."""
        self.hooks.wake()
        if drop_hooks:
            self.hooks.uninstall()
            if self.captures.modules.hooks.has_hooks:  # where they may not all go
                self.hooks.on_modules()
        elif self.hooks.loop is not None:
            if active is not None and active.is_monitored:
                self.hooks.on_modules()  # what is due in the open step stays, but the next one needs its hooks in time
            elif not self.state.is_open and self.would_measure(self.state.clock.next_step):
                with outside_dispatch_modes():
                    self.hooks.install()
