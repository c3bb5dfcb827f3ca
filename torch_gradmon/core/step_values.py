"""The values of one step by key, as the arrays that they come from."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import compress, takewhile
from typing import NamedTuple

from .keys import Key


class Block(NamedTuple):
    """Keys, and a value for each.

    Attributes:
        keys: the keys.
        numbers: their values.
        table: the source whose table of statistics these values are views of; empty if they are no views.
    """

    keys: Sequence[Key] = ()
    numbers: Sequence[float] = ()
    table: str = ""


#: A loop that logs more often than this in one step gets what it logged merged.
_BLOCKS = 16


class StepValues(Mapping[Key, float]):
    """Values in blocks. Most have the keys of the last step, as the same tuple, so they need not be renamed again.

    The dict that a lookup needs is built when one is first asked for, and of views only if one of these is: hashing thousands of keys costs
    more than computing their values, and a record that is kept keeps its dict, ten times as large as the values.

    Args:
        blocks: a later value replaces an earlier one of the same key.
    """

    __slots__ = ("_by_key", "_rest", "blocks")

    def __init__(self, *blocks: Block) -> None:
        self.blocks = blocks
        self._by_key: dict[Key, float] | None = None
        self._rest: StepValues | None = None

    @classmethod
    def of(cls, values: Mapping[Key, float]) -> StepValues:
        """These values, as one block if they are none yet."""
        return values if isinstance(values, cls) else cls(Block(tuple(values), tuple(values.values())))

    def updated(self, more: Mapping[Key, float]) -> StepValues:
        """These values with ``more``, which replace those of the same keys."""
        blocks = self.blocks
        if len(blocks) >= _BLOCKS:
            late = len(list(takewhile(lambda block: not block.table, reversed(blocks))))
            if late >= _BLOCKS:
                blocks = (*blocks[:-late], *StepValues.of(StepValues(*blocks[-late:]).by_key).blocks)
        return StepValues(*blocks, *StepValues.of(more).blocks)

    def since(self, before: StepValues) -> StepValues:
        """The values that came after ``before``, which these were made from by :meth:`updated`; else all."""
        shared = len(before.blocks)
        is_continued = len(self.blocks) >= shared and all(a is b for a, b in zip(before.blocks, self.blocks, strict=False))
        return StepValues(*self.blocks[shared if is_continued else 0 :])

    @property
    def rest(self) -> StepValues:
        """The values that are no views of tables."""
        if self._rest is None:
            self._rest = StepValues(*[block for block in self.blocks if not block.table])
        return self._rest

    def without(self, keys: Container[Key]) -> StepValues:
        """The values of all other keys."""
        left = []
        for block in self.blocks:
            some = [key not in keys for key in block.keys]
            left.append(Block(tuple(compress(block.keys, some)), tuple(compress(block.numbers, some)), block.table))
        return StepValues(*left)

    @property
    def by_key(self) -> dict[Key, float]:
        """All values as a dict."""
        if self._by_key is None:
            found: dict[Key, float] = {}
            for keys, numbers, _ in self.blocks:
                found.update(zip(keys, numbers, strict=True))
            self._by_key = found  # complete, since other threads may read it
        return self._by_key

    def _by_key_with(self, key: object) -> dict[Key, float]:
        """A dict that has ``key`` if there is a value of it; a plain tuple of its three parts is equal to it."""
        if self._by_key is not None:
            return self._by_key
        for block in self.blocks:
            if block.table and isinstance(key, tuple) and block.table in key[:1]:
                return self.by_key
        return self.rest.by_key

    def __getitem__(self, key: Key) -> float:
        return self._by_key_with(key)[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key_with(key)

    # those of a dict need no call for each value
    def get(self, key, default=None):  # type: ignore[no-untyped-def]
        """The value of ``key``, or ``default``."""
        return self._by_key_with(key).get(key, default)

    def items(self):  # type: ignore[no-untyped-def]
        """Keys with values."""
        return self.by_key.items()

    def keys(self):  # type: ignore[no-untyped-def]
        """The keys."""
        return self.by_key.keys()

    def values(self):  # type: ignore[no-untyped-def]
        """The values."""
        return self.by_key.values()

    def __repr__(self) -> str:
        return f"StepValues({self.by_key!r})"
