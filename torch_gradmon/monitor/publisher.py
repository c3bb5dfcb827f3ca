"""Output of records: to the run directory at once, to the sinks when the step is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import GradmonWarning, WarningLog
from ..core.records import StepRecord
from ..runs.writer import RunWriter, Superseded
from ..sinks.delivery import PATIENCE
from ..sinks.filtered_sink import FilteredSink


class Outbox:
    """Keeps one record until the next one comes, so that sinks receive a late ``log_scalar`` with it.

    The run directory gets a record at once, and its replacement when a value is added.

    Args:
        complaints: where failures are reported.
        run_dir: the run directory; None for none.
        meta: facts for the run directory.
        is_muted: whether another rank writes the output of this one.

    Attributes:
        outlets: the sinks.
        lasting: the run directory and this package's sinks, which must stay alive until the last row is written. The user's sinks
            are not among them: they may hold the model, the optimizer and the monitor.
    """

    def __init__(
        self,
        complaints: WarningLog,
        run_dir: str | os.PathLike[str] | None,
        meta: Mapping[str, Any],
        is_muted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_closed = True
        self._complaints = complaints
        self._is_muted = is_muted
        self.lasting: list[object] = []
        self._run_dir, self._meta = run_dir, dict(meta)
        self._writer = secrets.token_hex(8)
        self._store: RunWriter | None = None
        if run_dir is not None and not is_muted():
            self._opened(run_dir)
        self._waiting: tuple[StepRecord, Callable[[], Mapping[str, float]]] | None = None
        self._failures = 0
        self._has_claimed = False  # the run directory, with its first step
        self._process = os.getpid()
        self.outlets: list[FilteredSink] = []

    def add(self, outlet: FilteredSink) -> None:
        """Send records to ``outlet`` from now on."""
        self.outlets.append(outlet)
        if outlet.is_of_package:
            self.lasting.append(outlet)

    def remove(self, outlet: FilteredSink) -> None:
        """Stop sending records to ``outlet``, and close it."""
        self.outlets.remove(outlet)
        if outlet.is_of_package:
            self.lasting.remove(outlet)
        outlet.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def _forked(self) -> bool:
        """Whether this is a forked worker, which must not touch the parent's files."""
        return os.getpid() != self._process

    @property
    def is_muted(self) -> bool:
        """Whether another rank writes the output of this one."""
        return self._is_muted()

    @property
    def stores(self) -> bool:
        """Whether this rank, or the one that writes its output, has a run directory."""
        return self._run_dir is not None

    @property
    def directory(self) -> Path | None:
        """The run directory of this rank, or of the one that writes its output."""
        return None if self._run_dir is None else Path(self._run_dir)

    @property
    def place(self) -> str:
        """The run directory as part of a message; empty without one."""
        return f"the run directory {os.fspath(self._run_dir)!r}" if self._run_dir is not None else ""

    def is_awaited(self, step: int) -> bool:
        """Whether a sink needs the values of ``step`` as soon as the next step begins."""
        return any(not outlet.deferred and not outlet.dropped and step % outlet.every == 0 for outlet in self._heard)

    @property
    def _heard(self) -> list[FilteredSink]:
        """The sinks of this rank that receive records."""
        return [outlet for outlet in self.outlets if outlet.is_on_all_ranks] if self._is_muted() else self.outlets

    def note(self, **facts: Any) -> None:
        """Add facts about the run."""
        self._meta.update(facts)
        if self._store is not None and not self._forked():
            try:
                self._store.annotate(facts)
            except sqlite3.Error as error:
                self._complaints.add("store", f"the run directory {self._run_dir} could not be written", error)

    def put(self, record: StepRecord, shown: Callable[[], Mapping[str, float]], amend: bool = False) -> None:
        """Take a step's record and a function that returns its values for sinks. ``amend``: it replaces the previous record."""
        if self._forked() or (self.is_muted and not self._heard):
            return
        if not amend:
            self.publish()
        if not self.is_muted:
            self._write(record, amend)
        if not amend or self._waiting is not None:
            self._waiting, self._is_closed = (record, shown), False
        elif self.outlets:
            self._complaints.add("late", f"a value for step {record.step} came after the step had gone out to the sinks")

    def goes_back(self, step: int) -> None:
        """Drop the steps from ``step`` on, which belong to another branch, from the run directory: the run resumes at ``step``.

        With its first step this monitor becomes the writer of the directory.
        """
        if not self._forked() and self._store is not None:
            try:
                self._claim(self._store)
                self._store.rewind(step)
            except sqlite3.Error as error:
                self._complaints.add("store", f"the run directory {self._run_dir} could not be written", error)

    def fill(self, record: StepRecord) -> None:
        """Take the record of an earlier step for the run directory only."""
        if not self._forked() and not self.is_muted and self._run_dir is not None:
            self._write(record, fill=True)

    def publish(self) -> None:
        """Send the waiting record to the sinks."""
        if self._waiting is None or self._forked():
            return
        (record, shown), self._waiting = self._waiting, None
        heard = self._heard
        values = shown() if heard else {}
        texts = [(event, str(event)) for event in record.events] if heard else []
        first: Warning | None = None
        for outlet in heard:
            try:
                outlet.send(values, record.step)
                for event, text in texts:
                    outlet.send_spike(event, text)
            except GradmonWarning as warning:  # where warnings were made errors; the other sinks come first
                first = first or warning
        if first is not None:
            raise first

    def _write(self, record: StepRecord, amend: bool = False, fill: bool = False) -> None:
        if self._run_dir is None or self._failures >= PATIENCE:
            self._complaints.counts["store"] += self._run_dir is not None
            return
        try:
            store = self._opened(self._run_dir)
            self._claim(store)
            store.log(record, update=amend, backfill=fill)
            self._failures = 0
        except Superseded:
            self._failures = PATIENCE
            message = (
                f"another monitor writes to the run directory {self._run_dir} by now, so that this one, with step {record.step}, writes "
                "there no more; give each a run_dir of its own"
            )
            self._complaints.add("store", message)
        except (sqlite3.Error, OSError) as error:
            self._failures += 1
            message = (
                f"step {record.step} could not be written to the run directory {self._run_dir}; training continues, "
                f"and after {PATIENCE} failures in a row nothing more is written"
            )
            self._complaints.add("store", message, error)

    def _claim(self, store: RunWriter) -> None:
        """Claim the directory once, with the first step: if another monitor claims it later, that one keeps it."""
        if not self._has_claimed:
            store.claim(self._meta)
            self._has_claimed = True

    def _opened(self, run_dir: str | os.PathLike[str]) -> RunWriter:
        if self._store is None:
            self._store, self._is_closed = RunWriter(run_dir, self._meta, self._writer), False
            self.lasting.append(self._store)
        return self._store

    def reopen(self) -> None:
        """Mark the directory of a closed run as active again, before the first record comes.

        Nothing changes if this monitor no longer writes there, as after another monitor has claimed the directory.
        """
        if self._run_dir is not None and self._failures < PATIENCE and not self._is_muted() and not self._forked():
            with contextlib.suppress(sqlite3.Error, OSError):  # the first record reports the failure
                self._opened(self._run_dir).claim(self._meta)

    def close(self) -> None:
        """Send the waiting record and close everything; another record opens sinks and the run directory again."""
        if self._forked():
            return
        self._is_closed = True
        self.publish()
        for outlet in self.outlets:
            outlet.close()
        if self._store is not None:
            self._store.close()
            self.lasting.remove(self._store)
            self._store = None
