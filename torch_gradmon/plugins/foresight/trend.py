"""When a growing number reaches a level, if its trend lasts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

#: Fewest values, and the share of pairs of them that have to rise.
_FEWEST, _RISING = 5, 0.75


def steps_until(steps: Sequence[int], values: Sequence[float], level: float) -> float | None:
    """Steps from the last one until ``level``, by the median slope of all pairs of logarithms (Theil 1950, Sen 1968, JASA 63, 1379-1389).

    None where the values do not rise, as less than three quarters of the pairs do; 0 where the line has reached the level.
    """
    known = [(step, math.log(value)) for step, value in zip(steps, values, strict=True) if value > 0 and math.isfinite(value)]
    if len(known) < _FEWEST:
        return None
    slopes = [(b - a) / (there - here) for (here, a), (there, b) in combinations(known, 2)]
    slope = statistics.median(slopes)
    if slope <= 0 or sum(each > 0 for each in slopes) < _RISING * len(slopes):
        return None
    last = known[-1][0]
    now = statistics.median(value + slope * (last - step) for step, value in known)
    return max((math.log(level) - now) / slope, 0.0)
