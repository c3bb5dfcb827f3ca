"""The way of a monitored step's record through its consumers."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import GradmonWarning, SpikeError, WarningLog
from ..core.fence import Fence
from ..core.formatting import listed, placed, printable
from ..core.keys import SUMMARY, Key
from ..core.records import KeyFormatter, SpikeEvent, StepRecord, StepValues, loss_among
from ..core.torch_modes import HomeProcess, fresh_grad_mode, outside_dispatch_modes, process_facts
from ..core.validation import subsample_steps
from ..plugins.flight_recorder import FlightRecorder
from ..plugins.spike_policy.policy import Policy, policy_of
from ..spikes.attribution import SuspectHistory
from ..spikes.detector import SpikeDetector
from ..spikes.detector_set import DetectorSet
from ..spikes.signals import by_size
from ..step.buffer import StepBuffer
from ..step.exchange import RankExchange
from ..step.plan import Registry
from ..step.record_builder import PendingStep, asked_for, missing
from ..step.summary import LayerSelection, ReasonContext, Summary, SummaryChoice
from .plugin_set import PluginSet

if TYPE_CHECKING:
    from ..analysis.spike_report import RecentSteps
    from ..runs.writer import RunWriter
    from ..sinks.filtered_sink import FilteredSink


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
        path: the run directory; None for none.
        meta: facts about the run.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.
        tells: whether a line on stderr says at the end what is wrong with the run.

    Attributes:
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
        self._path, self._complaints, self._is_muted = path, complaints, is_muted
        self._meta = dict(meta) if path is None else {**meta, "process": process_facts()}
        self._is_taken = False  # the directory, by another writer
        self._has_lost = False  # a step
        self._unwritten = 0  # steps
        self._is_noted = False  # in the file, that the steps after the last one are lost
        self._is_lost = False  # the directory, which is made anew as soon as there is a place for it
        self._has_claimed = False  # the directory, with its first step
        self._tells, self._has_news = tells, False  # since the end was told last
        if path is not None and not is_muted():
            self._opened(path)

    def __del__(self) -> None:
        self._end()
        if self._path is not None and self._is_to_tell():  # at any moment of the script, whose end is soon enough
            atexit.register(say, self._path)

    @property
    def stores(self) -> bool:
        """Whether this rank, or the one that writes its output, has a run directory."""
        return self._path is not None

    @property
    def path(self) -> Path | None:
        """The run directory of this rank, or of the one that writes its output."""
        return None if self._path is None else Path(self._path)

    @property
    def description(self) -> str:
        """The run directory as part of a message; empty without one."""
        return f"the run directory {os.fspath(self._path)!r}" if self._path is not None else ""

    @property
    def has_lost(self) -> bool:
        """Whether a step is not in the run directory, as far as is known."""
        return self._has_lost

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts about the run, with a directory or without."""
        return self._meta

    def annotate(self, **facts: Any) -> None:
        """Add facts about the run."""
        self._meta.update(facts)
        if self._writer is not None and not self._process.is_forked:
            try:
                self._writer.annotate(facts)
            except (OSError, ValueError) as error:
                self._complaints.add("store", f"the run directory {self._path} could not be written", error)

    def rewind(self, step: int) -> None:
        """Drop the steps from ``step`` on, which belong to another branch: the run resumes at ``step``.

        With its first step this monitor becomes the writer of the directory.
        """
        if self._writer is not None and not self._process.is_forked:
            try:
                if not self._has_claimed and self._writer.replaces_all(step):
                    self._complaints.add("replaced", _REPLACED.format(self._path, self._writer.last, step))
                self._claim(self._writer)
                self._writer.rewind(step)
            except (OSError, ValueError) as error:
                self._complaints.add("store", f"the run directory {self._path} could not be written", error)

    def write(self, record: StepRecord, amends: bool = False, backfills: bool = False) -> None:
        """Store ``record``: of a new step, in place of the last one, or of an earlier step."""
        if self._path is None or self._process.is_forked or self._is_muted():
            return
        if self._is_taken:
            self._complaints.counts["store"] += 1
            self._unwritten += not amends
            return
        if self._is_lost and (amends or self._obstacle(self._path)):  # what would be amended is lost
            self._complaints.counts["gone"] += not amends
            self._unwritten += not amends
            return
        self._is_lost = False
        from ..runs.writer import Superseded

        try:
            if not amends and self.is_gone(record.step):
                return
            writer = self._opened(self._path)
            self._claim(writer)
            writer.log(record, update=amends, backfill=backfills)
            self._has_news, self._is_noted = True, False
        except Superseded:
            self._is_taken = self._has_lost = True
            message = (
                f"another monitor writes to the run directory {self._path} by now, so that this one, with step {record.step}, writes "
                "there no more; give each a run_dir of its own"
            )
            self._complaints.add("store", message)
        except (OSError, ValueError) as error:
            self._has_lost = True
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

    def is_gone(self, step: int | None = None) -> bool:
        """Whether nothing can be recorded now because someone else took the file away.

        Where it was deleted, it is made anew for ``step`` and later ones, unless that is None. Not with its parents: who deletes a whole
        tree of runs, as of a temporary directory, does not want it back. The remedy is in the warning.
        """
        writer, path = self._writer, self._path
        if writer is None or path is None or self._process.is_forked or (found := writer.presence()) == "there":
            return False
        self._has_lost = True
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
        if not self._has_claimed:
            writer.claim(self._meta)
            self._has_claimed = True

    def _opened(self, path: str | os.PathLike[str]) -> RunWriter:
        from ..runs.writer import RunWriter

        if self._writer is None:
            self._writer = RunWriter(path, self._meta)
            self.keep_alive.append(self._writer)
        return self._writer

    def keep_in(self, path: str | os.PathLike[str]) -> None:
        """Keep the run there. No step has ended yet.

        Raises:
            OSError: it cannot be written.
        """
        self._path, self._complaints.run = path, str(path)
        self._meta["process"] = process_facts()
        if not self._is_muted():
            self._opened(path)

    def reopen(self) -> None:
        """Mark the directory of a closed run as active again, before the first record comes.

        Nothing changes if this monitor no longer writes there, as after another monitor has claimed the directory.
        """
        if self._path is not None and not self._is_taken and not self._is_muted() and not self._process.is_forked:
            with contextlib.suppress(OSError, ValueError):  # the first record reports the failure
                self._opened(self._path).claim(self._meta)

    def close(self, raised: str = "") -> None:
        """Close the file; another record opens it again. What is wrong with the run is told, unless nobody wants to know.

        ``raised`` is the exception that ends the training, as text.
        """
        self._end(raised)
        if self._path is not None and self._is_to_tell():
            say(self._path)

    def _is_to_tell(self) -> bool:
        """Once for the steps so far."""
        told, self._has_news = not self._has_news, False
        return self._tells and not told and not self._process.is_forked

    def _end(self, raised: str = "") -> None:
        """Close the file. Of a monitor that nobody detached no plugin has noted that the run ended."""
        writer, tune = self._writer, self._meta.get("tune", {})
        if writer is not None and not self._process.is_forked:
            if not tune.get("ended"):
                tune = {**{name: fact for name, fact in tune.items() if name not in ("listens", "waits")}, "ended": True}
            with contextlib.suppress(OSError, ValueError):
                # again, where a plugin has noted the end: on a full disk that may be lost
                writer.annotate({"raised": raised, "unwritten": self._unwritten, "tune": tune})
        self._close()

    def _close(self) -> None:
        if (writer := self._writer) is not None and not self._process.is_forked:
            self._writer = None
            self.keep_alive.remove(writer)
            writer.close()


