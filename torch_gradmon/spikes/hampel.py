"""The default rule: the distance of a value's logarithm to its running medians."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from .arguments import positive
from .sorted_window import SortedWindow

#: Makes the median of absolute deviations a standard deviation for normal data.
MAD_TO_STD = 1.4826
#: Score above which a norm is a spike, and the smallest factor above usual of a spike.
THRESHOLD, LEAST = 5.5, 1.5
#: Number of last values, without spikes, in the near median.
NEAR = 9
#: Values before the first score.
FIRST = 3
#: Residuals before their spread counts.
FEWEST_RESIDUALS = 5
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


class Hampel:
    """Distance of ``log(value)`` to the median of the last values, in robust standard deviations. Made to run unattended.

    A value is compared with two medians. The one of the ``near`` last values follows the decay of the first steps and slow drifts. From
    the 40th value on, a second one of ``far`` values, ``lag`` values older, finds ramps of 5 % a step that the first one follows. The score
    is the larger ``(log value - median) / spread``. The spread is 1.4826 times the median absolute deviation of the last ``window`` such
    differences, and at least ``log(least) / threshold``: a factor below ``least`` is no spike, however quiet the signal.

    Early limits are higher, since the first steps of a training jump: after ``n`` values the smallest rise is ``log(least) + early / n``
    and the spread is ``1 + 16 / n`` times as large.

    Spikes stay out of the medians and the spread. If 5 of 9 values are spikes, or 3 and the first of them is 9 values old, the level has
    changed and the medians restart from these values. A lasting doubling is accepted within 10 steps, in noisy signals within 12. A height
    that occurs 16 times in ``window`` values is usual: a signal that jumps by design, such as every third step of a GAN, is flagged 16
    times and no more.

    The scale of the signal does not matter. From the first negative value on, values are compared instead of their logarithms, and
    ``least`` is relative to their median.

    Args:
        threshold: score above which a value is a spike.
        least: smallest factor above usual that is a spike. 1.5 is for gradient norms; losses need less, see :meth:`for_losses`.
        early: how much higher the limits are in the first steps.
        near, far, lag, window: numbers of values.

    Source: median and MAD as location and scale make Hampel's identifier (Davies and Gather 1993, The Identification of Multiple
    Outliers, JASA 88). The two medians, what counts as a change of level, and the defaults are this package's own; they were tuned
    on the labelled training curves and the scenarios of ``make bench-spikes``.

    Raises:
        TypeError, ValueError: an argument is not a positive number, or ``least`` is not above 1.
    """

    def __init__(
        self,
        threshold: float = THRESHOLD,
        *,
        least: float = LEAST,
        early: float = EARLY,
        near: int = NEAR,
        far: int = 7,
        lag: int = 7,
        window: int = 127,
    ) -> None:
        self.threshold = positive("threshold", threshold)
        self.least = positive("least", least, above=1.0)
        self.early = positive("early", early)
        self.lag = positive("lag", lag, whole=True)
        self._near = SortedWindow(positive("near", near, above=FIRST - 1, whole=True))
        self._far = SortedWindow(positive("far", far, above=FIRST - 1, whole=True))
        size = positive("window", window, above=FEWEST_RESIDUALS - 1, whole=True)
        self._near_residuals, self._far_residuals = SortedWindow(size), SortedWindow(size)
        self._between: deque[float] = deque()
        self._recent: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        self._peaks: deque[float] = deque([-math.inf] * size, maxlen=size)  # values above the threshold; -inf for the others
        self._count = 0
        self._linear = False
        self._scored: tuple[float, float | None] | None = None

    @classmethod
    def for_losses(cls, threshold: float = THRESHOLD) -> Hampel:
        """The preset for losses: spikes from 6 % on, since they are small compared with the level."""
        return cls(threshold, least=1.06, early=1.5)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the windows, by argument."""
        return {"near": self._near.size, "far": self._far.size, "lag": self.lag, "window": self._near_residuals.size}

    @property
    def linear(self) -> bool:
        """Whether a negative value has come, which makes the rule compare values instead of logarithms."""
        return self._linear

    @property
    def baseline(self) -> float | None:
        """The usual value now, in units of the signal."""
        if not len(self._near):
            return None
        return self._near.median() if self._linear else value_at(self._near.median())

    def score(self, value: float) -> float | None:
        """Robust standard deviations above normal, negative below it; None for the first three values."""
        if self._scored is None or self._scored[0] != value:
            self._scored = value, self._compared(value)  # cached for update()
        return self._scored[1]

    def _compared(self, value: float) -> float | None:
        if self._count < FIRST or (value < 0 and not self._linear):
            return None
        position = self._position(value)
        score = self._score(position, self._near, self._near_residuals)
        if self._count >= FAR_FROM:
            score = max(score, self._score(position, self._far, self._far_residuals))
        return min(score, self.threshold) if score > self.threshold and self._is_usual(position) else score

    def _is_usual(self, position: float) -> bool:
        unit = abs(self._near.median()) if self._linear else 1.0
        nearly = position - unit * math.log(self.least)
        return sum(peak >= nearly for peak in self._peaks) >= USUAL

    def _score(self, position: float, normal: SortedWindow, residuals: SortedWindow) -> float:
        median = normal.median()
        # a rise of the logarithm by log(least) is a factor of ``least``
        unit = abs(median) if self._linear else 1.0
        spread = unit * (math.log(self.least) + self.early / self._count) / self.threshold
        if len(residuals) >= FEWEST_RESIDUALS:
            deviation = residuals.median_deviation(residuals.median())
            spread = max(spread, MAD_TO_STD * deviation * (1 + EARLY_SPREAD / self._count))
        rise = position - median
        return rise / spread if spread > 0 else math.copysign(math.inf, rise) if rise else 0.0

    def update(self, value: float) -> None:
        """Learn a finite ``value`` unless its score is that of a spike."""
        if value < 0 and not self._linear:
            self._restart()
        score, position = self.score(value), self._position(value)
        self._scored = None
        is_spike = score is not None and score > self.threshold
        is_high = score is not None and score >= self.threshold
        self._peaks.append(position if is_high else -math.inf)
        self._recent.append((position, is_spike))
        if not is_spike:
            self._learn(position)
        spikes = sum(spike for _, spike in self._recent)
        lasting = spikes >= ACCEPT_IN_THE_END and len(self._recent) == RECENT and self._recent[0][1]
        if lasting or (is_spike and spikes >= ACCEPT_AT_ONCE):
            self._accept()

    def _learn(self, position: float) -> None:
        if len(self._near) >= FIRST:
            self._near_residuals.add(position - self._near.median())
        if len(self._far) >= FIRST:
            self._far_residuals.add(position - self._far.median())
        self._count += 1
        self._near.add(position)
        self._between.append(position)
        if len(self._between) > self.lag:
            self._far.add(self._between.popleft())

    def _accept(self) -> None:
        """Restart the medians from the first of the recent spikes on."""
        recent = list(self._recent)
        first = next(index for index, (_, is_spike) in enumerate(recent) if is_spike)
        for normal in (self._near, self._far):
            normal.clear()
            normal.extend(position for position, _ in recent[first:])
        self._between.clear()
        self._recent.clear()

    def _restart(self) -> None:
        """Drop all logarithms at the first negative value."""
        self._linear, self._count, self._scored = True, 0, None
        self._peaks.extend([-math.inf] * len(self._peaks))
        for window in (self._near, self._far, self._near_residuals, self._far_residuals, self._between, self._recent):
            window.clear()

    def _position(self, value: float) -> float:
        if self._linear:
            return value
        return log_of(value)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "near": self._near.values(),
            "far": self._far.values(),
            "near_residuals": self._near_residuals.values(),
            "far_residuals": self._far_residuals.values(),
            "between": list(self._between),
            "recent": [[position, is_spike] for position, is_spike in self._recent],
            "peaks": [None if peak == -math.inf else peak for peak in self._peaks],
            "count": self._count,
            "linear": self._linear,
            "sizes": self.sizes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            KeyError: a part is missing. The rule is unchanged.
            ValueError: the state is of a rule with other sizes. The rule is unchanged.
        """
        if state["sizes"] != self.sizes:
            raise ValueError(
                f"the state is of a Hampel rule with the sizes {dict(state['sizes'])}, but this one has {self.sizes}"
            )
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise KeyError(f"the state of a Hampel rule lacks {', '.join(sorted(missing))}")
        self._scored = None
        self._near = SortedWindow(self._near.size, map(float, state["near"]))
        self._far = SortedWindow(self._far.size, map(float, state["far"]))
        self._near_residuals = SortedWindow(self._near_residuals.size, map(float, state["near_residuals"]))
        self._far_residuals = SortedWindow(self._far_residuals.size, map(float, state["far_residuals"]))
        self._between = deque(map(float, state["between"]))
        self._recent = deque(((float(position), bool(spike)) for position, spike in state["recent"]), maxlen=RECENT)
        peaks = (-math.inf if peak is None else float(peak) for peak in state["peaks"])
        self._peaks = deque(peaks, maxlen=self._peaks.maxlen)
        self._count, self._linear = int(state["count"]), bool(state["linear"])


def log_of(value: float) -> float:
    """The logarithm. A norm of exactly zero is legal: it lies far below normal."""
    return math.log(value) if value > 0 else LOG_OF_ZERO


def value_at(position: float) -> float:
    """The inverse of :func:`log_of`."""
    return math.exp(position) if position > LOG_OF_ZERO + 1 else 0.0
