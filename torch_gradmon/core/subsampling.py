"""Some steps of many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

_ENDS, _AROUND = 50, 3


def subsample_steps(steps: Sequence[int], around: Iterable[int], most: int, liked: Sequence[int] = ()) -> list[int]:
    """Some of ``steps``, ascending: both ends, those close to steps in ``around``, and up to ``most`` at even distances.

    Of those between two such distances one in ``liked``, ascending and among ``steps``, is taken first: a loss that is logged every
    hundred steps would hardly ever be met by chance. Distances are of the steps' numbers and not of their places, so that what was
    thinned before can be thinned again.
    """
    if len(steps) <= most:
        return list(steps)
    ends = min(_ENDS, most // 8)
    chosen = {*steps[:ends], *steps[-ends:]}
    for step in around:
        at = bisect_left(steps, step)
        if len(chosen) + 2 * _AROUND + 1 > most * 3 // 4:
            break
        chosen.update(steps[max(at - _AROUND, 0) : at + _AROUND + 1])
    left = most - len(chosen)
    distance = (steps[-1] - steps[0]) / (left - 1)
    for number in range(left):
        due = steps[0] + number * distance
        at = bisect_left(liked, due)
        is_near = at < len(liked) and liked[at] < due + distance
        chosen.add(liked[at] if is_near else steps[min(bisect_left(steps, due), len(steps) - 1)])
    return sorted(chosen)
