"""The flat keys of the values of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_not

from .keys import Key, format_key
from .step_values import StepValues


class KeyFormatter:
    """Gives values their flat keys, and builds each key once.

    Args:
        style: of the keys; see :func:`format_key`.
        prefix: of all keys.
    """

    def __init__(self, style: str, prefix: str) -> None:
        self._style, self._prefix = style, prefix
        self._known: dict[Key, str] = {}
        self._of_block: list[tuple[Sequence[Key], list[str]]] = []  # of the last step
        self._layout: dict[str, float] = {}  # its keys; filling a copy is faster than a new dict

    def __call__(self, values: Mapping[Key, float]) -> dict[str, float]:
        """The values by flat key."""
        blocks = StepValues.of(values).blocks
        texts = [self._texts(place, keys) for place, (keys, *_) in enumerate(blocks)]
        last = [text for _, text in self._of_block]
        if len(texts) != len(last) or any(map(is_not, texts, last)):
            self._layout = {text: 0.0 for some in texts for text in some}
        self._of_block = [(keys, text) for (keys, *_), text in zip(blocks, texts, strict=True)]
        found = self._layout.copy()
        for text, (_, numbers, _) in zip(texts, blocks, strict=True):
            found.update(zip(text, numbers, strict=True))
        return found

    def _texts(self, place: int, keys: Sequence[Key]) -> list[str]:
        if place < len(self._of_block):
            last, texts = self._of_block[place]
            if last is keys or last == keys:  # as in most steps
                return texts
        return [self._known.get(key) or self.text(key) for key in keys]

    def text(self, key: Key) -> str:
        """The flat key of one value."""
        if key not in self._known:
            self._known[key] = format_key(key, self._style, self._prefix)
        return self._known[key]
