"""The run directory: one SQLite file that takes every step as it ends and stays readable if the process is killed.

Statistics are stored as what they are, sufficient: one packed float32 blob for each source and step. Every built-in metric of
every layer can be computed when reading, also those that nobody asked for while the run went on. For each tensor the blob
holds count (where it can change from step to step), mean, spread (population standard deviation, or rms where no sum was
measured), mean of |x|, near-zero count, non-finite count, smallest and largest value: float32 keeps seven digits of each,
where the raw sums would lose the spread.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..core.errors import display
from ..core.keys import PARAMETER_SOURCES
from ..core.moments import ALWAYS, WIDTH, Column, identity
from ..core.records import StatsTable, StepRecord

FILE_NAME = "gradmon.sqlite"
FORMAT = 1
_WRITER = "writer"  #: the fact that says which store has claimed a run
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tensors (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS layouts (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, columns INTEGER NOT NULL, tensors BLOB NOT NULL, counts BLOB NOT NULL,
    same_as TEXT NOT NULL, UNIQUE (source, columns, tensors, counts, same_as));
CREATE TABLE IF NOT EXISTS keys (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, metric TEXT NOT NULL, UNIQUE (source, name, metric));
CREATE TABLE IF NOT EXISTS steps (
    segment INTEGER, step INTEGER, time REAL NOT NULL, applied INTEGER NOT NULL, context TEXT NOT NULL, events TEXT NOT NULL,
    PRIMARY KEY (segment, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    segment INTEGER, step INTEGER, layout INTEGER, data BLOB NOT NULL, PRIMARY KEY (segment, step, layout));
CREATE TABLE IF NOT EXISTS segments (segment INTEGER PRIMARY KEY, first INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rng (segment INTEGER, step INTEGER, device TEXT, state BLOB NOT NULL, PRIMARY KEY (segment, step, device));
CREATE TABLE IF NOT EXISTS scalars (
    segment INTEGER, step INTEGER, key INTEGER, value, PRIMARY KEY (segment, step, key)) WITHOUT ROWID;
"""


def file_in(path: str | os.PathLike[str]) -> Path:
    """The run's file for a run directory, or for the file itself."""
    path = Path(path)
    return path if path.is_file() else path / FILE_NAME


