"""The protocol of a rule, the simple rules (a limit, a ratio, a cumulative sum, any function), and the default one for many signals.

A rule is a small object: ``score(value)``, then ``update(value)``, once for each value, and a ``threshold`` for the score. It never gets
NaN or Inf, which the detector handles. Each docstring states what the rule learns from a spike. Rules of published code are reproduced
exactly, weak points included, so that they can be compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.validation import positive, share
from . import hampel
from .hampel import LOG_OF_ZERO, MAD_TO_STD, RECENT, Hampel, SortedWindow, add_each, log_of, value_at


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
    """A rule whose state is in attributes that are numbers, deques of numbers, or windows."""

    _state: tuple[str, ...] = ()

    def update(self, value: float) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        values = {name.lstrip("_"): getattr(self, name) for name in self._state}
        return {name: list(value) if isinstance(value, (deque, SortedWindow)) else value for name, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name in self._state:
            value, here = state[name.lstrip("_")], getattr(self, name)
            if isinstance(here, SortedWindow):
                here.load(map(float, value))
            else:
                setattr(self, name, deque(map(float, value), maxlen=here.maxlen) if isinstance(here, deque) else value)


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
        self._function = function

    def score(self, value: float) -> float | None:
        """The function's result as a number; None stays None."""
        found = self._function(value)
        return None if found is None else float(found)


# --- Rules that count standard deviations above a mean, or robust ones above a median ---

#: Smallest spread that a rule divides by, as a share of the mean: a constant signal has none.
_SMALLEST_SPREAD = 1e-6


class MeanStd(StatefulRule):
    """Standard deviations above the mean of all values so far, in constant memory. Learns every value, spikes too.

    Args:
        k: standard deviations.
        warmup: values before the first score.

    Source: reviewers of ignite's pull request 3624 asked for ``mean + k * std`` in constant memory; the recurrence is Welford's (1962,
    Note on a Method for Calculating Corrected Sums of Squares and Products). It misses spikes of a signal that has decayed, since
    values of the first steps stay in the mean.
    """

    _state = ("_count", "_mean", "_squares")

    def __init__(self, k: float = 3.0, warmup: int = 10) -> None:
        self.threshold = positive("k", k)
        self._warmup = positive("warmup", warmup, whole=True)
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    @property
    def baseline(self) -> float | None:
        """The mean."""
        return self._mean if self._count else None

    def score(self, value: float) -> float | None:
        """Standard deviations above the mean."""
        if self._count < max(2, self._warmup):
            return None
        return _distance(value, self._mean, math.sqrt(self._squares / (self._count - 1)))

    def update(self, value: float) -> None:
        """Learn ``value``."""
        self._count += 1
        change = value - self._mean
        self._mean += change / self._count
        self._squares += change * (value - self._mean)


