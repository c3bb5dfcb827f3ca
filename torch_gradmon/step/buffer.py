"""The values of the current step, on the device.

Everything that hooks measure is stored here as device tensors; micro-batches merge here; a :class:`PendingReadback` sends all of it to the
host at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, count, filterfalse, islice, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import (
    GRADIENT,
    GRADIENT_BEFORE_CLIP,
    MODULE_SOURCES,
    PARAMETER,
    PARAMETER_DIFFERENCE,
    PARAMETER_SOURCES,
    RCC_SOURCES,
    UNDEFINED,
    Key,
)
from ..core.moments import ALL_COLUMNS, Column, identity, merge, merge_by_group
from ..core.records import REDUCERS, StatsTable, is_whole_loss
from ..core.torch_modes import copied_to_host, current_stream, keep_for_current_stream, stream_number
from ..statistics.request import accumulator_dtype, refusal

# --- Rows and values ---

#: Columns that show whether two rows are of the same values.
_WITNESSES = frozenset({Column.COUNT, Column.SUM, Column.SQUARE_SUM})


#: Where rows are, by name: a block of rows, and the row in it.
Rows = dict[str, tuple[Tensor, int]]
_BLOCK, _THIRD, _IS_CPU = itemgetter(0), itemgetter(2), attrgetter("is_cpu")
_SOURCE = attrgetter("source")


def _rows_at(places: Collection[tuple[Tensor, int]], blocks: Mapping[int, Tensor]) -> Tensor:
    """The rows at these places in a table; ``blocks``: what to read by the id of the tensor in a place, where it is another one."""
    used = {id(block): blocks.get(id(block), block) for block, _ in places}
    starts = dict(zip(used, accumulate(map(len, used.values()), initial=0), strict=False))
    return torch.cat([*used.values()])[[starts[id(block)] + row for block, row in places]]


def _shared(after: StatsTable, before: StatsTable) -> StatsTable:
    """``after``, or the rows of ``before`` if both have the same values: a run directory stores those once."""
    if not _WITNESSES <= after.columns <= before.columns:
        return after
    rows = before.rows
    if before.names != after.names:
        if not before.row_of.keys() >= set(after.names):
            return after
        rows = rows[[before.row_of[name] for name in after.names]]
    elif before.totals[Column.SQUARE_SUM] != after.totals[Column.SQUARE_SUM]:
        return after  # as in most steps that clip; both are needed anyway
    columns = sorted(after.columns)
    if not rows.equal(after.rows) and not rows[:, columns].equal(after.rows[:, columns]):
        return after
    found = StatsTable(after.names, rows, before.columns, GRADIENT_BEFORE_CLIP)
    if rows is before.rows:
        vars(found)["totals"] = before.totals  # a property that is computed once
    return found


# --- Values of one key: what a micro-batch contributes, how contributions merge, and the final number ---

Aggregation = str | Callable[..., Any]


_REDUCE: dict[str, Callable[..., Tensor]] = {"mean": torch.sum, "sum": torch.sum, "min": torch.amin, "max": torch.amax}


@dataclass
class PendingValue:
    aggregation: Aggregation
    parts: list[Tensor]  # per micro-batch: [sum, count], one value, or all values, by aggregation
    reducer: str = ""  # by which ranks merge it, if it was logged for that
    there: Tensor | None = None  # it exists if this is not zero: the number of ranks that have contributed, or a flag
    replaces: bool = False  # earlier values of the step
    stands_in: bool = False  # a trainer has logged it, and the script no such value
    of_all: bool = False  # it is that of all ranks by now


def as_tensor(value: Any, key: Key) -> Tensor:
    """A number or a tensor as one dimension, in the widest floating dtype of its device; TypeError or ValueError if neither."""
    if isinstance(value, Tensor):
        if (reason := refusal(value)) is not None:
            raise TypeError(f"the value of {'/'.join(filter(None, key))} cannot be read: {reason}")
        if value.is_complex():
            raise TypeError(f"the value of {'/'.join(filter(None, key))} is complex; return a real number, such as its abs()")
        if value.numel() == 0:
            raise ValueError(f"the value of {'/'.join(filter(None, key))} has no elements")
        return value.detach().to(accumulator_dtype(value.device)).reshape(-1)
    try:
        return torch.tensor([float(value)], dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the value of {'/'.join(filter(None, key))} must be a number or a tensor, got {type(value).__name__}"
        ) from error


def part_of(values: Tensor, aggregation: Aggregation, weight: int = 1) -> Tensor:
    """The contribution of one micro-batch, reduced at once: the tensor may be modified later. A single value counts ``weight`` times."""
    if aggregation == "mean":
        return torch.stack([values.sum(), torch.full_like(values[0], values.numel())]) * (weight if values.numel() == 1 else 1)
    if isinstance(aggregation, str):
        return _REDUCE[aggregation](values).reshape(1)
    return values.clone()  # it may be a view of its source


def merged_parts(parts: list[Tensor], aggregation: str) -> Tensor:
    return _REDUCE[aggregation](torch.stack(parts), 0)


def cosine(product: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The cosine of two vectors from their inner products. Infinite if one is zero: that marks an undefined value on the device."""
    lengths = (first * second).sqrt()
    return torch.where(lengths == 0, UNDEFINED, product / lengths)


