"""The end of a step: its values are exchanged between ranks and sent to the host, and its record follows."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from ...core.fence import Fence
from ...step.active_step import IDLE, ActiveStep, Mode, RecordedStep
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ...step.record_builder import PendingStep
from ..pipeline.record_pipeline import PendingQueue
from .step_planning import StepPlanning
from .value_log import ValueLog

#: The warning comes if the share is larger.
LARGE = 1 / 3
#: Seconds of the monitor's own time after which the share is computed: a loop that ends sooner lost less than that.
PATIENCE = 5.0
#: Monitored steps that are left out: they load code, plan, and are checked closely.
WARM_UP = 50
_SPARSER = 10


class CostNotice:
    """Warns once, and asks no more after that.

    Args:
        fence: has the monitor's own time.
        every: each step that this divides is monitored; None where the script decides otherwise.
    """

    def __init__(self, fence: Fence, every: int | None) -> None:
        self._fence, self._every = fence, every
        self._monitored = 0
        self._began = self._spent = 0.0
        self.is_due = True

    def step_closed(self) -> None:
        """A monitored step has ended."""
        self._monitored += 1
        if self._monitored <= WARM_UP:
            self._began, self._spent = perf_counter(), self._fence.spent()
        elif (own := self._fence.spent() - self._spent) > PATIENCE:
            self._judge(own, perf_counter() - self._began, self._monitored - WARM_UP)

    def _judge(self, own: float, elapsed: float, steps: int) -> None:
        self.is_due = False
        if own <= LARGE * elapsed:
            return
        fewer = own / _SPARSER
        then = fewer / (elapsed - own + fewer)
        what = "monitoring one in ten of these steps" if self._every is None else f"every={_SPARSER * self._every}"
        self._fence.complaints.add(
            "cost",
            f"the monitor takes {own / elapsed:.0%} of the time of this loop, {1000 * own / steps:.2g} ms for each monitored step; "
            f"{what} brings that to about {then:.0%}",
        )


class StepClosing:
    """Closes steps.

    Args:
        planning: has what was planned, and what measures.
        queue: the steps whose values are on their way, and the records.
        values: what the loop logs.
    """

    def __init__(self, planning: StepPlanning, queue: PendingQueue, values: ValueLog) -> None:
        self._planning, self._queue, self._values = planning, queue, values
        self._plugins = planning.cadence.plugins
        self._cost = CostNotice(planning.fence, planning.cadence.every)

    def close(self, active: ActiveStep, is_watched: bool, tags: dict[str, Any] | None = None) -> None:
        """Nothing more is measured in this step.

        Args:
            active: the step.
            is_watched: plugins are called, though nothing was measured.
            tags: facts of a step that was set aside, while measurements go on in the open one.
        """
        if active.is_monitored:
            self._close_monitored(active, tags)
        else:
            self._close_unmonitored(active, is_watched, tags)

    def _take(self, active: ActiveStep, tags: dict[str, Any] | None) -> tuple[StepBuffer, ModelIndex, dict[str, Any]]:
        """End the measurements of this step; return its values, the model index and the facts that the loop knows of it."""
        buffer, active.buffer = active.buffer, None
        self._values.step_closed()
        inventory = self._planning.planner.inventory
        assert buffer is not None
        assert inventory is not None
        try:
            if tags is None:
                self._planning.captures.end()
        finally:  # collective: the other ranks wait, whatever failed here
            self._planning.exchange.run(buffer, active.plans, may_extend=active.mode is Mode.MONITORED)
        return buffer, inventory, self._values.late.tags.take() if tags is None else tags

    def _close_unmonitored(self, active: ActiveStep, is_watched: bool, tags: dict[str, Any] | None) -> None:
        if active.buffer is not None:
            buffer, inventory, found = self._take(active, tags)
            recorded = RecordedStep(active, buffer, inventory, found, self._queue.oldest)
            self._plugins.call("on_unmonitored_step", recorded)
        else:
            if tags is None:
                self._values.late.tags.clear()
            if is_watched:
                self._plugins.call("on_unmonitored_step", RecordedStep(active), is_idle=active.mode is IDLE)
        if active.is_overflowed:
            self._queue.count_refusal(active.is_interrupted)
        if self._queue.pipeline.detection.count_unmonitored(active.is_overflowed and not active.is_interrupted):
            self._plugins.call("on_alert", active.number)

    def _close_monitored(self, active: ActiveStep, tags: dict[str, Any] | None) -> None:
        if self._cost.is_due:
            self._cost.step_closed()
        buffer, inventory, found = self._take(active, tags)
        evaluate = self._planning.captures.modules.values.evaluator()
        readback = buffer.start_readback()
        self._plugins.call("annotate", active)
        self._queue.start(
            PendingStep(
                readback,
                active,
                inventory,
                evaluate,
                self._planning.hooks.groups() if self._queue.factory.layers.choice == "blocks" else [],
                found,
                self._planning.fence.cost(),
                self._planning.exchange.exchange.ranks.count,
                attached=self._planning.hooks.loop is not None,
            )
        )
