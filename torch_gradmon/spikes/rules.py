"""What a rule is, and the simple ones: a limit, a ratio, a cumulative sum, any function.

A rule is a small object: ``score(value)``, then ``update(value)``, once for each value, and a ``threshold`` that scores of spikes
lie above. It never gets NaN or Inf, which the detector judges by itself. What it learns of a spike is its own affair, and said in
its docstring: the rules of published code are here as they are, weak points included, so that they can be compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .arguments import positive
from .hampel import log_of


class Rule(Protocol):
    """What a detector needs of a rule."""

    threshold: float

    def score(self, value: float) -> float | None:
        """How far a finite ``value`` lies above normal; None while the rule knows too little. Changes nothing."""

    def update(self, value: float) -> None:
        """Learn a finite ``value``, which was scored before."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class Kept:
    """A rule whose state is in attributes that are numbers, or deques of numbers."""

    _state: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        values = {name: getattr(self, name) for name in self._state}
        return {name.lstrip("_"): list(value) if isinstance(value, deque) else value for name, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name in self._state:
            value, here = state[name.lstrip("_")], getattr(self, name)
            setattr(self, name, deque(value, maxlen=here.maxlen) if isinstance(here, deque) else value)


class Threshold(Kept):
    """A fixed limit: the score is the value. Learns nothing.

    Source: ``skip_grad_norm_threshold`` of xtuner and ``grad_norm_skip_threshold`` of Megatron-LM do this, without a default.
    """

    def __init__(self, limit: float) -> None:
        self.threshold = positive("limit", limit)
        self.baseline = None

    def score(self, value: float) -> float:
        """The value itself."""
        return value

    def update(self, value: float) -> None:
        """Nothing is learned."""


class Ratio(Kept):
    """How many times a running baseline. Spikes stay out of it, but ``accept`` of them in a row are the new baseline.

    Args:
        limit: the ratio.
        alpha: weight of a new value in the exponential moving average.
        warmup: values before the first score.
        accept: spikes in a row that are accepted.

    Source: the ratio of loss to its moving average in metaseq (pull requests 521 and 542; span 9, that is alpha 0.2), which has
    no way out of a lasting change; that is this package's.
    """

    _state = ("_count", "_mean", "_run")

    def __init__(self, limit: float = 5.0, alpha: float = 0.2, warmup: int = 5, accept: int = 5) -> None:
        self.threshold = positive("limit", limit, above=1.0)
        self._alpha = share("alpha", alpha)
        self._warmup = positive("warmup", warmup, whole=True)
        self._accept = positive("accept", accept, whole=True)
        self._count, self._mean = 0, 0.0
        self._run: deque[float] = deque()

    @property
    def baseline(self) -> float | None:
        """The moving average."""
        return self._mean if self._count else None

    def score(self, value: float) -> float | None:
        """The ratio; nothing is above a baseline that is not positive."""
        if self._count < self._warmup:
            return None
        return value / self._mean if self._mean > 0 else 0.0

    def update(self, value: float) -> None:
        """Learn ``value``, unless it is a spike."""
        score = self.score(value)
        if score is not None and score > self.threshold:
            self._run.append(value)
            if len(self._run) >= self._accept:
                self._mean = sum(self._run) / len(self._run)
                self._run.clear()
            return
        self._run.clear()
        self._count += 1
        self._mean = value if self._count == 1 else self._mean + self._alpha * (value - self._mean)


class Cusum(Kept):
    """Cumulative sum of how far the logarithm lies above its mean of some time ago: for slow drifts, of which each step is noise.

    With ``z`` in standard deviations of the reference, ``S = max(0, S + z - allowance)``; the score is ``S``. The reference is
    the ``span`` values before the last ``span``, so that it follows a decay and not yet a drift upwards. It learns every value;
    after an alarm it begins anew.

    Args:
        limit: of the sum. By Siegmund's approximation 12 with an allowance of 1 is one false alarm in some 1e11 values of
            independent normal noise about a known mean; the mean of 50 is less than that. A shift by 2 standard deviations takes 12.
        allowance: half of the shift that is to be found, in standard deviations.
        span: length of the reference, and values before the first score.
        floor: smallest standard deviation of the logarithm.

    Source: Page (1954, Continuous Inspection Schemes, Biometrika 41); Siegmund (1985, Sequential Analysis). The moving reference
    is this package's.
    """

    _state = ("_values", "_sum")

    def __init__(self, limit: float = 12.0, allowance: float = 1.0, span: int = 50, floor: float = 0.03) -> None:
        self.threshold, self._allowance = positive("limit", limit), positive("allowance", allowance)
        self._span, self._floor = positive("span", span, whole=True), positive("floor", floor)
        self._values: deque[float] = deque(maxlen=2 * self._span)
        self._sum = 0.0

    @property
    def baseline(self) -> float | None:
        """The mean that is compared with, in units of the signal."""
        return math.exp(self._reference()[0]) if self._values else None

    def _reference(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        values = list(self._values)[: self._span]
        mean = math.fsum(values) / len(values)
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(1, len(values) - 1))

    def score(self, value: float) -> float | None:
        """The sum, were ``value`` added."""
        if len(self._values) < max(2, self._span):
            return None
        mean, spread = self._reference()
        return max(0.0, self._sum + (log_of(value) - mean) / max(spread, self._floor) - self._allowance)

    def update(self, value: float) -> None:
        """Add ``value`` to the sum."""
        score = self.score(value)
        if score is not None and score > self.threshold:
            self._values.clear()
            self._sum = 0.0
            return
        self._sum = score or 0.0
        self._values.append(log_of(value))


class Asked(Kept):
    """Any function of the value: it gives True or False, or a score above ``threshold`` for a spike. Learns nothing by itself."""

    def __init__(self, function: Callable[[float], Any], threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.baseline = None
        self._function = function

    def score(self, value: float) -> float | None:
        """What the function gives, as a number; None stays None."""
        found = self._function(value)
        return None if found is None else float(found)

    def update(self, value: float) -> None:
        """Nothing is learned."""


def share(name: str, value: float) -> float:
    """``value``, if it is between 0 and 1.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not positive(name, value) < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
    return float(value)
