"""The default rule: the distance of a value's logarithm to its running medians."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.validation import positive

# --- sorted window ---


class SortedWindow:
    """The last ``size`` values. Adding one moves a few hundred bytes at most; medians take no sorting.

    >>> window = SortedWindow(3, [9.0, 1.0, 2.0, 4.0], has_deviation=True)
    >>> window.median, window.deviation
    (2.0, 1.0)

    Attributes:
        median: that of an even number of values is the mean of the two in the middle; NaN without values.
        deviation: the median of ``|x - median|``; NaN without values, or where it is not kept.
    """

    def __init__(self, size: int, values: Iterable[float] = (), has_deviation: bool = False) -> None:
        self.size, self.has_deviation = size, has_deviation
        self.load(values)

    def load(self, values: Iterable[float]) -> None:
        kept = list(values)[-self.size :]
        self.in_time, self.in_order = deque(kept[:-1]), sorted(kept[:-1])
        self.median = self.deviation = math.nan
        self.nearest = 0  # where in their order the values begin that are nearest to the median
        add_each([(self, last) for last in kept[-1:]])  # the medians come with the last one

    def __iter__(self) -> Iterator[float]:
        return iter(self.in_time)


def add_each(pairs: Iterable[tuple[SortedWindow, float]]) -> None:
    """Each window takes its value, which is no NaN, for its oldest one."""
    for window, value in pairs:
        ordered = window.in_order
        if len(ordered) == window.size:
            del ordered[bisect_left(ordered, window.in_time.popleft())]
        window.in_time.append(value)
        insort(ordered, value)
        size = len(ordered)
        half = size // 2
        center = window.median = ordered[half] if size % 2 else (ordered[half - 1] + ordered[half]) / 2
        if not window.has_deviation:
            continue
        low, total = window.nearest, 0.0
        # distances grow to both sides of the center, so that the nearest ``rank`` values are neighbours, and nearly those of the last time
        for rank in (half + 1,) if size % 2 else (half, half + 1):
            if low + rank > size:
                low = size - rank
            while low and center - ordered[low - 1] < ordered[low + rank - 1] - center:
                low -= 1
            while low + rank < size and center - ordered[low] > ordered[low + rank] - center:
                low += 1
            total += max(center - ordered[low], ordered[low + rank - 1] - center)
        window.nearest, window.deviation = low, total if size % 2 else total / 2


# --- settings ---

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
#: Steps whose gradients are kept for attribution: 13 kB each for 200 parameters.
REMEMBERED = 64
#: The logarithm used for a norm of zero: below the logarithm of any positive number.
LOG_OF_ZERO = -745.0


def log_of(value: float) -> float:
    """The logarithm. A norm of exactly zero is legal: it lies far below normal."""
    return math.log(value) if value > 0 else LOG_OF_ZERO


def value_at(position: float) -> float:
    """The inverse of :func:`log_of`."""
    return math.exp(position) if position > LOG_OF_ZERO + 1 else 0.0


# --- the rule for one signal ---


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
        self.window = positive("window", window, above=FEWEST_RESIDUALS - 1, whole=True)
        #: the last values of each level, as positions: logarithms, or the values themselves
        self._levels = {"near": SortedWindow(near), "far": SortedWindow(far)}
        #: their distances to the median before them
        self._residuals = {name: SortedWindow(self.window, has_deviation=True) for name in self._levels}
        self._between: deque[float] = deque()
        self._recent: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        # above the threshold; -inf for the others
        self._peaks: deque[float] = deque([-math.inf] * self.window, maxlen=self.window)
        self._count = 0
        self.linear = False  # after a negative value, values are compared instead of logarithms
        self._scored: tuple[float, float | None] | None = None  # the value that was scored last, until it is learned

    @classmethod
    def for_losses(cls, threshold: float = THRESHOLD) -> Hampel:
        """The preset for losses: spikes from 6 % on, since they are small compared with the level."""
        return cls(threshold, least=1.06, early=1.5)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the windows, by argument."""
        return {**{name: level.size for name, level in self._levels.items()}, "lag": self.lag, "window": self.window}

    @property
    def baseline(self) -> float | None:
        """The usual value now, in units of the signal."""
        near = self._levels["near"]
        if not near.in_order:
            return None
        return near.median if self.linear else value_at(near.median)

    def score(self, value: float) -> float | None:
        """Robust standard deviations above normal, negative below it; None for the first eight values."""
        score = None
        if self._count >= JUDGES and not (value < 0 and not self.linear):
            position = value if self.linear else math.log(value) if value > 0 else LOG_OF_ZERO
            score = -math.inf
            # a rise of the logarithm by log(least) is a factor of ``least``
            least = math.log(self.least) + self.early / self._count
            for name in ("near", "far") if self._count >= FAR_FROM else ("near",):
                median, residuals = self._levels[name].median, self._residuals[name]
                spread = (abs(median) if self.linear else 1.0) * least / self.threshold
                if len(residuals.in_order) >= FEWEST_RESIDUALS:
                    spread = max(spread, MAD_TO_STD * residuals.deviation * (1 + EARLY_SPREAD / self._count))
                rise = position - median
                score = max(score, rise / spread if spread > 0 else math.copysign(math.inf, rise) if rise else 0.0)
            if score > self.threshold:
                nearly = position - (abs(self._levels["near"].median) if self.linear else 1.0) * math.log(self.least)
                is_usual = sum(peak >= nearly for peak in self._peaks) >= USUAL
                score = self.threshold if is_usual else score
        self._scored = value, score
        return score

    def update(self, value: float) -> None:
        """Learn a finite ``value`` unless its score is that of a spike."""
        if value < 0 and not self.linear:  # the first negative value: all logarithms are of no use
            self.linear, self._count, self._scored = True, 0, None
            self._peaks.extend([-math.inf] * self.window)
            self._between.clear()
            self._recent.clear()
            for window in (*self._levels.values(), *self._residuals.values()):
                window.load(())
        known = self._scored  # a subclass may have a score of its own
        score = known[1] if known is not None and known[0] == value and type(self) is Hampel else self.score(value)
        self._scored = None
        position = value if self.linear else math.log(value) if value > 0 else LOG_OF_ZERO
        is_spike = score is not None and score > self.threshold
        is_high = score is not None and score >= self.threshold
        self._peaks.append(position if is_high else -math.inf)
        self._recent.append((position, is_spike))
        if not is_spike:
            learned = [(self._levels["near"], position)]
            self._between.append(position)
            if len(self._between) > self.lag:
                learned.append((self._levels["far"], self._between.popleft()))
            for name, level in self._levels.items():
                if len(level.in_order) >= FIRST:
                    learned.append((self._residuals[name], position - level.median))
            self._count += 1
            add_each(learned)
        is_oldest = len(self._recent) == RECENT and self._recent[0][1]
        if is_spike or is_oldest:
            spikes = [spike for _, spike in self._recent].count(True)
            if spikes >= (ACCEPT_IN_THE_END if is_oldest else ACCEPT_AT_ONCE):
                # restart the medians from the first of the recent spikes on
                recent = list(self._recent)
                first = next(index for index, (_, was_spike) in enumerate(recent) if was_spike)
                for level in self._levels.values():
                    level.load(position for position, _ in recent[first:])
                self._between.clear()
                self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            **{name: list(level) for name, level in self._levels.items()},
            **{f"{name}_residuals": list(residuals) for name, residuals in self._residuals.items()},
            "between": list(self._between),
            "recent": list(map(list, self._recent)),
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
        for name, level in self._levels.items():
            level.load(map(float, state[name]))
            self._residuals[name].load(map(float, state[f"{name}_residuals"]))
        self._between = deque(map(float, state["between"]))
        self._recent = deque(((float(position), bool(spike)) for position, spike in state["recent"]), maxlen=RECENT)
        self._peaks = deque((-math.inf if peak is None else float(peak) for peak in state["peaks"]), maxlen=self.window)
        self._count, self.linear = int(state["count"]), bool(state["linear"])
