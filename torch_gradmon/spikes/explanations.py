"""Where a spike comes from, as the text of its event."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..core.loss_keys import loss_in
from ..core.records import SpikeEvent, StepRecord
from ..step.micro_batches import rank_norms_text
from ..step.worst_rows import rows_text
from .attribution import spike_cause
from .episodes import size
from .follow_up import FollowUp
from .suspect_history import SuspectHistory


class Explanations:
    """Adds the suspects to new events.

    Args:
        history: gradients of the last steps.
        follow_up: knows which spikes are new.
    """

    def __init__(self, history: SuspectHistory, follow_up: FollowUp) -> None:
        self._history, self._follow_up = history, follow_up
        self._fetch_recorded: Callable[[], Sequence[StepRecord]] = tuple
        self._fetched: list[StepRecord] = []
        #: the last spike is NaN or Inf, and was explained before the loss of its step was logged
        self.awaits_loss = False

    def fetch_from(self, fetch_recorded: Callable[[], Sequence[StepRecord]]) -> None:
        """Fetch the records of earlier, unmonitored steps there when a spike starts."""
        self._fetch_recorded = fetch_recorded

    def take_fetched(self) -> list[StepRecord]:
        """The records fetched since the last call."""
        taken, self._fetched = self._fetched, []
        return taken

    def explained(self, events: list[SpikeEvent], record: StepRecord) -> list[SpikeEvent]:
        """These events of ``record``, with the layers that they come from."""
        if any(map(self._follow_up.is_new, events)):
            for earlier in self._fetch_recorded():
                self._fetched.append(earlier)
                self._history.gradients.backfill(earlier.step, earlier.tables)
        if any(map(self._follow_up.is_largest, events)):  # a spike that shrinks is explained already
            largest, loss = max(map(size, events)), loss_in(record.values)
            self.awaits_loss = loss is None and largest == math.inf
            events = self._with_causes(events, record, largest, loss)
        return [replace(event, action=record.context.get("action", "")) for event in events]

    def _with_causes(
        self, events: Iterable[SpikeEvent], record: StepRecord, largest: float, loss: float | None
    ) -> list[SpikeEvent]:
        suspects, context = self._history.at_spike(record.step, largest), record.context
        before = self._follow_up.complete
        comes_late = before is not None and loss_in(before.values) is not None
        cause = spike_cause(suspects, record.step, loss, comes_late, "by_turns" in context)
        causes = (cause.words, rank_norms_text(context.get("batch_norms", {})), rows_text(context.get("rows", {})))
        return [replace(event, where="; ".join(filter(None, causes))) for event in events]

    def revised(self, record: StepRecord) -> StepRecord:
        """The same record, with what its loss, logged after the end of the step, tells about NaN and Inf in it."""
        infinite = [event for event in record.events if size(event) == math.inf]
        if not infinite or (loss := loss_in(record.values)) is None:
            self.awaits_loss = bool(infinite)
            return record
        self.awaits_loss = False
        events = self._with_causes(record.events, record, math.inf, loss)
        if any(map(self._follow_up.is_new, infinite)) and events[0].where != record.events[0].where:
            self._follow_up.add_report(f"step {record.step}: {events[0].where}")
        return replace(record, events=tuple(events))
