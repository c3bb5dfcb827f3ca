"""Many steps of a run's file, some hundred at a time: nothing is read twice, and no transaction stays open in between."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, NamedTuple

from ..core.keys import Key
from ..core.moments import Column
from ..core.records import SpikeEvent, StepRecord
from .stats_series import StatsSeries
from .step_index import StepIndex
from .writer import unpack_steps

#: Steps that are read at a time: 13 MB of statistics for a thousand tensors.
_AT_A_TIME = 200
_EVENT = frozenset(field.name for field in fields(SpikeEvent))


class TableLayout(NamedTuple):
    """What packed statistics of one source are of; ``same_as`` names another source of the same step that has them."""

    names: tuple[str, ...]
    columns: frozenset[Column]
    counts: bytes
    same_as: str


def stored_keys(db: sqlite3.Connection) -> dict[int, Key]:
    """The keys of the values that are stored as such, by their numbers."""
    return {number: Key(*key) for number, *key in db.execute("SELECT id, source, name, metric FROM keys ORDER BY id").fetchall()}


class RunScan:
    """Reads what an index knows of.

    Args:
        db: the file.
        index: its steps.
        names_of: the names of the tensors that a layout has.
    """

    def __init__(self, db: sqlite3.Connection, index: StepIndex, names_of: Callable[[bytes], tuple[str, ...]]) -> None:
        self._db, self._index, self._names_of = db, index, names_of

    def records(self, since: int | None, wanted: Callable[[Key], bool] | None) -> Iterator[StepRecord]:
        """See :meth:`torch_gradmon.analysis.run.Run.records`."""
        for span in self._index.spans(since, _AT_A_TIME):
            values = self._values(span, wanted)
            rows = self._db.execute(
                "SELECT step, time, applied, context, events FROM steps WHERE segment = ? AND step BETWEEN ? AND ? ORDER BY step",
                span,
            ).fetchall()
            for step, time, applied, context, events in rows:
                if step in self._index.segment_of:  # else it was filled in a moment ago
                    yield StepRecord(step, time, bool(applied), values.get(step, {}), {}, json.loads(context), events_in(events))

    def _values(self, span: tuple[int, int, int], wanted: Callable[[Key], bool] | None) -> dict[int, dict[Key, float]]:
        keys = stored_keys(self._db)
        condition = ""
        if wanted is not None:
            keys = {number: key for number, key in keys.items() if wanted(key)}
            condition = f" AND key IN ({', '.join(map(str, keys))})"
        rows = self._db.execute(
            f"SELECT step, key, value FROM scalars WHERE segment = ? AND step BETWEEN ? AND ?{condition} ORDER BY step, key", span
        )
        found: dict[int, dict[Key, float]] = {}
        for step, key, value in rows.fetchall():
            if key in keys:
                found.setdefault(step, {})[keys[key]] = float(value)
        return found

    def stacks(self, source: str, since: int | None) -> Iterator[StatsSeries]:
        """See :meth:`torch_gradmon.analysis.run.Run.stacks`."""
        for span in self._index.spans(since, _AT_A_TIME):
            yield from self._stacks(source, span)

    def _stacks(self, source: str, span: tuple[int, int, int]) -> Iterator[StatsSeries]:
        layouts = self._layouts(source)
        rows = self._db.execute(
            f"SELECT step, layout, data FROM rows WHERE segment = ? AND step BETWEEN ? AND ? "
            f"AND layout IN ({', '.join(map(str, layouts))}) ORDER BY step",
            span,
        ).fetchall()
        rows = [row for row in rows if row[0] in self._index.segment_of]
        for number, group in groupby(rows, key=lambda row: int(row[1])):
            layout, steps, blobs = layouts[number], [], []
            for step, _, data in group:
                steps.append(step)
                blobs.append(data)
            if layout.same_as:
                yield from self._same(layout, (span[0], steps[0], steps[-1]), steps)
            else:
                rows_of = unpack_steps(b"".join(blobs), len(steps), len(layout.names), layout.columns, layout.counts)
                yield StatsSeries(tuple(steps), layout.names, rows_of, layout.columns)

    def _same(self, layout: TableLayout, span: tuple[int, int, int], steps: Sequence[int]) -> Iterator[StatsSeries]:
        """Rows that another source of the same steps has."""
        wanted, kept = set(steps), set(layout.names)
        for stack in self._stacks(layout.same_as, span):
            places = [place for place, step in enumerate(stack.steps) if step in wanted]
            if places:
                yield stack.at(places).of(tuple(name for name in stack.names if name in kept))

    def _layouts(self, source: str) -> dict[int, TableLayout]:
        rows = self._db.execute(
            "SELECT id, columns, tensors, counts, same_as FROM layouts WHERE source = ?", (source,)
        ).fetchall()
        return {
            number: TableLayout(self._names_of(tensors), frozenset(c for c in Column if mask >> c & 1), counts, same_as)
            for number, mask, tensors, counts, same_as in rows
        }


def events_in(text: str) -> tuple[SpikeEvent, ...]:
    """What the detectors found in a step, as it was stored; what a later version knows besides is left out."""
    found: list[dict[str, Any]] = json.loads(text)
    return tuple(SpikeEvent(**{name: value for name, value in event.items() if name in _EVENT}) for event in found)
