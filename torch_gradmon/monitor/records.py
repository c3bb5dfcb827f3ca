"""The way of a monitored step's record through its consumers."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import GradmonWarning, SpikeError, WarningLog
from ..core.fence import Fence
from ..core.formatting import listed, placed, printable
from ..core.keys import Key
from ..core.records import KeyFormatter, SpikeEvent, StatsTable, StepRecord, StepValues, loss_among
from ..core.torch_modes import HomeProcess, fresh_grad_mode, outside_dispatch_modes, process_facts
from ..core.validation import subsample_steps
from ..plugins.reactions import Policy, policy_of
from ..spikes.detector_set import DetectorSet, SuspectHistory
from ..spikes.signals import by_size
from ..step.buffer import PendingReadback, StepBuffer
from ..step.planner import ExchangePolicy
from ..step.record_builder import PendingStep, RecordFactory
from .machine import StepState
from .plugin_set import PluginSet

if TYPE_CHECKING:
    from ..analysis.spike_report import RecentSteps
    from ..runs.writer import RunWriter
    from ..sinks.delivery import FilteredSink


# --- last word ---


#: Findings that the line names.
_NAMED = 3


def last_word(path: str | os.PathLike[str]) -> str:
    """The errors and warnings of the run in ``path`` on one line, consequences left out; empty if there are none.

    Raises:
        OSError, ValueError: the run cannot be read.
    """
    from ..analysis.diagnosis.findings import SEVERITIES
    from ..analysis.run import diagnose
    from ..runs.reader import single_threaded

    with outside_dispatch_modes(), single_threaded():
        found = [finding for finding, _ in diagnose(path).grouped() if finding.severity != "info"]
    counts = Counter(finding.severity for finding in found)
    head = ", ".join(f"{counts[each]} {each}{'s' * (counts[each] > 1)}" for each in SEVERITIES if counts[each])
    names = listed([placed(finding.rule, finding.where) for finding in found], _NAMED)
    return printable(f"{head}: {names}; gradmon diagnose {shlex.quote(os.fspath(path))}") if found else ""


def say(path: str | os.PathLike[str]) -> None:
    """Print :func:`last_word` to stderr. A training that has ended is not failed by what it did wrong, so that nothing is raised."""
    with contextlib.suppress(Exception):
        if text := last_word(path):
            sys.stderr.write(f"torch_gradmon: {text}\n")


# --- The run directory as a consumer of records, which must not fail ---


_REPLACED = (
    "the run directory {} has a run with steps up to {}, and this one, which begins with step {}, takes its place; to keep both give "
    "each a run_dir of its own, and to resume pass start_step= or call load_state_dict()"
)
_GONE = "the run directory {} was deleted or moved while this run was recorded there, and its steps{} went with it"
_TAKEN = (
    "the file in the run directory {} is no longer the one that this run is recorded in: it was replaced, and the steps{} are lost. "
    "Nothing more is written there; give each run a run_dir of its own"
)


class RunDirectory:
    """Stores each record at once, and its replacement when a value is added.

    Args:
        is_muted: whether another rank writes the output of this one.
        tells: whether a line on stderr says at the end what is wrong with the run.

    Attributes:
        path: the run directory of this rank, or of the one that writes its output.
        facts: about the run, with a directory or without.
        has_lost: a step is not in the run directory, as far as is known.
        keep_alive: the writer, which must stay alive until the last record is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        meta: Mapping[str, Any],
        complaints: WarningLog,
        is_muted: Callable[[], bool],
        tells: bool = False,
    ) -> None:
        self._writer: RunWriter | None = None
        self._process = HomeProcess()
        self.keep_alive: list[object] = []
        self.path: Path | None = None
        self._path, self._complaints, self._is_muted = path, complaints, is_muted
        self.facts: dict[str, Any] = dict(meta)
        self.has_lost = False
        self._is_taken = False  # the directory, by another writer
        self._unwritten = 0  # steps
        self._is_noted = False  # in the file, that the steps after the last one are lost
        self._is_lost = False  # the directory, which is made anew as soon as there is a place for it
        self._has_claimed = False  # the directory, with its first step
        self._tells, self._has_news = tells, False  # since the end was told last
        if path is not None:
            self.keep_in(path)

    def keep_in(self, path: str | os.PathLike[str]) -> None:
        """Keep the run there. No step has ended yet.

        Raises:
            OSError: it cannot be written.
        """
        self._path, self._complaints.run = path, str(path)
        self.facts["process"] = process_facts()
        if not self._is_muted():
            self._opened(path)
        self.path = Path(path)

    def __del__(self) -> None:
        self._end("", lambda path: atexit.register(say, path))  # at any moment of the script, whose end is soon enough

    @property
    def description(self) -> str:
        """The run directory as part of a message; empty without one."""
        return f"the run directory {os.fspath(self._path)!r}" if self._path is not None else ""

    @property
    def _own(self) -> RunWriter | None:
        """The writer, in the process that made it."""
        return None if self._writer is None or self._process.is_forked else self._writer

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._complaints.add("store", f"the run directory {self._path} could not be written", error)

    def annotate(self, **facts: Any) -> None:
        self.facts.update(facts)
        if (writer := self._own) is not None:
            with self._reporting():
                writer.annotate(facts)

    def rewind(self, step: int) -> None:
        """Drop the steps from ``step`` on, which belong to another branch: the run resumes at ``step``.

        With its first step this monitor becomes the writer of the directory.
        """
        if (writer := self._own) is not None:
            with self._reporting():
                if not self._has_claimed and writer.replaces_all(step):
                    self._complaints.add("replaced", _REPLACED.format(self._path, writer.last, step))
                if not self._has_claimed:
                    self._claim(writer)
                writer.rewind(step)

    def write(self, record: StepRecord, amends: bool = False, backfills: bool = False) -> None:
        """Store ``record``: of a new step, in place of the last one, or of an earlier step; on the rank that writes."""
        if self._path is None or os.getpid() != self._process.number or self._is_muted():
            return
        # what would be amended is lost with the directory
        if self._is_taken or (self._is_lost and (amends or self._obstacle(self._path))):
            self._complaints.counts["store" if self._is_taken else "gone"] += self._is_taken or not amends
            self._unwritten += not amends
            return
        self._is_lost = False
        from ..runs.writer import Superseded

        try:
            writer = self._writer or self._opened(self._path)
            if not amends and (found := writer.presence()) != "there":
                if self._vanished(found, writer, self._path, record.step):
                    return
                writer = self._opened(self._path)
            if not self._has_claimed:
                self._claim(writer)
            writer.log(record, update=amends, backfill=backfills)
            self._has_news, self._is_noted = True, False
        except Superseded:
            self._is_taken = self.has_lost = True
            message = (
                f"another monitor writes to the run directory {self._path} by now, so that this one, with step {record.step}, writes "
                "there no more; give each a run_dir of its own"
            )
            self._complaints.add("store", message)
        except (OSError, ValueError) as error:
            self.has_lost = True
            self._unwritten += not amends
            message = (
                f"step {record.step} could not be written to the run directory {self._path}; training continues, and later steps are "
                "written as soon as that succeeds again"
            )
            self._note_loss(error)
            self._complaints.add("store", message, error)

    def _note_loss(self, error: Exception) -> None:
        """Say in the file that steps are lost, as nothing may be said later: a disk without room for a step often has some for this."""
        if (writer := self._writer) is not None and not self._is_noted:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            with contextlib.suppress(OSError, ValueError):
                writer.annotate({"unwritten": self._unwritten, "lost_after": writer.last, "lost_why": why})
                self._is_noted = True

    def _vanished(self, found: str, writer: RunWriter, path: str | os.PathLike[str], step: int | None = None) -> bool:
        """Whether nothing can be recorded now because someone else took the file away: it was ``found`` deleted or replaced.

        Where it was deleted, it is made anew for ``step`` and later ones, unless that is None. Not with its parents: who deletes a whole
        tree of runs, as of a temporary directory, does not want it back. The remedy is in the warning.
        """
        self.has_lost = True
        span = "" if writer.last is None else f" up to {writer.last}"
        self._close()
        if found == "replaced":
            self._is_taken = True
            self._complaints.add("gone", _TAKEN.format(path, span))
            return True
        self._has_claimed, gone = False, _GONE.format(path, span)
        if step is None:
            self._complaints.add("gone", gone)
            return True
        if obstacle := self._obstacle(path):
            self._is_lost = True
            self._complaints.add("gone", f"{gone}; the steps from {step} on are lost too, until you {obstacle}")
            return True
        self._complaints.add("gone", f"{gone}; it is made anew, for the steps from {step} on")
        return False

    @staticmethod
    def _obstacle(path: str | os.PathLike[str]) -> str:
        """What to do before the directory can be made anew; empty for nothing."""
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            return f"make the directory {parent} again"
        if os.path.exists(path) and not os.path.isdir(path):
            return f"remove the file {os.fspath(path)}, which took its place"
        return ""

    def _claim(self, writer: RunWriter) -> None:
        """Claim the directory once, with the first step: if another monitor claims it later, that one keeps it."""
        writer.claim(self.facts)
        self._has_claimed = True

    def _opened(self, path: str | os.PathLike[str]) -> RunWriter:
        from ..runs.writer import RunWriter

        if self._writer is None:
            self._writer = RunWriter(path, self.facts)
            self.keep_alive.append(self._writer)
        return self._writer

    def reopen(self) -> None:
        """Mark the directory of a closed run as active again, before the first record comes.

        Nothing changes if this monitor no longer writes there, as after another monitor has claimed the directory.
        """
        if self._path is not None and not self._is_taken and not self._is_muted() and not self._process.is_forked:
            with contextlib.suppress(OSError, ValueError):  # the first record reports the failure
                self._opened(self._path).claim(self.facts)

    def close(self, raised: str = "") -> None:
        """Close the file; another record opens it again. What is wrong with the run is told, unless nobody wants to know.

        ``raised`` is the exception that ends the training, as text.
        """
        if (writer := self._own) is not None and self._path is not None and (found := writer.presence()) != "there":
            self._vanished(found, writer, self._path)
        self._end(raised, say)

    def _end(self, raised: str, tell: Callable[[str | os.PathLike[str]], object]) -> None:
        """Close the file, ``tell`` once for the steps so far. Of a monitor that nobody detached no plugin has noted that the run ended."""
        tune = self.facts.get("tune", {})
        if (writer := self._own) is not None:
            if not tune.get("ended"):
                tune = {**{name: fact for name, fact in tune.items() if name not in ("listens", "waits")}, "ended": True}
            with contextlib.suppress(OSError, ValueError):
                # again, where a plugin has noted the end: on a full disk that may be lost
                writer.annotate({"raised": raised, "unwritten": self._unwritten, "tune": tune})
        self._close()
        has_news, self._has_news = self._has_news, False
        if self._path is not None and has_news and self._tells and not self._process.is_forked:
            tell(self._path)

    def _close(self) -> None:
        if (writer := self._own) is not None:
            self._writer = None
            self.keep_alive.remove(writer)
            writer.close()


