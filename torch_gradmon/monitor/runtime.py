"""One monitor at work: the step machine, what carries out its actions, and the life cycle of hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..core.fence import Fence, fenced
from ..core.torch_modes import outside_dispatch_modes
from ..step.active_step import Mode
from ..step.planner import Planner
from ..step.plugin import Plugin
from .followed_loop import FollowedLoop
from .loop_connection import LoopConnection
from .machine.step_machine import StepCycle, StepState
from .pipeline.record_pipeline import RecordFactory, RecordPipeline
from .steps.captures import Captures
from .steps.step_lifecycle import StepLifecycle


class Runtime:
    """The state of one monitor. :class:`torch_gradmon.ModuleMonitor` is its facade.

    Args:
        lifecycle: opens and closes steps.

    Attributes:
        cycle: the step machine's part that knows the numbers of steps.
        connection: with the training loop.
        owner: the facade, which lives as long as the loop that it watches.
    """

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self.lifecycle = lifecycle
        self.cycle = StepCycle(lifecycle, lifecycle.state)
        self.connection = LoopConnection(lifecycle, self.cycle)
        self.owner: object = None
        self.mark: object = None  # by which watch() finds the monitor of a model

    # --- parts ---------------------------------------------------------------------------------------------------------------

    @property
    def fence(self) -> Fence:
        """The fence."""
        return self.lifecycle.fence

    @property
    def planner(self) -> Planner:
        """Knows the model and the requested metrics."""
        return self.lifecycle.planning.planner

    @property
    def captures(self) -> Captures:
        """The sources of values."""
        return self.lifecycle.captures

    @property
    def pipeline(self) -> RecordPipeline:
        """The records and their consumers."""
        return self.lifecycle.queue.pipeline

    @property
    def factory(self) -> RecordFactory:
        """Makes the records."""
        return self.lifecycle.queue.factory

    @property
    def state(self) -> StepState:
        """What the step machine knows."""
        return self.lifecycle.state

    @property
    def loop(self) -> FollowedLoop | None:
        """The followed loop; None where steps begin and end by hand."""
        return self.connection.loop

    def plugin(self, name: str) -> Any:
        """The plugin of this name; None where there is none."""
        return next((plugin for plugin in self.lifecycle.plugins if plugin.name == name), None)

    @property
    def plugins(self) -> Sequence[Plugin]:
        """All plugins, in the order in which they are called."""
        return tuple(self.lifecycle.plugins)

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @fenced
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand. Returns whether this one is monitored."""
        self.lifecycle.values.follow(True)
        self.lifecycle.hooks.wake()
        if self.loop is None and self.lifecycle.plugins.has("before_optimizer_step"):
            message = (
                "on_spike cannot act on a step, since the optimizers are not known: call attach() in addition to begin_step()"
            )
            self.fence.complaints.add("acting", message)
        self.cycle.begin_by_hand(step)
        active = self.lifecycle.active
        return active is not None and active.mode is Mode.MONITORED

    @fenced
    def end_step(self) -> None:
        """End the step and send it out."""
        self.lifecycle.hooks.wake()
        self.cycle.end()
        self._publish()

    @fenced
    def _end_last(self) -> None:
        self.cycle.finish()
        self._publish()

    def _publish(self) -> None:
        self.lifecycle.flush_pending()
        self.pipeline.finish()

    @fenced
    def log_rows(self, ids: Any, losses: Tensor) -> None:
        """The losses of the rows of the open step, if it is measured."""
        active = self.lifecycle.active
        if self.state.is_open and active is not None and active.is_monitored and active.buffer is not None:
            active.buffer.log_rows(ids, losses)
        elif not self.state.is_open and active is not None:
            self.fence.complaints.add(
                "rows", "log_rows was called between two steps, and the rows are lost: call it before optimizer.step()"
            )

    @fenced
    def backfill(self) -> None:
        """Take the records of unmonitored steps that plugins still have. Waits for the device."""
        for records in self.lifecycle.plugins.call("rest"):
            self.pipeline.backfill(records)

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def set_reference(self, module: nn.Module | None, follows: bool) -> None:
        """Compare with ``module`` from now on; ``follows`` keeps it in the mode of the watched model."""
        reference = self.captures.modules.reference
        if module is None:
            reference.remove()
        else:
            reference.set(module, self.planner.rename, follows)
        self.captures.parameters.compare_with({} if module is None else reference.parameters)
        self.planner.changed()
        self.replan()

    def replan(self) -> None:
        """What is measured changed: register the hooks for it."""
        self.lifecycle.planning.replan(self.lifecycle.active, drop_hooks=False)

    def leave(self) -> None:
        """End the step in flight, or drop it if it is unfinished, and take what is recorded."""
        try:
            self.lifecycle.hooks.wake()
            with self.lifecycle.planning.exchange.without_others():
                self._end_last()
                self.backfill()
        finally:
            self.lifecycle.plugins.call("on_leave", self.state.clock.ended)

    def detach(self) -> None:
        """End the step, send what waits, and take every hook away."""
        with outside_dispatch_modes():
            try:
                self.leave()
            finally:
                self.connection.disconnect()
                self.lifecycle.planning.exchange.exchange.end()
                self.close()

    def close(self) -> None:
        """Let go of the model and close everything that is open; what comes later opens it again."""
        self.lifecycle.plugins.call("close")
        self.pipeline.close(self.captures.modules.ending())


def at_exit(runtime: Callable[[], Runtime | None], *_keep_alive: object) -> None:
    """Publish the last step when the interpreter ends. Of a runtime that is collected the publisher itself sends what is known of it."""
    if (alive := runtime()) is None:
        return
    try:
        alive.leave()
    finally:  # also where a spike in the last step is raised
        alive.close()
