"""The values of the current step, on the device.

Everything that hooks measure is stored here as device tensors; micro-batches merge here; :meth:`StepBuffer.depart` sends all of it to the
host at once.
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

#: Sources of values of a rank's own batch.
SHARED_SOURCES = frozenset((*MODULE_SOURCES, *RCC_SOURCES))
#: Columns that show whether two rows are of the same values.
_WITNESSES = frozenset({Column.COUNT, Column.SUM, Column.SQUARE_SUM})
#: A fact: the difference between the steps of ranks that have exchanged values.
SKEW = "ranks/skew"


class StepBuffer:
    """What was measured in one step.

    Args:
        step: its number.
        complaints: gets failures of aggregation functions.
    """

    def __init__(self, step: int, complaints: WarningLog) -> None:
        self.step = step
        self.noted: dict[str, Tensor | float] = {}  # facts about the step
        self.thawed: set[str] = set()  # parameters frozen only for a part of the step
        self.used: set[str] = set()  # parameters of the optimizers that stepped, with or without a gradient
        self.absent: dict[tuple[str, str], str] = {}
        self.refused: dict[str, str] = {}
        self.rng: dict[str, Tensor] = {}  # states of the random generators at its beginning
        self.unshown: set[tuple[str, str]] = set()  # source and name of rows for the run directory only
        self._complaints = complaints
        self._blocks: list[Tensor] = []
        self._place: dict[tuple[str, str], tuple[int, int]] = {}  # block and row of each tensor
        self._parts: dict[tuple[str, str], list[Tensor]] = {}
        self._columns: dict[str, frozenset[Column]] = {}
        self._pending: dict[Key, PendingValue] = {}
        self._exchanged: set[tuple[str, str]] = set()  # tensors whose rows are merged over ranks
        self._reducers: dict[Key, str] = {}
        self._contributions: dict[Key, tuple[str, Tensor]] = {}
        self._counts: dict[Key, Tensor] = {}  # for values that may not exist: the number of contributing ranks, or a flag

    def put_rows(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Store statistics ``[len(names), 8]``, replacing those of the same names."""
        if len(self._blocks) >= 64:
            self._drop_replaced()
        self._place.update({(source, name): (len(self._blocks), row) for row, name in enumerate(names)})
        self._blocks.append(rows)
        self._columns[source] = self._columns.get(source, columns) & columns

    @property
    def block_count(self) -> int:
        """Number of stored blocks of rows."""
        return len(self._blocks)

    def names_of(self, source: str) -> set[str]:
        """The tensors of ``source`` with stored rows."""
        return {name for of, name in self._place if of == source}

    def rows_of(self, source: str, names: Iterable[str]) -> Tensor:
        """The stored rows of these names, which must exist: ``[names, 8]``, on the device."""
        return torch.stack([self._blocks[block][row] for block, row in (self._place[source, name] for name in names)])

    def _drop_replaced(self) -> None:
        kept = sorted({block for block, _ in self._place.values()})
        number = {block: index for index, block in enumerate(kept)}
        self._blocks = [self._blocks[block] for block in kept]
        self._place = {where: (number[block], row) for where, (block, row) in self._place.items()}

    def clear(self, source: str, names: Iterable[str] | None = None) -> None:
        """Remove the values of ``source``, or of some of its tensors."""
        gone = None if names is None else set(names)

        def kept(of: str, name: str) -> bool:
            return of != source or (gone is not None and name not in gone)

        self._place = {where: place for where, place in self._place.items() if kept(*where)}
        self._parts = {where: parts for where, parts in self._parts.items() if kept(*where)}
        self._pending = {key: pending for key, pending in self._pending.items() if kept(key.source, key.name)}

    def merge_rows(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Merge statistics of one micro-batch or call with those of the same names."""
        for name, row in zip(names, rows, strict=True):
            parts = self._parts.setdefault((source, name), [])
            parts.append(row)
            if len(parts) == 64:  # bounds the memory for many micro-batches
                parts[:] = [merge(torch.stack(parts))]
        self._columns[source] = self._columns.get(source, columns) & columns

    def refuse(self, source: str, name: str, reason: str) -> None:
        """Mark a tensor as not measurable, which also prevents sums over the whole source."""
        self.absent[source, name] = reason
        self.refused[source] = f"{name} could not be measured: {reason}"

    # --- exchange between ranks ---------------------------------------------------------------------------------------------------

    def refuse_all(self, source: str, reason: str) -> None:
        """Mark all of ``source`` as missing."""
        self.clear(source)
        self.absent[source, ""] = self.refused[source] = reason

    def out_of_step(self) -> None:
        """Warn that ranks have exchanged values of different steps, which are useless."""
        reason = "the ranks are not in the same step: on one of them a step did not end, or ended twice"
        self._complaints.add("ranks:skew", f"values from step {self.step} on are dropped, because {reason}")
        self.absent.update(((source, ""), reason) for source in (*PARAMETER_SOURCES, *MODULE_SOURCES, *RCC_SOURCES))

    def rows_or_none(self, source: str, names: Sequence[str]) -> Tensor:
        """The stored rows of these names, or the identity for missing ones: ``[names, 8]``."""
        places = [(row, self._place[source, name]) for row, name in enumerate(names) if (source, name) in self._place]
        if not places:
            return identity(len(names))
        found = torch.stack([self._blocks[block][row] for _, (block, row) in places])
        rows = identity(len(names), found.device, found.dtype)
        rows[[row for row, _ in places]] = found
        return rows

    def put_exchanged(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Store rows merged over all ranks; those without elements on any rank are dropped on the host."""
        self.put_rows(source, names, rows, columns)
        for name in names:
            self._parts.pop((source, name), None)
            self._exchanged.add((source, name))

    def loose_rows(self) -> dict[tuple[str, str], Tensor]:
        """The merged rows of :meth:`merge_rows`, without those of micro-batch gradients: ``[8]`` by source and name."""
        found = {where: parts for where, parts in self._parts.items() if where[0] not in PARAMETER_SOURCES}
        return {where: merge(torch.stack(parts)) if len(parts) > 1 else parts[0] for where, parts in found.items()}

    def contribute(self, key: Key, reducer: str, sums: Tensor) -> None:
        """Add this rank's sums to a value of the whole tensor, a ``"norm"`` or ``"cosine"``."""
        self._contributions[key] = reducer, row_of_sums(sums)

    def share(self, key: Key, reducer: str) -> None:
        """Merge the value of ``key`` over ranks by ``reducer``."""
        self._reducers[key] = reducer

    def shared_values(self, watches: Callable[[Key], bool]) -> dict[Key, tuple[str, Tensor]]:
        """How each value merges over ranks, and this rank's contribution.

        These are values logged to be shared or that a detector ``watches``, and metrics of modules with a named reducer.
        """
        found = dict(self._contributions)
        for key, pending in self._pending.items():
            reducer = self._reducers.get(key) or ("mean" if not key.source and watches(key) else "")
            if not reducer and key.source in SHARED_SOURCES and isinstance(pending.aggregation, str):
                reducer = pending.aggregation
            if reducer:
                with contextlib.suppress(Exception):  # of a user's aggregation; reported when the step ends
                    if (row := contribution(key, pending, reducer)) is not None:
                        found[key] = reducer, row
        return found

    def put_shared(self, key: Key, reducer: str, row: Tensor) -> None:
        """Store the merged contributions of all ranks; dropped on the host if there were none."""
        self._pending[key] = PendingValue(reducer if reducer in REDUCERS else "sum", [part_from(row, reducer)])
        self._counts[key] = row[Column.COUNT]

    def put_where(self, key: Key, value: Tensor, there: Tensor) -> None:
        """Store a value that exists only if ``there``, 0-d on the device, is true; replaces an earlier one."""
        self.put_value(key, value)
        self._counts[key] = there

    def parts_of(self, source: str) -> list[Tensor]:
        """The rows of :meth:`merge_rows` of all tensors of a source: ``[8]`` each."""
        return [row for (of, _), rows in self._parts.items() if of == source for row in rows]

    def put_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Store a scalar, or a tensor whose elements ``aggregation`` reduces; replaces an earlier value."""
        self._pending.pop(key, None)
        self.merge_value(key, value, aggregation, weight)

    def merge_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Merge a scalar or tensor of one micro-batch with the others of this step by ``aggregation``.

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
        """Merge the values of :meth:`merge_rows` and :meth:`merge_value` in ``other``."""
        for (source, name), parts in other._parts.items():
            for row in parts:
                self.merge_rows(source, [name], row.unsqueeze(0), other._columns[source])
        for key, pending in other._pending.items():
            self._merge(key, pending.parts, pending.aggregation)
        self._reducers.update(other._reducers)
        self.absent.update(other.absent)
        self.refused.update(other.refused)

    def take_over(self, other: StepBuffer, source: str, names: Iterable[str]) -> None:
        """Replace the values of these tensors by those in ``other``."""
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
        """The keys of logged values."""
        return frozenset(key for key in self._pending if not key.source)

    def scalars(self) -> StepBuffer:
        """A new buffer that continues with the logged values."""
        more = StepBuffer(self.step, self._complaints)
        more._pending = {key: PendingValue(p.aggregation, list(p.parts)) for key, p in self._pending.items() if not key.source}
        return more

    def part(self, sources: Iterable[str]) -> StepBuffer:
        """A new buffer with the stored rows of ``sources`` and the logged values. This one is unchanged."""
        wanted, found = set(sources), self.scalars()
        found._blocks = list(self._blocks)
        found._place = {where: place for where, place in self._place.items() if where[0] in wanted}
        found._drop_replaced()
        found._columns = {source: columns for source, columns in self._columns.items() if source in wanted}
        found._reducers = dict(self._reducers)
        found.refused = {source: reason for source, reason in self.refused.items() if source in wanted}
        return found

    def depart(self) -> PendingReadback:
        """Start the copy to the host, after which nothing may be stored. Does not synchronise."""
        parts = [
            part for parts in self._parts.values() for part in parts
        ]  # merged on the host, which is cheaper than one launch for each
        reduced = self._reduced()
        noted = {name: fact for name, fact in self.noted.items() if isinstance(fact, Tensor)}
        arrival = DeviceToHostCopy([*self._blocks, *parts, *reduced.values(), *noted.values(), *self._counts.values()])
        merged = [(where, len(parts)) for where, parts in self._parts.items()]
        return PendingReadback(self, arrival, merged, list(reduced), set(noted), list(self._counts))

    def flush(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """:meth:`depart`, then wait: see :meth:`PendingReadback.land`."""
        return self.depart().land()

    def collect(self, blocks: list[Tensor], merged: Sequence[tuple[str, str]]) -> dict[str, StatsTable]:
        """The tables by source, from the stored blocks on the host; the last block has the ``merged`` rows."""
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
        """Final scalars; several for a key whose aggregation returned a dict."""
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
    """``after``, or the rows of ``before`` if both have the same values: a run directory stores those once."""
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
        buffer: their source.
        arrival: the copy.
        merged: tensors whose rows are yet to be merged, and how many.
        reduced: the keys of values.
        noted: the names of facts that are tensors.
        counted: the keys of values that may not exist.
    """

    buffer: StepBuffer
    arrival: DeviceToHostCopy
    merged: list[tuple[tuple[str, str], int]]
    reduced: list[Key]
    noted: set[str]
    counted: list[Key]

    def land(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """Tables by source, custom values and facts, on the host. Waits for the copy, once per device."""
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
