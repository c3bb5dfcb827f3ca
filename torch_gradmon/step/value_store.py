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


class ValueStore:
    """Values by key, merged over micro-batches and ranks by named reducers or functions."""

    def __init__(self) -> None:
        self._pending: dict[Key, PendingValue] = {}
        self._reducers: dict[Key, str] = {}
        self._contributions: dict[Key, tuple[str, Tensor]] = {}
        self._vectors: list[tuple[list[Key | None], Tensor]] = []  # None for a value that was removed
        self._stand_ins: set[Key] = set()  # values of a trainer that the script has not logged
        self._counts: dict[Key, Tensor] = {}  # for values that may not exist: the number of contributing ranks, or a flag

    def _note_stream(self, device: torch.device) -> None:
        """A value is computed on the current stream of ``device``."""

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
        """Merge the values in ``other``."""
        for key, pending in other._pending.items():
            if key.source or self._takes(key, key in other._stand_ins):
                self._merge(key, pending.parts, pending.aggregation)
        self._vectors += other._vectors
        self._reducers.update(other._reducers)

    def take_values(self, other: ValueStore, source: str, names: set[str]) -> None:
        """Take the values of these tensors from ``other``."""
        self._pending.update({key: p for key, p in other._pending.items() if key.source == source and key.name in names})
        for keys, values in other._vectors:
            self._vectors.append(([key if key and key.source == source and key.name in names else None for key in keys], values))

    def share_logged(self, other: ValueStore, reducers: bool = False) -> None:
        """Start with the logged values of ``other``, and on request how ranks merge them."""
        self._pending = {key: PendingValue(p.aggregation, list(p.parts)) for key, p in other._pending.items() if not key.source}
        self._stand_ins = set(other._stand_ins)
        if reducers:
            self._reducers = dict(other._reducers)


def _stands_for(given: Key, own: Key) -> bool:
    """Whether a trainer's value ``given`` tells the same as ``own`` of the script."""
    return given == own or (is_whole_loss(given) and is_whole_loss(own))
