"""Where the rows of one source are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import count, repeat


class RowPlaces:
    """Block and row of each tensor of a source.

    In most steps one block has all of them, in order; then no dict of places is built.

    Args:
        whole: names of the rows of one block, and its number, if that has all rows.
        by_name: otherwise block and row by name.

    Attributes:
        whole: the same; None if there are several blocks, or rows that were replaced.
    """

    def __init__(self, whole: tuple[tuple[str, ...], int] | None, by_name: dict[str, tuple[int, int]] | None = None) -> None:
        self.whole, self._by_name = whole, by_name

    @property
    def by_name(self) -> dict[str, tuple[int, int]]:
        """Block and row by name."""
        if self._by_name is None:
            assert self.whole is not None
            names, block = self.whole
            self._by_name = dict(zip(names, zip(repeat(block), count()), strict=False))
        return self._by_name

    def put(self, names: Iterable[str], block: int) -> None:
        """A new block replaces the rows of these names."""
        self.add(dict(zip(names, zip(repeat(block), count()), strict=False)))

    def add(self, places: Mapping[str, tuple[int, int]]) -> None:
        """More places, or others for these names."""
        self.by_name.update(places)
        self.whole = None

    def remove(self, names: Collection[str]) -> None:
        """Forget the rows of these names."""
        kept = {name: place for name, place in self.by_name.items() if name not in names}
        if len(kept) < len(self.by_name):
            self._by_name, self.whole = kept, None

    def renumbered(self, number: dict[int, int]) -> RowPlaces:
        """The same places with other numbers of blocks."""
        whole = None if self.whole is None else (self.whole[0], number[self.whole[1]])
        return RowPlaces(whole, {name: (number[block], row) for name, (block, row) in self.by_name.items()})
