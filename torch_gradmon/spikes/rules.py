"""The protocol of a rule, and the simple rules: a limit, a ratio, a cumulative sum, any function.

A rule is a small object: ``score(value)``, then ``update(value)``, once for each value, and a ``threshold`` for the score. It never gets
NaN or Inf, which the detector handles. Each docstring states what the rule learns from a spike. Rules of published code are reproduced
exactly, weak points included, so that they can be compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..core.validation import positive, share
from .level import log_of


class Rule(Protocol):
    """What a detector needs from a rule."""

    threshold: float

    def score(self, value: float) -> float | None:
        """How far a finite ``value`` lies above normal; None during the warm-up. Changes nothing."""

    def update(self, value: float) -> None:
        """Learn a finite ``value``, which :meth:`score` got before."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class StatefulRule:
    """A rule whose state is in attributes that are numbers or deques of numbers."""

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


class Threshold(StatefulRule):
    """A fixed limit: the score is the value. Learns nothing.

    Source: ``skip_grad_norm_threshold`` of xtuner and ``grad_norm_skip_threshold`` of Megatron-LM, both without a default.
    """

    def __init__(self, limit: float) -> None:
        self.threshold = positive("limit", limit)
        self.baseline = None

    def score(self, value: float) -> float:
        """The value itself."""
        return value

    def update(self, value: float) -> None:
        """Nothing to learn."""


class Ratio(StatefulRule):
    """The ratio to a running baseline. Spikes stay out of it, but ``accept`` consecutive spikes become the new baseline.

    Args:
        limit: the ratio above which a value is a spike.
        alpha: weight of a new value in the exponential moving average.
        warmup: values before the first score.
        accept: consecutive spikes that are accepted as a new level.

    Source: the ratio of loss to its moving average in metaseq (pull requests 521 and 542; span 9, that is alpha 0.2). ``accept`` is this
    package's: metaseq never adapts to a lasting change.
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
        """The ratio; 0 while the baseline is not positive."""
        if self._count < self._warmup:
            return None
        return value / self._mean if self._mean > 0 else 0.0

    def update(self, value: float) -> None:
        """Learn ``value`` unless it is a spike."""
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


class Cusum(StatefulRule):
    """Cumulative sum of how far the logarithm lies above an older mean: for slow drifts, whose single steps look like noise.

    With ``z`` in standard deviations of the reference, ``S = max(0, S + z - allowance)``; the score is ``S``. The reference is the ``span``
    values before the last ``span``: it follows a decay, but not yet an upward drift. Every value is learned; after an alarm the rule
    restarts.

    Args:
        limit: of the sum. By Siegmund's approximation, 12 with an allowance of 1 gives one false alarm in about 1e11 values of independent
            normal noise about a known mean; a mean of 50 values gives more. A shift by 2 standard deviations is found after 12 values.
        allowance: half of the shift to be found, in standard deviations.
        span: length of the reference, and values before the first score.
        floor: smallest standard deviation of the logarithm.

    Source: Page (1954, Continuous Inspection Schemes, Biometrika 41); Siegmund (1985, Sequential Analysis). The moving reference is this
    package's.
    """

    _state = ("_values", "_sum")

    def __init__(self, limit: float = 12.0, allowance: float = 1.0, span: int = 50, floor: float = 0.03) -> None:
        self.threshold, self._allowance = positive("limit", limit), positive("allowance", allowance)
        self._span, self._floor = positive("span", span, whole=True), positive("floor", floor)
        self._values: deque[float] = deque(maxlen=2 * self._span)
        self._sum = 0.0

    @property
    def baseline(self) -> float | None:
        """The mean of the reference, in units of the signal."""
        return math.exp(self._reference()[0]) if self._values else None

    def _reference(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        values = list(self._values)[: self._span]
        mean = math.fsum(values) / len(values)
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(1, len(values) - 1))

    def score(self, value: float) -> float | None:
        """The sum that adding ``value`` would give."""
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


class FunctionRule(StatefulRule):
    """Any function of the value that returns True or False, or a score. Learns nothing by itself."""

    def __init__(self, function: Callable[[float], Any], threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.baseline = None
        self._function = function

    def score(self, value: float) -> float | None:
        """The function's result as a number; None stays None."""
        found = self._function(value)
        return None if found is None else float(found)

    def update(self, value: float) -> None:
        """Nothing to learn."""
