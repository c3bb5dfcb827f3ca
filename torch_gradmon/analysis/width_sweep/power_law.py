"""The exponent of a power law in the width, with its confidence interval: least squares on logarithms, without SciPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slope:
    """``value`` is about ``2**offset * width**exponent``.

    Attributes:
        exponent: the slope of log2(value) over log2(width).
        low: lower end of the confidence interval of the exponent.
        high: its upper end.
        offset: log2 of the value at width 1, averaged over seeds.
        scatter: standard deviation of log2(value) about the lines; 0.1 is about 7 percent of the value.
        freedom: degrees of freedom of the interval.
    """

    exponent: float
    low: float
    high: float
    offset: float
    scatter: float
    freedom: int

    def at(self, width: float) -> float:
        """The value of the fitted line at ``width``."""
        return math.pow(2.0, self.offset + self.exponent * math.log2(width))


def fit_slope(points: Mapping[int, Sequence[tuple[int, float]]], confidence: float = 0.95) -> Slope:
    """Fit one exponent to the runs of all seeds, with an offset for each seed.

    Runs of one seed share their data, so their values are high or low together; the offset removes that. The interval is that of ordinary
    least squares: exponent -+ t * s / sqrt(Sxx), with s^2 the sum of squared residuals over the degrees of freedom (points - seeds - 1),
    Sxx the sum of squares of log2(width) about the mean of its seed, and t the quantile of Student's distribution (Draper & Smith, Applied
    Regression Analysis, section 1.4). It covers the scatter of initialisations. The bend of the line at small widths is not scatter; a
    tolerance has to cover that.

    Args:
        points: by seed, pairs of a width and a positive, finite value.
        confidence: probability that the interval covers the exponent.

    Raises:
        ValueError: too few points for one degree of freedom, no two widths in one seed, or a value without a logarithm.
    """
    total = sum(len(pairs) for pairs in points.values())
    freedom = total - len(points) - 1
    if freedom < 1:
        raise ValueError(
            f"{total} points of {len(points)} seeds are too few for an exponent with an interval; give three widths or more"
        )
    logs = {seed: [(math.log2(width), _logarithm(value)) for width, value in pairs] for seed, pairs in points.items()}
    means = {seed: (_mean([x for x, _ in pairs]), _mean([y for _, y in pairs])) for seed, pairs in logs.items()}
    centred = [(x - means[seed][0], y - means[seed][1]) for seed, pairs in logs.items() for x, y in pairs]
    spread = math.fsum(x * x for x, _ in centred)
    if spread == 0.0:
        raise ValueError("all runs of a seed have the same width; give different widths")
    exponent = math.fsum(x * y for x, y in centred) / spread
    scatter = math.sqrt(math.fsum((y - exponent * x) ** 2 for x, y in centred) / freedom)
    half = student_quantile(0.5 + confidence / 2, freedom) * scatter / math.sqrt(spread)
    offset = _mean([y - exponent * x for x, y in means.values()])
    return Slope(exponent, exponent - half, exponent + half, offset, scatter, freedom)


@functools.lru_cache(maxsize=64)
def student_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution has ``probability``.

    With whole degrees of freedom the distribution is a finite sum in the angle arctan(t / sqrt(freedom)): Abramowitz & Stegun,
    Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4. Bisection inverts the sum to the last bits of a float.

    Raises:
        ValueError: a probability outside ]0, 1[, or degrees of freedom that are not a whole number of at least 1.
    """
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability={probability!r} must lie between 0 and 1")
    if freedom < 1 or freedom != int(freedom):
        raise ValueError(f"freedom={freedom!r} must be a whole number of at least 1")
    if probability < 0.5:
        return -student_quantile(1.0 - probability, freedom)
    inside = 2.0 * probability - 1.0
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < inside else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    """The probability that ``|t| <= sqrt(freedom) * tan(angle)``."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = math.cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for power in range(2 if freedom % 2 else 1, freedom, 2):
        total += term
        term *= square * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if freedom % 2 else sine * total


def _logarithm(value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{value!r} has no logarithm; only positive, finite values lie on a power law")
    return math.log2(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
