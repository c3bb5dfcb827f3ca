"""Values of one step that are not statistics: of metric functions, and logged ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.keys import MODULE_SOURCES, RCC_SOURCES, Key
from ..core.loss_keys import is_whole_loss
from ..core.metric import REDUCERS
from ..core.moments import Column
from .reduction import Aggregation, PendingValue, as_tensor, contribution, merged_parts, part_from, part_of, row_of_sums

#: Sources of values of a rank's own batch.
SHARED_SOURCES = frozenset((*MODULE_SOURCES, *RCC_SOURCES))
_BY_FUNCTION = (
    "metric_aggregation_fn= is a function, and ranks merge values of their batches by a named reducer: pass 'mean', 'sum', 'min' or "
    "'max'"
)
_SEVERAL = "ranks merge one value for each key, and its aggregation function returns several"


class ValueStore:
    """Values by key, merged over micro-batches and ranks by named reducers or functions."""

    def __init__(self) -> None:
        self._pending: dict[Key, PendingValue] = {}
        self._reducers: dict[Key, str] = {}
        self._contributions: dict[Key, tuple[str, Tensor]] = {}
        self._vectors: list[tuple[list[Key | None], Tensor]] = []  # None for a value that was removed
        self._stand_ins: set[Key] = set()  # values of a trainer that the script has not logged
        self._counts: dict[Key, Tensor] = {}  # for values that may not exist: the number of contributing ranks, or a flag
        self._replaced: set[Key] = set()
        self._shared: set[Key] = set()  # values that are those of all ranks by now

    def _note_stream(self, device: torch.device) -> None:
        """A value is computed on the current stream of ``device``."""

    def withhold(self, key: Key, reason: str) -> None:
        """Remove a value that is not that of all ranks."""
        self._pending.pop(key, None)

    def contribute(self, key: Key, reducer: str, sums: Tensor) -> None:
        """Add this rank's sums to a value of the whole tensor, a ``"norm"`` or ``"cosine"``."""
        if not sums.is_cpu:
            self._note_stream(sums.device)
        self._contributions[key] = reducer, row_of_sums(sums)

    def share(self, key: Key, reducer: str) -> None:
        """Merge the value of ``key`` over ranks by ``reducer``."""
        self._reducers[key] = reducer

    def shared_values(self, watches: Callable[[Key], bool]) -> dict[Key, tuple[str, Tensor]]:
        """How each value merges over ranks, and this rank's contribution.

        These are values logged to be shared or that a detector ``watches``, and metrics of modules. What has no named reducer is withheld:
        a function cannot be applied to values of ranks, each of which has applied it to its own.
        """
        found = dict(self._contributions)
        for key, pending in list(self._pending.items()):
            reducer = self._reducers.get(key) or ("mean" if not key.source and watches(key) else "")
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
        self._pending[key] = PendingValue(reducer if reducer in REDUCERS else "sum", [part_from(row, reducer)])
        self._counts[key] = row[Column.COUNT]
        self._shared.add(key)

    def put_where(self, key: Key, value: Tensor, there: Tensor) -> None:
        """Store a value that exists only if ``there``, 0-d on the device, is true; replaces an earlier one."""
        self.put_value(key, value)
        self._counts[key] = there

    def put_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Store a scalar, or a tensor whose elements ``aggregation`` reduces; replaces an earlier value."""
        self._pending.pop(key, None)
        self._replaced.add(key)
        self.merge_value(key, value, aggregation, weight)

    def merge_value(self, key: Key, value: Any, aggregation: Aggregation = "mean", weight: int = 1) -> None:
        """Merge a scalar or tensor of one micro-batch with the others of this step by ``aggregation``.

        Raises:
            TypeError: neither a number nor a real tensor.
            ValueError: a tensor without elements.
        """
        self._merge(key, [part_of(as_tensor(value, key), aggregation, weight)], aggregation)

    def merge_logged(self, key: Key, value: Any, aggregation: Aggregation, stands_in: bool) -> bool:
        """Merge a logged value, as :meth:`merge_value` does; returns whether it was taken.

        A value of a trainer ``stands_in`` for one that the script may log: whichever comes first, the script's value replaces it.
        """
        if not self._takes(key, stands_in):
            return False
        self.merge_value(key, value, aggregation)
        return True

    def _takes(self, key: Key, stands_in: bool) -> bool:
        if stands_in:
            if any(_stands_for(key, own) for own in self.logged - self._stand_ins):
                return False
            self._stand_ins.add(key)
        elif self._stand_ins:
            for given in [given for given in self._stand_ins if _stands_for(given, key)]:
                self._stand_ins.remove(given)
                self._pending.pop(given, None)
        return True

    def put_values(self, keys: Sequence[Key], values: Tensor) -> None:
        """Store final values ``[len(keys)]``, replacing earlier ones that came in this way."""
        if not values.is_cpu:
            self._note_stream(values.device)
        names: list[Key | None] = list(keys)
        self._vectors = [one for one in self._vectors if one[0] != names]  # an optimizer may step often in a step
        self._vectors.append((names, values))

    def _merge(self, key: Key, parts: list[Tensor], aggregation: Aggregation) -> None:
        for part in parts:
            if not part.is_cpu:
                self._note_stream(part.device)
        pending = self._pending.setdefault(key, PendingValue(aggregation, []))
        if pending.aggregation != aggregation and isinstance(pending.aggregation, str) | isinstance(aggregation, str):
            first, second = (repr(each) if isinstance(each, str) else "a function" for each in (pending.aggregation, aggregation))
            raise ValueError(f"the values of one key in one step need one aggregation, and were logged with {first} and {second}")
        pending.parts += parts
        if len(pending.parts) >= 64 and isinstance(aggregation, str):
            pending.parts[:] = [merged_parts(pending.parts, aggregation)]

    @property
    def logged(self) -> frozenset[Key]:
        """The keys of logged values."""
        return frozenset(key for key in self._pending if not key.source)

    def clear_values(self, source: str, names: Collection[str] | None) -> None:
        """Remove the values of ``source``, or of some of its tensors."""
        for keys, _ in self._vectors:
            keys[:] = [None if key and key.source == source and (names is None or key.name in names) else key for key in keys]
        if self._pending:
            gone = [key for key in self._pending if key.source == source and (names is None or key.name in names)]
            for key in gone:
                del self._pending[key]

    def absorb_values(self, other: ValueStore) -> None:
        """Merge the values in ``other``, unless the value here is that of all ranks."""
        for key, pending in other._pending.items():
            if key not in self._shared and (key.source or self._takes(key, key in other._stand_ins)):
                self._merge(key, pending.parts, pending.aggregation)
        self._vectors += other._vectors
        self._reducers.update(other._reducers)

    def take_all_values(self, other: ValueStore) -> None:
        """Have all values of ``other``, which begins anew."""
        self._pending, self._vectors, self._counts = other._pending, other._vectors, other._counts
        self._contributions, self._reducers, self._replaced = other._contributions, dict(other._reducers), other._replaced
        self._shared = other._shared

    def begin_values_anew(self) -> None:
        """Another store has all values."""
        self._pending, self._vectors, self._counts, self._contributions, self._replaced = {}, [], {}, {}, set()
        self._shared = set()

    def take_back_values(self, earlier: ValueStore, first: Collection[str], is_dropped: Callable[[str, str], bool]) -> None:
        """Take all values of ``earlier`` that were not replaced since; of the sources ``first``, where the first values count, all."""
        found: dict[Key, PendingValue] = {}
        for key, value in earlier._pending.items():
            if key.source in first or not (key in self._replaced or is_dropped(key.source, key.name)):
                found[key] = PendingValue(value.aggregation, list(value.parts))
        for key, value in self._pending.items():
            if key in found and key.source not in first:
                found[key].parts += value.parts
            else:
                found.setdefault(key, value)
        known = {key for keys, _ in self._vectors for key in keys if key is not None and key.source not in first}
        again = {key for keys, _ in earlier._vectors for key in keys if key is not None and key.source in first}
        older = [
            ([None if key is None or key in known or is_dropped(key.source, key.name) else key for key in keys], values)
            for keys, values in earlier._vectors
        ]
        newer = [([None if key in again else key for key in keys], values) for keys, values in self._vectors]
        self._pending, self._vectors = found, [*older, *newer]
        self._replaced |= earlier._replaced
        self._shared |= earlier._shared
        self._contributions = {**earlier._contributions, **self._contributions}
        self._counts, self._reducers = {**earlier._counts, **self._counts}, {**earlier._reducers, **self._reducers}

    def take_values(self, other: ValueStore, source: str, names: set[str]) -> None:
        """Take the values of these tensors from ``other``."""
        self._pending.update({key: p for key, p in other._pending.items() if key.source == source and key.name in names})
        for keys, values in other._vectors:
            self._vectors.append(([key if key and key.source == source and key.name in names else None for key in keys], values))

    def share_logged(self, other: ValueStore, reducers: bool = False) -> None:
        """Start with the logged values of ``other``, and on request how ranks merge them."""
        self._pending = {key: PendingValue(p.aggregation, list(p.parts)) for key, p in other._pending.items() if not key.source}
        self._stand_ins, self._shared = set(other._stand_ins), set(other._shared)
        if reducers:
            self._reducers = dict(other._reducers)


def _stands_for(given: Key, own: Key) -> bool:
    """Whether a trainer's value ``given`` tells the same as ``own`` of the script."""
    return given == own or (is_whole_loss(given) and is_whole_loss(own))
