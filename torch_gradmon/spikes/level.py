"""The level of a signal in the default rule: its settings, and a running median with residuals."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .sorted_window import SortedWindow

#: Makes the median of absolute deviations a standard deviation for normal data.
MAD_TO_STD = 1.4826
#: Score above which a norm is a spike, and the smallest factor above usual of a spike.
THRESHOLD, LEAST = 5.5, 1.5
#: Number of last values, without spikes, in the near median.
NEAR = 9
#: Values before the first residual.
FIRST = 3
#: Residuals before their spread counts.
FEWEST_RESIDUALS = 5
#: Values before the first score, which is in units of that spread: without one, nobody knows what is far.
JUDGES = FIRST + FEWEST_RESIDUALS
#: After n values the logarithm of the smallest rise is larger by EARLY / n, and the spread is 1 + EARLY_SPREAD / n times as large.
EARLY, EARLY_SPREAD = 9.0, 16
#: Values before the far median counts as well: norms of the first steps of a warm-up rise like a ramp.
FAR_FROM = 40
#: A new level needs ACCEPT_AT_ONCE spikes among the RECENT last values, or ACCEPT_IN_THE_END if the oldest of these is one.
ACCEPT_AT_ONCE, ACCEPT_IN_THE_END, RECENT = 5, 3, 9
#: A value is usual, and no spike, after this number of similarly high ones among the last ``window``.
USUAL = 16
#: The logarithm used for a norm of zero: below the logarithm of any positive number.
LOG_OF_ZERO = -745.0


class Level:
    """A running median, and the residuals of values to it."""

    def __init__(self, size: int, window: int) -> None:
        self.values, self.residuals = SortedWindow(size), SortedWindow(window)

    def score(self, position: float, linear: bool, least: float, threshold: float, widening: float) -> float:
        """Robust standard deviations above the median.

        Args:
            position: the value or its logarithm.
            linear: it is a value.
            least, threshold: smallest rise, relative to the median if ``linear``, and its score.
            widening: factor for the spread of the residuals.
        """
        median = self.values.median()
        # a rise of the logarithm by log(least) is a factor of ``least``
        spread = (abs(median) if linear else 1.0) * least / threshold
        if len(self.residuals) >= FEWEST_RESIDUALS:
            deviation = self.residuals.median_deviation(self.residuals.median())
            spread = max(spread, MAD_TO_STD * deviation * widening)
        rise = position - median
        return rise / spread if spread > 0 else math.copysign(math.inf, rise) if rise else 0.0

    def add_residual(self, position: float) -> None:
        """Add the distance of ``position`` to the median, once there is one."""
        if len(self.values) >= FIRST:
            self.residuals.add(position - self.values.median())

    def restart(self, positions: Iterable[float]) -> None:
        """Replace the values; the residuals stay."""
        self.values.clear()
        self.values.extend(positions)

    def load(self, values: Iterable[float], residuals: Iterable[float]) -> None:
        """Replace both windows."""
        self.values = SortedWindow(self.values.size, map(float, values))
        self.residuals = SortedWindow(self.residuals.size, map(float, residuals))


def log_of(value: float) -> float:
    """The logarithm. A norm of exactly zero is legal: it lies far below normal."""
    return math.log(value) if value > 0 else LOG_OF_ZERO


def value_at(position: float) -> float:
    """The inverse of :func:`log_of`."""
    return math.exp(position) if position > LOG_OF_ZERO + 1 else 0.0
