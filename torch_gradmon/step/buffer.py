"""The values of the step in flight, on the device.

Everything that hooks measure is put here as device tensors; micro-batches merge here; :meth:`StepBuffer.depart` sends all of it
to the host at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, MODULE_SOURCES, PARAMETER_SOURCES, RCC_SOURCES, Key
from ..core.metric import REDUCERS
from ..core.moments import Column, identity, merge, merge_by_group
from ..core.records import StatsTable
from .device_transfer import DeviceToHostCopy
from .reduction import Aggregation, PendingValue, as_tensor, contribution, finished, merged_parts, part_from, part_of, row_of_sums

#: Sources of values that are those of a rank's own batch.
SHARED_SOURCES = frozenset((*MODULE_SOURCES, *RCC_SOURCES))
#: Columns that together show whether two rows are of the same values.
_WITNESSES = frozenset({Column.COUNT, Column.SUM, Column.SQUARE_SUM})
#: A noted fact: by how many steps ranks lie apart that have told each other values.
SKEW = "ranks/skew"


class StepBuffer:
    """What was measured in one step.

    Args:
        step: its number.
        complaints: where a failing aggregation function is reported.
    """

    def __init__(self, step: int, complaints: WarningLog) -> None:
        self.step = step
        self.noted: dict[str, Tensor | float] = {}  # facts of the step that are no values
        self.thawed: set[str] = set()  # parameters that are frozen for a part of the step only
        self.used: set[str] = set()  # parameters whose gradients were measured for the optimizer, or were not there for it
        self.absent: dict[tuple[str, str], str] = {}
        self.refused: dict[str, str] = {}
        self.rng: dict[str, Tensor] = {}  # states of the random generators when it began
        self.unshown: set[tuple[str, str]] = set()  # source and name of rows whose values are for the run directory only
        self._complaints = complaints
        self._blocks: list[Tensor] = []
        self._place: dict[tuple[str, str], tuple[int, int]] = {}  # block and row of each tensor
        self._parts: dict[tuple[str, str], list[Tensor]] = {}
        self._columns: dict[str, frozenset[Column]] = {}
        self._pending: dict[Key, PendingValue] = {}
        self._exchanged: set[tuple[str, str]] = set()  # tensors whose rows are of all ranks
        self._reducers: dict[Key, str] = {}
        self._contributions: dict[Key, tuple[str, Tensor]] = {}
        self._counts: dict[Key, Tensor] = {}  # of values that may not exist: how many ranks contributed, or whether

    def put_rows(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Statistics ``[len(names), 8]``; what was there for these names is replaced."""
        if len(self._blocks) >= 64:
            self._drop_replaced()
        self._place.update({(source, name): (len(self._blocks), row) for row, name in enumerate(names)})
        self._blocks.append(rows)
        self._columns[source] = self._columns.get(source, columns) & columns

    @property
    def block_count(self) -> int:
        """How many blocks of rows were put."""
        return len(self._blocks)

    def names_of(self, source: str) -> set[str]:
        """The tensors of ``source`` that rows were put for."""
        return {name for of, name in self._place if of == source}

    def rows_of(self, source: str, names: Iterable[str]) -> Tensor:
        """The rows that were put for these names, all of them known: ``[names, 8]``, still on the device."""
        return torch.stack([self._blocks[block][row] for block, row in (self._place[source, name] for name in names)])

    def _drop_replaced(self) -> None:
        kept = sorted({block for block, _ in self._place.values()})
        number = {block: index for index, block in enumerate(kept)}
        self._blocks = [self._blocks[block] for block in kept]
        self._place = {where: (number[block], row) for where, (block, row) in self._place.items()}

    def clear(self, source: str, names: Iterable[str] | None = None) -> None:
        """Forget what there is of ``source``, or of these tensors of it."""
        gone = None if names is None else set(names)

        def kept(of: str, name: str) -> bool:
            return of != source or (gone is not None and name not in gone)

        self._place = {where: place for where, place in self._place.items() if kept(*where)}
        self._parts = {where: parts for where, parts in self._parts.items() if kept(*where)}
        self._pending = {key: pending for key, pending in self._pending.items() if kept(key.source, key.name)}

    def merge_rows(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Statistics of one micro-batch or one call; merged with what is there for these names."""
        for name, row in zip(names, rows, strict=True):
            parts = self._parts.setdefault((source, name), [])
            parts.append(row)
            if len(parts) == 64:  # bounds what many micro-batches hold
                parts[:] = [merge(torch.stack(parts))]
        self._columns[source] = self._columns.get(source, columns) & columns

    def refuse(self, source: str, name: str, reason: str) -> None:
        """This tensor cannot be measured, so there are no sums over the whole source either."""
        self.absent[source, name] = reason
        self.refused[source] = f"{name} could not be measured: {reason}"

    # --- what ranks exchange -----------------------------------------------------------------------------------------------------

    def refuse_all(self, source: str, reason: str) -> None:
        """Nothing of ``source`` can be told."""
        self.clear(source)
        self.absent[source, ""] = self.refused[source] = reason

    def out_of_step(self) -> None:
        """The ranks have told each other values of different steps, which are of no use."""
        reason = "the ranks are not in the same step: on one of them a step did not end, or ended twice"
        self._complaints.add("ranks:skew", f"nothing can be told of step {self.step} and those after it, for {reason}")
        self.absent.update(((source, ""), reason) for source in (*PARAMETER_SOURCES, *MODULE_SOURCES, *RCC_SOURCES))

    def rows_or_none(self, source: str, names: Sequence[str]) -> Tensor:
        """The rows that were put for these names, those of no elements for the others: ``[names, 8]``."""
        places = [(row, self._place[source, name]) for row, name in enumerate(names) if (source, name) in self._place]
        if not places:
            return identity(len(names))
        found = torch.stack([self._blocks[block][row] for _, (block, row) in places])
        rows = identity(len(names), found.device, found.dtype)
        rows[[row for row, _ in places]] = found
        return rows

    def put_exchanged(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """The same merged over all ranks; those that no rank has any elements of are dropped on the host."""
        self.put_rows(source, names, rows, columns)
        for name in names:
            self._parts.pop((source, name), None)
            self._exchanged.add((source, name))

    def loose_rows(self) -> dict[tuple[str, str], Tensor]:
        """The rows of :meth:`merge_rows` but for those of micro-batches' gradients, merged: ``[8]`` by source and name."""
        found = {where: parts for where, parts in self._parts.items() if where[0] not in PARAMETER_SOURCES}
        return {where: merge(torch.stack(parts)) if len(parts) > 1 else parts[0] for where, parts in found.items()}

    def contribute(self, key: Key, reducer: str, sums: Tensor) -> None:
        """What the parts of tensors on this rank add to a value of the whole, which is a ``"norm"`` or ``"cosine"``."""
        self._contributions[key] = reducer, row_of_sums(sums)

    def share(self, key: Key, reducer: str) -> None:
        """The value of ``key`` is merged over ranks by ``reducer``."""
        self._reducers[key] = reducer

    def shared_values(self, watches: Callable[[Key], bool]) -> dict[Key, tuple[str, Tensor]]:
        """How each value merges over ranks, and what this one contributes: those that were logged to be shared or that somebody
        ``watches``, and metrics of what modules take and return that merge by a name.
        """
        found = dict(self._contributions)
        for key, pending in self._pending.items():
            reducer = self._reducers.get(key) or ("mean" if not key.source and watches(key) else "")
            if not reducer and key.source in SHARED_SOURCES and isinstance(pending.aggregation, str):
                reducer = pending.aggregation
            if reducer:
                with contextlib.suppress(Exception):  # of an aggregation of the user's; it is told of when the step departs
                    if (row := contribution(key, pending, reducer)) is not None:
                        found[key] = reducer, row
        return found

    def put_shared(self, key: Key, reducer: str, row: Tensor) -> None:
        """What came of all ranks' contributions; dropped on the host where there was none."""
        self._pending[key] = PendingValue(reducer if reducer in REDUCERS else "sum", [part_from(row, reducer)])
        self._counts[key] = row[Column.COUNT]

    def put_where(self, key: Key, value: Tensor, there: Tensor) -> None:
        """A value that exists only where ``there``, 0-d, is true, which the device knows; replaces what is there."""
        self.put_value(key, value)
        self._counts[key] = there

    def parts_of(self, source: str) -> list[Tensor]:
        """The rows of :meth:`merge_rows` of all tensors of a source: ``[8]`` each."""
        return [row for (of, _), rows in self._parts.items() if of == source for row in rows]

    def put_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """A scalar, or a tensor whose elements are reduced by ``aggregation``; replaces what is there."""
        self._pending.pop(key, None)
        self.merge_value(key, value, aggregation, weight)

    def merge_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """A scalar or tensor of one micro-batch; merged with the others of this step by ``aggregation``.

        Raises:
            TypeError: neither a number nor a real tensor.
            ValueError: a tensor without elements.
        """
        self._merge(key, [part_of(as_tensor(value, key), aggregation, weight)], aggregation)

    def _merge(self, key: Key, parts: list[Tensor], aggregation: Aggregation) -> None:
        pending = self._pending.setdefault(key, PendingValue(aggregation, []))
        pending.parts += parts
        if len(pending.parts) >= 64 and isinstance(aggregation, str):
            pending.parts[:] = [merged_parts(pending.parts, aggregation)]

    def absorb(self, other: StepBuffer) -> None:
        """Merge in what :meth:`merge_rows` and :meth:`merge_value` put into ``other``."""
        for (source, name), parts in other._parts.items():
            for row in parts:
                self.merge_rows(source, [name], row.unsqueeze(0), other._columns[source])
        for key, pending in other._pending.items():
            self._merge(key, pending.parts, pending.aggregation)
        self._reducers.update(other._reducers)
        self.absent.update(other.absent)
        self.refused.update(other.refused)

    def take_over(self, other: StepBuffer, source: str, names: Iterable[str]) -> None:
        """Put what ``other`` has of these tensors in the place of what is here."""
        names = list(names)
        self.clear(source, names)
        found = [name for name in names if (source, name) in other._place]
        if found:
            self.put_rows(source, found, other.rows_of(source, found), other._columns[source])
        wanted = set(names)
        self._pending.update({key: p for key, p in other._pending.items() if key.source == source and key.name in wanted})
        self.absent.update({where: reason for where, reason in other.absent.items() if where[0] == source})

    @property
    def logged(self) -> frozenset[Key]:
        """The keys of the values that were logged by hand."""
        return frozenset(key for key in self._pending if not key.source)

    def scalars(self) -> StepBuffer:
        """A buffer that goes on with the values that were logged by hand."""
        more = StepBuffer(self.step, self._complaints)
        more._pending = {key: PendingValue(p.aggregation, list(p.parts)) for key, p in self._pending.items() if not key.source}
        return more

    def part(self, sources: Iterable[str]) -> StepBuffer:
        """A buffer with the rows that were put for ``sources`` so far, and the values that were logged by hand. This one stays as it
        is.
        """
        wanted, found = set(sources), self.scalars()
        found._blocks = list(self._blocks)
        found._place = {where: place for where, place in self._place.items() if where[0] in wanted}
        found._drop_replaced()
        found._columns = {source: columns for source, columns in self._columns.items() if source in wanted}
        found._reducers = dict(self._reducers)
        found.refused = {source: reason for source, reason in self.refused.items() if source in wanted}
        return found

    def depart(self) -> PendingReadback:
        """Start the one copy to the host; after it nothing may be put here. Does not synchronise."""
        parts = [part for parts in self._parts.values() for part in parts]  # merged on the host: a launch for each costs more
        reduced = self._reduced()
        noted = {name: fact for name, fact in self.noted.items() if isinstance(fact, Tensor)}
        arrival = DeviceToHostCopy([*self._blocks, *parts, *reduced.values(), *noted.values(), *self._counts.values()])
        merged = [(where, len(parts)) for where, parts in self._parts.items()]
        return PendingReadback(self, arrival, merged, list(reduced), set(noted), list(self._counts))

    def flush(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """:meth:`depart`, and wait for it: see :meth:`PendingReadback.land`."""
        return self.depart().land()

    def collect(self, blocks: list[Tensor], merged: Sequence[tuple[str, str]]) -> dict[str, StatsTable]:
        """The tables by source, from the blocks of rows that were put and last one of the ``merged``, all on the host."""
        if not blocks:
            return {}
        rows = torch.cat(blocks)
        starts = [0, *accumulate(len(block) for block in blocks)]
        collected: dict[str, dict[str, int]] = {}
        for (source, name), (block, row) in self._place.items():
            place = starts[block] + row
            if (source, name) not in self._exchanged or rows[place, Column.COUNT] > 0:  # else no rank had any
                collected.setdefault(source, {})[name] = place
        for offset, (source, name) in enumerate(merged):
            collected.setdefault(source, {})[name] = starts[-2] + offset
        tables = {
            source: StatsTable(tuple(found), rows[list(found.values())], self._columns[source])
            for source, found in collected.items()
        }
        if GRADIENT in tables and GRADIENT_BEFORE_CLIP in tables:
            tables[GRADIENT] = _shared(tables[GRADIENT], tables[GRADIENT_BEFORE_CLIP])
        return tables

    def _reduced(self) -> dict[Key, Tensor]:
        """Final scalars; several of one key where its aggregation gave a dict."""
        reduced: dict[Key, Tensor] = {}
        for key, pending in self._pending.items():
            try:
                reduced.update(finished(key, pending))
            except Exception as error:
                name = getattr(pending.aggregation, "__name__", repr(pending.aggregation))
                self._complaints.add(
                    f"aggregation:{key}", f"the aggregation {name} of {'/'.join(filter(None, key))} failed", error
                )
                self.absent[key.source, key.name] = f"its aggregation function raised {type(error).__name__}: {error}"
        return reduced


def _shared(after: StatsTable, before: StatsTable) -> StatsTable:
    """``after``, or the rows of ``before`` in its place where both are of the same values: a run directory stores those once."""
    place = {name: row for row, name in enumerate(before.names)}
    if not _WITNESSES <= after.columns <= before.columns or not place.keys() >= set(after.names):
        return after
    rows, columns = before.rows[[place[name] for name in after.names]], sorted(after.columns)
    return (
        StatsTable(after.names, rows, before.columns, GRADIENT_BEFORE_CLIP)
        if rows[:, columns].equal(after.rows[:, columns])
        else after
    )


@dataclass
class PendingReadback:
    """The values of a step on their way to the host.

    Attributes:
        buffer: where they were.
        arrival: the copy.
        merged: which tensors have rows that are yet to be merged, and how many.
        reduced: the keys of values.
        noted: the names of noted facts that are tensors.
        counted: the keys of values that count elements of all ranks, or whether they exist.
    """

    buffer: StepBuffer
    arrival: DeviceToHostCopy
    merged: list[tuple[tuple[str, str], int]]
    reduced: list[Key]
    noted: set[str]
    counted: list[Key]

    def land(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """Tables by source, custom values and noted facts, on the host. Waits for the copy, once per device."""
        host = iter(self.arrival.land())
        blocks = list(islice(host, self.buffer.block_count))
        counts = [count for _, count in self.merged]
        parts = list(islice(host, sum(counts)))
        if parts:
            rows = torch.stack(parts)
            owners = [number for number, count in enumerate(counts) for _ in range(count)]
            blocks.append(rows if len(parts) == len(counts) else merge_by_group(rows, owners, len(counts)))
        tables = self.buffer.collect(blocks, [where for where, _ in self.merged])
        values = {key: float(next(host)) for key in self.reduced}
        facts = {name: float(next(host) if name in self.noted else fact) for name, fact in self.buffer.noted.items()}
        if facts.pop(SKEW, 0.0):
            self.buffer.out_of_step()
            return {}, {}, facts
        contributed = {key: float(next(host)) for key in self.counted}
        values = {key: value for key, value in values.items() if contributed.get(key, 1.0)}
        return tables, values, facts
