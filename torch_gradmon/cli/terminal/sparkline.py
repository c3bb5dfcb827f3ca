"""Values over steps on one line of characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...analysis.diagnosis.series import lower_median

#: From low to high.
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
#: NaN or infinite.
NONFINITE = "!"
#: A smaller range, of a logarithm or as a part of the values, is noise and drawn flat.
_LEAST_LOG, _LEAST_PART = math.log(2), 0.1


@dataclass(frozen=True)
class Columns:
    """The steps of each column. Columns begin at multiples of their size, so that they stay in place while steps are added."""

    first: int  # number of the first column, counted from step 0
    count: int  # number of columns
    size: int  # steps in each

    @classmethod
    def of(cls, steps: Sequence[int], most: int) -> Columns:
        """At most ``most`` columns for the last of ``steps``, ascending."""
        if not steps:
            return cls(0, 0, 1)
        stride = int(lower_median(after - before for before, after in pairwise(steps))) if len(steps) > 1 else 1
        size = stride * math.ceil(((steps[-1] - steps[0]) / stride + 1) / most)
        first, last = steps[0] // size, steps[-1] // size
        first = max(first, last - most + 1)
        return cls(first, last - first + 1, size)

    def place(self, step: int) -> int | None:
        """The column of ``step``; None if it is before the first."""
        place = step // self.size - self.first
        return place if 0 <= place < self.count else None

    def largest(self, steps: Iterable[int], values: Iterable[float]) -> list[float | None]:
        """The largest value of each column, NaN if one is not finite, None without any."""
        found: list[float | None] = [None] * self.count
        for step, value in zip(steps, values, strict=True):
            place = self.place(step)
            if place is not None:
                known = found[place]
                if not math.isfinite(value):
                    found[place] = math.nan
                elif known is None or value > known:  # NaN stays
                    found[place] = value
        return found

    def marks(self, steps: Iterable[int], mark: str) -> str:
        """A mark in each column that has one of the steps."""
        places = {self.place(step) for step in steps}
        return "".join(mark if place in places else " " for place in range(self.count))


def sparkline(values: Sequence[float | None], letters: str = BLOCKS, span: tuple[float, float] | None = None) -> str:
    """One character for each value, scaled to their range or to ``span``. The scale is logarithmic unless a value is negative.

    >>> sparkline([0.0, 1.0, 2.0, 4.0, 8.0, None, math.nan], ASCII)
    '..-*@ !'
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    is_log = span is None and bool(known) and min(known) >= 0
    if is_log:
        known = [math.log(value) for value in known if value > 0]
    low, high = span or _span(known, is_log)
    return "".join(" " if value is None else _letter(value, letters, low, high, is_log) for value in values)


def _letter(value: float, letters: str, low: float, high: float, is_log: bool) -> str:
    if not math.isfinite(value):
        return NONFINITE
    if is_log:
        value = math.log(value) if value > 0 else low
    top = len(letters) - 1
    return letters[min(max(round((value - low) / (high - low) * top), 0), top)]


def _span(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    least = _LEAST_LOG if is_log else _LEAST_PART * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        return middle - least / 2, middle + least / 2
    return low, high
