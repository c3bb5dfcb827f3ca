"""When a loss leaves its own normal for good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

#: Losses of a window; deviations above the median that are still normal; losses whose median has to be above; steps that it has to last.
WINDOW, WIDE, TOGETHER, LASTING = 50, 6.0, 10, 30
#: For a normal distribution, the median of distances to the median times this is the standard deviation.
_MAD = 1.4826


def onset(losses: Sequence[float]) -> int | None:
    """The step at which the loss rises above its own normal for good; None if it does not.

    Normal is up to the lowest value so far of median plus six deviations over fifty losses, the deviation from the median of distances.
    The loss has left it where the median of ten is above and stays above until the end, thirty steps at least, or until it is not finite.
    """
    usual, first = math.inf, None
    for step in range(len(losses) - (TOGETHER - 1 if math.isfinite(losses[-1]) else 0)):
        if step >= WINDOW:
            before = [x for x in losses[step - WINDOW : step] if math.isfinite(x)]
            middle = median(before)
            usual = min(usual, middle + WIDE * _MAD * median(abs(x - middle) for x in before))
        ahead = median(x if math.isfinite(x) else math.inf for x in losses[step : step + TOGETHER])
        if ahead <= usual:
            first = None
        elif first is None and not losses[step] <= usual:
            first = step
    lasts = first is not None and (len(losses) - first >= LASTING or not math.isfinite(losses[-1]))
    return first if lasts else None
