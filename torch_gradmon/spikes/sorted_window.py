"""The last values of a signal, kept in order of time and of size, which makes medians cheap."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class SortedWindow:
    """The last ``size`` values. Adding one moves a few hundred bytes at most; medians take no sorting.

    >>> window = SortedWindow(3, [9.0, 1.0, 2.0, 4.0])
    >>> window.median(), window.median_deviation(2.0)
    (2.0, 1.0)
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []
        self.extend(values)

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, value: float) -> None:
        """Take ``value``, which is no NaN, for the oldest one."""
        if len(self._in_time) == self.size:
            del self._in_order[bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(value)
        insort(self._in_order, value)

    def extend(self, values: Iterable[float]) -> None:
        """Take all of ``values``."""
        for value in values:
            self.add(value)

    def clear(self) -> None:
        """Forget all values."""
        self._in_time.clear()
        self._in_order.clear()

    def values(self) -> list[float]:
        """The values, oldest first."""
        return list(self._in_time)

    def median(self) -> float:
        """The median; of an even number of values the mean of the two in the middle. There must be a value."""
        ordered, middle = self._in_order, len(self._in_order) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def median_deviation(self, center: float) -> float:
        """The median of ``|x - center|``. There must be a value."""
        half = len(self._in_order) // 2
        upper = self._nearest(center, half + 1)
        return upper if len(self._in_order) % 2 else (self._nearest(center, half) + upper) / 2

    def _nearest(self, center: float, rank: int) -> float:
        """The ``rank``-th smallest distance to ``center``, the first being 1.

        Distances grow to both sides of ``center``, so that the nearest ``rank`` values are neighbours: what is sought is how many
        of them lie below it.
        """
        ordered = self._in_order
        split = bisect_left(ordered, center)
        fewest, most = max(0, rank - len(ordered) + split), min(rank, split)
        while fewest < most:
            below = (fewest + most) // 2
            above = rank - below
            if above > 0 and center - ordered[split - below - 1] < ordered[split + above - 1] - center:
                fewest = below + 1
            else:
                most = below
        lower = center - ordered[split - fewest] if fewest else -math.inf
        upper = ordered[split + rank - fewest - 1] - center if fewest < rank else -math.inf
        return max(lower, upper)
