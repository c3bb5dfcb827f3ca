"""Which steps a run's file has, kept up to date by reading what is new only."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class StepIndex:
    """The steps of a file and the segment of each. A segment takes the place of what earlier ones have from its first step on.

    Args:
        db: the file; no other thread uses it, and no transaction is left open on it, which would keep a writer's log from being
            emptied.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._version: int | None = None
        self._segment, self._rowid = -1, 0
        self.steps: list[int] = []
        self.segment_of: dict[int, int] = {}

    def look(self) -> int | None:
        """Look at what was written since the last look.

        Returns:
            The first step that may be new or changed, such as the last one, which what is logged late amends; None where nothing was
            written.
        """
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return None
        self._db.execute("BEGIN")  # so that all of it is seen as it was at one time
        try:
            first = min([self._take(segment, first) for segment, first in self._news()], default=None)
        finally:
            self._db.rollback()
        self._version = version
        return first

    def _news(self) -> Iterator[tuple[int, int]]:
        """Segments that were written to, and the first step from which on each has to be read."""
        written = self._written()
        if self.steps:
            yield self._segment, min(self.steps[-1], written.get(self._segment, self.steps[-1]))
        begins = self._told_begins()
        while True:
            (segment,) = self._db.execute("SELECT MIN(segment) FROM steps WHERE segment > ?", (self._segment,)).fetchone()
            if segment is None:
                return
            (first,) = self._db.execute("SELECT MIN(step) FROM steps WHERE segment = ?", (segment,)).fetchone()
            yield segment, min(first, begins.get(segment, first))

    def _written(self) -> dict[int, int]:
        """By segment the first step whose statistics were written since: also that of one which a spike made interesting later."""
        before, self._rowid = self._rowid, self._db.execute("SELECT IFNULL(MAX(rowid), 0) FROM rows").fetchone()[0]
        if not self.steps:
            return {}
        # the plus keeps SQLite from walking over all rows in the order of an index
        return dict(
            self._db.execute("SELECT segment, MIN(step) FROM rows WHERE rowid > ? GROUP BY +segment", (before,)).fetchall()
        )

    def _told_begins(self) -> dict[int, int]:
        """The first step of segments whose beginning was no monitored step, as far as it was written down."""
        try:
            return dict(self._db.execute("SELECT segment, first FROM segments").fetchall())
        except sqlite3.OperationalError:  # a run of before these were kept
            return {}

    def _take(self, segment: int, first: int) -> int:
        """From ``first`` on the steps are those of ``segment``."""
        cut = bisect_left(self.steps, first)
        for step in self.steps[cut:]:
            del self.segment_of[step]
        rows = self._db.execute("SELECT step FROM steps WHERE segment = ? AND step >= ? ORDER BY step", (segment, first))
        self.steps[cut:] = [step for (step,) in rows.fetchall()]
        self.segment_of.update(dict.fromkeys(self.steps[cut:], segment))
        self._segment = segment
        return first

    def spans(self, since: int | None, most: int) -> Iterator[tuple[int, int, int]]:
        """The steps from ``since`` on in parts, ascending: segment, first and last step. ``most`` steps each at most."""
        at = 0 if since is None else bisect_left(self.steps, since)
        while at < len(self.steps):
            segment = self.segment_of[self.steps[at]]
            end = min(at + most, len(self.steps))
            end = bisect_right(self.steps, segment, at, end, key=self.segment_of.__getitem__)  # later ones have later steps
            yield segment, self.steps[at], self.steps[end - 1]
            at = end