# --- Output of records to sinks, when their steps are complete ---


class Publisher:
    """Keeps one record until the next step begins, so that sinks receive a late ``log_scalar`` with it.

    What waits to be sent may outlive the monitor, so nothing here refers to ``on_spike``, which may keep the model alive.

    Attributes:
        format_keys: makes the keys of values.
        of_trainer: keys of values that a trainer has given, and logs itself; they are left out.
        keep_alive: this package's sinks, which must stay alive until the last row is written. The user's sinks are not among them: they
            may hold the model, the optimizer and the monitor.
    """

    def __init__(self, format_keys: KeyFormatter, complaints: WarningLog, is_muted: Callable[[], bool]) -> None:
        self._is_closed = True  # no record has come since the sinks were closed
        self._process = HomeProcess()
        self.format_keys, self._complaints, self._is_muted = format_keys, complaints, is_muted
        self.sinks: list[FilteredSink] = []
        self.keep_alive: list[object] = []
        self.of_trainer: Set[Key] = frozenset()
        self.waiting: StepRecord | None = None

    def __del__(self) -> None:
        if self.sinks and not self._is_closed and self._receivers():
            self.close()

    def add(self, sink: FilteredSink) -> None:
        self.sinks.append(sink)
        if sink.is_of_package:
            self.keep_alive.append(sink)

    def remove(self, sink: FilteredSink) -> None:
        self.sinks.remove(sink)
        if sink.is_of_package:
            self.keep_alive.remove(sink)
        with fresh_grad_mode():
            sink.close()

    def _receivers(self) -> list[FilteredSink]:
        return [sink for sink in self.sinks if sink.is_on_all_ranks] if self._is_muted() else self.sinks

    def is_awaited(self, step: int) -> bool:
        """Whether a sink needs the values of ``step`` as soon as the next step begins."""
        return any(not sink.deferred and not sink.dropped and step % sink.every == 0 for sink in self._receivers())

    def shown(self, record: StepRecord) -> dict[str, float]:
        hidden = record.hidden
        shown = self.format_keys(StepValues.of(record.values).without(hidden) if hidden else record.values)
        for key in self.of_trainer:
            shown.pop(self.format_keys.text(key), None)
        return shown

    def put(self, record: StepRecord, amends: bool) -> None:
        """Take a step's record. ``amends``: it replaces the previous one."""
        if os.getpid() != self._process.number:
            return
        if self.waiting is not None and not amends:
            self.publish()
        if not amends or self.waiting is not None:
            self.waiting, self._is_closed = record, False
        elif self._receivers():
            self._complaints.add("late", f"a value for step {record.step} came after the step had gone out to the sinks")

    def publish(self) -> None:
        if self.waiting is None or os.getpid() != self._process.number:
            return
        record, self.waiting = self.waiting, None
        values: dict[str, float] = {}
        texts = [*zip(record.events, map(str, record.events), strict=True)]
        first: Warning | None = None
        for sink in self._receivers() if self.sinks else ():
            try:
                if not values and sink.takes_values:
                    values = self.shown(record)
                with fresh_grad_mode():
                    sink.send(values, record.step)
                    for event, text in texts:
                        sink.send_spike(event, text)
            except GradmonWarning as warning:  # where warnings were made errors; the other sinks come first
                first = first or warning
        if first is not None:
            raise first

    def close(self) -> None:
        """Send the waiting record and close the sinks; another record opens them again."""
        if self._process.is_forked:
            return
        self._is_closed = True
        self.publish()
        with fresh_grad_mode():
            for sink in self.sinks:
                sink.close()


