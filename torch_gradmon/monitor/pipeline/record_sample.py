"""A sample of the records of a run with their statistics, for a diagnosis during training."""

from __future__ import annotations

from dataclasses import replace

from ...core.loss_keys import loss_among
from ...core.records import StepRecord
from ...core.subsampling import subsample_steps
from ...spikes.episodes import by_size

#: The largest number of records, the largest size of their statistics in bytes, and the number of records kept in any case.
MOST, BYTES, FEWEST = 400, 32 << 20, 48


class Memory:
    """Keeps records as they come, and when they become too many, both ends, those with events, and evenly chosen ones between.

    Nothing is copied: the statistics are on the host, a few kilobytes a step.

    Args:
        most: how many records.
        budget: bytes of their statistics.
    """

    def __init__(self, most: int = MOST, budget: int = BYTES) -> None:
        self._most, self._budget = most, budget
        self._records: dict[int, StepRecord] = {}
        self.is_whole = True  # nothing was forgotten

    def keep(self, record: StepRecord) -> None:
        """Take ``record``, in place of one of its step."""
        self._records[record.step] = replace(record, rng={}) if record.rng else record
        cap = self._cap(record)
        if len(self._records) >= 2 * cap:  # rarely, so that a step costs next to nothing
            events = by_size(event for known in self._records.values() for event in known.events)
            loss = loss_among({key for known in self._records.values() for key in known.values})
            liked = sorted(step for step, known in self._records.items() if loss in known.values)
            chosen = set(subsample_steps(sorted(self._records), events, cap, liked))
            self._records = {step: _lean(known) for step, known in self._records.items() if step in chosen}
            self.is_whole = False

    def _cap(self, record: StepRecord) -> int:
        size = sum(table.rows.nbytes for table in record.tables.values() if not table.same_as)
        return max(min(self._most, self._budget // max(size, 1)), FEWEST)

    def goes_back(self, step: int) -> None:
        """Drop the records from ``step`` on, which belong to another branch: the run resumes at ``step``."""
        self._records = {known: record for known, record in self._records.items() if known < step}

    def records(self) -> list[StepRecord]:
        """The kept records, ascending by step."""
        return [self._records[step] for step in sorted(self._records)]


def _lean(record: StepRecord) -> StepRecord:
    """The record without the values that follow from its tables, which may be tens of thousands."""
    if not record.derived:
        return record
    values = {key: value for key, value in record.values.items() if key not in record.derived}
    return replace(record, values=values, derived=frozenset())