class RollingZScore(StatefulRule):
    """Standard deviations above the mean of the last values. Learns every value, spikes too.

    Args:
        window: size of the window; scores begin once it is half full.
        k: standard deviations.

    Source: OLMo-core's ``SkipStepOptimizer`` (6 standard deviations over the 128 previous values).
    """

    _state = ("_values",)

    def __init__(self, window: int = 128, k: float = 6.0) -> None:
        self.threshold = positive("k", k)
        self._values: deque[float] = deque(maxlen=positive("window", window, whole=True))

    @property
    def baseline(self) -> float | None:
        """The mean of the window."""
        return math.fsum(self._values) / len(self._values) if self._values else None

    def score(self, value: float) -> float | None:
        """Standard deviations above the mean."""
        count, size = len(self._values), self._values.maxlen or 0
        if count < max(2, size // 2):
            return None
        mean = math.fsum(self._values) / count
        return _distance(value, mean, math.sqrt(math.fsum(_square(x - mean) for x in self._values) / (count - 1)))

    def update(self, value: float) -> None:
        """Learn ``value``."""
        self._values.append(value)


class EmaZScore(StatefulRule):
    """Standard deviations above an exponential moving average. A spike is learned as the value that ZClip would clip it to.

    Args:
        k: standard deviations.
        alpha: weight of the past.
        warmup: values whose mean and population variance are the start.

    Source: ZClip (arXiv 2504.02507), with its defaults: 2.5, 0.97, 25; the clipped value is ``mean + k^2 / z * std``, the mean
    moves first, and the variance is around the new one. At 2.5 it flags many normal values: ZClip only limits them, which is cheap.
    """

    _state = ("_first", "_mean", "_variance")

    def __init__(self, k: float = 2.5, alpha: float = 0.97, warmup: int = 25) -> None:
        self.threshold = positive("k", k)
        self._alpha = share("alpha", alpha)
        self._warmup = positive("warmup", warmup, whole=True)
        self._first: deque[float] = deque()
        self._mean, self._variance = 0.0, 0.0

    @property
    def baseline(self) -> float | None:
        """The average."""
        return self._mean if len(self._first) >= self._warmup else None

    def score(self, value: float) -> float | None:
        """Standard deviations above the average."""
        if len(self._first) < self._warmup:
            return None
        return _distance(value, self._mean, math.sqrt(self._variance))

    def update(self, value: float) -> None:
        """Learn ``value``, clipped if it is a spike."""
        score = self.score(value)
        if score is None:
            self._first.append(value)
            self._mean = math.fsum(self._first) / len(self._first)
            self._variance = math.fsum(_square(x - self._mean) for x in self._first) / len(self._first)
            return
        if score > self.threshold:
            value = self._mean + self.threshold**2 / score * math.sqrt(self._variance)
        self._mean = self._alpha * self._mean + (1 - self._alpha) * value
        self._variance = self._alpha * self._variance + (1 - self._alpha) * _square(value - self._mean)


class MedianMad(StatefulRule):
    """Robust z-score of the logarithm: ``(log x - median) / max(1.4826 * MAD, floor)`` over the last ``window`` values.

    Gradient norms are positive and skewed, so their logarithm scatters evenly; scaling the signal changes nothing. Spikes stay out of the
    window, but ``accept`` consecutive ones are a new level, from which the window restarts.

    Args:
        window: size of the window.
        threshold: robust standard deviations above the median.
        floor: smallest standard deviation of the logarithm; 0.03 is 3 %. Keeps constant signals quiet.
        warmup: values before the first score.
        accept: consecutive spikes that become the new level.

    Source: median and MAD as location and scale are Hampel's identifier (Davies and Gather 1993, The Identification of
    Multiple Outliers); 1.4826 makes MAD a standard deviation for normal data. The defaults are conventional, not tuned.
    One median over the whole window is too high while a signal decays: see :class:`Hampel`.
    """

    _state = ("_values", "_run")

    def __init__(self, window: int = 128, threshold: float = 6.0, floor: float = 0.03, warmup: int = 16, accept: int = 5) -> None:
        self._values = SortedWindow(positive("window", window, whole=True), has_deviation=True)
        self.threshold, self._floor = positive("threshold", threshold), positive("floor", floor)
        self._warmup, self._accept = positive("warmup", warmup, whole=True), positive("accept", accept, whole=True)
        if warmup > window:
            raise ValueError(f"warmup={warmup} is larger than window={window}: no value would ever be scored")
        self._run: deque[float] = deque()

    @property
    def baseline(self) -> float | None:
        """The median, in units of the signal."""
        return value_at(self._values.median) if self._values.in_order else None

    def score(self, value: float) -> float | None:
        """Robust standard deviations above the median; negative below it."""
        if len(self._values.in_order) < self._warmup:
            return None
        return (log_of(value) - self._values.median) / max(MAD_TO_STD * self._values.deviation, self._floor)

    def update(self, value: float) -> None:
        """Learn ``value``; a spike only as part of a lasting change of level."""
        score = self.score(value)
        if score is None or score <= self.threshold:
            self._run.clear()
            add_each([(self._values, log_of(value))])
            return
        self._run.append(log_of(value))
        if len(self._run) >= self._accept:
            # repeated up to the warm-up, else the rule would give no scores on the new level
            self._values.load([*self._run] * -(-self._warmup // len(self._run)))
            self._run.clear()


def _distance(value: float, mean: float, spread: float) -> float:
    spread = max(spread, _SMALLEST_SPREAD * abs(mean))
    return (value - mean) / spread if spread > 0 else math.copysign(math.inf, value) if value else 0.0


def _square(x: float) -> float:
    return x * x  # gives inf where ``**`` raises


# --- the rule for many signals ---


class _Windows:
    """The last ``size`` values of each of ``rows`` signals; free places hold ``empty``."""

    def __init__(self, rows: int, size: int, empty: float = math.inf) -> None:
        self.values, self._empty = np.full((rows, size), empty), empty
        self.count, self._next = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def add(self, chosen: np.ndarray, values: np.ndarray) -> None:
        """Replace the oldest value of each chosen row by that in ``values``; both ``[rows]``."""
        rows = chosen.nonzero()[0]
        self.values[rows, self._next[rows]] = values[rows]
        self._next[rows] = (self._next[rows] + 1) % self.values.shape[1]
        self.count[rows] = np.minimum(self.count[rows] + 1, self.values.shape[1])

    def oldest(self) -> np.ndarray:
        """What the next value replaces: ``[rows]``."""
        found: np.ndarray = self.values[np.arange(len(self.values)), self._next]
        return found

    def median(self) -> np.ndarray:
        """``[rows]``; infinite where there is no value."""
        return self._middle(self.values)

    def deviation(self) -> np.ndarray:
        """The median of ``|x - median|``, 0 where there are too few values: ``[rows]``."""
        found = self._middle(np.abs(self.values - self.median()[:, None]))
        return np.where(self.count >= hampel.FEWEST_RESIDUALS, found, 0.0)

    def _middle(self, values: np.ndarray) -> np.ndarray:
        ordered, rows = np.sort(values, axis=1), np.arange(len(values))  # free places come last
        middle: np.ndarray = (ordered[rows, np.maximum(self.count - 1, 0) // 2] + ordered[rows, self.count // 2]) / 2
        return middle

    def ordered(self, row: int) -> list[float]:
        """The values of one row, oldest first."""
        found: list[float] = np.roll(self.values[row], -self._next[row]).tolist()
        return found[len(found) - int(self.count[row]) :]

    def load(self, row: int, values: Sequence[float] = ()) -> None:
        """The inverse of :meth:`ordered`."""
        size = self.values.shape[1]
        kept = list(values)[-size:]
        self.values[row] = kept + [self._empty] * (size - len(kept))
        self.count[row], self._next[row] = len(kept), len(kept) % size


class HampelBank:
    """:class:`Hampel` for a fixed number of signals that are never negative, with the settings of the rule ``like``."""

    def __init__(self, like: Hampel, signals: int) -> None:
        self.threshold, self._least, self._early = like.threshold, math.log(like.least), like.early
        self._sizes = sizes = like.sizes
        self._levels = {name: _Windows(signals, sizes[name]) for name in ("near", "far")}
        self._residuals = {name: _Windows(signals, sizes["window"]) for name in self._levels}
        self._between = _Windows(signals, sizes["lag"])  # of the near window and the far one
        # those whose values are in the state as they are
        self._plain = {
            **self._levels,
            **{f"{name}_residuals": of for name, of in self._residuals.items()},
            "between": self._between,
        }
        self._peaks = _Windows(signals, sizes["window"], -math.inf)  # values above the threshold, -inf for the others
        self._peaks.count[:] = sizes["window"]
        self._recent, self._flags = _Windows(signals, RECENT), _Windows(signals, RECENT, 0.0)  # values, and which were spikes
        self._count = np.zeros(signals, np.int64)

    def verdicts(self, values: Tensor, learns: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score ``values``, float64 ``[signals]`` on the CPU, then learn them, or not. Returns the scores, infinite for NaN and Inf, NaN
        if there is none yet; which values are spikes; and the logarithms of the usual values before, infinite if unknown.
        """
        positions = torch.where(values > 0, values.log(), LOG_OF_ZERO).numpy()
        finite, medians = values.isfinite().numpy(), {name: level.median() for name, level in self._levels.items()}
        with np.errstate(all="ignore"):
            early = 1 / self._count
            widening, least = 1 + hampel.EARLY_SPREAD * early, (self._least + self._early * early) / self.threshold
            near, far = (
                (positions - medians[name]) / np.maximum(MAD_TO_STD * residuals.deviation() * widening, least)
                for name, residuals in self._residuals.items()
            )
            scores = np.where(self._count >= hampel.FAR_FROM, np.maximum(near, far), near)
        scores = np.where(self._count >= hampel.JUDGES, scores, np.nan)
        high = (scores > self.threshold).nonzero()[0]
        usual = (self._peaks.values[high] >= (positions[high] - self._least)[:, None]).sum(axis=1) >= hampel.USUAL
        scores[high[usual]] = self.threshold
        spikes = finite & (scores > self.threshold)
        if learns:
            self._peaks.add(finite, np.where(scores >= self.threshold, positions, -np.inf))
            self._learn(positions, medians, finite, spikes)
        return np.where(finite, scores, np.inf), spikes | ~finite, medians["near"]

    def _learn(self, positions: np.ndarray, medians: Mapping[str, np.ndarray], finite: np.ndarray, spikes: np.ndarray) -> None:
        calm = finite & ~spikes
        for name, level in self._levels.items():
            known = calm & (level.count >= hampel.FIRST)
            self._residuals[name].add(known, positions - np.where(known, medians[name], 0.0))
        leaving = self._between.oldest()
        self._levels["far"].add(calm & (leaving < np.inf), leaving)
        self._levels["near"].add(calm, positions)
        self._between.add(calm, positions)
        self._count += calm
        self._recent.add(finite, positions)
        self._flags.add(finite, spikes)
        # restart the medians where the level has changed, from the first of the recent spikes on
        number = self._flags.values.sum(axis=1)
        lasting = (number >= hampel.ACCEPT_IN_THE_END) & (self._recent.count == RECENT) & (self._flags.oldest() > 0)
        for row in (finite & (lasting | (spikes & (number >= hampel.ACCEPT_AT_ONCE)))).nonzero()[0].tolist():
            begun = self._recent.ordered(row)[self._flags.ordered(row).index(1.0) :]
            for level in self._levels.values():
                level.load(row, begun)
            for window in (self._between, self._recent, self._flags):
                window.load(row)

    def state(self, signal: int) -> dict[str, Any]:
        """As of a single rule."""
        recent = zip(self._recent.ordered(signal), map(bool, self._flags.ordered(signal)), strict=True)
        return {
            **{name: window.ordered(signal) for name, window in self._plain.items()},
            "recent": list(map(list, recent)),
            "peaks": [None if peak == -math.inf else peak for peak in self._peaks.ordered(signal)],
            "count": int(self._count[signal]),
            "linear": False,
            "sizes": self._sizes,
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of :meth:`state`, for all signals."""
        for signal, state in enumerate(states):
            for name, window in self._plain.items():
                window.load(signal, state[name])
            self._recent.load(signal, [position for position, _ in state["recent"]])
            self._flags.load(signal, [flag for _, flag in state["recent"]])
            self._peaks.load(signal, [-math.inf if peak is None else peak for peak in state["peaks"]])
            self._count[signal] = state["count"]
