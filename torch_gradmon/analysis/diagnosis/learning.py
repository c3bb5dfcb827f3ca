"""Whether the model learns, which most rules need before they report a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ...core.records import Severity
from .series import Series

State = Literal["falls", "flat", "rises", "unknown"]
#: The fewest losses that have a trend.
_FEWEST = 20
#: The last fifth is compared with the first fifth, by ranks, and with the first few losses, for models that learn quickly.
_HEAD, _TAIL, _FEW = 0.2, 0.2, 5
#: A shift counts from this many standard deviations of the rank sum; losses of neighbouring steps are not independent.
_RANKS = 3.0
#: The first few losses count from this many standard deviations of the last fifth,
_SPREADS = 6.0
#: and either comparison from this share of the loss at the beginning.
_SHARE = 0.01
#: The standard deviation over the median absolute deviation, for a normal distribution.
_OF_MAD = 1.4826
#: A trend that makes the deviation this many times as large is none.
_NO_TREND = 10.0
#: The fewest values from which a trend is subtracted, and the expectation of the deviation of fewer ones, over the standard deviation.
_WITH_TREND, _EXPECTED = 6, {3: 0.673, 4: 0.509, 5: 0.821}
#: For n of more values it is 1 - 3 / n with a trend and 1 - 2 / n without: the means of 200,000 normal samples, to 0.02 up to n = 100.
_LOST_WITH_TREND, _LOST_ALONE = 3.0, 2.0
#: Standard errors within which a difference of medians may lie, and the error of a median over that of a mean, the root of pi / 2.
_ERRORS, _OF_MEDIAN = 2.0, 1.2533
#: A loss below 0 has no bound if it falls no slower in the end than in the middle, by this part at least, and ends this many times as far
#: from 0 as it began; or, however it falls, this many times.
_NO_SLOWER, _AWAY, _FAR_AWAY = 0.8, 10.0, 1e4
#: The share that a loss has to fall, and the start of the later part, in which a loss that has not should still fall.
_THIRD, _LATER = 1 / 3, 0.3
#: Losses before they are compared with chance; the share of it that counts as learnt, and where another fault has to be.
_LONG, _LEARNT, _NEAR = 50, 0.03, 1.2
#: A loss below this share of chance has been learnt, however soon. One that begins above this share began with nothing learnt.
_KNOWN, _UNKNOWN = 0.1, 0.9
#: After as many losses a fall that stays as near to chance is far too little.
_VERY_LONG = 200
#: A fall of the ranks by this many standard deviations happens by chance in one of twenty cases: the loss may well fall.
PERHAPS = 1.645
#: By this many it does so in one of a hundred, which is proof enough for a loss that is below chance already.
_PROBABLY = 2.33


@dataclass(frozen=True)
class Learning:
    """The trend of the loss.

    Attributes:
        state: ``unknown`` without enough losses.
        first: median loss at the beginning; NaN if unknown.
        last: median of the last fifth.
        has_fallen: whether it fell by a third at least, also from its first value if that is below the first few, or is negative, or ends
            far below chance; a third below it is far if it began there.
        is_stuck: whether it neither has fallen nor still falls. False if that is unknown, and for a resumed run whose loss was flat all the
            time: there may be nothing left to learn.
        is_at_chance: whether it ends where the loss of the best constant answer lies, and does not fall in the second half of a short run.
        is_worse: whether it ends above that, however far it has fallen, and does not fall any more, or has had long enough.
    """

    state: State
    first: float = math.nan
    last: float = math.nan
    has_fallen: bool = False
    is_stuck: bool = False
    is_at_chance: bool = False
    is_worse: bool = False

    @property
    def is_learning(self) -> bool:
        """Whether the loss falls; False if that is unknown."""
        return self.state == "falls"

    @property
    def concern(self) -> Severity:
        """The severity of a problem that matters only if the model does not learn."""
        return "warning" if self.is_stuck or self.is_worse else "info"


def learning(loss: Series, is_resumed: bool = False, chance: float = 0.0) -> Learning:
    """The trend of the finite losses.

    Args:
        loss: of each step.
        is_resumed: the training began earlier.
        chance: the loss of the best constant answer; 0 if it is unknown.
    """
    finite = loss.finite
    state, first, last = trend(finite)
    if state == "unknown":
        return Learning("unknown")
    from_ = min(first, finite.values[0])
    has_fallen = state == "falls" and not 0 < from_ * (1 - _THIRD) < last
    has_fallen |= state != "rises" and last < (_KNOWN if finite.values[0] < _UNKNOWN * chance else 1 - _THIRD) * chance
    is_at_rest = is_resumed and state == "flat"
    is_at_chance = _is_at_chance(finite, chance)
    has_fallen &= not is_at_chance  # from far above it, perhaps
    is_stuck = not has_fallen and not is_at_rest and (is_at_chance or trend(finite.part(_LATER, 1.0))[0] != "falls")
    is_worse = len(finite) >= _LONG and last > _NEAR * chance > 0
    is_worse &= len(finite) >= _VERY_LONG or trend(finite.part(0.5, 1.0))[0] != "falls"
    return Learning(state, first, last, has_fallen, is_stuck, is_at_chance, is_worse)


def _is_at_chance(finite: Series, chance: float) -> bool:
    is_near = chance > 0 and len(finite) >= _LONG and 1 - _LEARNT < finite.part(1 - _TAIL, 1).median / chance < _NEAR
    before, after = finite.part(0.5, 0.75), finite.part(0.75, 1)
    shift = rank_shift(before.values, after.values)
    may_fall = shift < -PERHAPS and before.median - after.median > _SHARE * abs(before.median)
    may_fall |= shift < -_PROBABLY and after.median < chance  # from above it, it would fall by itself
    return is_near and (len(finite) >= _VERY_LONG or not may_fall)


def trend(finite: Series) -> tuple[State, float, float]:
    """The trend of the losses against their own noise, and the medians of the beginning and the end.

    The first and the last fifth are compared by their ranks (Mann and Whitney 1947, Ann. Math. Stat. 18, 50-60), a test that assumes
    nothing about the noise.
    """
    if len(finite) < _FEWEST:
        return "unknown", math.nan, math.nan
    few, head, tail = Series(finite.steps[:_FEW], finite.values[:_FEW]), finite.part(0.0, _HEAD), finite.part(1 - _TAIL, 1.0)
    least = _SHARE * abs(few.median)
    fell = few.median - tail.median
    if fell > max(_SPREADS * spread(tail), least):
        return "falls", few.median, tail.median
    shift, change = rank_shift(head.values, tail.values), tail.median - head.median
    state: State = "flat"
    if abs(shift) > _RANKS and abs(change) > least:
        state = "falls" if shift < 0 else "rises"
    return state, head.median, tail.median


def falls_without_bound(loss: Series) -> bool:
    """Whether the losses fall below 0, ever faster or very far."""
    fifths = [loss.part(at / 5, (at + 1) / 5).median for at in range(5)]
    falls = [before - after for before, after in pairwise(fifths)]
    is_slower = min(falls) <= 0 or falls[-1] < _NO_SLOWER * max(falls[:-1])
    return -fifths[-1] > (_FAR_AWAY if is_slower else _AWAY) * max(abs(fifths[0]), abs(loss.values[0]))


def spread(part: Series) -> float:
    """The standard deviation of a part, from its median absolute deviation after subtracting a straight trend.

    A trend that makes the deviation far larger is none: in a short part a single value may be taken for one. From the shortest parts,
    whose values it would go through, none is subtracted. The deviation of few values is too small on average, so it is divided by
    its expectation for a normal distribution.
    """
    if len(part) < _WITH_TREND:
        return _OF_MAD * _deviation(part) / _EXPECTED.get(len(part), 1.0)
    values = part.values
    third = max(len(values) // 3, 1)
    rise = Series(part.steps[-third:], values[-third:]).median - Series(part.steps[:third], values[:third]).median
    slope = rise / max(len(values) - third, 1)
    level = _deviation(Series(part.steps, tuple(value - slope * place for place, value in enumerate(values))))
    as_it_is = _deviation(part)
    count = len(values)
    is_none = 0 < _NO_TREND * as_it_is < level
    return _OF_MAD * (as_it_is / (1 - _LOST_ALONE / count) if is_none else level / (1 - _LOST_WITH_TREND / count))


def may_fall(before: Series, after: Series, least: float) -> bool:
    """Whether the losses are so noisy that the medians of two parts may differ by ``least``, though they do not show it."""
    noise = max(spread(before), spread(after))
    return before.median - after.median + _ERRORS * _OF_MEDIAN * noise * math.sqrt(1 / len(before) + 1 / len(after)) > least


def _deviation(part: Series) -> float:
    """The median absolute deviation from the median."""
    middle = part.median
    return Series(part.steps, tuple(abs(value - middle) for value in part.values)).median


def rank_shift(before: Sequence[float], after: Sequence[float]) -> float:
    """By how many standard deviations ``after`` ranks above ``before``; positive if it is larger. Ties have the mean of their
    ranks.
    """
    count, other = len(after), len(before)
    below = sum((a > b) + 0.5 * (a == b) for a in after for b in before)
    return (below - count * other / 2) / math.sqrt(count * other * (count + other + 1) / 12)
