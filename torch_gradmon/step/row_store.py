"""Rows of statistics of one step, on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, PARAMETER_SOURCES
from ..core.moments import Column, identity, merge
from ..core.records import StatsTable
from .row_places import RowPlaces

#: Columns that show whether two rows are of the same values.
_WITNESSES = frozenset({Column.COUNT, Column.SUM, Column.SQUARE_SUM})


class RowStore:
    """Rows by source and name: stored ones, where the last one counts, and merged ones of micro-batches and calls."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._places: dict[str, RowPlaces] = {}  # by source
        self._parts: dict[tuple[str, str], list[Tensor]] = {}
        self._columns: dict[str, frozenset[Column]] = {}
        self._exchanged: set[tuple[str, str]] = set()  # tensors whose rows are merged over ranks
        self._versions: Counter[str] = Counter()
        self._dropped: set[tuple[str, str | None]] | None = (
            None  # what replaces nothing that was set aside; None where nothing was
        )

    def _note_stream(self, device: torch.device) -> None:
        """A row is computed on the current stream of ``device``."""

    def put_rows(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Store statistics ``[len(names), 8]``, replacing those of the same names."""
        if not rows.is_cpu:
            self._note_stream(rows.device)
        if len(self._blocks) >= 64:
            self._drop_replaced()
        if len(names) != len(rows):
            raise ValueError(f"{len(rows)} rows of {source} for {len(names)} names")
        if (places := self._places.get(source)) is None:
            self._places[source] = RowPlaces((tuple(names), len(self._blocks)))
        else:
            places.put(names, len(self._blocks))
        self._blocks.append(rows)
        self._versions[source] += 1
        self._narrow(source, columns)

    def _narrow(self, source: str, columns: frozenset[Column]) -> None:
        """Of this source, only columns are known that all its rows have."""
        known = self._columns.setdefault(source, columns)
        if known is not columns:
            self._columns[source] = known & columns

    def repeat_rows(self, source: str, names: Sequence[str], of: str, columns: frozenset[Column]) -> None:
        """Rows of ``source`` are those of the same names of the source ``of``, which must exist."""
        there = self._places[of]
        if source not in self._places and there.whole is not None and there.whole[0] == tuple(names):
            self._places[source] = RowPlaces(there.whole)
        else:
            places = self._places.setdefault(source, RowPlaces(None, {}))
            places.add({name: there.by_name[name] for name in names})
        self._narrow(source, columns)

    def version_of(self, source: str) -> int:
        """How often rows of this source were stored."""
        return self._versions[source]

    @property
    def block_count(self) -> int:
        """Number of stored blocks of rows."""
        return len(self._blocks)

    def names_of(self, source: str) -> set[str]:
        """The tensors of ``source`` with stored rows."""
        return set(self._by_name(source))

    def _by_name(self, source: str) -> Mapping[str, tuple[int, int]]:
        places = self._places.get(source)
        return {} if places is None else places.by_name

    def rows_of(self, source: str, names: Iterable[str]) -> Tensor:
        """The stored rows of these names, which must exist: ``[names, 8]``, on the device."""
        places = self._by_name(source)
        return torch.stack([self._blocks[block][row] for block, row in (places[name] for name in names)])

    def _drop_replaced(self) -> None:
        kept = sorted({block for places in self._places.values() for block, _ in places.by_name.values()})
        number = {block: index for index, block in enumerate(kept)}
        self._blocks = [self._blocks[block] for block in kept]
        self._places = {source: places.renumbered(number) for source, places in self._places.items() if places.by_name}

    def merge_rows(self, source: str, names: Sequence[str], rows: Tensor | Sequence[Tensor], columns: frozenset[Column]) -> None:
        """Merge statistics of one micro-batch or call with those of the same names."""
        if len(rows) and not rows[0].is_cpu:
            self._note_stream(rows[0].device)
        for name, row in zip(names, rows, strict=True):
            parts = self._parts.setdefault((source, name), [])
            parts.append(row)
            if len(parts) == 64:  # bounds the memory for many micro-batches
                parts[:] = [merge(torch.stack(parts))]
        self._narrow(source, columns)

    def expect_row(self, source: str, name: str) -> None:
        """A row will be merged later, and has its place now: the order of rows is that of the calls."""
        self._parts.setdefault((source, name), [])

    def drop_parts(self, source: str, name: str) -> None:
        """Forget what was merged of this name, or was expected."""
        self._parts.pop((source, name), None)

    def rows_or_none(self, source: str, names: Sequence[str]) -> Tensor:
        """The stored rows of these names, or the identity for missing ones: ``[names, 8]``."""
        known = self._by_name(source)
        places = [(row, known[name]) for row, name in enumerate(names) if name in known]
        if not places:
            return identity(len(names))
        found = torch.stack([self._blocks[block][row] for _, (block, row) in places])
        rows = identity(len(names), found.device, found.dtype)
        rows[[row for row, _ in places]] = found
        return rows

    def put_exchanged(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Store rows merged over all ranks; those without elements on any rank are dropped on the host."""
        if source in self._places and self._by_name(source).keys() <= set(names):
            del self._places[source]  # in this order on each rank, whatever it has had itself: sums are then the same
        self.put_rows(source, names, rows, columns)
        for name in names:
            self._parts.pop((source, name), None)
            self._exchanged.add((source, name))

    def merged_rows_of_calls(self) -> dict[tuple[str, str], Tensor]:
        """The merged rows of :meth:`merge_rows`, without those of micro-batch gradients: ``[8]`` by source and name."""
        found = {where: parts for where, parts in self._parts.items() if parts and where[0] not in PARAMETER_SOURCES}
        return {where: merge(torch.stack(parts)) if len(parts) > 1 else parts[0] for where, parts in found.items()}

    def parts_of(self, source: str) -> list[Tensor]:
        """The rows of :meth:`merge_rows` of all tensors of a source: ``[8]`` each."""
        return [row for (of, _), rows in self._parts.items() if of == source for row in rows]

    def collect(self, blocks: list[Tensor], merged: Sequence[tuple[str, str]]) -> dict[str, StatsTable]:
        """The tables by source, from the stored blocks on the host; the last block has the ``merged`` rows."""
        if not blocks:
            return {}
        edited = {source for source, _ in self._exchanged}.union(source for source, _ in merged)
        tables: dict[str, StatsTable] = {}
        collected: dict[str, dict[str, tuple[int, int]]] = {}
        for source, places in self._places.items():
            if places.whole is not None and source not in edited:
                names, block = places.whole
                if names:
                    tables[source] = StatsTable(names, blocks[block], self._columns[source])
            else:
                collected[source] = dict(places.by_name)
        for source, name in self._exchanged:
            place = collected.get(source, {}).get(name)
            if place is not None and not blocks[place[0]][place[1], Column.COUNT] > 0:  # no rank had any
                del collected[source][name]
        for row, (source, name) in enumerate(merged):
            collected.setdefault(source, {})[name] = len(blocks) - 1, row
        tables.update(
            (source, StatsTable(tuple(found), _rows_at(blocks, [*found.values()]), self._columns[source]))
            for source, found in collected.items()
            if found
        )
        if GRADIENT in tables and GRADIENT_BEFORE_CLIP in tables:
            tables[GRADIENT] = _shared(tables[GRADIENT], tables[GRADIENT_BEFORE_CLIP])
        return tables

    def has_rows(self, source: str) -> bool:
        """Whether there are rows of ``source``."""
        return source in self._places or any(of == source for (of, _), parts in self._parts.items() if parts)

    def clear_rows(self, source: str, names: Collection[str] | None) -> None:
        """Remove the rows of ``source``, or of some of its tensors."""
        if names is None:
            self._places.pop(source, None)
        elif (places := self._places.get(source)) is not None:
            places.remove(names)
            if not places.by_name:
                del self._places[source]
        if self._parts:
            self._parts = {
                w: parts for w, parts in self._parts.items() if w[0] != source or (names is not None and w[1] not in names)
            }

    def absorb_rows(self, other: RowStore) -> None:
        """Merge the rows of :meth:`merge_rows` in ``other``."""
        for (source, name), parts in other._parts.items():
            for row in parts:
                self.merge_rows(source, [name], row.unsqueeze(0), other._columns[source])

    def take_all_rows(self, other: RowStore) -> None:
        """Have all rows of ``other``, which begins anew."""
        self._blocks, self._places, self._parts = other._blocks, other._places, other._parts
        self._columns, self._dropped = dict(other._columns), other._dropped

    def begin_rows_anew(self) -> None:
        """Another store has all rows."""
        self._blocks, self._places, self._parts, self._dropped = [], {}, {}, set()

    def _is_dropped(self, source: str, name: str) -> bool:
        return bool(self._dropped) and not self._dropped.isdisjoint({(source, name), (source, None)})  # type: ignore[union-attr]

    def take_back_rows(self, earlier: RowStore, first: Collection[str]) -> None:
        """Take all rows of ``earlier`` that were not replaced since; of the sources ``first``, where the first rows count, all."""
        for source, places in earlier._places.items():
            kept = set() if source in first else set(self._by_name(source))
            names = [name for name in places.by_name if name not in kept and not self._is_dropped(source, name)]
            self.take_rows(earlier, source, names)
        parts = {where: list(rows) for where, rows in earlier._parts.items() if not self._is_dropped(*where)}
        for where, rows in self._parts.items():
            parts.setdefault(where, []).extend(rows)
        self._parts = parts
        self._dropped = None if earlier._dropped is None else earlier._dropped | (self._dropped or set())
        for source in {source for source, _ in parts} & earlier._columns.keys():
            self._narrow(source, earlier._columns[source])

    def take_rows(self, other: RowStore, source: str, names: Iterable[str]) -> None:
        """Store the rows of ``other`` for those of these names that it has."""
        known = other._by_name(source)
        found = [name for name in names if name in known]
        if found:
            self.put_rows(source, found, other.rows_of(source, found), other._columns[source])

    def share_rows(self, other: RowStore, sources: Iterable[str]) -> None:
        """Start with the stored rows of ``other`` for ``sources``."""
        wanted = set(sources)
        self._blocks = list(other._blocks)
        self._places = {source: places for source, places in other._places.items() if source in wanted}
        self._drop_replaced()
        self._columns = {source: columns for source, columns in other._columns.items() if source in wanted}


def _rows_at(blocks: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Tensor:
    """The rows at these places, each a block and a row in it."""
    (block, first), count = places[0], len(places)
    if places[-1] == (block, first + count - 1) and list(places) == [(block, first + row) for row in range(count)]:
        return blocks[block][first : first + count]  # as for what was merged
    starts = [0, *accumulate(len(block) for block in blocks)]
    return torch.cat(list(blocks))[[starts[block] + row for block, row in places]]


def _shared(after: StatsTable, before: StatsTable) -> StatsTable:
    """``after``, or the rows of ``before`` if both have the same values: a run directory stores those once."""
    if not _WITNESSES <= after.columns <= before.columns:
        return after
    if before.names == after.names and before.sums[Column.SQUARE_SUM] != after.sums[Column.SQUARE_SUM]:
        return after  # as in most steps that clip; both sums are needed anyway
    rows = before.rows
    if before.names != after.names:
        place = {name: row for row, name in enumerate(before.names)}
        if not place.keys() >= set(after.names):
            return after
        rows = rows[[place[name] for name in after.names]]
    there, here = rows, after.rows
    if before.columns != after.columns:
        columns = sorted(after.columns)
        there, here = rows[:, columns], after.rows[:, columns]
    return StatsTable(after.names, rows, before.columns, GRADIENT_BEFORE_CLIP) if there.equal(here) else after
