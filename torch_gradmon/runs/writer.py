"""Write a run directory: one SQLite file that takes every step as it ends and stays readable if the process is killed.

Statistics are stored as rows of sufficient statistics, one blob for each source and step, see :mod:`torch_gradmon.runs.packing`. Every
built-in metric of every layer can be computed from them, requested during the run or not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ..core.errors import display
from ..core.process import HomeProcess
from ..core.records import StatsTable, StepRecord
from ..core.step_values import StepValues
from .file import FILE_NAME, FORMAT, open_to_read, open_to_write
from .packing import fixed_counts, pack

#: Steps with NaN or Inf in a row whose states of random generators are stored, 5 kB each: after these a run is NaN for good.
_SPOILED = 8
_WRITER = "writer"  #: the fact with the name of the writer that has claimed the run


class Superseded(Exception):
    """Another writer has claimed the run directory."""


class RunWriter:
    """Writes records into a run directory.

    Args:
        path: the directory, created if missing. An existing run is continued: steps that it already has open a new segment.
        meta: facts about the run, stored as JSON unless another writer has claimed the run.
        writer: a name for :meth:`claim`. A writer without a name ignores claims.

    Raises:
        TypeError: ``path`` is not a path.
        NotADirectoryError: ``path`` is a file.
        OSError, sqlite3.Error: the directory cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, Any] | None = None, writer: str = "") -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"run_dir must be a directory path, got {display(path)}")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir={str(path)!r} is a file; give a directory, such as 'runs/first'")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._db = open_to_write(self.path / FILE_NAME)
            self._file = _identity(self.path / FILE_NAME)
        except (OSError, sqlite3.Error) as error:
            raise type(error)(f"run_dir={str(path)!r} cannot be written: {error}; give another directory") from error
        self._process = HomeProcess()
        self._ids: dict[tuple[str, tuple[Any, ...]], int] = {}
        self._writer, self._version = writer, -1
        self._written: StepRecord | None = None  # the last one, as the file has it
        self._spoiled = 0  # steps in a row before this one with a spike of NaN or Inf
        self.annotate({"format": FORMAT, **(meta or {})})
        self._segment, self._last = self._end()

    def _end(self) -> tuple[int, int | None]:
        """The last segment, and the last step written to it."""
        segment, last = self._db.execute(
            "SELECT segment, step FROM steps ORDER BY segment DESC, step DESC LIMIT 1"
        ).fetchone() or (0, None)
        begun = self._db.execute("SELECT MAX(segment) FROM segments").fetchone()[0] or 0
        return (begun, None) if begun > segment else (segment, last)  # the segment has begun, but has no step

    def presence(self) -> Literal["there", "deleted", "replaced"]:
        """Whether the path still leads to the file that is written. SQLite goes on with a deleted file, which nobody can read."""
        try:
            found = _identity(self.path / FILE_NAME)
        except FileNotFoundError:
            return "deleted"
        except OSError:  # as where a server does not answer
            return "there"
        if found != self._file:
            if not self._is_written_at(self.path):
                return "replaced"
            self._file = found  # some network file systems number their files anew
        return "there"

    def _is_written_at(self, path: Path) -> bool:
        """Whether the file there was claimed by this writer."""
        try:
            database, meta = open_to_read(path)
        except (OSError, ValueError, sqlite3.Error):
            return False
        database.close()
        return bool(self._writer) and meta.get(_WRITER) == self._writer

    def claim(self, facts: Mapping[str, Any]) -> None:
        """Become the writer of this run, with these facts. A writer of another name stops at its next record.

        Raises:
            sqlite3.Error: it could not be written.
        """
        self._version = -1
        self._put_facts({"format": FORMAT, **facts, _WRITER: self._writer})
        (self._segment, self._last), self._written = self._end(), None

    def _is_writer(self) -> bool:
        """Whether no other writer has claimed the run. Reads the file only after another connection wrote to it."""
        if not self._writer:
            return True
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            found = self._db.execute("SELECT value FROM meta WHERE name = ?", (_WRITER,)).fetchone()
            if found is not None and json.loads(found[0]) != self._writer:
                return False
            self._version = version
        return True

    def annotate(self, facts: Mapping[str, Any]) -> None:
        """Store facts about the run, as JSON, unless another writer has claimed it.

        Raises:
            sqlite3.Error: they could not be written.
        """
        if self._is_writer():
            self._put_facts(facts)

    def _put_facts(self, facts: Mapping[str, Any]) -> None:
        rows = [(name, json.dumps(value, default=str)) for name, value in facts.items()]
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def replaces_all(self, step: int) -> bool:
        """Whether the run has steps, and a rewind to ``step`` replaces all of them.

        Raises:
            sqlite3.Error: the run could not be read.
        """
        if self._last is None:
            return False
        (first,) = self._db.execute("SELECT MIN(step) FROM steps").fetchone()
        return first is not None and step <= int(first)

    @property
    def last(self) -> int | None:
        """The last step that was written."""
        return self._last

    def rewind(self, step: int) -> None:
        """Replace the steps from ``step`` on: the next record opens a new segment.

        Raises:
            sqlite3.Error: it could not be written.
        """
        if self._last is not None and step <= self._last and self._is_writer():
            with self._db:
                self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (self._segment + 1, step))
            self._segment, self._last, self._written = self._segment + 1, None, None

    def log(self, record: StepRecord, update: bool = False, backfill: bool = False) -> None:
        """Write one step in one transaction. ``update`` replaces the last step, ``backfill`` adds an earlier one.

        Raises:
            sqlite3.Error: it could not be written; the transaction was rolled back.
            Superseded: another writer has claimed the run.
        """
        if not self._is_writer():
            raise Superseded
        if self._last is not None and record.step <= self._last and not (update or backfill):
            self._segment += 1
        if not (update or backfill):
            self._spoiled = self._spoiled + 1 if self._written is not None and _is_spoiled(self._written) else 0
        where = (self._segment, record.step)
        try:
            with self._db:
                self._write(where, record, self._written if update else None)
        except sqlite3.Error:
            self._ids.clear()  # ids from the rolled-back transaction do not exist
            self._written = None
            raise
        self._written = None if backfill else record
        self._last = record.step if self._last is None or not backfill else max(record.step, self._last)

    def _write(self, where: tuple[int, int], record: StepRecord, known: StepRecord | None) -> None:
        if known is None or known.step != record.step:
            tables, values = record.tables, record.values
        else:  # a value that came late: what the file has is not written again
            tables = {source: table for source, table in record.tables.items() if known.tables.get(source) is not table}
            values = StepValues.of(record.values).since(StepValues.of(known.values))
        if tables is record.tables or known is None or _facts(record) != _facts(known):
            events = json.dumps([asdict(event) for event in record.events])
            self._db.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?)",
                (*where, record.time, record.applied, json.dumps(record.context, default=str, skipkeys=True), events),
            )
        counts = {source: fixed_counts(source, table) for source, table in tables.items()}
        blobs = pack({source: (table, bool(counts[source])) for source, table in tables.items() if not table.same_as})
        self._db.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)",
            [(*where, self._layout(source, table, counts[source]), blobs.get(source, b"")) for source, table in tables.items()],
        )
        if record.events and self._spoiled < _SPOILED:
            states = [(*where, device, bytes(state.tolist())) for device, state in record.rng.items()]
            self._db.executemany("INSERT OR REPLACE INTO rng VALUES (?, ?, ?, ?)", states)
        self._db.executemany(
            "INSERT OR REPLACE INTO scalars VALUES (?, ?, ?, ?)",
            [
                # without a call for a key that is known
                (*where, self._ids.get(("keys", key)) or self._id("keys", ("source", "name", "metric"), key), _storable(value))
                for key, value in record.values_beside_views(values).by_key.items()
            ],
        )

    def _layout(self, source: str, table: StatsTable, counts: bytes) -> int:
        known = "known layouts", (source, *table.names, table.columns, counts, table.same_as)
        if known in self._ids:
            return self._ids[known]
        tensors = array("I", [self._id("tensors", ("name",), (name,)) for name in table.names]).tobytes()
        mask = sum(1 << column for column in table.columns)
        columns = ("source", "columns", "tensors", "counts", "same_as")
        found = self._ids[known] = self._id("layouts", columns, (source, mask, tensors, counts, table.same_as))
        return found

    def _id(self, table: str, columns: tuple[str, ...], values: Iterable[Any]) -> int:
        values = tuple(values)
        found = self._ids.get((table, values))
        if found is None:
            self._db.execute(
                f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", values
            )
            condition = " AND ".join(f"{column} = ?" for column in columns)
            found = int(self._db.execute(f"SELECT id FROM {table} WHERE {condition}", values).fetchone()[0])
            self._ids[table, values] = found
        return found

    def close(self) -> None:
        """Close the file. In a forked child, where the file belongs to the parent, do nothing."""
        if not self._process.is_forked:
            # SQLite checkpoints on close only if no reader has the file open
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._db.close()


def _facts(record: StepRecord) -> tuple[object, ...]:
    """What the table of steps has of a record."""
    return record.time, record.applied, record.context, record.events


def _identity(file: Path) -> tuple[int, int]:
    """What distinguishes this file from a later one of its name."""
    found = os.stat(file)
    return found.st_dev, found.st_ino


def _is_spoiled(record: StepRecord) -> bool:
    """Whether NaN or Inf is a spike of this step."""
    return any(not math.isfinite(event.value) for event in record.events)


def _storable(value: float) -> float | str:
    # SQLite would store NaN as NULL, which means that there is no value
    return "NaN" if value != value else value
