"""Names that a tracker takes, where it does not take all."""

from __future__ import annotations

import zlib
from collections.abc import Callable


class KeyRewriter:
    """Gives each key a name of its own, no longer than so many characters.

    Args:
        longest: the most characters.
        clean: makes a name of the characters that are allowed; two may come out alike.
    """

    def __init__(self, longest: int, clean: Callable[[str], str] = str) -> None:
        self._longest, self._clean = longest, clean
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, key: str) -> str:
        """The name for ``key``, the same each time."""
        name = self._names.get(key)
        if name is None:
            name = self._clean(key)
            start, number = name, zlib.crc32(key.encode())
            while len(name) > self._longest or name in self._taken:
                mark = f"_{number:08x}"
                name = start[: self._longest - len(mark)] + mark
                number = (number + 1) % 2**32
            self._names[key] = name
            self._taken.add(name)
        return name
