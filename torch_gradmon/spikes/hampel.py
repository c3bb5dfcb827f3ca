"""The default rule: the distance of a value's logarithm to its running medians."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..core.validation import positive
from .level import (
    ACCEPT_AT_ONCE,
    ACCEPT_IN_THE_END,
    EARLY,
    EARLY_SPREAD,
    FAR_FROM,
    FEWEST_RESIDUALS,
    FIRST,
    JUDGES,
    LEAST,
    NEAR,
    RECENT,
    THRESHOLD,
    USUAL,
    Level,
    log_of,
    value_at,
)


class Hampel:
    """Distance of ``log(value)`` to the median of the last values, in robust standard deviations. Made to run unattended.

    A value is compared with two medians. The one of the ``near`` last values follows the decay of the first steps and slow drifts. From
    the 40th value on, a second one of ``far`` values, ``lag`` values older, finds ramps of 5 % a step that the first one follows. The score
    is the larger ``(log value - median) / spread``. The spread is 1.4826 times the median absolute deviation of the last ``window`` such
    differences, and at least ``log(least) / threshold``: a factor below ``least`` is no spike, however quiet the signal.

    The first eight values have no score: the spread is that of five differences, and the first difference is that of the fourth value.
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
        near, far = positive("near", near, above=FIRST - 1, whole=True), positive("far", far, above=FIRST - 1, whole=True)
        size = positive("window", window, above=FEWEST_RESIDUALS - 1, whole=True)
        self._near, self._far = Level(near, size), Level(far, size)
        self._between: deque[float] = deque()
        self._recent: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        self._peaks: deque[float] = deque([-math.inf] * size, maxlen=size)  # values above the threshold; -inf for the others
        self._count = 0
        self.linear = False  # after a negative value, values are compared instead of logarithms
        self._scored: tuple[float, float | None] | None = None

    @classmethod
    def for_losses(cls, threshold: float = THRESHOLD) -> Hampel:
        """The preset for losses: spikes from 6 % on, since they are small compared with the level."""
        return cls(threshold, least=1.06, early=1.5)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the windows, by argument."""
        return {
            "near": self._near.values.size,
            "far": self._far.values.size,
            "lag": self.lag,
            "window": self._near.residuals.size,
        }

    @property
    def baseline(self) -> float | None:
        """The usual value now, in units of the signal."""
        if not len(self._near.values):
            return None
        return self._near.values.median() if self.linear else value_at(self._near.values.median())

    def score(self, value: float) -> float | None:
        """Robust standard deviations above normal, negative below it; None for the first eight values."""
        if self._scored is None or self._scored[0] != value:
            self._scored = value, self._compared(value)  # cached for update()
        return self._scored[1]

    def _compared(self, value: float) -> float | None:
        if self._count < JUDGES or (value < 0 and not self.linear):
            return None
        position = value if self.linear else log_of(value)
        least = math.log(self.least) + self.early / self._count
        limits = self.linear, least, self.threshold, 1 + EARLY_SPREAD / self._count
        score = self._near.score(position, *limits)
        if self._count >= FAR_FROM:
            score = max(score, self._far.score(position, *limits))
        return min(score, self.threshold) if score > self.threshold and self._is_usual(position) else score

    def _is_usual(self, position: float) -> bool:
        nearly = position - (abs(self._near.values.median()) if self.linear else 1.0) * math.log(self.least)
        return sum(peak >= nearly for peak in self._peaks) >= USUAL

    def update(self, value: float) -> None:
        """Learn a finite ``value`` unless its score is that of a spike."""
        if value < 0 and not self.linear:
            self._restart()
        score, position = self.score(value), (value if self.linear else log_of(value))
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
        self._near.add_residual(position)
        self._far.add_residual(position)
        self._count += 1
        self._near.values.add(position)
        self._between.append(position)
        if len(self._between) > self.lag:
            self._far.values.add(self._between.popleft())

    def _accept(self) -> None:
        """Restart the medians from the first of the recent spikes on."""
        recent = list(self._recent)
        first = next(index for index, (_, is_spike) in enumerate(recent) if is_spike)
        for level in (self._near, self._far):
            level.restart(position for position, _ in recent[first:])
        self._between.clear()
        self._recent.clear()

    def _restart(self) -> None:
        """Drop all logarithms at the first negative value."""
        self.linear, self._count, self._scored = True, 0, None
        self._peaks.extend([-math.inf] * len(self._peaks))
        self._between, self._recent = deque(), deque(maxlen=RECENT)
        for level in (self._near, self._far):
            level.load((), ())

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "near": self._near.values.values(),
            "far": self._far.values.values(),
            "near_residuals": self._near.residuals.values(),
            "far_residuals": self._far.residuals.values(),
            "between": list(self._between),
            "recent": [[position, is_spike] for position, is_spike in self._recent],
            "peaks": [None if peak == -math.inf else peak for peak in self._peaks],
            "count": self._count,
            "linear": self.linear,
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
        if missing := self.state_dict().keys() - state.keys():
            raise KeyError(f"the state of a Hampel rule lacks {', '.join(sorted(missing))}")
        self._scored = None
        self._near.load(state["near"], state["near_residuals"])
        self._far.load(state["far"], state["far_residuals"])
        self._between = deque(map(float, state["between"]))
        self._recent = deque(((float(position), bool(spike)) for position, spike in state["recent"]), maxlen=RECENT)
        peaks = (-math.inf if peak is None else float(peak) for peak in state["peaks"])
        self._peaks = deque(peaks, maxlen=self._peaks.maxlen)
        self._count, self.linear = int(state["count"]), bool(state["linear"])
