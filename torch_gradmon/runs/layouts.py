"""What packed statistics are of: names, columns and counts, stored once in a run's file."""

from __future__ import annotations

import sqlite3
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.moments import Column
from ..core.records import StatsTable
from .packing import unpack_steps
from .step_index import StepIndex

_LAYOUTS = "SELECT id, source, tensors, columns, counts, same_as FROM layouts"


class TableLayout(NamedTuple):
    """The tensors and columns of packed statistics; ``same_as`` names another source of the same step that stores them."""

    names: tuple[str, ...]
    columns: frozenset[Column]
    counts: bytes
    same_as: str

    def rows(self, blobs: Sequence[bytes]) -> torch.Tensor:
        """The statistics of several steps, float64 ``[steps, tensors, 8]``."""
        return unpack_steps(b"".join(blobs), len(blobs), len(self.names), self.columns, self.counts)

    def table(self, blob: bytes) -> StatsTable:
        """The statistics of one step."""
        return StatsTable(self.names, self.rows([blob])[0], self.columns)


class Layouts:
    """The layouts of a run's file. They never change, so known ones are not read again.

    Args:
        db: the file.
        index: its steps.
    """

    def __init__(self, db: sqlite3.Connection, index: StepIndex) -> None:
        self._db, self._index = db, index
        self._tensors: dict[int, str] = {}
        self._known: dict[int, tuple[str, TableLayout]] = {}

    def of(self, number: int) -> tuple[str, TableLayout]:
        """The source and the layout of this id."""
        if number not in self._known:
            self._read("WHERE id = ?", number)
        return self._known[number]

    def of_source(self, source: str) -> dict[int, TableLayout]:
        """The layouts of ``source`` in the file, by their ids, ascending."""
        numbers = self._read("WHERE source = ? ORDER BY id", source)
        return {number: self._known[number][1] for number in numbers}

    def measured(self) -> dict[str, list[TableLayout]]:
        """By source, the layouts of the steps of the run, in the order of their first use."""
        self._read("WHERE TRUE ORDER BY id")
        found: dict[str, list[TableLayout]] = {}
        for source, layout in self._index.of_the_run(dict(sorted(self._known.items())), "layout", "rows").values():
            found.setdefault(source, []).append(layout)
        return found

    def _read(self, where: str, *values: int | str) -> list[int]:
        rows = self._db.execute(f"{_LAYOUTS} {where}", values).fetchall()
        for number, source, tensors, mask, counts, same_as in rows:
            if number not in self._known:
                columns = frozenset(column for column in Column if mask >> column & 1)
                self._known[number] = source, TableLayout(self._names(tensors), columns, counts, same_as)
        return [row[0] for row in rows]

    def _names(self, tensors: bytes) -> tuple[str, ...]:
        ids = array("I")
        ids.frombytes(tensors)
        if sys.byteorder == "big":
            ids.byteswap()
        if not self._tensors.keys() >= set(ids):
            self._tensors = dict(self._db.execute("SELECT id, name FROM tensors"))
        return tuple(self._tensors[i] for i in ids)