# --- The records of a run that a monitor keeps in memory ---


#: The largest number of records, the largest size of their statistics in bytes, and the number of records kept in any case.
MOST, BYTES, FEWEST = 400, 32 << 20, 48


class RecordHistory:
    """The records of the last steps, and a sample of all, with their statistics, for a diagnosis during training.

    When the sample becomes too large, both ends of it stay, records with events, and evenly chosen ones between. Nothing is copied: the
    statistics, of ``budget`` bytes at most, are on the host, a few kilobytes a step.
    """

    def __init__(self, length: int, suspects: SuspectHistory, most: int = MOST, budget: int = BYTES) -> None:
        self._length, self._suspects, self._most, self._budget = length, suspects, most, budget
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._backfilled: OrderedDict[int, StepRecord] = OrderedDict()
        self._sample: dict[int, tuple[StepRecord, Mapping[str, StatsTable]]] = {}
        self.is_whole = True  # the sample has all records

    def __contains__(self, step: int) -> bool:
        return step in self._records

    def keep(self, record: StepRecord) -> None:
        """Take ``record``, in place of one of its step."""
        tables, values = record.tables, record.values
        known = self._records[record.step] = record._replace(tables={}, rng={})
        if len(self._records) > self._length:
            self._records.popitem(last=False)
        if tables and isinstance(values, StepValues) and values.has_views:  # those that follow from tables may be thousands
            known = known._replace(values=values.rest)
        self._sample[record.step] = known, tables
        if len(self._sample) >= 2 * FEWEST:
            size = 0
            for table in tables.values():
                size += 0 if table.same_as else 64 * len(table.names)
            cap = max(min(self._most, self._budget // max(size, 1)), FEWEST)
            if len(self._sample) >= 2 * cap:  # rarely, so that a step costs next to nothing
                self._thin(cap)

    def _thin(self, cap: int) -> None:
        records = self.sampled()
        events = by_size(event for known in records for event in known.events)
        loss = loss_among({key for known in records for key in known.values})
        liked = [known.step for known in records if loss in known.values]
        chosen = set(subsample_steps([known.step for known in records], events, cap, liked))
        self._sample = {known.step: (known, known.tables) for known in records if known.step in chosen}
        self.is_whole = False

    def backfill(self, record: StepRecord) -> None:
        self._suspects.gradients.backfill(record.step, record.tables)
        self._backfilled[record.step] = record._replace(tables={})
        if len(self._backfilled) > self._length:
            self._backfilled.popitem(last=False)

    def rewind(self, step: int) -> None:
        """Drop the records from ``step`` on, which belong to another branch."""
        for known in (self._records, self._backfilled):
            while known and next(reversed(known)) >= step:
                known.popitem()
        self._sample = {known: record for known, record in self._sample.items() if known < step}

    def records(self) -> list[StepRecord]:
        """The records of the last monitored steps, without statistics; other threads may call this during training."""
        return list(self._records.values())

    def sampled(self) -> list[StepRecord]:
        """The sample in the order of steps, without the values that follow from tables."""
        return [record._replace(tables=tables) for _, (record, tables) in sorted(self._sample.items())]

    def recent(self) -> RecentSteps:
        """The records for reports: those of the last steps, and those that a diagnosis needs."""
        from ..analysis.spike_report import RecentSteps  # most trainings end without a report

        sample = {record.step: record for record in self.sampled()}
        known = {**sample, **self._backfilled, **self._records}
        return RecentSteps(known, self._suspects.gradients, self._suspects.suspects)


# --- The way of a monitored step's record through its consumers ---


#: Of skipped steps in a row, those with a warning.
_WITH_WARNING = frozenset({1, 2, 3, 4, 10, 30, 100, 300, 1000, 3000, 10_000})


class RecordPipeline:
    """Passes the record of each monitored step to detectors, history, run directory, sinks and ``on_spike``, in this order.

    A step waits here until its values have come to the host: at most two do, the one that ended last and the one before. Its record then
    enters, once. Late values and facts amend it until the next step begins. Then it is finished: detectors evaluate the signals that came
    late, and the sinks receive it.

    Attributes:
        last: the record of the step that ended last; None if that is not monitored, or its values are on their way.
        absent: reasons for values that the last record lacks, by source and name.
        observers: called with each record, and whether it replaces the last one.
        waiting: the steps whose records are not made yet, ascending.
    """

    def __init__(
        self,
        state: StepState,
        factory: RecordFactory,
        detectors: DetectorSet,
        history: RecordHistory,
        directory: RunDirectory,
        publisher: Publisher,
        plugins: PluginSet,
        on_spike: str | Policy | Callable[[SpikeEvent], Any] | None,
        exchange: ExchangePolicy,
        fence: Fence,
        is_muted: Callable[[], bool],
    ) -> None:
        self._state, self.factory, self.detectors = state, factory, detectors
        self.history, self.directory, self.publisher, self._plugins = history, directory, publisher, plugins
        self._exchange, self._fence, self._complaints, self._is_muted = exchange, fence, fence.complaints, is_muted
        self._on_spike = on_spike
        self._acts = policy_of(on_spike) is not None  # something is done about spikes before they change the model
        self._warns = on_spike == "warn" or self._acts
        self.waiting: deque[PendingStep] = deque()
        self.last: StepRecord | None = None
        self.absent: dict[tuple[str, str], str] = {}
        self.observers: list[Callable[[StepRecord, bool], object]] = []
        self._signals: Mapping[str, float] = {}  # the whole-model values of the last record
        self._of_last: StepBuffer | None = None  # what was measured and logged in the last step
        self._late: StepBuffer | None = None  # merges with that what is logged for it, once anything is
        self._numbers: dict[Key, float] = {}  # late ones that are not there yet
        self._added: Mapping[Key, float] = {}  # the late values that the last record has
        self._is_finished = True

    def __del__(self) -> None:
        # collected without detach(): what is still on its way reaches the run directory
        with contextlib.suppress(Exception):
            recorder = self._plugins.built_in.recorder
            rest = [] if recorder is None else recorder.rest()
            if self.waiting or rest:
                self.enter(open_to_late_values=False)
                self.backfill(rest)
                self.close()

    # --- steps whose values are on their way -----------------------------------------------------------------------------------

    @property
    def _newest(self) -> PendingStep | None:
        """The step that ended last, if its values are on their way."""
        return self.waiting[-1] if self.waiting and self.waiting[-1].step == self._state.ended else None

    @property
    def is_last_monitored(self) -> bool:
        """Whether the step that ended last has values, complete or on their way."""
        return self.last is not None or self._newest is not None

    def count_refusal(self, is_interrupted: bool) -> None:
        if self.waiting:
            self.waiting[-1].refusals_after += 1
            self.waiting[-1].interruptions_after += is_interrupted
        else:
            self.factory.summary.count_rejected(1, int(is_interrupted))

    def seal(self, begins: int) -> None:
        """Step ``begins`` is about to open: nothing more comes for the one that ended last, whose record enters if it is ready, or if a
        sink that is not deferred or ``on_spike`` awaits it. Waits for the values of the step before that one.
        """
        for pending in self.waiting:
            pending.seal()
        if self.publisher.is_awaited(self._state.ended or 0) or self._on_spike not in (None, "warn"):
            self.enter()
        while self.waiting and (len(self.waiting) > 1 or self._is_ready(self.waiting[0], begins)):
            start = time.perf_counter()
            self.waiting[0].readback.arrival.wait()
            # the device is two steps behind, and it is the training that waits here rather than elsewhere
            self._fence.exclude_time(time.perf_counter() - start)
            self.enter(only_oldest=True)

    def _is_ready(self, pending: PendingStep, begins: int) -> bool:
        return begins >= pending.step + 2 if self._exchange.takes_place else pending.readback.arrival.is_ready()

    def enter(self, open_to_late_values: bool = True, only_oldest: bool = False) -> None:
        """Make the records of all steps and enter them, or that of the oldest, whose values have come. Waits for their values.
        ``open_to_late_values``: values may still be added to the step that ended last.
        """
        while self.waiting:
            if not (only_oldest or self.waiting[0].readback.arrival.is_local):
                self.waiting[0].readback.arrival.wait()  # interrupted here, the step is still there
            pending = self.waiting.popleft()
            record, signals = self.factory.make(pending)
            try:
                self._of_last, self._late, self._numbers, self._added = pending.readback.buffer, None, {}, {}
                self.absent = self._of_last.absent
                self.detectors.begin(record, self.absent)
                record, events = self.detectors.detect(record, signals, self.absent)
                self._is_finished = False
                self._pass_on(record, amends=False)
                if self.detectors.fetched:
                    self.backfill(self.detectors.take_fetched())
                self._signals = signals
                if self._plugins.listening["on_record"]:
                    self._plugins.call("on_record", record)
                action = record.context.get("action", "")
                if events or action or self.detectors.failures or self.detectors.follow_up.rejected:
                    self._notify(events, action)
            finally:  # where a spike raises
                if pending.late is not None:
                    readback = pending.late_readback or PendingReadback(pending.late)
                    self._late = pending.late
                    self._amend(readback.land()[1])
                if pending.refusals_after:
                    self.factory.summary.count_rejected(pending.refusals_after, pending.interruptions_after)
            is_latest = record.step == self._state.ended
            if not (is_latest and open_to_late_values):
                self.finish()
                self.publisher.publish()
            if not is_latest:
                self.last = None
            if only_oldest:
                return

    def _pass_on(self, record: StepRecord, amends: bool) -> None:
        self.last = record
        self.history.keep(record)
        for observe in self.observers:
            observe(record, amends)
        if self.directory.path is not None:
            self.directory.write(record, amends)
        self.publisher.put(record, amends)

    # --- what is added to the step that ended last: its record is here, or was made, or the recorder has the step ----------------

    @property
    def recorded(self) -> StepBuffer | None:
        """The values of the step that ended last, if the recorder has them."""
        recorder = self._plugins.built_in.recorder
        return None if recorder is None else recorder.late_buffer(self._state.ended)

    @property
    def absent_of_last(self) -> dict[tuple[str, str], str]:
        pending = self._newest
        return self.absent if pending is None else pending.readback.buffer.absent

    def add(self, late: StepBuffer) -> None:
        if (recorded := self.recorded) is not None:
            recorded.absorb(late)
        elif (pending := self._newest) is not None:
            pending.add(late)
        elif self.last is not None and self._of_last is not None:
            merged = self._late = self._late or self._of_last.part()
            for key, number in self._numbers.items():
                merged.merge_value(key, number)
            self._numbers = {}
            merged.absorb(late)
            self._amend(merged.flush()[1])

    def add_numbers(self, numbers: Mapping[Key, float]) -> bool:
        """Add plain numbers to a record that is here, where no value is merged with them; returns whether that is so."""
        buffer, known = self._late or self._of_last, self._added.keys()
        if self.last is None or buffer is None or not known.isdisjoint(numbers):
            return False
        if not buffer.has_only(known - self._numbers.keys()):
            return False
        self._numbers.update(numbers)
        self._amend({**self._added, **numbers})
        return True

    def _amend(self, values: Mapping[Key, float]) -> None:
        if (last := self.last) is not None:
            self._is_finished, self._added = False, values
            self._pass_on(last._replace(values=StepValues.updated(last.values, values)), amends=True)

    def tag(self, tags: Mapping[str, Any]) -> None:
        recorder = self._plugins.built_in.recorder
        if recorder is not None and recorder.tag_late(self._state.ended, tags):
            return
        if (pending := self._newest) is not None:
            pending.tags.update(tags)
        elif self.last is not None:
            context = {**self.last.context, "tags": {**self.last.context.get("tags", {}), **tags}}
            self._pass_on(self.last._replace(context=context), amends=True)

    # --- the end of the last record ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing more can come for the last record, which may go out to the sinks: evaluate the signals that came late."""
        if (record := self.last) is not None and not self._is_finished:
            self._is_finished, detectors = True, self.detectors
            if detectors.due or detectors.awaits_loss or detectors.failures or detectors.follow_up.rejected:
                self._detect_late(record)
            if reports := detectors.follow_up.reports(self.last or record, self._signals):
                self._warn(reports)
            if detectors.due:
                detectors.finish(self.absent)

    def detect_late(self) -> None:
        """Evaluate the signals that came late so far."""
        if self.last is not None and not self._is_finished:
            self._detect_late(self.last)

    def _detect_late(self, record: StepRecord) -> None:
        events: list[SpikeEvent] = []
        if self.detectors.accepts_late_values:
            detected, events = self.detectors.detect(record, {}, self.absent)
            if detected is not record:
                self._pass_on(detected, amends=True)
                self.backfill(self.detectors.take_fetched())
        self._notify(events)

    def close(self, raised: str = "") -> None:
        """Send the waiting record, close the sinks and the run directory; another record opens them again.

        ``raised`` is the exception that ends the training, as text.
        """
        self.publisher.close()
        self.directory.close(raised)

    # --- other steps ---------------------------------------------------------------------------------------------------------

    def backfill(self, records: Iterable[StepRecord]) -> None:
        """Take unmonitored steps that a spike before or after them makes relevant. Sinks do not get them."""
        for record in records:
            self.history.backfill(record)
            self.directory.write(record, backfills=True)

    def learn(self, record: StepRecord, signals: Mapping[str, float]) -> None:
        """Take a step that is not monitored, whose values the detectors learn from."""
        self._warn(self.detectors.learn(record, signals, self.absent))

    def rewind(self, step: int) -> None:
        """The run goes back to ``step``: what is known of later ones is of another branch."""
        self.history.rewind(step)
        self.detectors.rewind(step)

    # --- what is told of spikes, when all consumers have the record -----------------------------------------------------------

    def _warn(self, messages: Iterable[str]) -> None:
        """Warn with each message, where the script has warnings of spikes."""
        if self._warns and not self._is_muted():
            for message in messages:
                self._complaints.warn(message)

    def _notify(self, events: Sequence[SpikeEvent], action: str = "") -> None:
        """Report new ``events`` of the last record, and the ``action`` on its step.

        Raises:
            SpikeError: the script asks for it.
        """
        record, messages = self.last, self.detectors.follow_up.alerts(events) if events else []
        if record is not None and action:  # as a rank knows it, though not hundreds in a row
            if record.context["in_a_row"] not in _WITH_WARNING:
                return
            reasons = [event.reason for event in events] or [record.skipped]
            where = next((event.where for event in events if event.where), "")
            messages = [f"step {record.step}: " + "; ".join(filter(None, (*reasons, where, action)))]
        elif self._acts and (missed := [event.signal for event in events if event.signal not in self.detectors.predicted]):
            signals = ", ".join(missed)
            self._complaints.add(
                f"late:{signals}",
                f"that {signals} spiked in step {events[0].step} became known only when the optimizer had stepped, so that nothing was "
                "done about it; what is logged has to be logged before optimizer.step()",
            )
        if (self.detectors.needs_detail() or messages) and record is not None:
            self._plugins.alert(record.step)
        self.detectors.warn_of_failures()
        self._warn(messages)
        for event in events:
            if callable(self._on_spike):
                try:
                    with fresh_grad_mode():
                        self._on_spike(event)
                except Exception as error:
                    self._complaints.add("on_spike", "the function on_spike failed; training continues", error)
            elif self._on_spike == "raise":
                raise SpikeError(str(event))
