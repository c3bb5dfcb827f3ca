"""Whether a model learns: what most rules have to know before they call anything a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.records import Severity
from .series import Series

State = Literal["falls", "flat", "rises", "unknown"]
#: So many losses make a trend.
_FEWEST = 20
#: What is compared with the last fifth: the first fifth, by ranks, and the first few, which is where a quick learner is still above.
_HEAD, _TAIL, _FEW = 0.2, 0.2, 5
#: A shift counts from so many standard deviations of the rank sum on; losses of neighbouring steps are not independent,
_RANKS = 3.0
#: the first few losses from so many standard deviations of the last fifth on,
_SPREADS = 6.0
#: and either from such a share of the loss at the beginning on.
_SHARE = 0.01
#: Of a normal distribution, the standard deviation over the median absolute deviation.
_OF_MAD = 1.4826
#: What counts as having fallen, and where the later part begins, in which a loss that has not should still fall.
_THIRD, _LATER = 1 / 3, 0.3


@dataclass(frozen=True)
class Learning:
    """How the loss went.

    Attributes:
        state: ``unknown`` without enough losses.
        first: the median of the losses at the beginning; NaN where unknown.
        last: that of the last fifth.
        has_fallen: whether it fell by a third at least, from its first value too if that is below the first few, or is negative.
        is_stuck: whether it neither has fallen nor falls any more; False where that is not known, and where the run goes on with
            one that was flat all the time: there may be nothing left to learn.
    """

    state: State
    first: float = math.nan
    last: float = math.nan
    has_fallen: bool = False
    is_stuck: bool = False

    @property
    def is_learning(self) -> bool:
        """Whether the loss falls. One that is not known is not taken for a fault, nor for an excuse: this is False then."""
        return self.state == "falls"

    @property
    def concern(self) -> Severity:
        """The severity of what is a fault only where the model does not learn."""
        return "warning" if self.is_stuck else "info"


def learning(loss: Series, goes_on: bool = False) -> Learning:
    """How the loss went; losses that are not finite are left out. ``goes_on``: the training did not begin here."""
    finite = loss.finite
    state, first, last = trend(finite)
    if state == "unknown":
        return Learning("unknown")
    from_ = min(first, finite.values[0])
    has_fallen = state == "falls" and not 0 < from_ * (1 - _THIRD) < last
    is_at_rest = goes_on and state == "flat"
    is_stuck = not has_fallen and not is_at_rest and trend(finite.part(_LATER, 1.0))[0] != "falls"
    return Learning(state, first, last, has_fallen, is_stuck)


def trend(finite: Series) -> tuple[State, float, float]:
    """Where the losses went from the beginning to the end, against their own noise, and both medians.

    The first and the last fifth are compared by their ranks (Mann and Whitney 1947, Ann. Math. Stat. 18, 50-60), which asks
    nothing of the noise.
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


def spread(part: Series) -> float:
    """The standard deviation of a part, as its median absolute deviation tells it; a straight trend within it is none."""
    values = part.values
    third = max(len(values) // 3, 1)
    rise = Series(part.steps[-third:], values[-third:]).median - Series(part.steps[:third], values[:third]).median
    slope = rise / max(len(values) - third, 1)
    level = Series(part.steps, tuple(value - slope * place for place, value in enumerate(values)))
    return _OF_MAD * Series(part.steps, tuple(abs(value - level.median) for value in level.values)).median


def rank_shift(before: Sequence[float], after: Sequence[float]) -> float:
    """By how many standard deviations ``after`` ranks above ``before``: positive where it is larger. Ties have the mean of their ranks."""
    count, other = len(after), len(before)
    below = sum((a > b) + 0.5 * (a == b) for a in after for b in before)
    return (below - count * other / 2) / math.sqrt(count * other * (count + other + 1) / 12)
