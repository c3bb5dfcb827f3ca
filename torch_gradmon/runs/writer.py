"""Write a run directory: every step is appended as it ends, one record of values and one of rows.

Statistics are stored as rows of sufficient statistics, see :func:`.format.pack`. Every built-in metric of every layer can be computed from
them, requested during the run or not.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.errors import display
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.moments import Column
from ..core.records import StatsTable, StepRecord, StepValues
from ..core.torch_modes import HomeProcess
from . import format as f
from .index import RunIndex
from .log import LogReader, LogWriter, reading_within

#: Steps with NaN or Inf in a row whose states of random generators are stored, 5 kB each: after these a run is NaN for good.
_SPOILED = 8
#: A pair of files is left for another one beyond this size, so that copies of a running run copy finished files once.
_LARGEST = 256 << 20
#: Sets of keys that are remembered.
_SETS = 256
#: What is over as soon as there is room again, for the same file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Seconds between looks at who else writes to the directory.
_LOOKS = 1.0
#: So many later writers of a run are looked at, each for so many seconds a look.
_SUCCESSORS, _LOOK_SECONDS = 16, 0.02
#: Seconds between syncs, and the largest share of the time that they may take.
_SYNCS, _SHARE = 2.0, 0.001
#: What is stored of a record beside values and rows.
_FACTS = attrgetter("time", "applied", "context", "events")


class Superseded(Exception):
    """Another writer has claimed the run directory."""


class Successors:
    """The writers of a run after pair ``number``. A look reads what is new in their files, in limited time: the training waits for it."""

    def __init__(self, directory: Path, number: int) -> None:
        self._directory, self._number = directory, number
        self._files: list[LogReader | None] = []  # None for a file of something else

    def have_claimed(self) -> bool:
        # there is none, or it cannot be asked for now, which must not keep the training waiting
        with contextlib.suppress(OSError):
            while len(self._files) < _SUCCESSORS:
                self._files.append(LogReader(self._directory / f.name_of(self._number + 1 + len(self._files), f.VALUES)))
        return any(self._has_claimed(place) for place in range(len(self._files)))

    def _has_claimed(self, place: int) -> bool:
        file = self._files[place]
        try:
            with reading_within(_LOOK_SECONDS):
                for record in file.follow() if file is not None else ():
                    kind = record.data[:1]
                    if kind == f.STEP or (kind == f.JSON and f.json_of(record.data).get("claims") is True):
                        return True
        except ValueError:  # it takes too long, or is of something else
            self._files[place] = None
        except OSError:
            pass
        return False

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()


class RunWriter:
    """Writes records into a run directory, which is created if missing, into files of its own.

    An existing run is continued: steps that it already has are replaced. ``meta`` are facts about the run, stored as JSON; they count until
    another writer claims the run. Raises TypeError, OSError, and ValueError if the run in it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, Any] | None = None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"run_dir must be a directory path, got {display(path)}")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir={str(path)!r} is a file; give a directory, such as 'runs/first'")
        self._process = HomeProcess()
        self._meta = dict(meta or {})
        self._name, self._number = secrets.token_hex(8), 0  # of no files yet
        self._has_claimed = self._is_done = False  # whether it, or a later one, is the writer of the run
        self._written: StepRecord | None = None  # the last one, as the file has it
        self._spoiled = 0  # steps in a row before this one with a spike of NaN or Inf
        self._looked = self._synced = time.monotonic()
        self._sync_takes = 0.0
        self._is_cut_off, self._begun_anew = False, -math.inf
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            there = f.pairs_in(self.path)
            self._before = RunIndex(self.path) if there else None  # what earlier writers wrote, until the first step
            self.last = self._before.steps[-1] if self._before is not None and self._before.steps else None
            self._begin_pair(f.next_number(self.path))
        except OSError as error:
            raise type(error)(f"run_dir={str(path)!r} cannot be written: {error}; give another directory") from error

    # --- the files ------------------------------------------------------------------------------------------------------------------

    def _begin_pair(self, number: int) -> None:
        """Begin a pair of files with the next free number from ``number`` on, which no other writer can have."""
        while True:
            try:
                values = LogWriter(self.path / f.name_of(number, f.VALUES))
                break
            except FileExistsError:
                number += 1
        try:
            head = {"is": "head", "format": f.FORMAT, "writer": self._name, "claims": self._has_claimed, "facts": self._meta}
            begin = values.append(f.of_json(head))[0]
        except OSError:
            os.unlink(values.path)
            raise
        if self._number:
            self._close_files()
        self._number, self._values, self._successors = number, values, Successors(self.path, number)
        self._rows: LogWriter | None = None
        self._begin_index()
        self._entries.append((begin, 0, 0.0, 0, 0, 0, 0, f.IS_JSON))
        self._ids: dict[Key, int] = {}
        self._key_sets: dict[tuple[Key, ...], tuple[int, tuple[int, ...]]] = {}  # the number of each, and those of its keys
        self._key_set = 0  # the last one that was defined
        self._layouts: dict[f.TableLayout | str, int] = {}  # where each is defined
        self._latest: dict[str, tuple[f.TableLayout, int]] = {}  # the same of each source, since hashing all names takes time
        self._layout_sets: dict[tuple[int, ...], int] = {(): 0}

    def _close_files(self) -> None:
        if len(self._entries) >= f.INDEXED // 8 and not self._is_done:
            with contextlib.suppress(OSError):  # which costs readers time only
                self._put_index()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.sync()
            with contextlib.suppress(OSError):
                file.close()
        self._successors.close()

    def _put(self, facts: Mapping[str, Any]) -> None:
        begin, _ = self._values.append(f.of_json(facts))
        self._entries.append((begin, 0, 0.0, 0, 0, 0, 0, f.IS_JSON))

    def _begin_index(self, before: tuple[int, int] = (0, 0)) -> None:
        self._before_index = before
        self._entries: list[tuple[float, ...]] = []  # of an index of the records since the last one
        self._indexed: list[tuple[tuple[int, ...], np.ndarray]] = []  # the keys and values of each of these that has any
        self._waiting = 0  # so many values

    def _put_index(self) -> None:
        """Write an index of the records since the last one, and their values by key, so that a reader need not read all of them."""
        columns: dict[int, list[float]] = {}
        for keys, values in self._indexed:
            for key, value in zip(keys, values.tolist(), strict=True):
                columns.setdefault(key, []).append(value)
        begins = {key: self._values.append(f.of_column(key, np.array(column)))[0] for key, column in columns.items()}
        entries = np.array(self._entries, f.ENTRY)
        self._begin_index(self._values.append(f.of_index(self._before_index, entries, begins)))

    def _row_file(self) -> LogWriter:
        if self._rows is None:
            self._rows = LogWriter(self.path / f.name_of(self._number, f.ROWS))
        return self._rows

    @property
    def _files(self) -> list[LogWriter]:
        return [self._values] if self._rows is None else [self._rows, self._values]  # values are read once their rows are there

    def presence(self) -> Literal["there", "deleted", "replaced"]:
        """Whether the path still leads to the file that is written. A process goes on with a deleted file, which nobody can read.

        Asks the file system about the path once a second, and about the file at each call.
        """
        try:
            own = os.fstat(self._values.file)
            if own.st_nlink and time.monotonic() - self._looked < _LOOKS:
                return "there"
            found = os.lstat(self._values.path)
        except (FileNotFoundError, NotADirectoryError):
            return "deleted"
        except OSError:  # as where a server does not answer
            return "there"
        return "there" if os.path.samestat(found, own) or self._is_head_at(Path(self._values.path)) else "replaced"

    def _is_head_at(self, path: Path) -> bool:
        """Whether the file there begins as ours: some network file systems number their files anew."""
        try:
            with contextlib.closing(LogReader(path)) as file:
                return f.json_of(file.at(0) or b"").get("writer") == self._name
        except (OSError, ValueError):
            return False

    def _is_superseded(self) -> bool:
        """Whether a later writer has claimed the run. Looks once a second."""
        now = time.monotonic()
        if not self._is_done and now - self._looked >= _LOOKS:
            self._looked = now
            self._is_done = self._successors.have_claimed()
        return self._is_done

    # --- facts ----------------------------------------------------------------------------------------------------------------------

    def claim(self, facts: Mapping[str, Any]) -> None:
        """Become the writer of this run, with these facts; an earlier writer stops within a second. Raises OSError."""
        self._meta, self._is_done = dict(facts), False
        if self._before is not None:  # the last look at what earlier writers wrote
            self._before.refresh()
            self.last = self._before.steps[-1] if self._before.steps else None
            self._before.close()
            self._before = None
        free = f.next_number(self.path)
        self._has_claimed = True
        if free > self._number + 1:
            self._begin_pair(free)
        else:
            self._put({"is": "claim", "claims": True, "facts": self._meta})

    def annotate(self, facts: Mapping[str, Any]) -> None:
        """Store facts about the run, as JSON, unless another writer has claimed it. Raises OSError."""
        self._meta.update(facts)
        self._looked = -math.inf  # facts are few, so that each looks
        if not self._is_superseded():
            self._put({"is": "facts", "facts": dict(facts)})

    # --- steps ----------------------------------------------------------------------------------------------------------------------

    def replaces_all(self, step: int) -> bool:
        """Whether the run has steps of earlier writers, and a rewind to ``step`` replaces all of them."""
        return self._before is not None and bool(self._before.steps) and step <= self._before.steps[0]

    def rewind(self, step: int) -> None:
        """Replace the steps from ``step`` on. Raises OSError."""
        if self.last is not None and step <= self.last and not self._is_superseded():
            self._put({"is": "rewind", "step": step})
            self.last = self._written = None

    def log(self, record: StepRecord, update: bool = False, backfill: bool = False) -> None:
        """Write one step. ``update`` replaces the last step, ``backfill`` adds an earlier one.

        Raises OSError, when what was written of it is cut off, and Superseded if another writer has claimed the run.
        """
        now = time.monotonic()
        if (self._is_done or now - self._looked >= _LOOKS) and self._is_superseded():
            raise Superseded
        if not (update or backfill):
            before = self._written.events if self._written is not None else ()
            spoiled = bool(before) and any(not math.isfinite(event.value) for event in before)
            self._spoiled = self._spoiled + 1 if spoiled else 0
            if len(self._entries) >= f.INDEXED or self._waiting >= f.INDEXED_VALUES:
                with contextlib.suppress(OSError):  # the step says so; a later step tries it again
                    self._put_index()
            # these files cannot be written any more, as after a server was away, though others may be
            is_lost = self._is_cut_off and now - self._begun_anew >= _LOOKS
            if is_lost:
                self._begun_anew, self._is_cut_off = now, False
            if is_lost or self._values.size + (0 if self._rows is None else self._rows.size) > _LARGEST:
                self._begin_pair(self._number + 1)
        known, self._written = self._written if update else None, None
        # what an earlier file has is no longer amended, and its step is written anew
        backfills = backfill or (update and known is None and self.last is not None and record.step <= self.last)
        try:
            self._write(record, known, f.BACKFILLS if backfills else f.AMENDS if update else 0)
        except OSError as error:
            self._is_cut_off = error.errno not in _FULL
            raise
        self._written = None if backfill else record
        self.last = record.step if self.last is None or not backfill else max(record.step, self.last)
        if now - self._synced >= max(_SYNCS, self._sync_takes / _SHARE):  # make what was written visible on other hosts
            begin = time.monotonic()
            for file in self._files:
                file.sync()
            self._synced = time.monotonic()
            self._sync_takes = self._synced - begin

    def _write(self, record: StepRecord, known: StepRecord | None, flags: int) -> None:
        if known is None or known.step != record.step:
            tables, values, rng, is_news = record.tables, record.values, record.rng, True
        else:  # a value that came late: what the file has is not written again
            tables, rng, is_news = dict[str, StatsTable](), {} if known.events else record.rng, _FACTS(record) != _FACTS(known)
            if record.tables is not known.tables:
                tables = {source: table for source, table in record.tables.items() if known.tables.get(source) is not table}
            values = record.values
            if isinstance(values, StepValues) and isinstance(known.values, StepValues):
                values = values.since(known.values)
        rng = rng if record.events and self._spoiled < _SPOILED else {}
        sources, stored = self._layouts_of(tables) if tables else ([], [])
        blobs = iter(f.pack(stored) if stored else ())
        parts = [(place, *((0, b"") if same_as else next(blobs))) for place, same_as in sources]
        for device, state in rng.items():
            parts.append((self._defined(device), 0, bytes(state.tolist())))
        places = tuple(map(itemgetter(0), parts))
        if (layouts := self._layout_sets.get(places)) is None:
            layouts = len(self._layout_sets)
            self._put({"is": "layouts", "number": layouts, "at": places})
            self._layout_sets[places] = layouts
        rows = (self._rows or self._row_file()).append(f.of_tables(record.step, parts)) if parts else (0, 0)
        if not isinstance(values, StepValues):
            values = StepValues.of(values)
        elif record.tables and values.has_views:  # which readers compute from the rows
            values = values.rest
        by_key = values.by_key
        number, keys = self._key_sets.get(tuple(by_key)) or self._new_key_set(tuple(by_key)) if by_key else (0, ())
        frame = f.StepFrame(
            record.step,
            record.time,
            flags | (f.APPLIED if record.applied else 0) | (f.HAS_EVENTS if record.events else 0),
            rows,
            layouts,
            number,
            np.array(list(by_key.values()), np.float64),
            f.text_of(record.context) if is_news else b"",
            f.text_of([asdict(event) for event in record.events]) if is_news and record.events else b"",
        )
        begin, _ = self._values.append(frame.packed())
        self._indexed.append((keys, frame.values))
        self._waiting += len(keys)
        self._entries.append((begin, frame.step, frame.time, *rows, layouts, number, frame.flags))

    def _layouts_of(self, tables: Mapping[str, StatsTable]) -> tuple[list[tuple[int, Any]], list[Any]]:
        """Of each table where its layout is defined, and the source that has the same rows; and what has to be packed of the others."""
        places, stored = [], list[Any]()
        for source, table in tables.items():
            rows = table.rows.numpy()
            # tensors of other sources change their size
            counts = f.integers(rows[:, Column.COUNT].tobytes()) if source in PARAMETER_SOURCES else ()
            layout = f.TableLayout(source, table.names, table.columns, counts, table.same_as)
            known = self._latest.get(source)
            if known is None or known[0] != layout:
                known = self._latest[source] = layout, self._defined(layout)
            places.append((known[1], table.same_as))
            if not table.same_as:
                stored.append((rows, table.columns, bool(counts)))
        return places, stored

    def _defined(self, layout: f.TableLayout | str) -> int:
        """Where a layout, or the device of a random state, is defined in the file with rows."""
        place = self._layouts.get(layout)
        if place is None:
            facts = {"is": "rng", "device": layout} if isinstance(layout, str) else layout.definition()
            place = self._layouts[layout] = self._row_file().append(f.of_json(facts))[0]
        return place

    def _new_key_set(self, keys: tuple[Key, ...]) -> tuple[int, tuple[int, ...]]:
        """The number of a set of keys, and those of the keys."""
        if new := [key for key in keys if key not in self._ids]:
            self._put({"is": "keys", "first": len(self._ids), "keys": new})
            self._ids.update(zip(new, range(len(self._ids), len(self._ids) + len(new)), strict=True))
        found = self._key_set + 1, tuple([self._ids[key] for key in keys])
        self._put({"is": "sets", "number": found[0], "keys": found[1]})
        self._key_set = found[0]
        if len(self._key_sets) >= _SETS:
            self._key_sets.clear()
        self._key_sets[keys] = found
        return found

    def close(self) -> None:
        """Close the files. In a forked child, where they belong to the parent, do nothing."""
        if self._process.is_forked:
            return
        self._close_files()
        if self._before is not None:
            self._before.close()
