"""The steps whose values are on their way to the host, in order."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from ...core.fence import Fence
from ...step.exchange import RankExchange
from ...step.pending_step import PendingStep
from ..plugin_set import PluginSet
from .record_factory import RecordFactory
from .record_pipeline import RecordPipeline


class PendingQueue:
    """The steps whose records are not made yet, at most two of them: the one that ended last and the one before.

    Args:
        factory: makes records.
        pipeline: takes them.
        exchange: with other ranks, the steps' numbers decide when values are fetched, not the device.
        fence: receives the time that others spent.
        plugins: may have unwritten records when the run ends.

    Attributes:
        steps: the steps, ascending.
    """

    def __init__(
        self, factory: RecordFactory, pipeline: RecordPipeline, exchange: RankExchange, fence: Fence, plugins: PluginSet
    ) -> None:
        self.factory, self.pipeline = factory, pipeline
        self._exchange, self._fence, self._plugins = exchange, fence, plugins
        self.steps: deque[PendingStep] = deque()

    def __del__(self) -> None:
        # collected without detach(): what is still on its way reaches the run directory
        with contextlib.suppress(Exception):
            rest = [record for records in self._plugins.call("rest") for record in records]
            if self.steps or rest:
                self.enter_all(None, open_to_late_values=False)
                self.pipeline.backfill(rest)
                self.pipeline.close()

    def newest(self, step: int | None) -> PendingStep | None:
        """``step``, if it is the newest one."""
        return self.steps[-1] if self.steps and self.steps[-1].step == step else None

    @property
    def oldest(self) -> int | None:
        """The number of the oldest step."""
        return self.steps[0].step if self.steps else None

    def start(self, pending: PendingStep) -> None:
        """Take ``pending``; where its values are on the host already, its record is made at once."""
        self.steps.append(pending)
        if pending.readback.arrival.is_local:
            self.enter_all(pending.step, open_to_late_values=True)

    def count_refusal(self, is_interrupted: bool) -> None:
        """A step that was not monitored was not applied."""
        if self.steps:
            self.steps[-1].count_refusal_after(is_interrupted)
        else:
            self.factory.summary.count_rejected(1, int(is_interrupted))

    def seal(self, ended: int | None, begins: int) -> None:
        """Step ``begins`` is about to open: nothing more comes for step ``ended``, whose record is finished if it is ready or awaited."""
        if self.steps:  # else there is no need to know whether anything awaits it
            for pending in self.steps:
                pending.seal()
            if self.pipeline.is_awaited(ended or 0):
                self.enter_all(ended, open_to_late_values=True)
            else:
                self._enter_ready(ended, begins)
        self.pipeline.finish()

    def enter_all(self, ended: int | None, open_to_late_values: bool) -> None:
        """Make the records of all steps and enter them. Waits for their values.

        Args:
            ended: number of the step that ended last; the last record is of that one, or there is none.
            open_to_late_values: that step is the latest, so that values may still be added to it.
        """
        while self.steps:
            self.steps[0].readback.arrival.wait()  # interrupted here, the step is still there
            self._enter_oldest(ended, open_to_late_values)

    def _enter_ready(self, ended: int | None, begins: int) -> None:
        """Enter the records whose values have come. Waits only for those of the step before the last one."""
        while self.steps and (len(self.steps) > 1 or self._is_ready(self.steps[0], begins)):
            start = time.perf_counter()
            self.steps[0].readback.arrival.wait()
            # the device is two steps behind, and it is the training that waits here rather than elsewhere
            self._fence.exclude_time(time.perf_counter() - start)
            self._enter_oldest(ended, open_to_late_values=True)

    @property
    def ranks_synchronised(self) -> bool:
        """Whether ranks take their records at the same steps."""
        return self._exchange.takes_place

    def _is_ready(self, pending: PendingStep, begins: int) -> bool:
        return begins >= pending.step + 2 if self.ranks_synchronised else pending.readback.arrival.is_ready()

    def _enter_oldest(self, ended: int | None, open_to_late_values: bool) -> None:
        pending = self.steps.popleft()
        self._enter(pending)
        if pending.step != ended or not open_to_late_values:
            self.pipeline.finish()
        if pending.step != ended:
            self.pipeline.drop_last()

    def _enter(self, pending: PendingStep) -> None:
        """Make the record and enter it."""
        record, signals = self.factory.make(pending)
        try:
            self.pipeline.enter(record, signals, pending.readback.buffer)
        finally:  # where a spike raises
            if pending.late is not None:
                readback = pending.late_readback or pending.late.start_readback()
                self.pipeline.amend(pending.late, readback.land()[1])
            self.factory.summary.count_rejected(pending.refusals_after, pending.interruptions_after)
