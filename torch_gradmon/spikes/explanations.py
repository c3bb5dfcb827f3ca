"""Where a spike comes from, as the text of its event."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from ..core.keys import Key
from ..core.loss_keys import loss_among, loss_in
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
        self._logged: Set[Key] = frozenset()

    def fetch_from(self, fetch_recorded: Callable[[], Sequence[StepRecord]]) -> None:
        """Fetch the records of earlier, unmonitored steps there when a spike starts."""
        self._fetch_recorded = fetch_recorded

    def know_logged(self, keys: Set[Key]) -> None:
        """The ``keys`` that are logged, a set that grows: the loss may come later than the rest of a step."""
        self._logged = keys

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
            suspects = self._history.at_spike(record.step, max(map(size, events)))
            cause = spike_cause(suspects, record.step, loss_in(record.values), loss_among(self._logged) is not None)
            context = record.context
            causes = (cause.words, rank_norms_text(context.get("batch_norms", {})), rows_text(context.get("rows", {})))
            events = [replace(event, where="; ".join(filter(None, causes))) for event in events]
        return [replace(event, action=record.context.get("action", "")) for event in events]
