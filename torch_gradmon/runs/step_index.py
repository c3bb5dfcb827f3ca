"""Which steps a run's file has, kept up to date by reading only what is new."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class StepIndex:
    """The steps of a file and the segment of each. A segment replaces the steps of earlier ones from its own first step on.

    Args:
        db: the file; used by this thread only. No transaction is left open on it, since that would keep a writer from truncating its log.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._version: int | None = None
        self._segment, self._rowid = -1, 0
        self.steps: list[int] = []
        self.segment_of: dict[int, int] = {}

    def look(self) -> int | None:
        """Read what was written since the last look.

        Returns:
            The first step that may be new or changed; None if nothing was written. The last step may change by a late value.
        """
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return None
        self._db.execute("BEGIN")  # a consistent snapshot
        try:
            first = min([self._take(segment, first) for segment, first in self._changes()], default=None)
        finally:
            self._db.rollback()
        self._version = version
        return first

    def _changes(self) -> Iterator[tuple[int, int]]:
        """Segments that were written to, and the first step to read from each."""
        written = self._written()
        if self.steps:
            yield self._segment, min(self.steps[-1], written.get(self._segment, self.steps[-1]))
        begins = self._declared_begins()
        while True:
            (segment,) = self._db.execute("SELECT MIN(segment) FROM steps WHERE segment > ?", (self._segment,)).fetchone()
            if segment is None:
                return
            (first,) = self._db.execute("SELECT MIN(step) FROM steps WHERE segment = ?", (segment,)).fetchone()
            yield segment, min(first, begins.get(segment, first))

    def _written(self) -> dict[int, int]:
        """By segment, the first step with new statistics; an older one if it was recorded before a spike and added later."""
        before, self._rowid = self._rowid, self._db.execute("SELECT IFNULL(MAX(rowid), 0) FROM rows").fetchone()[0]
        if not self.steps:
            return {}
        # the plus keeps SQLite from scanning the whole table in the order of an index
        return dict(
            self._db.execute("SELECT segment, MIN(step) FROM rows WHERE rowid > ? GROUP BY +segment", (before,)).fetchall()
        )

    def _declared_begins(self) -> dict[int, int]:
        """First steps of segments that begin at a step which was not monitored."""
        try:
            return dict(self._db.execute("SELECT segment, first FROM segments").fetchall())
        except sqlite3.OperationalError:  # early files have no such table
            return {}

    def _take(self, segment: int, first: int) -> int:
        """Assign the steps from ``first`` on to ``segment``."""
        cut = bisect_left(self.steps, first)
        for step in self.steps[cut:]:
            del self.segment_of[step]
        rows = self._db.execute("SELECT step FROM steps WHERE segment = ? AND step >= ? ORDER BY step", (segment, first))
        self.steps[cut:] = [step for (step,) in rows.fetchall()]
        self.segment_of.update(dict.fromkeys(self.steps[cut:], segment))
        self._segment = segment
        return first

    def of_the_run(self, known: Mapping[int, T], column: str, table: str) -> dict[int, T]:
        """Those of ``known``, by ids in a column of a table, that some step of the run has: a replaced step does not count."""
        if self._segment < 1:  # nothing was replaced
            return dict(known)
        query = f"SELECT DISTINCT {column} FROM {table} WHERE segment = ? AND step BETWEEN ? AND ?"
        there = {number for span in self.spans(None, len(self.steps)) for (number,) in self._db.execute(query, span).fetchall()}
        return {number: each for number, each in known.items() if number in there}

    def spans(self, since: int | None, most: int) -> Iterator[tuple[int, int, int]]:
        """The steps from ``since`` on in parts of ``most`` steps or fewer, ascending: segment, first and last step."""
        at = 0 if since is None else bisect_left(self.steps, since)
        while at < len(self.steps):
            segment = self.segment_of[self.steps[at]]
            end = min(at + most, len(self.steps))
            end = bisect_right(self.steps, segment, at, end, key=self.segment_of.__getitem__)  # later ones have later steps
            yield segment, self.steps[at], self.steps[end - 1]
            at = end
