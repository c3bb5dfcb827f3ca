"""The end of a step: its values are exchanged between ranks and sent to the host, and its record follows."""

from __future__ import annotations

from typing import Any

from ...step.active_step import IDLE, ActiveStep, Mode, RecordedStep
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ...step.pending_step import PendingStep
from ..pipeline.pending_queue import PendingQueue
from .step_planning import StepPlanning
from .value_log import ValueLog


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

    def close(self, active: ActiveStep, is_watched: bool) -> None:
        """Nothing more is measured in this step. ``is_watched``: plugins are called, though nothing was measured."""
        if active.is_monitored:
            self._close_monitored(active)
        else:
            self._close_unmonitored(active, is_watched)

    def _take(self, active: ActiveStep) -> tuple[StepBuffer, ModelIndex, dict[str, Any]]:
        """End the measurements of this step; return its values, the model index and the facts that the loop knows of it."""
        buffer, active.buffer = active.buffer, None
        self._values.step_closed()
        inventory = self._planning.planner.inventory
        assert buffer is not None
        assert inventory is not None
        try:
            self._planning.captures.end()
        finally:  # collective: the other ranks wait, whatever failed here
            self._planning.exchange.run(buffer, active.plans, may_extend=active.mode is Mode.MONITORED)
        return buffer, inventory, self._values.late.tags.take()

    def _close_unmonitored(self, active: ActiveStep, is_watched: bool) -> None:
        if active.buffer is not None:
            buffer, inventory, tags = self._take(active)
            recorded = RecordedStep(active, buffer, inventory, tags, self._queue.oldest)
            self._plugins.call("on_unmonitored_step", recorded)
        else:
            self._values.late.tags.clear()
            if is_watched:
                self._plugins.call("on_unmonitored_step", RecordedStep(active), is_idle=active.mode is IDLE)
        if active.is_overflowed:
            self._queue.count_refusal(active.is_interrupted)
        if self._queue.pipeline.detection.count_unmonitored(active.is_overflowed and not active.is_interrupted):
            self._plugins.call("on_alert", active.number)

    def _close_monitored(self, active: ActiveStep) -> None:
        buffer, inventory, tags = self._take(active)
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
                tags,
                self._planning.fence.cost(),
                self._planning.exchange.exchange.ranks.count,
                attached=self._planning.hooks.loop is not None,
            )
        )