def turn(own: Tensor, product: Tensor, change: Tensor) -> Tensor:
    """The angle in radians between a vector and its sum with a change, from the inner products of the vector with itself, of both, and of
    the change with itself: exact for small angles too. Infinite if the vector or the sum is zero: that marks an undefined value.
    """
    across = (own * change - product.square()).clamp(min=0).sqrt()
    along = own + product
    return torch.where((own == 0) | ((across == 0) & (along == 0)), UNDEFINED, torch.atan2(across, along))


def growth(own: Tensor, product: Tensor, change: Tensor) -> Tensor:
    """How much longer a vector's sum with a change is, relative to the vector, from the same products. Infinite for a zero vector."""
    relative = (2 * product + change) / own
    return torch.where(own == 0, UNDEFINED, relative / ((1 + relative).clamp(min=0).sqrt() + 1))


def contribution(key: Key, pending: PendingValue, reducer: str) -> Tensor | None:
    """This rank's contribution to a value that ranks merge by ``reducer``, ``[8]``; None if the aggregation function returned several."""
    if pending.aggregation == reducer == "mean":  # weighted by how many values each rank has
        total, count = merged_parts(pending.parts, "mean").unbind()
    else:
        found = finished(key, pending)
        if list(found) != [key]:
            return None
        total, count = found[key], torch.ones_like(found[key])
    row = identity(1, total.device, total.dtype)[0]
    row[Column.COUNT] = count
    if reducer in _EXTREMES:  # min and max ignore NaN, so it is counted separately
        row[Column.NONFINITE] = total.isnan()
        row[_EXTREMES[reducer]] = torch.where(total.isnan(), row[_EXTREMES[reducer]], total)
    else:
        row[Column.SUM] = total
    return row


def part_from(row: Tensor, reducer: str) -> Tensor:
    """The inverse of :func:`contribution`: one part of a pending value, from the merged rows."""
    if reducer == "mean":
        return torch.stack([row[Column.SUM], row[Column.COUNT]])
    if reducer in _EXTREMES:
        return torch.where(row[Column.NONFINITE] > 0, torch.nan, row[_EXTREMES[reducer]]).reshape(1)
    sums = row[Column.SUM : Column.SUM + 3].unbind()
    return (_OF_SUMS[reducer](*sums) if reducer in _OF_SUMS else sums[0]).reshape(1)


#: The value from up to three sums; for other reducers it is the first one.
_OF_SUMS: dict[str, Callable[..., Tensor]] = {
    "norm": lambda squares, *_: squares.sqrt(),
    "rms": lambda squares, count, _: (squares / count).sqrt(),
    "cosine": cosine,
    "angle": turn,
    "growth": growth,
}
_EXTREMES = {"min": Column.MIN, "max": Column.MAX}


def finished(key: Key, pending: PendingValue) -> dict[Key, Tensor]:
    """The final scalar of a key, or several if the aggregation function returned a dict."""
    if isinstance(pending.aggregation, str):
        merged = merged_parts(pending.parts, pending.aggregation)
        return {key: merged[0] / merged[1] if pending.aggregation == "mean" else merged[0]}
    result = pending.aggregation(torch.cat(pending.parts))
    if not isinstance(result, Mapping):
        return {key: _scalar(result, key)}
    field = "metric" if key.metric else "name"
    return {
        (sub := key._replace(**{field: f"{getattr(key, field)}.{str(name).replace('/', '.')}"})): _scalar(value, sub)
        for name, value in result.items()
    }


def _scalar(value: Any, key: Key) -> Tensor:
    tensor = as_tensor(value, key)
    if tensor.numel() != 1:
        raise ValueError(f"{'/'.join(filter(None, key))} must be one number, got {tensor.numel()} of them")
    return tensor[0]


#: Sources of values of a rank's own batch.
SHARED_SOURCES = frozenset((*MODULE_SOURCES, *RCC_SOURCES))
_BY_FUNCTION = (
    "metric_aggregation_fn= is a function, and ranks merge values of their batches by a named reducer: pass 'mean', 'sum', 'min' or "
    "'max'"
)
_SEVERAL = "ranks merge one value for each key, and its aggregation function returns several"


# --- Streams, and the copy to the host ---


