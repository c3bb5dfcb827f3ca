"""Pack statistics into blobs of float32.

The blob of a source and step has columns, each with a number for every tensor: count (if it can change between steps), mean, mean of |x|,
spread (population standard deviation, or rms if no sum was measured), near-zero count, non-finite count, smallest and largest value.
float32 keeps seven digits of each; of raw sums it would lose the spread. Columns that are 0 everywhere are left out, but one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.moments import ALWAYS, SUMMED, WIDTH, Column
from ..core.records import StatsTable
from .format import LONGEST_NAME, REQUIRED, Form, Unreadable, fits

#: The names of columns where the number stored is not what the column is, but follows from it.
_DERIVED = {Column.SUM: "mean", Column.ABS_SUM: "abs_mean", Column.SQUARE_SUM: "std"}
_NAMES = {column: _DERIVED.get(column, column.name.lower()) for column in Column}
_COLUMNS = {name: column for column, name in _NAMES.items()}


class TableLayout(NamedTuple):
    """The tensors and columns of packed statistics."""

    source: str
    names: tuple[str, ...]
    columns: frozenset[Column]
    counts: tuple[int, ...]  # numbers of elements that never change; empty if they are among the statistics
    same_as: str  # another source of the same step that stores them; empty if they are stored

    def definition(self) -> dict[str, Any]:
        return {
            "is": "layout",
            "source": self.source,
            "measured": [_NAMES[column] for column in sorted(self.columns)],
            "stored": [_NAMES[Column(column)] for column in _stored(self.columns, bool(self.counts))],
            "tensors": self.names,
            "counts": self.counts,
            "same_as": self.same_as,
        }

    def has_size(self, absent: int, data: bytes) -> bool:
        """Whether these can be the rows of a step; ``absent`` has a bit for each column that is left out."""
        columns = 0 if self.same_as else len(_stored(self.columns, bool(self.counts)))
        there = columns - (absent & (1 << columns) - 1).bit_count()
        return len(data) == 4 * len(self.names) * there and (there > 0 or not columns)

    def dense(self, absent: int, data: bytes) -> bytes:
        width = 4 * len(self.names)
        for place in range(len(_stored(self.columns, bool(self.counts)))):
            if absent >> place & 1:
                data = data[: width * place] + bytes(width) + data[width * place :]
        return data

    def rows(self, blobs: Sequence[bytes]) -> torch.Tensor:
        """The statistics of several steps, float64 ``[steps, tensors, 8]``."""
        rows = np.zeros((len(blobs), len(self.names), WIDTH))
        rows[..., Column.MIN], rows[..., Column.MAX] = np.inf, -np.inf
        if not rows.size:
            return torch.from_numpy(rows)
        stored = np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), -1, len(self.names))
        rows[..., _stored(self.columns, bool(self.counts))] = stored.swapaxes(1, 2)
        if self.counts:
            rows[..., Column.COUNT] = self.counts
        count, spread = rows[..., Column.COUNT], rows[..., Column.SQUARE_SUM].copy()
        mean = rows[..., Column.SUM].copy() if Column.SUM in self.columns else 0.0
        with np.errstate(all="ignore"):
            rows[..., Column.SUM] *= count
            rows[..., Column.ABS_SUM] *= count
            rows[..., Column.SQUARE_SUM] = count * np.where(np.isfinite(spread), mean * mean + spread * spread, spread)
        rows[count == 0] = [0.0] * SUMMED + [np.inf, -np.inf]
        return torch.from_numpy(rows)

    def table(self, blob: bytes) -> StatsTable:
        return StatsTable(self.names, self.rows([blob])[0], self.columns)

    def part(self, data: bytes, names: Sequence[str]) -> tuple[TableLayout, bytes]:
        """The layout and data of those of its tensors that are among ``names``."""
        if names == self.names or (kept := set(names)).issuperset(self.names):
            return self, data
        rows = [row for row, name in enumerate(self.names) if name in kept]
        counts = tuple(self.counts[row] for row in rows) if self.counts else ()
        columns = np.frombuffer(data, "<f4").reshape(-1, len(self.names))
        return self._replace(names=tuple(self.names[row] for row in rows), counts=counts), columns[:, rows].tobytes()


def _is_name(found: object) -> bool:
    return type(found) is str and len(found) <= LONGEST_NAME


_LAYOUT: Form = {
    REQUIRED: ("source", "same_as", "tensors", "measured", "stored", "counts"),
    "source": _is_name,
    "same_as": str,
    "tensors": [_is_name],
    "measured": list,
    "counts": [lambda found: type(found) is int and 0 <= found < 2**62],
}


def layout_of(facts: Mapping[str, Any]) -> TableLayout:
    """The layout that was defined so. Raises Unreadable if it is none."""
    if not fits(facts, _LAYOUT):
        raise Unreadable("a layout is none")
    names, counts = tuple(facts["tensors"]), tuple(facts["counts"])
    columns = frozenset(column for name, column in _COLUMNS.items() if name in facts["measured"])
    stored = [_NAMES[Column(column)] for column in _stored(columns, bool(counts))]
    if facts["stored"] != stored or len(set(names)) != len(names) or len(counts) not in (0, len(names)):
        raise Unreadable("a layout has other columns or counts, or names twice")
    return TableLayout(facts["source"], names, columns, counts, facts["same_as"])


@lru_cache(maxsize=8)  # in most steps they are those of the last one
def integers(numbers: bytes) -> tuple[int, ...]:
    """Those in an array of float64."""
    return tuple(map(int, np.frombuffer(numbers, np.float64)))


@cache
def _stored(columns: frozenset[Column], counted: bool) -> list[int]:
    return sorted(map(int, (columns | ALWAYS) - ({Column.COUNT} if counted else set())))


def pack(tables: Sequence[tuple[np.ndarray, frozenset[Column], bool]]) -> list[tuple[int, bytes]]:
    """Of each table, given by its rows and columns, the columns that are left out, a bit for each, and the blob of the others.

    All tables are packed together, since each operation on small arrays costs the same. Each comes with whether to leave out its counts,
    which are then stored with the layout.
    """
    if not tables:
        return []
    rows, parts, begin = np.concatenate([*map(itemgetter(0), tables)]).T, [], 0
    for block, columns, counted in tables:
        end = begin + len(block)
        parts.append((begin, end, columns, counted))
        if Column.SUM not in columns:
            rows[Column.SUM, begin:end] = 0.0  # which makes the spread the rms
        begin = end
    count = rows[Column.COUNT]
    with np.errstate(all="ignore"):
        rows[Column.SUM : Column.SQUARE_SUM + 1] /= count
        mean, square = rows[Column.SUM], rows[Column.SQUARE_SUM]
        variance = np.maximum(square - mean * mean, 0.0)
        # if the spread is not finite, store the mean square, which keeps NaN and infinity apart
        rows[Column.SQUARE_SUM] = np.sqrt(np.where(np.isfinite(square), variance, square))
        if not count.all():
            rows[:, count <= 0] = 0.0
        packed, size = rows.astype("<f4").tobytes(), 4 * len(mean)
    found = []
    for begin, end, columns, counted in parts:
        zero, begin, end = bytes(4 * (end - begin)), 4 * begin, 4 * end
        absent, kept = 0, []
        for place, column in enumerate(_stored(columns, counted)):
            data = packed[column * size + begin : column * size + end]
            if data != zero:
                kept.append(data)
            else:
                absent |= 1 << place
        found.append((absent, b"".join(kept)) if kept else (absent - 1, zero))  # the first one stays
    return found