# --- From a step whose values have come to its record ---


class ModelFacts:
    """What the run directory and a diagnosis need to know of the model.

    Args:
        annotate: adds facts to the run directory.

    Attributes:
        matrices: the fan-in of each parameter of two or more dimensions, see :attr:`torch_gradmon.step.model_index.ModelIndex.facts`.
        kinds: the class of each module by name.
        parameters: the shape and dtype of each parameter, see there.
    """

    def __init__(self, annotate: Callable[..., None]) -> None:
        self.matrices: Mapping[str, int] = {}
        self.kinds: Mapping[str, str] = {}
        self.parameters: Mapping[str, Mapping[str, Any]] = {}
        self._annotate = annotate
        self._stored: dict[str, Any] = {}

    def update(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of the model as it is now."""
        if facts["matrices"] is self.matrices:
            return
        self.matrices, self.kinds, self.parameters = facts["matrices"], facts["kinds"], facts["parameters"]
        # alternating models, as in a GAN, change the inventory in every step, but no other fact
        new = {name: fact for name, fact in facts.items() if fact != self._stored.get(name)}
        if new:
            self._stored.update(new)
            self._annotate(**new)


class RecordFactory:
    """Makes the records of monitored steps, and knows why the last one lacks values.

    Args:
        registry: the metrics.
        layers: which per-layer values are shown.
        directory: whether there is one decides what a record needs.

    Attributes:
        summary: the whole-model values.
        is_stored: records have the states of random generators, for a run directory.
        model: facts about the model of the last record.
    """

    def __init__(self, registry: Registry, layers: LayerSelection, directory: RunDirectory) -> None:
        self._registry, self.layers, self.is_stored = registry, layers, directory.stores
        self.summary = Summary(SummaryChoice(all_columns=self.is_stored, of_layers=layers.needs))
        self.model = ModelFacts(directory.annotate)
        self._reasons: ReasonContext | None = None

    def make(self, pending: PendingStep) -> tuple[StepRecord, dict[str, float]]:
        """The record of a step, and all whole-model values by name. Waits for the values."""
        active, refused = pending.active, pending.readback.buffer.refused
        self.model.update(pending.inventory.facts)
        self._reasons = ReasonContext(
            pending.inventory, active.plans, active.due, self.summary.choice.shown, pending.attached, refused
        )
        return pending.record(self.summary, self.layers, self._registry)

    def requested(self, names: Mapping[str, Any]) -> list[Key]:
        """The keys of all requested values; ``names`` are those of parameters and modules, by source."""
        return asked_for(self._registry.metrics, names, self.summary.choice.shown)

    def missing(
        self, record: StepRecord, absent: Mapping[tuple[str, str], str], names: Mapping[str, Any], owned: Set[str] | None
    ) -> dict[Key, str]:
        """Why requested values are not in ``record``, the last one.

        Args:
            record: the last one.
            absent: reasons that are known, by source and name.
            names: of parameters and modules, by source.
            owned: the parameters of attached optimizers, if known.
        """
        if self._reasons is None:
            return {}
        return missing(record, list(self._registry.metrics), names, absent, self._reasons, self.layers, owned)


# --- Output of records to sinks, when their steps are complete ---


class Publisher:
    """Keeps one record until the next step begins, so that sinks receive a late ``log_scalar`` with it.

    What waits to be sent may outlive the monitor, so nothing here refers to ``on_spike``, which may keep the model alive.

    Args:
        format_keys: makes the keys of values.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.

    Attributes:
        sinks: those that were added.
        keep_alive: this package's sinks, which must stay alive until the last row is written. The user's sinks are not among them: they
            may hold the model, the optimizer and the monitor.
    """

    def __init__(self, format_keys: KeyFormatter, complaints: WarningLog, is_muted: Callable[[], bool]) -> None:
        self._is_closed = True  # no record has come since the sinks were closed
        self._process = HomeProcess()
        self.format_keys, self._complaints, self._is_muted = format_keys, complaints, is_muted
        self.sinks: list[FilteredSink] = []
        self.keep_alive: list[object] = []
        self._of_trainer: Set[Key] = frozenset()
        self._waiting: StepRecord | None = None

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def add(self, sink: FilteredSink) -> None:
        """Send records to ``sink`` from now on."""
        self.sinks.append(sink)
        if sink.is_of_package:
            self.keep_alive.append(sink)

    def remove(self, sink: FilteredSink) -> None:
        """Stop sending records to ``sink``, and close it."""
        self.sinks.remove(sink)
        if sink.is_of_package:
            self.keep_alive.remove(sink)
        with fresh_grad_mode():
            sink.close()

    def _receivers(self) -> list[FilteredSink]:
        """The sinks of this rank that receive records."""
        return [sink for sink in self.sinks if sink.is_on_all_ranks] if self._is_muted() else self.sinks

    def is_awaited(self, step: int) -> bool:
        """Whether a sink needs the values of ``step`` as soon as the next step begins."""
        return any(not sink.deferred and not sink.dropped and step % sink.every == 0 for sink in self._receivers())

    def leave_out(self, of_trainer: Set[Key]) -> None:
        """Leave out the values with these keys, a set that may change: a trainer has given them, and logs them itself."""
        self._of_trainer = of_trainer

    def shown(self, record: StepRecord) -> dict[str, float]:
        """The values of ``record`` that sinks receive, by key."""
        hidden = record.hidden
        shown = self.format_keys(StepValues.of(record.values).without(hidden) if hidden else record.values)
        for key in self._of_trainer:
            shown.pop(self.format_keys.text(key), None)
        return shown

    def put(self, record: StepRecord, amends: bool) -> None:
        """Take a step's record. ``amends``: it replaces the previous one."""
        if self._process.is_forked or (not self._receivers() and self._is_muted()):
            return
        if not amends:
            self.publish()
        if not amends or self._waiting is not None:
            self._waiting, self._is_closed = record, False
        elif self.sinks:
            self._complaints.add("late", f"a value for step {record.step} came after the step had gone out to the sinks")

    def publish(self) -> None:
        """Send the waiting record to the sinks."""
        if self._waiting is None or self._process.is_forked:
            return
        record, self._waiting = self._waiting, None
        receivers = self._receivers()
        values: dict[str, float] = {}
        texts = [(event, str(event)) for event in record.events] if receivers else []
        first: Warning | None = None
        for sink in receivers:
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
        from ..analysis.spike_report import RecentSteps  # most trainings end without a report

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


# --- The detectors of a run at work on its records ---


Absent = MutableMapping[tuple[str, str], str]

_NO_SIGNAL = "no step so far has it; log it with log_scalar(), or add the metric that it is a key of"


class SpikeDetection:
    """Evaluates detectors on each record, when it enters and again when values come late.

    Args:
        summary: has to compute the whole-model values that detectors need.
        complaints: where failures are reported.

    Attributes:
        detector_set: the detectors and what they know.
    """

    def __init__(self, summary: Summary, complaints: WarningLog) -> None:
        self.detector_set = DetectorSet()
        self._summary, self._complaints = summary, complaints
        self._of_preset: set[str] = set()

    def enter(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        """Evaluate a new record. Returns it with scores and events, and these events; ``absent`` gets reasons for missing scores."""
        self.detector_set.begin(record, absent)
        return self._detect(record, signals, absent)

    def detect_late(self, record: StepRecord, absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        """Evaluate the signals of the same record that had no value before."""
        return self._detect(record, {}, absent) if self.detector_set.accepts_late_values else (record, [])

    def _detect(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> tuple[StepRecord, list[SpikeEvent]]:
        try:
            return self.detector_set.detect(record, signals, absent)
        except Exception as error:  # the record must not be lost for it
            self._complaints.add("internal:judge", f"step {record.step} could not be judged", error)
            return record, []

    def reports(self, record: StepRecord, signals: Mapping[str, float]) -> list[str]:
        """What there is to report on the complete ``record`` and on earlier spikes."""
        return self.detector_set.follow_up.reports(record, signals)

    def finish(self, absent: Absent) -> None:
        """The record is complete: warn about signals that never had a value."""
        for signal in self.detector_set.signals_without_values():
            why = absent.get((SUMMARY, signal.removeprefix(f"{SUMMARY}/")), _NO_SIGNAL)
            self._complaints.add(f"signal:{signal}", f"the spike detector of {signal} has nothing to judge: {why}")

    # --- steps that are not monitored ----------------------------------------------------------------------------------------

    def learn(self, record: StepRecord, signals: Mapping[str, float], absent: Absent) -> list[str]:
        """Evaluate a step that has values for the detectors only. Returns what there is to report."""
        self.detector_set.begin(record, {})
        self._detect(record, signals, absent)
        return self.reports(record, signals)

    def count_unmonitored(self, is_refused: bool) -> bool:
        """Count a step that is not monitored. Returns whether a series of refused ones calls for more detail."""
        if not (is_refused or self.detector_set.follow_up.rejected):
            return False
        self.detector_set.follow_up.step_ended(applied=not is_refused)
        return self.detector_set.needs_detail()

    # --- detectors and state -------------------------------------------------------------------------------------------------

    def add(self, detector: SpikeDetector, of_preset: bool = False) -> None:
        """Use ``detector``. One that the user brings replaces a preset's, and is not replaced by one.

        Raises:
            ValueError: the user has brought one for this signal already.
        """
        is_known = detector.name in self.detector_set.detectors
        if of_preset:
            self.detector_set.shows_main_score = True
        if is_known and of_preset:
            return
        if is_known and detector.name not in self._of_preset:
            raise ValueError(f"there is a detector for {detector.name!r} already; a signal has one")
        (self._of_preset.add if of_preset else self._of_preset.discard)(detector.name)
        self.detector_set.add(detector)
        self._summary.choice.require(detector.name.removeprefix(f"{SUMMARY}/"))

    def remove(self, detector: SpikeDetector) -> None:
        if self.detector_set.detectors.get(detector.name) is detector:
            del self.detector_set.detectors[detector.name]

    def state_dict(self) -> dict[str, Any]:
        """The state of each detector by signal, as plain numbers and lists."""
        return {signal: detector.state_dict() for signal, detector in self.detector_set.detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for signal, detector in self.detector_set.detectors.items():
            detector.load_state_dict(state[signal])


# --- spike notification ---


#: Of skipped steps in a row, those with a warning.
_WITH_WARNING = frozenset({1, 2, 3, 4, 10, 30, 100, 300, 1000, 3000, 10_000})


class SpikeNotification:
    """Reports spikes when all consumers have the record.

    Args:
        on_spike: the option of :class:`torch_gradmon.ModuleMonitor`.
        detectors: know which spikes are new.
        plugins: get an alert for a step that calls for more detail.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.

    Attributes:
        awaits_records: ``on_spike`` needs each record when the next step begins.
    """

    def __init__(
        self,
        on_spike: str | Policy | Callable[[SpikeEvent], Any] | None,
        detectors: DetectorSet,
        plugins: PluginSet,
        complaints: WarningLog,
        is_muted: Callable[[], bool],
    ) -> None:
        self._on_spike, self._detectors, self._plugins = on_spike, detectors, plugins
        self._complaints, self._is_muted = complaints, is_muted
        self._acts = policy_of(on_spike) is not None  # something is done about spikes before they change the model
        self._warns = on_spike == "warn" or self._acts
        self.awaits_records = on_spike not in (None, "warn")

    def warn(self, messages: Iterable[str]) -> None:
        """Warn with each message, where the script has warnings of spikes."""
        for message in messages if self._warns and not self._is_muted() else ():
            self._complaints.warn(message)

    def notify(self, record: StepRecord | None, events: Sequence[SpikeEvent], action: str = "") -> None:
        """Report new ``events`` of the last record, and the ``action`` on its step.

        Raises:
            SpikeError: the script asks for it.
        """
        messages = self._detectors.follow_up.alerts(events) if events else []
        if record is not None and action:  # as a rank knows it, though not hundreds in a row
            if record.context["in_a_row"] not in _WITH_WARNING:
                return
            reasons = [event.reason for event in events] or [record.skipped]
            where = next((event.where for event in events if event.where), "")
            messages = [f"step {record.step}: " + "; ".join(filter(None, (*reasons, where, action)))]
        elif self._acts:
            self._report_missed([event for event in events if event.signal not in self._detectors.predicted])
        if (self._detectors.needs_detail() or messages) and record is not None:
            self._plugins.call("on_alert", record.step)
        self._detectors.warn_of_failures(self._complaints)
        self.warn(messages)
        for event in events:
            self._call(event)

    def _report_missed(self, events: Sequence[SpikeEvent]) -> None:
        """Warn about spikes that nothing could be done about."""
        if events:
            signals = ", ".join(event.signal for event in events)
            self._complaints.add(
                f"late:{signals}",
                f"that {signals} spiked in step {events[0].step} became known only when the optimizer had stepped, so that nothing was "
                "done about it; what is logged has to be logged before optimizer.step()",
            )

    def _call(self, event: SpikeEvent) -> None:
        if callable(self._on_spike):
            try:
                with fresh_grad_mode():
                    self._on_spike(event)
            except Exception as error:
                self._complaints.add("on_spike", "the function on_spike failed; training continues", error)
        elif self._on_spike == "raise":
            raise SpikeError(str(event))


# --- The way of a monitored step's record through its consumers ---


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
        self.backfill(self.detection.detector_set.take_fetched())
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
            self.backfill(self.detection.detector_set.take_fetched())
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


# --- The steps whose values are on their way to the host, in order ---


class PendingQueue:
    """The steps whose records are not made yet, at most two of them: the one that ended last and the one before.

    Args:
        factory: makes records.
        pipeline: takes them.
        exchange: with other ranks, the steps' numbers decide when values are fetched, not the device.
        fence: receives the time that others spent.
        recorder: may have unwritten records when the run ends.

    Attributes:
        steps: the steps, ascending.
    """

    def __init__(
        self, factory: RecordFactory, pipeline: RecordPipeline, exchange: RankExchange, fence: Fence, recorder: FlightRecorder
    ) -> None:
        self.factory, self.pipeline = factory, pipeline
        self._exchange, self._fence, self._recorder = exchange, fence, recorder
        self.steps: deque[PendingStep] = deque()

    def __del__(self) -> None:
        # collected without detach(): what is still on its way reaches the run directory
        with contextlib.suppress(Exception):
            rest = self._recorder.rest()
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
