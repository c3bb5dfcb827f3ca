"""The way of a monitored step's record through its consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...core.keys import Key
from ...core.records import StepRecord
from ...core.step_values import StepValues
from ...step.buffer import StepBuffer
from .publisher import Publisher
from .record_history import RecordHistory
from .run_directory import RunDirectory
from .spike_detection import SpikeDetection
from .spike_notification import SpikeNotification


class RecordPipeline:
    """Passes the record of each monitored step to detectors, history, run directory and sinks, in this order.

    A record enters once, when its step has ended and its values have come. Late values and facts amend it until the next step begins.
    Then it is finished: detectors evaluate the signals that came late, and the sinks receive it.

    Args:
        detection: evaluates records.
        history: keeps the records of the last steps.
        directory: stores records.
        publisher: sends records to sinks.
        notification: reports spikes.
        on_record: called with each record that has entered.

    Attributes:
        last: the record of the step that ended last; None if that is not monitored, or its values are on their way.
        absent: reasons for values that the last record lacks, by source and name.
        observers: called with each record, and whether it replaces the last one.
    """

    def __init__(
        self,
        detection: SpikeDetection,
        history: RecordHistory,
        directory: RunDirectory,
        publisher: Publisher,
        notification: SpikeNotification,
        on_record: Callable[[StepRecord], object],
    ) -> None:
        self.detection, self.history, self.directory = detection, history, directory
        self.publisher, self.notification = publisher, notification
        self.last: StepRecord | None = None
        self.absent: dict[tuple[str, str], str] = {}
        self.observers: list[Callable[[StepRecord, bool], object]] = []
        self._on_record = on_record
        self._signals: Mapping[str, float] = {}
        self._late: StepBuffer | None = None  # merges what is logged for the last step
        self._is_finished = True

    def enter(self, record: StepRecord, signals: Mapping[str, float], buffer: StepBuffer) -> None:
        """A step has ended with ``record``; ``signals`` are its whole-model values, ``buffer`` what it was made of."""
        self.absent = buffer.absent
        record, events = self.detection.enter(record, signals, self.absent)
        self._late, self._is_finished = buffer.scalars(), False
        self._pass_on(record, amends=False)
        self.backfill(self.detection.detector_set.explanations.take_fetched())
        self._signals = signals
        self._on_record(self.last or record)
        self.notification.notify(self.last, events, record.context.get("action", ""))

    def _pass_on(self, record: StepRecord, amends: bool) -> None:
        self.last = record
        self.history.keep(record)
        for observe in self.observers:
            observe(record, amends)
        self.directory.write(record, amends)
        self.publisher.put(record, amends)

    # --- amendments of the last record ---------------------------------------------------------------------------------------

    def add(self, late: StepBuffer) -> None:
        """Late values for the step that ended last."""
        if self.last is not None and self._late is not None:
            self._late.absorb(late)
            self.amend(self._late, self._late.flush()[1])

    def amend(self, late: StepBuffer, values: Mapping[Key, float]) -> None:
        """Late ``values`` of the last step; ``late`` is the buffer that they are from, and merges more of them."""
        if self.last is not None:
            self._late, self._is_finished = late, False
            self._pass_on(replace(self.last, values=StepValues.of(self.last.values).updated(values)), amends=True)

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Facts about the step that ended last."""
        if self.last is not None:
            context = {**self.last.context, "tags": {**self.last.context.get("tags", {}), **tags}}
            self._pass_on(replace(self.last, context=context), amends=True)

    # --- the end of the last record ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing more can come for the last record: evaluate the signals that came late, and send it to the sinks."""
        if self.last is not None and not self._is_finished:
            self._is_finished, record = True, self.last
            self._detect_again(record)
            self.notification.warn(self.detection.reports(self.last or record, self._signals))
            self.detection.finish(self.absent)
        self.publisher.publish()

    def detect_late(self) -> None:
        """Evaluate the signals that came late so far, before the last record is finished."""
        if self.last is not None and not self._is_finished:
            self._detect_again(self.last)

    def _detect_again(self, record: StepRecord) -> None:
        detected, events = self.detection.detect_late(record, self.absent)
        if detected is not record:
            self._pass_on(detected, amends=True)
            self.backfill(self.detection.detector_set.explanations.take_fetched())
        self.notification.notify(self.last, events)

    def drop_last(self) -> None:
        """The step of the last record is no longer the one that ended last."""
        self.last = None

    def close(self, raised: str = "") -> None:
        """Send the waiting record, close the sinks and the run directory; another record opens them again.

        ``raised`` is the exception that ends the training, as text.
        """
        self.publisher.close()
        self.directory.is_gone()
        self.directory.close(raised)

    # --- other steps ---------------------------------------------------------------------------------------------------------

    def backfill(self, records: Iterable[StepRecord]) -> None:
        """Take unmonitored steps that a spike before or after them makes relevant. Sinks do not get them."""
        for record in records:
            self.history.backfill(record)
            self.directory.write(record, backfills=True)

    def learn(self, record: StepRecord, signals: Mapping[str, float]) -> None:
        """Take a step that is not monitored, whose values the detectors learn from."""
        self.notification.warn(self.detection.learn(record, signals, self.absent))

    def is_awaited(self, step: int) -> bool:
        """Whether a sink that is not deferred, or ``on_spike``, needs the record of ``step`` when the next step begins."""
        return self.publisher.is_awaited(step) or self.notification.awaits_records

    def rewind(self, step: int) -> None:
        """The run goes back to ``step``: what is known of later ones is of another branch."""
        self.history.rewind(step)
        self.detection.detector_set.rewind(step)
