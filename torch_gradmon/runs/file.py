"""The file of a run directory: its schema, and how it is opened."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

FILE_NAME = "gradmon.sqlite"
FORMAT = 1
SCHEMA = """
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
#: What SQLite reports where it cannot create the files that it keeps beside a database.
_BARRED = "unable to open", "readonly database"
_UNREADABLE = (
    "{!r} could not be read: SQLite has to create files beside that of a run that has not ended or was killed, and {!r} is not writable; "
    "copy the directory to a writable place"
)


def file_in(path: str | os.PathLike[str]) -> Path:
    """The run's file; ``path`` is the run directory or the file itself."""
    path = Path(path)
    return path if path.is_file() else path / FILE_NAME


def open_to_read(path: str | os.PathLike[str]) -> tuple[sqlite3.Connection, dict[str, Any]]:
    """The file of the run in ``path``, and the facts about the run. It may be of another user, or on a read-only medium.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of this package, or cannot be read.
    """
    file = file_in(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no run in {str(path)!r}: {str(file)!r} does not exist")
    real = file.resolve()  # beside which SQLite keeps its other files
    if not os.access(file, os.R_OK):
        raise ValueError(f"{str(file)!r} could not be read: this user has no permission")
    is_writable = os.access(real, os.W_OK) and os.access(real.parent, os.W_OK)
    try:
        # Beside a database in WAL mode SQLite keeps other files: a connection that may write removes them at its end, and one that may not
        # cannot create them, or would leave some that the owner of the run cannot use.
        return _connected(real, "mode=rw" if is_writable or _is_written(real) else "mode=ro&immutable=1")
    except sqlite3.DatabaseError as error:
        if any(sign in str(error) for sign in _BARRED):
            raise ValueError(_UNREADABLE.format(str(file), os.fspath(real.parent))) from error
        what = "could not be read" if "lock" in str(error) else "is not a run of torch_gradmon"
        raise ValueError(f"{str(file)!r} {what}: {error}") from error


def _is_written(file: Path) -> bool:
    """Whether the run has not ended, or was killed: SQLite keeps its last steps in another file."""
    try:
        return Path(f"{file}-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


class Connection(sqlite3.Connection):
    """A connection that closes when nothing refers to it any more, without the warning that Python 3.13 gives."""

    def __del__(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # as in another thread than its own
            self.close()


def _connected(file: Path, how: str) -> tuple[sqlite3.Connection, dict[str, Any]]:
    db = sqlite3.connect(f"{file.as_uri()}?{how}", uri=True, factory=Connection)
    try:
        db.execute("PRAGMA query_only=1")
        return db, stored_meta(db)
    except sqlite3.Error:
        db.close()
        raise


def stored_meta(db: sqlite3.Connection) -> dict[str, Any]:
    """The facts about a run."""
    return {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM meta").fetchall()}


def open_to_write(path: Path) -> Connection:
    """A connection to the file of a run, which is made if it is missing.

    Raises:
        sqlite3.Error: it is no such file, or cannot be written.
    """
    # hooks may run on autograd's threads, but the monitor never writes from two threads at once
    database = sqlite3.connect(path, check_same_thread=False, timeout=5.0, factory=Connection)
    database.execute("PRAGMA page_size=8192")  # a step of 200 parameters fits one page
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.executescript(SCHEMA)
    return database