def open_to_read(path: str | os.PathLike[str]) -> tuple[sqlite3.Connection, dict[str, Any]]:
    """The run in ``path``, and the facts about it.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of ours, or cannot be read.
    """
    file = file_in(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no run in {str(path)!r}: {str(file)!r} does not exist")
    try:
        try:
            return _connected(file, "mode=ro")
        except sqlite3.OperationalError as error:
            # on a medium that cannot be written to not even a reader can make the files that a run which goes on has beside it
            if "unable to open" not in str(error) or Path(f"{file}-wal").exists():
                raise
            return _connected(file, "mode=ro&immutable=1")
    except sqlite3.DatabaseError as error:
        what = "could not be read" if "lock" in str(error) or "unable to open" in str(error) else "is not a run of torch_gradmon"
        raise ValueError(f"{str(file)!r} {what}: {error}") from error


def _connected(file: Path, how: str) -> tuple[sqlite3.Connection, dict[str, Any]]:
    db = sqlite3.connect(f"{file.resolve().as_uri()}?{how}", uri=True)
    try:
        return db, stored_meta(db)
    except sqlite3.Error:
        db.close()
        raise


def stored_meta(db: sqlite3.Connection) -> dict[str, Any]:
    """The facts about a run."""
    return {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM meta").fetchall()}


class Superseded(Exception):
    """Another store writes into the run directory by now."""


class RunWriter:
    """Writes records into a run directory.

    Args:
        path: the directory, made when missing. An existing run is continued: steps that it has already open a new segment.
        meta: facts about the run, stored as JSON; not where another store has claimed the run.
        writer: what this store calls itself in :meth:`claim`; without a name it writes whoever else does.

    Raises:
        TypeError: ``path`` is no path.
        NotADirectoryError: ``path`` is a file.
        OSError, sqlite3.Error: the directory cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, Any] | None = None, writer: str = "") -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"run_dir must be a directory path, got {display(path)}")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir={str(path)!r} is a file; give a directory, such as 'runs/first'")
        self.path.mkdir(parents=True, exist_ok=True)
        self._process = os.getpid()
        # a hook may run on one of autograd's threads; the monitor never writes from two threads at once
        self._db = sqlite3.connect(self.path / FILE_NAME, check_same_thread=False, timeout=5.0)
        self._db.execute("PRAGMA page_size=8192")  # a step of 200 parameters fits one page
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._ids: dict[tuple[str, tuple[Any, ...]], int] = {}
        self._writer, self._version = writer, -1
        self.note({"format": FORMAT, **(meta or {})})
        self._segment, self._last = self._end()

    def _end(self) -> tuple[int, int | None]:
        """The last segment, and the last step that was written in it."""
        segment, last = self._db.execute(
            "SELECT segment, step FROM steps ORDER BY segment DESC, step DESC LIMIT 1"
        ).fetchone() or (0, None)
        begun = self._db.execute("SELECT MAX(segment) FROM segments").fetchone()[0] or 0
        return (begun, None) if begun > segment else (segment, last)  # nothing was written in the one that was begun

    def claim(self, facts: Mapping[str, Any]) -> None:
        """Write into this run from now on, with these facts: a store of another name that did so before finds out and stops.

        Raises:
            sqlite3.Error: it could not be written.
        """
        self._version = -1
        self._put_facts({"format": FORMAT, **facts, _WRITER: self._writer})
        self._segment, self._last = self._end()

    def _is_writer(self) -> bool:
        """Whether no other store has claimed the run. Reads the file only where somebody wrote to it since; a store without a name
        never asks.
        """
        if not self._writer:
            return True
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            found = self._db.execute("SELECT value FROM meta WHERE name = ?", (_WRITER,)).fetchone()
            if found is not None and json.loads(found[0]) != self._writer:
                return False
            self._version = version
        return True

    def note(self, facts: Mapping[str, Any]) -> None:
        """Store facts about the run, as JSON, unless another store writes into it.

        Raises:
            sqlite3.Error: they could not be written.
        """
        if self._is_writer():
            self._put_facts(facts)

    def _put_facts(self, facts: Mapping[str, Any]) -> None:
        rows = [(name, json.dumps(value, default=str)) for name, value in facts.items()]
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    def goes_back(self, step: int) -> None:
        """The steps from ``step`` on are not what was written of them: what comes opens a new segment.

        Raises:
            sqlite3.Error: it could not be written.
        """
        if self._last is not None and step <= self._last and self._is_writer():
            with self._db:
                self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, ?)", (self._segment + 1, step))
            self._segment, self._last = self._segment + 1, None

    def log(self, record: StepRecord, amend: bool = False, fill: bool = False) -> None:
        """Write one step in one transaction. ``amend`` replaces the step that was written last, ``fill`` adds an earlier one.

        Raises:
            sqlite3.Error: it could not be written; nothing of it was.
            Superseded: another store has claimed the run.
        """
        if not self._is_writer():
            raise Superseded
        if self._last is not None and record.step <= self._last and not (amend or fill):
            self._segment += 1
        where = (self._segment, record.step)
        try:
            with self._db:
                self._write(where, record)
        except sqlite3.Error:
            self._ids.clear()  # ids of a transaction that was rolled back do not exist
            raise
        self._last = record.step if self._last is None or not fill else max(record.step, self._last)

    def _write(self, where: tuple[int, int], record: StepRecord) -> None:
        events = json.dumps([asdict(event) for event in record.events])
        self._db.execute(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?)",
            (*where, record.time, record.applied, json.dumps(record.context, default=str, skipkeys=True), events),
        )
        for source, table in record.tables.items():
            counts = fixed_counts(source, table)
            data = (*where, self._layout(source, table, counts), b"" if table.same_as else pack(table, bool(counts)))
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", data)
        if record.events:
            states = [(*where, device, bytes(state.tolist())) for device, state in record.rng.items()]
            self._db.executemany("INSERT OR REPLACE INTO rng VALUES (?, ?, ?, ?)", states)
        self._db.executemany(
            "INSERT OR REPLACE INTO scalars VALUES (?, ?, ?, ?)",
            [
                (*where, self._id("keys", ("source", "name", "metric"), key), _storable(value))
                for key, value in record.values.items()
                if key not in record.derived
            ],
        )

    def _layout(self, source: str, table: StatsTable, counts: bytes) -> int:
        tensors = array("I", [self._id("tensors", ("name",), (name,)) for name in table.names]).tobytes()
        mask = sum(1 << column for column in table.columns)
        columns = ("source", "columns", "tensors", "counts", "same_as")
        return self._id("layouts", columns, (source, mask, tensors, counts, table.same_as))

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
        if os.getpid() == self._process:
            with contextlib.suppress(
                sqlite3.Error
            ):  # SQLite does it by itself only where nobody else has the file open to read it
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._db.close()


def fixed_counts(source: str, table: StatsTable) -> bytes:
    """The counts of a source whose tensors keep their size, to be stored once: little-endian int64; empty for other sources."""
    if source not in PARAMETER_SOURCES:
        return b""
    counts = array("q", table.rows[:, Column.COUNT].to(torch.int64).tolist())
    if sys.byteorder == "big":
        counts.byteswap()
    return counts.tobytes()


def _stored(columns: frozenset[Column], counted: bool) -> list[Column]:
    return sorted((columns | ALWAYS) - ({Column.COUNT} if counted else set()))


def pack(table: StatsTable, counted: bool) -> bytes:
    """``table`` as little-endian float32, tensor after tensor, measured columns in the order of :class:`Column`.

    ``counted``: without the counts, which are kept elsewhere.
    """
    rows, columns = table.rows, _stored(table.columns, counted)
    count = rows[:, Column.COUNT]
    per_element = rows.clone()
    per_element[:, Column.SUM] = rows[:, Column.SUM] / count
    per_element[:, Column.ABS_SUM] = rows[:, Column.ABS_SUM] / count
    mean_square = rows[:, Column.SQUARE_SUM] / count
    if Column.SUM in table.columns:
        variance = (mean_square - per_element[:, Column.SUM].square()).clamp(min=0)
        # without a finite spread, NaN or infinite mean squares still tell which of the two it was
        per_element[:, Column.SQUARE_SUM] = torch.where(mean_square.isfinite(), variance, mean_square).sqrt()
    else:
        per_element[:, Column.SQUARE_SUM] = mean_square.sqrt()
    per_element = torch.where(count.unsqueeze(1) > 0, per_element, 0.0)
    packed = array("f", per_element[:, columns].to(torch.float32).flatten().tolist())
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes, names: tuple[str, ...], columns: frozenset[Column], counts: bytes) -> StatsTable:
    """The inverse of :func:`pack`, to float32 precision of the values that metrics are made of. ``counts`` may be empty."""
    return StatsTable(names, unpack_steps(data, 1, len(names), columns, counts)[0], columns)


def unpack_steps(data: bytes, steps: int, tensors: int, columns: frozenset[Column], counts: bytes) -> torch.Tensor:
    """What :func:`pack` made of so many steps, one behind the other, as rows ``[steps, tensors, 8]``."""
    present = _stored(columns, bool(counts))
    rows = identity(steps * tensors).reshape(steps, tensors, WIDTH)
    if not rows.numel():
        return rows
    stored = _numbers("f", data, torch.float32).reshape(steps, tensors, len(present))
    rows[..., present] = stored.to(torch.float64)
    if counts:
        rows[..., Column.COUNT] = _numbers("q", counts, torch.int64).to(torch.float64)
    count, spread = rows[..., Column.COUNT].clone(), rows[..., Column.SQUARE_SUM].clone()
    mean = rows[..., Column.SUM].clone() if Column.SUM in columns else torch.zeros_like(count)
    rows[..., Column.SUM] *= count
    rows[..., Column.ABS_SUM] *= count
    rows[..., Column.SQUARE_SUM] = count * torch.where(spread.isfinite(), mean.square() + spread.square(), spread)
    empty = count == 0
    rows[empty] = identity(int(empty.sum()))
    return rows


def _numbers(code: str, data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Little-endian numbers, of which there is at least one."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return torch.frombuffer(numbers, dtype=dtype)


def _storable(value: float) -> float | str:
    # SQLite stores NaN as NULL, which could not be told from nothing
    return "NaN" if value != value else value