class DeviceToHostCopy:
    """An asynchronous copy of tensors as float64, one per device, to pinned memory behind the device's work: :meth:`land` waits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.host: list[Tensor] = []  # those of other devices are replaced when they land
        by_device: dict[torch.device, list[int]] = {}
        for position, tensor in enumerate(tensors):
            if tensor.is_cpu:  # without packing it
                tensor = tensor.to(torch.float64, copy=True)
            else:
                by_device.setdefault(tensor.device, []).append(position)
            self.host.append(tensor)
        self.is_local = not by_device
        # of each device the places of its tensors, these, and the event to wait for; None: they are still on the device
        self._groups: list[tuple[list[int], Tensor, Any]] = []
        for device, positions in by_device.items():
            wide = accumulator_dtype(device)
            packed = torch.cat([tensors[p].reshape(-1).to(wide) for p in positions])
            self._groups.append((positions, *copied_to_host(packed)))

    def is_ready(self) -> bool:
        """Whether :meth:`land` would not wait. Does not synchronise."""
        return all(copied is not None and copied.query() for *_, copied in self._groups)

    def wait(self) -> None:
        for *_, copied in self._groups:
            if copied is not None:
                copied.synchronize()

    def land(self) -> list[Tensor]:
        """The tensors on the host, in order. Waits for the copies, but not for work queued after them."""
        self.wait()
        for positions, packed, _ in self._groups:
            pieces = torch.split(packed.to("cpu", torch.float64), [self.host[p].numel() for p in positions])
            for position, piece in zip(positions, pieces, strict=True):
                self.host[position] = piece.reshape(self.host[position].shape)
        self._groups = []
        return self.host


#: Of steps whose values are all on the host, where they change no more: whoever measures makes new rows.
_ARRIVED = DeviceToHostCopy([])


# --- The rows of a batch with the largest losses ---

#: Rows that are kept of each step.
KEPT = 8
#: Identities on a device travel in three parts of as many bits, which float32 holds exactly.
_PARTS, _BITS = 3, 22

#: Identities of the rows of one call: on the host all of them, on a device those of the largest losses, behind the numbers.
Identities = Sequence[Any] | Tensor


@torch.no_grad()
def largest_of(losses: Tensor, identities: Identities) -> Tensor:
    """Numbers about the losses of rows, ``[n]``, on their device: the sum of finite losses, the numbers of others and of negative ones, the
    :data:`KEPT` largest losses, those that are not finite first, their places, and the parts of their identities where these are a tensor.
    Does not synchronise.
    """
    values = losses.detach().to(accumulator_dtype(losses.device))
    is_finite = values.isfinite()
    places = torch.where(is_finite, values, math.inf).topk(min(KEPT, len(values))).indices
    counts = [(~is_finite).sum(), (is_finite & (values < 0)).sum()]
    numbers = [torch.where(is_finite, values, 0.0).sum().view(1), torch.stack(counts), values[places], places]
    if isinstance(identities, Tensor):
        named = identities.detach().to(values.device, torch.int64)[places]
        numbers += [named >> 2 * _BITS, named >> _BITS & 2**_BITS - 1, named & 2**_BITS - 1]
    return torch.cat([each.to(values.dtype) for each in numbers])


def merged_losses(calls: Sequence[tuple[Identities, int, Tensor]]) -> dict[str, Any]:
    """The worst rows of a step, for its context; a row of several calls has the sum of its losses. ``calls``: identities, number of rows,
    and the numbers of :func:`largest_of` on the host.
    """
    found: dict[Any, float] = {}
    for identities, _, numbers in calls:
        is_here = not isinstance(identities, Tensor)
        count = (len(numbers) - 3) // (2 if is_here else 2 + _PARTS)
        losses, places, *parts = numbers[3:].view(-1, count).tolist()
        if is_here:
            here = (identities[int(place)] for place in places)
            names = [int(name) if hasattr(name, "__index__") else str(name) for name in here]
        else:
            names = [(int(high) << 2 * _BITS) + (int(mid) << _BITS) + int(low) for high, mid, low in zip(*parts, strict=True)]
        for loss, name in zip(losses, names, strict=True):
            found[name] = found.get(name, 0.0) + loss
    largest = sorted(found.items(), key=lambda row: -row[1] if math.isfinite(row[1]) else -math.inf)[:KEPT]
    total, nonfinite, negative = (sum(float(numbers[place]) for *_, numbers in calls) for place in range(3))
    return {
        "ids": [name for name, _ in largest],
        "losses": [loss for _, loss in largest],
        "sum": total,
        "nonfinite": int(nonfinite),
        "negative": int(negative),
        "count": sum(count for _, count, _ in calls),
    }


# --- The values of the current step, on the device ---

#: Sources that are measured before the first optimizer of a step changes anything.
_FIRST = frozenset({PARAMETER, PARAMETER_DIFFERENCE})
#: Facts that count all optimizers of a step.
_ADDED = frozenset({"edited", "found_inf", "unseen_refusals"})
#: Sets, and dicts of which the later one counts, of two parts of a step.
_UNITED = ("thawed", "frozen", "used", "unshown", "absent", "refused", "noted", "extras", "_contributions")
#: A fact: the difference between the steps of ranks that have exchanged values.
SKEW = "ranks/skew"


@dataclass
class _Source:
    """The rows of the tensors of one source, by name."""

    columns: frozenset[Column]  # that all rows have
    whole: tuple[Sequence[str], Tensor] | None = None  # what was put, where it came at once and nobody has asked for single rows
    places: Rows = field(default_factory=dict)  # what was put otherwise
    last: Tensor | None = None  # of these, the rows that were put last
    merging: dict[str, list[Tensor]] = field(default_factory=dict)  # what merges, but for the first table of several
    table: tuple[Sequence[str], Tensor] | None = None
    exchanged: set[str] = field(default_factory=set)  # whose rows are merged over ranks
    totals: list[float] | None = None  # the rows of `whole` merged into one, where that is known

    @property
    def rows(self) -> Rows:
        """What was put."""
        if self.whole is not None:
            (names, rows), self.whole = self.whole, None
            self.places = dict(zip(names, zip(repeat(rows), count()), strict=False))
        return self.places

    @property
    def parts(self) -> dict[str, list[Tensor]]:
        """What merges."""
        if self.table is not None:
            (names, rows), self.table = self.table, None
            self.merging = {name: [row] for name, row in zip(names, rows, strict=True)}
        return self.merging


class StepBuffer:
    """What was measured in one step: rows of statistics by source and name, values by key, and facts.

    Rows are stored, where the last one counts, or merged over micro-batches and calls.
    """

    def __init__(self, step: int, complaints: WarningLog) -> None:
        self.step, self._complaints = step, complaints
        self._dropped: set[tuple[str, str | None]] | None = None  # replaces nothing that was set aside; None where nothing was
        self._sources: dict[str, _Source] = {}
        self._values: dict[Key, PendingValue] = {}
        self._has_stand_ins = False  # values of a trainer that the script has not logged
        self._contributions: dict[Key, tuple[str, Tensor]] = {}
        self._finals: dict[Key, tuple[Tensor, int]] = {}  # where values are that nothing merges with
        self.noted: dict[str, Tensor | float] = {}  # facts about the step
        self.extras: dict[str, Tensor] = {}  # small tensors for plugins, by a name that begins with theirs
        self.rows: list[tuple[Identities, int, Tensor]] = []  # logged ones, call by call, with the numbers of their losses
        self.are_rows_over = False  # all of the batch are logged; where a closure is evaluated again, they come anew
        self.unshown: set[tuple[str, str]] = set()  # source and name of rows for the run directory only
        self.thawed: set[str] = set()  # parameters frozen only for a part of the step
        self.frozen: set[str] = set()  # parameters frozen since the step began
        self.used: set[str] = set()  # parameters of the optimizers that stepped, with or without a gradient
        self.absent: dict[tuple[str, str], str] = {}
        self.refused: dict[str, str] = {}
        self.rng: dict[str, Tensor] = {}  # states of the random generators at its beginning
        self._streams: dict[tuple[torch.device, int], Any] = {}  # those on which values were computed

    def _source(self, source: str, columns: frozenset[Column] = ALL_COLUMNS) -> _Source:
        """The source, which gets rows of these ``columns``."""
        found = self._sources.get(source)
        if found is None:
            found = self._sources[source] = _Source(columns)
        elif found.columns is not columns:
            found.columns &= columns
        return found

    def put_rows(
        self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column], totals: list[float] | None = None
    ) -> None:
        """Store statistics ``[len(names), 8]`` of different names, replacing those of the same ones; ``totals``: these merged into one."""
        if not rows.is_cpu:
            self._note_stream(rows.device)
        if len(names) != rows.size(0):
            raise ValueError(f"{len(rows)} rows of {source} for {len(names)} names")
        of = self._sources.setdefault(source, _Source(columns))
        if of.columns is not columns:
            of.columns &= columns
        of.last = rows
        if of.whole is None and not of.places:
            of.whole, of.totals = (names, rows), totals
        else:
            of.rows.update(zip(names, zip(repeat(rows), count()), strict=False))

    def repeat_rows(self, source: str, names: Iterable[str], of: str, columns: frozenset[Column]) -> None:
        """Rows of ``source`` are those of the same names of the source ``of``, which must exist."""
        known = self._sources[of].rows
        self._source(source, columns).rows.update({name: known[name] for name in names})

    def last_put(self, source: str) -> Tensor | None:
        """The rows that were put last, which show whether others have come since."""
        return self._sources[source].last if source in self._sources else None

    def names_of(self, source: str) -> set[str]:
        return set(self._sources[source].rows) if source in self._sources else set()

    def rows_of(self, source: str, names: Iterable[str]) -> Tensor:
        """The stored rows of these names, which must exist: ``[names, 8]``, on the device."""
        places = self._sources[source].rows
        return torch.stack([rows[row] for rows, row in (places[name] for name in names)])

    def merge_rows(self, source: str, names: Sequence[str], rows: Tensor | Sequence[Tensor], columns: frozenset[Column]) -> None:
        """Merge statistics of one micro-batch or call with those of the same names."""
        if len(rows) and not rows[0].is_cpu:
            self._note_stream(rows[0].device)
        of = self._source(source, columns)
        if of.table is None and not of.merging and isinstance(rows, Tensor) and len({*names}) == len(rows) > 1:
            of.table = names, rows
            return
        known = of.parts
        for name, row in zip(names, rows, strict=True):
            parts = known.setdefault(name, [])
            parts.append(row)
            if len(parts) == 64:  # bounds the memory for many micro-batches
                parts[:] = [merge(torch.stack(parts))]

    def expect_row(self, source: str, name: str) -> None:
        """A row will be merged later, and has its place now: the order of rows is that of the calls."""
        self._source(source).parts.setdefault(name, [])

    def drop_parts(self, source: str, name: str) -> None:
        self._source(source).parts.pop(name, None)

    def rows_or_none(self, source: str, names: Sequence[str]) -> Tensor:
        """The stored rows of these names, or the identity for missing ones: ``[names, 8]``."""
        known = self.names_of(source).intersection(names)
        found = self.rows_of(source, [name for name in names if name in known]) if known else identity(0)
        rows = identity(len(names), found.device, found.dtype)
        rows[[row for row, name in enumerate(names) if name in known]] = found
        return rows

    def put_exchanged(self, source: str, names: Sequence[str], rows: Tensor, columns: frozenset[Column]) -> None:
        """Store rows merged over all ranks; those without elements on any rank are dropped on the host."""
        of = self._source(source, columns)
        if of.rows.keys() <= set(names):
            of.places = {}  # in this order on each rank, whatever it has had itself: sums are then the same
        self.put_rows(source, names, rows, columns)
        if of.parts:
            of.merging = {name: parts for name, parts in of.parts.items() if name not in of.rows}
        of.exchanged.update(names)

    def merged_rows_of_calls(self) -> dict[tuple[str, str], Tensor]:
        """The merged rows of :meth:`merge_rows`, without those of micro-batch gradients: ``[8]`` by source and name."""
        found = {(source, name): parts for source, name, parts in self._parts() if source not in PARAMETER_SOURCES}
        return {where: merge(torch.stack(parts)) if len(parts) > 1 else parts[0] for where, parts in found.items()}

    def _parts(self) -> list[tuple[str, str, list[Tensor]]]:
        return [(source, name, parts) for source, of in self._sources.items() for name, parts in of.parts.items() if parts]

    def parts_of(self, source: str) -> list[Tensor]:
        return [row for of, _, rows in self._parts() if of == source for row in rows]

    def put_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Store a scalar, or a tensor whose elements ``aggregation`` reduces; replaces an earlier value."""
        self._values.pop(key, None)
        self.merge_value(key, value, aggregation, weight)
        self._values[key].replaces = True

    def put_where(self, key: Key, value: Tensor, there: Tensor) -> None:
        """Store a value that exists only if ``there``, 0-d on the device, is true; replaces an earlier one."""
        self.put_value(key, value)
        self._values[key].there = there

    def put_values(self, keys: Sequence[Key], values: Tensor) -> None:
        """Store final values ``[len(keys)]``, replacing earlier ones that came in this way."""
        if not values.is_cpu:
            self._note_stream(values.device)
        for key in self._finals.keys() & keys:
            del self._finals[key]  # the last ones come last
        self._finals.update(zip(keys, zip(repeat(values), count()), strict=False))

    def merge_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Merge a scalar or tensor of one micro-batch with the others of this step by ``aggregation``."""
        self._merge(key, PendingValue(aggregation, [part_of(as_tensor(value, key), aggregation, weight)]))

    def merge_logged(self, key: Key, value: Any, aggregation: Aggregation, stands_in: bool) -> bool:
        """Merge a logged value; returns whether it was taken. A value of a trainer ``stands_in`` for one that the script may log:
        whichever comes first, the script's value replaces it.
        """
        if (stands_in or self._has_stand_ins) and not self._takes(key, stands_in):
            return False
        part = part_of(as_tensor(value, key), aggregation)
        self._merge(key, PendingValue(aggregation, [part], stands_in=stands_in))
        return True

    def has_only(self, keys: Set[Key]) -> bool:
        """Whether these are the keys of all logged values, and no value of a trainer is among them."""
        return not self._has_stand_ins and keys == set(filterfalse(_SOURCE, self._values))

    def _takes(self, key: Key, stands_in: bool) -> bool:
        self._has_stand_ins = True
        is_loss = is_whole_loss(key)
        alike = []
        for known, value in self._values.items():
            if not known.source and value.stands_in != stands_in and (known == key or (is_loss and is_whole_loss(known))):
                alike.append(known)
        if stands_in:
            return not alike
        for known in alike:
            del self._values[known]
        return True

    def _merge(self, key: Key, given: PendingValue) -> None:
        for part in given.parts:
            if not part.is_cpu:
                self._note_stream(part.device)
        known = self._values.setdefault(key, given)
        if known is given:
            return
        aggregations = known.aggregation, given.aggregation
        if aggregations[0] != aggregations[1] and any(isinstance(each, str) for each in aggregations):
            first, second = (repr(each) if isinstance(each, str) else "a function" for each in aggregations)
            raise ValueError(f"the values of one key in one step need one aggregation, and were logged with {first} and {second}")
        known.parts += given.parts
        known.stands_in, known.reducer = given.stands_in, given.reducer or known.reducer
        if len(known.parts) >= 64 and isinstance(known.aggregation, str):
            known.parts[:] = [merged_parts(known.parts, known.aggregation)]

    @property
    def logged(self) -> frozenset[Key]:
        return frozenset(key for key in self._values if not key.source)

    def contribute(self, key: Key, reducer: str, sums: Tensor) -> None:
        """Add this rank's sums, at most three, to a value of the whole tensor, a ``"norm"`` or ``"cosine"``."""
        if not sums.is_cpu:
            self._note_stream(sums.device)
        row = identity(1, sums.device, sums.dtype)[0]
        row[Column.COUNT] = 1
        row[Column.SUM : Column.SUM + len(sums)] = sums
        self._contributions[key] = reducer, row

    def share(self, key: Key, reducer: str) -> None:
        """Ranks merge the value by ``reducer``."""
        if key in self._values:
            self._values[key].reducer = reducer

    def shared_values(self, watches: Callable[[Key], bool]) -> dict[Key, tuple[str, Tensor]]:
        """How each value merges over ranks, and this rank's contribution: values logged to be shared or that a detector ``watches``, and
        metrics of modules. What has no named reducer is withheld: a function cannot be applied to values of ranks, each of which has
        applied it already.
        """
        found = dict(self._contributions)
        for key, pending in list(self._values.items()):
            reducer = pending.reducer or ("mean" if not key.source and watches(key) else "")
            if not reducer and key.source in SHARED_SOURCES:
                if not isinstance(pending.aggregation, str):
                    self.withhold(key, _BY_FUNCTION)
                    continue
                reducer = pending.aggregation
            if reducer:
                with contextlib.suppress(Exception):  # of a user's aggregation; reported when the step ends
                    if (row := contribution(key, pending, reducer)) is not None:
                        found[key] = reducer, row
                    else:
                        self.withhold(key, _SEVERAL)
        return found

    def put_shared(self, key: Key, reducer: str, row: Tensor) -> None:
        """Store the merged contributions of all ranks; dropped on the host if there were none."""
        aggregation = reducer if reducer in REDUCERS else "sum"
        self._values[key] = PendingValue(aggregation, [part_from(row, reducer)], there=row[Column.COUNT], of_all=True)

    def withhold(self, key: Key, reason: str) -> None:
        self._values.pop(key, None)
        self.absent[key.source, "/".join(filter(None, key[1:]))] = reason

    def withhold_values(self, watches: Callable[[Key], bool], reason: str) -> None:
        """Remove this rank's values of its own batches, which those of other ranks were not merged with."""
        sources = {source for source, _ in self.merged_rows_of_calls()}
        for source in sources | {key.source for key in self._values if key.source in SHARED_SOURCES}:
            self.refuse_all(source, reason)
        for key in self.shared_values(watches):
            self.withhold(key, reason)

    def clear(self, source: str, names: Iterable[str] | None = None) -> None:
        if source not in self._sources and self._dropped is None and not (self._values or self._finals):
            return
        gone = None if names is None else frozenset(names)
        if self._dropped is not None:
            self._dropped.update([(source, None)] if gone is None else ((source, name) for name in gone))
        if (of := self._sources.get(source)) is not None:
            if gone is None:
                self._sources[source] = _Source(of.columns)  # those that its rows have in common stay
            else:
                are_all = of.whole is not None and gone.issuperset(of.whole[0])
                of.places = {} if are_all else {name: place for name, place in of.rows.items() if name not in gone}
                of.whole, of.merging = None, {name: parts for name, parts in of.parts.items() if name not in gone}
        for key in [*self._values, *self._finals]:
            if key.source == source and (gone is None or key.name in gone):
                self._values.pop(key, None)
                self._finals.pop(key, None)

    def refuse(self, source: str, name: str, reason: str) -> None:
        """Mark a tensor as not measurable, which also prevents sums over the whole source."""
        self.absent[source, name] = reason
        self.refused[source] = f"{name} could not be measured: {reason}"

    def refuse_all(self, source: str, reason: str) -> None:
        self.clear(source)
        self.absent[source, ""] = self.refused[source] = reason

    def absorb(self, other: StepBuffer) -> None:
        """Merge the values of :meth:`merge_rows` and :meth:`merge_value` in ``other``, unless the value here is that of all ranks; what was
        put there replaces what is here.
        """
        if other._streams:
            other.join_streams()
            self._streams.update(other._streams)
        for source, of in other._sources.items():
            for name, parts in of.parts.items():
                for row in parts:
                    self.merge_rows(source, [name], row.unsqueeze(0), of.columns)
            if of.rows:
                self._source(source, of.columns).rows.update(of.rows)
        for key, value in other._values.items():
            is_of_all = key in self._values and self._values[key].of_all
            may_stand_in = value.stands_in or self._has_stand_ins
            if not is_of_all and (key.source or not may_stand_in or self._takes(key, value.stands_in)):
                self._merge(key, value)
        self._finals.update(other._finals)
        self.absent.update(other.absent)
        self.refused.update(other.refused)

    def part(self, sources: Collection[str] = ()) -> StepBuffer:
        """A new buffer that continues with the logged values, and has the stored rows of ``sources``. This one is unchanged."""
        if self._streams:
            self.join_streams()
        found = StepBuffer(self.step, self._complaints)
        found._streams, found._has_stand_ins = dict(self._streams), self._has_stand_ins
        found._values = {key: replace(value, parts=[*value.parts]) for key, value in self._values.items() if not key.source}
        for source, of in self._sources.items():
            if source in sources:
                found._sources[source] = _Source(of.columns, of.whole, dict(of.places))
        found.refused = {source: reason for source, reason in self.refused.items() if source in sources}
        return found

    def set_aside(self) -> StepBuffer:
        """A new buffer with all that was measured so far. This one begins anew."""
        earlier = copy(self)
        self.__dict__ = vars(StepBuffer(self.step, self._complaints))
        earlier.are_rows_over, self._dropped = False, set()
        return earlier

    def rejoin(self, earlier: StepBuffer) -> None:
        """What was set aside is of the same step: merge as if it never had been. Of parameters the first values count, of what an
        optimizer's step gives the last ones.
        """
        earlier.join_streams()
        self._streams.update(earlier._streams)
        dropped = self._dropped or set()

        def is_left(source: str, name: str) -> bool:
            return dropped.isdisjoint({(source, name), (source, None)})

        for source, was in earlier._sources.items():
            of = self._source(source, was.columns)
            for name, place in was.rows.items():
                if (source in _FIRST or name not in of.rows) and is_left(source, name):
                    of.rows[name] = place
            parts = {name: rows for name, rows in was.parts.items() if is_left(source, name)}
            for name, rows in of.parts.items():
                parts.setdefault(name, []).extend(rows)
            of.merging = parts
        since, self._values = self._values, {}
        for key, value in earlier._values.items():
            is_replaced = key in since and since[key].replaces
            if key.source in _FIRST or (not is_replaced and is_left(key.source, key.name)):
                self._values[key] = value
        for key, value in since.items():
            known = self._values.setdefault(key, value)
            if known is not value and key.source not in _FIRST:
                known.parts += value.parts
                known.stands_in, known.reducer = value.stands_in, value.reducer or known.reducer
        before = earlier._finals.items()
        left = {key: place for key, place in before if key not in self._finals and is_left(key.source, key.name)}
        self._finals = left | self._finals
        added = {name: earlier.noted[name] + fact for name, fact in self.noted.items() if name in _ADDED & earlier.noted.keys()}
        for name in _UNITED:
            setattr(self, name, getattr(earlier, name) | getattr(self, name))
        self.noted |= added
        self.rows, self.rng = [*earlier.rows, *self.rows], earlier.rng
        self._has_stand_ins |= earlier._has_stand_ins
        self._dropped = None if earlier._dropped is None else earlier._dropped | dropped

    def log_sample_losses(self, ids: Identities, losses: Tensor) -> None:
        if self.are_rows_over:
            self.rows, self.are_rows_over = [], False
        # a list may be filled anew before the numbers are on the host
        self.rows.append((ids if isinstance(ids, Tensor) else list(ids), len(losses), largest_of(losses, ids)))

    def _note_stream(self, device: torch.device) -> None:
        number = stream_number(device)
        if number is not None and (device, number) not in self._streams and (stream := current_stream(device)) is not None:
            self._streams[device, number] = stream

    def join_streams(self) -> None:
        """Whatever the stream that a value was computed on, the current one may read it from now on. The host does not wait."""
        streams, self._streams = self._streams, {}
        here = {device: stream_number(device) for device, _ in streams}
        others = [(device, stream) for (device, number), stream in streams.items() if here[device] != number]
        for device, stream in others:
            current_stream(device).wait_stream(stream)
        if elsewhere := {device for device, _ in others}:
            for value in self._on_device():
                if value.device in elsewhere:
                    keep_for_current_stream(value)  # else the next tensor of its own stream may get this memory early
        for device in here:
            self._note_stream(device)

    def _on_device(self) -> Iterator[Tensor]:
        yield from self._blocks().values()
        for _, _, parts in self._parts():
            yield from parts
        for value in self._values.values():
            yield from value.parts
            if value.there is not None:
                yield value.there
        yield from (sums for _, sums in self._contributions.values())
        yield from (fact for fact in self.noted.values() if isinstance(fact, Tensor))
        yield from self.extras.values()
        yield from (numbers for *_, numbers in self.rows)

    def _blocks(self) -> dict[int, Tensor]:
        """The tensors that rows and final values are in by id, each once."""
        blocks = [*map(_BLOCK, self._finals.values())]
        for of in self._sources.values():
            blocks += map(_BLOCK, of.places.values()) if of.whole is None else (of.whole[1],)
        return dict(zip(map(id, blocks), blocks, strict=True))

    def flush(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        return PendingReadback(self).land()


class PendingReadback:
    def __init__(self, buffer: StepBuffer) -> None:
        """Start the copy of its values to the host, after which nothing may be stored there. Does not synchronise."""
        if buffer._streams:
            buffer.join_streams()
        self.buffer = buffer
        self.extras: dict[str, Tensor] = {}  # what plugins have sent along, once the copy has landed: float64
        self.rows: list[tuple[Identities, int, Tensor]] = []  # logged ones, likewise
        merges = False
        for source, of in [*buffer._sources.items()]:
            if of.whole is None and not of.places:  # it only merges: behind the others
                buffer._sources[source] = buffer._sources.pop(source)
                of.whole, of.table, of.totals = of.table, None, None
            merges = merges or of.table is not None or len(of.merging) > 0
        # merged on the host, which is cheaper than one launch for each
        self._parts = buffer._parts() if merges else []
        self._flags: dict[Key, Tensor] = {}
        reduced = self._reduced() if buffer._values else {}
        self._is_plain = not (self._parts or buffer._finals)  # rows are on the host, those of a source in one tensor
        for of in buffer._sources.values():
            self._is_plain = self._is_plain and of.whole is not None and of.whole[1].is_cpu
        blocks = {} if self._is_plain else {number: block for number, block in buffer._blocks().items() if not block.is_cpu}
        self._keys, self._blocks, facts = [*reduced], blocks, []
        for fact in buffer.noted.values():
            if isinstance(fact, Tensor):
                facts.append(fact)
        parts, losses = [*chain.from_iterable(map(_THIRD, self._parts))], map(_THIRD, buffer.rows)
        self._are_stacked = len(parts) > 0 and all(map(_IS_CPU, parts))
        rows = [torch.stack(parts)] if self._are_stacked else parts
        scalars = chain(reduced.values(), facts, self._flags.values())
        sent = [*self._blocks.values(), *rows, *scalars, *buffer.extras.values(), *losses]
        self.arrival = DeviceToHostCopy(sent) if sent else _ARRIVED

    def _reduced(self) -> dict[Key, Tensor]:
        """Final scalars; several for a key whose aggregation returned a dict."""
        buffer, reduced = self.buffer, dict[Key, Tensor]()
        for key, pending in buffer._values.items():
            if pending.there is not None:
                self._flags[key] = pending.there
            try:
                reduced.update(finished(key, pending))
            except Exception as error:
                name = getattr(pending.aggregation, "__name__", repr(pending.aggregation))
                buffer._complaints.add(
                    f"aggregation:{key}", f"the aggregation {name} of {'/'.join(filter(None, key))} failed", error
                )
                buffer.absent[key.source, key.name] = f"its aggregation function raised {type(error).__name__}: {error}"
        return reduced

    def land(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """Tables by source, custom values and facts, on the host. Waits for the copy, once per device."""
        buffer, host = self.buffer, iter(self.arrival.host if self.arrival.is_local else self.arrival.land())
        blocks = dict(zip(self._blocks, host, strict=False))
        tables: dict[str, StatsTable] = {}
        places = {} if self._is_plain else self._places(blocks, host)
        for source, of in buffer._sources.items():
            if of.whole is not None:
                names, rows, totals = tuple(of.whole[0]), blocks.get(id(of.whole[1]), of.whole[1]), of.totals
            elif where := places.get(source):
                names, rows, totals = tuple(where), _rows_at(where.values(), blocks), None
            else:
                continue
            if of.exchanged and not bool((rows[:, Column.COUNT] > 0).all()):  # no rank had any of some
                counts, totals = rows[:, Column.COUNT].tolist(), None
                some = [count > 0 or name not in of.exchanged for name, count in zip(names, counts, strict=True)]
                names, rows = tuple(compress(names, some)), rows[some]
            if names:
                tables[source] = table = StatsTable(names, rows, of.columns)
                if totals is not None:
                    vars(table)["totals"] = totals  # a property that is computed once
        after, before = tables.get(GRADIENT), tables.get(GRADIENT_BEFORE_CLIP)
        if after is not None and before is not None and after.columns >= _WITNESSES:
            tables[GRADIENT] = _shared(after, before)
        values = dict(zip(self._keys, map(float, host), strict=False))
        facts: dict[str, float] = {}
        for name, fact in buffer.noted.items():
            facts[name] = float(next(host) if isinstance(fact, Tensor) else fact)
        if facts.pop(SKEW, 0.0):  # what ranks have exchanged is useless
            reason = "the ranks are not in the same step: on one of them a step did not end, or ended twice"
            buffer._complaints.add("ranks:skew", f"values from step {buffer.step} on are dropped, because {reason}")
            buffer.absent.update(((source, ""), reason) for source in (*PARAMETER_SOURCES, *MODULE_SOURCES, *RCC_SOURCES))
            return {}, {}, facts
        for key, is_there in zip(self._flags, map(float, host), strict=False):
            if not is_there:
                values.pop(key, None)
        if buffer._finals:
            vectors = [*map(_BLOCK, buffer._finals.values())]
            once = dict(zip(map(id, vectors), vectors, strict=True))
            finals = {number: blocks.get(number, vector).tolist() for number, vector in once.items()}
            values.update({key: finals[id(vector)][place] for key, (vector, place) in buffer._finals.items()})
        self.extras = dict(zip(buffer.extras, host, strict=False))
        for ids, length, _ in buffer.rows:
            self.rows.append((ids, length, next(host)))
        buffer.rows = []  # the buffer may stay, and the loop's own tensors may name these
        return tables, values, facts

    def _places(self, blocks: dict[int, Tensor], host: Iterator[Tensor]) -> dict[str, Rows]:
        """Where the rows of each source are: those that were put, and parts, which are the next ones on the ``host``; ``blocks``, which
        gets these: what was put by the id of the tensor in places, where it comes from a device.
        """
        sources = self.buffer._sources.items()
        found = {source: of.rows.copy() for source, of in sources if of.whole is None or of.parts}
        if self._parts:
            owners = [number for number, (*_, parts) in enumerate(self._parts) for _ in parts]
            rows = next(host) if self._are_stacked else torch.stack([*islice(host, len(owners))])
            rows = rows if len(owners) == len(self._parts) else merge_by_group(rows, owners, len(self._parts))
            blocks[id(rows)] = rows
            for row, (source, name, _) in enumerate(self._parts):
                found[source][name] = rows, row
        return found
