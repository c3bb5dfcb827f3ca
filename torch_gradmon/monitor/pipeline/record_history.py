"""The records of a run that a monitor keeps in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from ...analysis.spike_report.source import RecentSteps
from ...core.loss_keys import loss_among
from ...core.records import StepRecord
from ...core.subsampling import subsample_steps
from ...spikes.episodes import by_size
from ...spikes.suspect_history import SuspectHistory

#: The largest number of records, the largest size of their statistics in bytes, and the number of records kept in any case.
MOST, BYTES, FEWEST = 400, 32 << 20, 48


class RecordHistory:
    """The records of the last steps, and a sample of all.

    Args:
        length: the number of last steps.
        suspects: gradients of the last steps, and the suspects of spikes.

    Attributes:
        sample: records with their statistics, for a diagnosis during training.
    """

    def __init__(self, length: int, suspects: SuspectHistory) -> None:
        self._length, self._suspects = length, suspects
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._backfilled: OrderedDict[int, StepRecord] = OrderedDict()
        self.sample = RecordSample()

    def __contains__(self, step: int) -> bool:
        """Whether there is a record of ``step`` as a monitored one."""
        return step in self._records

    def keep(self, record: StepRecord) -> None:
        """Take ``record``, in place of one of its step."""
        self._records[record.step] = replace(record, tables={}, rng={})
        self.sample.keep(record)
        while len(self._records) > self._length:
            self._records.popitem(last=False)

    def backfill(self, record: StepRecord) -> None:
        """Take the record of an earlier step that is not monitored."""
        self._suspects.gradients.backfill(record.step, record.tables)
        self._backfilled[record.step] = replace(record, tables={})
        while len(self._backfilled) > self._length:
            self._backfilled.popitem(last=False)

    def rewind(self, step: int) -> None:
        """Drop the records from ``step`` on, which belong to another branch."""
        for known in (self._records, self._backfilled):
            while known and next(reversed(known)) >= step:
                known.popitem()
        self.sample.rewind(step)

    def records(self) -> list[StepRecord]:
        """The records of the last monitored steps, without statistics; other threads may call this during training."""
        return list(self._records.values())

    def recent(self) -> RecentSteps:
        """The records for reports: those of the last steps, and those that a diagnosis needs."""
        sample = {record.step: record for record in self.sample.records()}
        known = {**sample, **self._backfilled, **self._records}
        return RecentSteps(known, self._suspects.gradients, self._suspects.suspects)


class RecordSample:
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
        """Take ``record``, in place of one of its step, without the values that follow from its tables, which may be thousands."""
        self._records[record.step] = replace(record, values=record.values_beside_views(), rng={})
        cap = self._cap(record)
        if len(self._records) >= 2 * cap:  # rarely, so that a step costs next to nothing
            events = by_size(event for known in self._records.values() for event in known.events)
            loss = loss_among({key for known in self._records.values() for key in known.values})
            liked = sorted(step for step, known in self._records.items() if loss in known.values)
            chosen = set(subsample_steps(sorted(self._records), events, cap, liked))
            self._records = {step: known for step, known in self._records.items() if step in chosen}
            self.is_whole = False

    def _cap(self, record: StepRecord) -> int:
        size = sum([table.rows.nbytes for table in record.tables.values() if not table.same_as])
        return max(min(self._most, self._budget // max(size, 1)), FEWEST)

    def rewind(self, step: int) -> None:
        """Drop the records from ``step`` on, which belong to another branch: the run resumes at ``step``."""
        self._records = {known: record for known, record in self._records.items() if known < step}

    def records(self) -> list[StepRecord]:
        """The kept records, ascending by step."""
        return [self._records[step] for step in sorted(self._records)]
