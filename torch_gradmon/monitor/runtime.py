"""One monitor at work: the step machine, what carries out its actions, and the life cycle of hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.grad_scale import reciprocal, scale_of
from ..core.fence import Fence, fenced
from ..core.keys import Key
from ..core.records import StepRecord
from ..core.torch_modes import outside_dispatch_modes
from ..plugins.clipping.adaptive import Told
from ..plugins.spike_policy.policy import Counts
from ..step.active_step import Mode
from ..step.planner import Planner
from ..step.plugin import Plugin
from ..step.reduction import Aggregation
from .captures import Captures
from .followed_loop import FollowedLoop
from .pipeline.ledger import Ledger
from .step_cycle import StepCycle
from .step_lifecycle import StepLifecycle
from .step_state import StepState
from .value_log import OverflowLog

_GONE = "the attached optimizers are gone; call monitor.detach(), then monitor.attach() with the new ones"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)


class Runtime:
    """The state of one monitor. :class:`torch_gradmon.ModuleMonitor` is its facade.

    Args:
        lifecycle: opens and closes steps.

    Attributes:
        cycle: the step machine's part that knows the numbers of steps.
        owner: the facade, which lives as long as the loop that it watches.
    """

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self.lifecycle = lifecycle
        self.cycle = StepCycle(lifecycle, lifecycle.state)
        self.overflows = OverflowLog(lifecycle.values)
        self.owner: object = None
        self.mark: object = None  # by which watch() finds the monitor of a model
        self._scaler: torch.amp.GradScaler | None = None
        self._loop: FollowedLoop | None = None
        self._scale_by_hand()

    # --- parts ---------------------------------------------------------------------------------------------------------------

    @property
    def guard(self) -> Fence:
        """The fence."""
        return self.lifecycle.fence

    @property
    def planner(self) -> Planner:
        """Knows the model, and what is to be measured."""
        return self.lifecycle.planner

    @property
    def captures(self) -> Captures:
        """The sources of values."""
        return self.lifecycle.captures

    @property
    def ledger(self) -> Ledger:
        """The records."""
        return self.lifecycle.queue.ledger

    @property
    def state(self) -> StepState:
        """What the step machine knows."""
        return self.lifecycle.state

    @property
    def loop(self) -> FollowedLoop | None:
        """The followed loop; None where steps begin and end by hand."""
        return self._loop

    def plugin(self, name: str) -> Any:
        """The plugin of this name; None where there is none."""
        return next((plugin for plugin in self.lifecycle.plugins if plugin.name == name), None)

    @property
    def plugins(self) -> Sequence[Plugin]:
        """All plugins, in the order in which they are called."""
        return tuple(self.lifecycle.plugins)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if one is known."""
        return self._scaler if self.loop is None else self.loop.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler

    # --- questions -----------------------------------------------------------------------------------------------------------

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        clock, cadence, active = self.state.clock, self.lifecycle.cadence, self.lifecycle.active
        if clock.step is not None and step <= clock.step:
            is_open = self.state.is_open and step == clock.step and active is not None and active.is_monitored
            is_known = self.lifecycle.is_pending(step) or self.ledger.was_monitored(step)
            return is_open or is_known or cadence.foretells(step, None)
        ahead = step - clock.next_step if clock.step is None else (step - clock.step - 1) // clock.stride
        return cadence.foretells(step, ahead)

    @property
    def is_listening(self) -> bool:
        """Whether a value from inside of a forward counts."""
        return self.lifecycle.values.is_listening(self._may_be_forward)

    def _may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one: no hook saw the last one's, or this is the first,
        or only its backward pass shows it.
        """
        state = self.state
        may_be = state.patterns.hides_forward or state.patterns.is_undecided or state.clock.ended is None
        leads = self.loop is not None and not state.is_manual and torch.is_grad_enabled()
        return may_be and leads and self.lifecycle.would_measure(state.clock.next_step)

    @property
    def stale_reason(self) -> str:
        """Why values of the last step would be stale; empty where they are not."""
        if self.loop is None or self.state.is_manual:
            return ""
        if self.loop.is_orphaned:
            return _GONE
        in_step = self.state.is_open and not self.state.progress.has_stepped
        with outside_dispatch_modes():
            is_stale = any(self.lifecycle.plugins.call("is_stale", in_step))
        return _UNATTACHED if is_stale else ""

    def counts(self) -> Counts:
        """Of the steps so far, as far as their values have come."""
        summary, policy, attempts = self.ledger.summary, self.plugin("spike_policy"), self.state.clock.attempts
        skipped, rollbacks = (0, 0) if policy is None else (policy.skipped, policy.rollbacks)
        applied, overflowed = attempts - summary.not_applied, summary.not_applied - skipped
        return Counts(attempts, applied, skipped, overflowed, summary.nonfinite, rollbacks)

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @fenced
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand. Returns whether this one is monitored."""
        self.lifecycle.values.is_detached = False
        if self.loop is None and self.lifecycle.plugins.has("before_optimizer_step"):
            message = "nothing can be done about spikes, for the optimizers are not known: call attach() besides begin_step()"
            self.guard.complaints.add("acting", message)
        self.cycle.begin_by_hand(step)
        active = self.lifecycle.active
        return active is not None and active.mode is Mode.MONITORED

    @fenced
    def end_step(self) -> None:
        """End the step and send it out."""
        self.cycle.end()
        self._publish()

    @fenced
    def _end_last(self) -> None:
        self.cycle.finish()
        self._publish()

    def _publish(self) -> None:
        self.flush_pending()
        self.ledger.finish()

    @fenced
    def capture_activation(self, name: str, activations: Any) -> None:
        """Measure a value that is no module's output."""
        self.captures.modules.capture(name, activations)

    @fenced
    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure one call of attention, unless it was seen by itself."""
        with outside_dispatch_modes():
            self.captures.modules.attention.tell(name, named, {"query": named["query"], "key": named["key"], **arguments})

    def log(self, key: Key, value: Any, aggregation: Aggregation, reducer: str = "", is_measured: bool = False) -> None:
        """See :meth:`ValueLog.log`."""
        self.lifecycle.values.log(key, value, aggregation, reducer, is_measured)

    def put(self, values: Mapping[Key, Told]) -> None:
        """See :meth:`ValueLog.put`."""
        self.lifecycle.values.put(values)

    def tag(self, tags: Mapping[str, Any]) -> None:
        """See :meth:`ValueLog.tag`."""
        self.lifecycle.values.tag(tags)

    def pause(self, is_paused: bool) -> bool:
        """Measure nothing, or go on; whether nothing was measured before."""
        before = self.captures.modules.paused
        self.captures.modules.paused = self.state.is_paused = is_paused
        self.lifecycle.plugins.call("on_pause", is_paused)
        return before

    # --- values of the last step ---------------------------------------------------------------------------------------------

    def flush_pending(self) -> None:
        """Make the record of the last step, if it was not made yet. Waits for its values."""
        self.lifecycle.queue.land(self.state.clock.ended, open_to_late_values=not self.state.is_open)

    def settle_now(self) -> StepRecord | None:
        """The record of the last step, None where it was not monitored. Waits for the device."""
        self._flush_fenced()  # does nothing inside of what is fenced already, such as on_spike
        return None if self.stale_reason else self.ledger.last

    @fenced
    def recall(self) -> None:
        """Take what is recorded of the steps that followed a spike so far. Waits for the device."""
        self._backfill_rest()

    def _backfill_rest(self) -> None:
        for records in self.lifecycle.plugins.call("rest"):
            self.ledger.fill(records)

    @fenced
    def judge_now(self) -> None:
        """Make the record of the last step, and judge already now what was logged since."""
        self.cycle.release()
        self.flush_pending()
        self.ledger.judge_late()

    @fenced
    def _flush_fenced(self) -> None:
        self.cycle.release()
        self.flush_pending()

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def follow(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]] = (),
    ) -> None:
        """Follow the loop by hooks from now on."""
        lifecycle = self.lifecycle
        self._scaler, self.state.is_manual, lifecycle.values.is_detached = scaler, False, False
        with outside_dispatch_modes():
            loop = FollowedLoop(self, self.cycle, lifecycle, self.overflows, module, optimizers, scaler, wrappers)
            self._loop = lifecycle.hooks.loop = loop
            self.state.is_driven = True
            lifecycle.plugins.restart()
            lifecycle.plugins.call("on_attach", module, optimizers)
            lifecycle.hooks.mark_stale()
            modules = self.captures.modules
            modules.inverse_scale, modules.opening = loop.measurement.inverse_scale, loop.hooks.model.root_called
            modules.part_called = loop.part_called
            # also where the first step is not monitored: a model that will be compiled takes only the hooks that it has then
            lifecycle.hooks.install()
            self.guard.cost()

    def _scale_by_hand(self) -> None:
        """Without a followed loop, what is known of gradients inside of the model is the scaler that was named."""
        runtime = weakref.ref(self)

        def inverse_scale() -> Tensor | None:
            scaler = None if (alive := runtime()) is None else alive.scaler
            return None if (scale := scale_of(scaler)) is None else reciprocal(scale)

        modules = self.captures.modules
        modules.inverse_scale = inverse_scale
        modules.opening = modules.part_called = lambda _: None

    def set_reference(self, module: nn.Module | None, follows: bool) -> None:
        """Compare with ``module`` from now on; ``follows`` keeps it in the mode of the watched model."""
        reference = self.captures.modules.reference
        if module is None:
            reference.remove()
        else:
            reference.set(module, self.planner.rename, follows)
        self.captures.parameters.reference = {} if module is None else reference.parameters
        self.planner.changed()
        self.replan()

    def replan(self) -> None:
        """What is measured changed: register the hooks for it."""
        self.lifecycle.replan(drop_hooks=False)

    def leave(self) -> None:
        """End the step in flight, or drop it if it is unfinished, and take what is recorded."""
        exchange = self.lifecycle.exchange
        exchange.leaving = True
        try:
            self._end_last()
            self.recall()
        finally:
            exchange.leaving = False
            self.lifecycle.plugins.call("on_leave", self.state.clock.ended)

    def detach(self) -> None:
        """End the step, send what waits, and take every hook away."""
        with outside_dispatch_modes():
            try:
                self.leave()
            finally:
                self._detach()

    def _detach(self) -> None:
        self.lifecycle.values.is_detached = True
        self.lifecycle.hooks.uninstall()
        self.captures.modules.remove()
        self.captures.modules.reference.forget()
        if self.loop is not None:
            self._scaler = self.loop.scaler
            self.loop.hooks.remove()
            self.lifecycle.plugins.call("on_detach")
            self._loop, self.lifecycle.hooks.loop, self.state.is_driven = None, None, False
            self._scale_by_hand()
        self.close()

    def close(self) -> None:
        """Let go of the model and close everything that is open; what comes later opens it again."""
        self.lifecycle.plugins.call("close")
        self.ledger.outbox.close()


def at_exit(runtime: Callable[[], Runtime | None], _lasting: object = None) -> None:
    """Publish the last step when the interpreter ends. Of a runtime that is collected the publisher itself sends what is known of it."""
    if (alive := runtime()) is None:
        return
    try:
        alive.leave()
    finally:  # also where a spike in the last step is raised
        alive.close()
