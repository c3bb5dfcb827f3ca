"""Where nothing was measured: stretches of steps that no cell and no line may cover."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..diagnosis.series import lower_median

#: A value is due at a distance of steps if it is there in so large a part of them, of which there are so many.
_NEARLY_ALL, _FEWEST = 0.9, 3
#: Distances that are tried.
_TRIED = 3
#: A longer distance between recorded steps than so many usual ones is a break.
_LONGER = 1.5
#: A cell is at least so large a part of the axis, so that a single step can be seen.
_VISIBLE = 1 / 300
#: From where to where nothing was measured, on the axis of steps; infinite at its ends.
Gap = tuple[float, float]


@dataclass(frozen=True)
class Recorded:
    """The steps of a run, which tell where a value is missing.

    Attributes:
        steps: ascending.
        is_whole: whether these are all steps that were recorded; a monitor forgets some of many.
    """

    steps: tuple[int, ...]
    is_whole: bool = True

    @cached_property
    def stride(self) -> int:
        """The usual distance between steps."""
        return _commonest(self.steps) if self.is_whole else 1

    def gaps(self, measured: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value was due and is not there, or nothing was recorded, ascending. A step reaches half-way to the next one.

        Args:
            measured: the steps that have it, ascending, at least one. It is due in all steps, or in every tenth if it has that cadence.
        """
        cadence = 1 if len(measured) == len(self.steps) else self._cadence(measured)
        there, half = set(measured), max(cadence, self.stride) / 2
        due = sorted(self._due(measured, cadence) | there)
        found: list[Gap] = [(-math.inf, due[0] - half)]
        for before, step, after in zip([-math.inf, *due], due, [*due[1:], math.inf], strict=False):
            if bisect_right(self._breaks, step) > bisect_right(self._breaks, before) and before + half < step - half:
                found.append((before + half, step - half))
            if step not in there:
                found.append(((before + step) / 2, (step + after) / 2))
        return _joined([*found, (due[-1] + half, math.inf)])

    def _cadence(self, measured: Sequence[int]) -> int:
        """10 for a value that is measured in every tenth step, and in few others; 1 where there is no such number."""
        distances = Counter(after - before for before, after in pairwise(measured))
        likely = [distance for distance, _ in distances.most_common(_TRIED)]
        for distance in dict.fromkeys((math.gcd(*distances), *likely)) if distances else ():
            due = self._due(measured, distance)
            there = len(due.intersection(measured))
            elsewhere = len(measured) - there
            is_rule = elsewhere < there and 2 * elsewhere <= len(self.steps) - len(due)
            if len(due) >= _FEWEST and there >= _NEARLY_ALL * len(due) and is_rule:
                return distance
        return 1

    def _due(self, measured: Sequence[int], cadence: int) -> set[int]:
        """The steps at the distance ``cadence`` from most of those that were measured."""
        ((remainder, _),) = Counter(step % cadence for step in measured).most_common(1)
        return {step for step in self.steps if step % cadence == remainder}

    @cached_property
    def _breaks(self) -> tuple[int, ...]:
        """The first steps after a break in the recording."""
        longest = _LONGER * self.stride if self.is_whole else math.inf
        return tuple(after for before, after in pairwise(self.steps) if after - before > longest)


def _commonest(steps: Sequence[int]) -> int:
    """The distance of more than half of the neighbours, or their lower median."""
    distances = Counter(after - before for before, after in pairwise(steps))
    if not distances:
        return 1
    distance, count = max(distances.items(), key=lambda pair: (pair[1], -pair[0]))
    return distance if 2 * count > distances.total() else int(lower_median(distances.elements()))


def _joined(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """The same, ascending, in as few pieces as there are."""
    found: list[Gap] = []
    for low, high in gaps:
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def common(some: Sequence[Gap], others: Sequence[Gap]) -> tuple[Gap, ...]:
    """Where both have a gap."""
    found: list[Gap] = []
    one = other = 0
    while one < len(some) and other < len(others):
        low, high = max(some[one][0], others[other][0]), min(some[one][1], others[other][1])
        if low < high:
            found.append((low, high))
        if some[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return tuple(found)


def between(gaps: Sequence[Gap], before: float, after: float) -> Gap | None:
    """The gap between two steps that follow each other among those that were measured, if there is one."""
    place = bisect_left(gaps, (before, -math.inf))
    return gaps[place] if place < len(gaps) and gaps[place][1] <= after else None


def begins(gaps: Sequence[Gap], steps: Sequence[int], most: int) -> tuple[int, ...]:
    """The steps that have a gap before them; where there are more than ``most`` steps, only gaps that so many points can show."""
    narrow = (steps[-1] - steps[0]) / most if len(steps) > most else 0.0
    found = ((after, between(gaps, before, after)) for before, after in pairwise(steps))
    return tuple(after for after, gap in found if gap is not None and gap[1] - gap[0] > narrow)


@dataclass(frozen=True)
class Grid:
    """The columns of a heat map, side by side.

    Attributes:
        edges: of the columns, ascending, one more than there are columns.
        places: of each column the number of the cells in it; None for a gap.
    """

    edges: tuple[float, ...]
    places: tuple[int | None, ...]


def grid(first: Sequence[int], last: Sequence[int], gaps: Sequence[Gap], span: tuple[int, int]) -> Grid:
    """Lay out cells over the steps from ``span[0]`` to ``span[1]``: each reaches half-way to its neighbours, or to a gap.

    Args:
        first: of each cell the first step that was measured.
        last: the last one.
        gaps: see :meth:`Recorded.gaps`.
        span: the steps of the run, of which these are some.
    """
    begin, end = span[0] - 0.5, span[1] + 0.5
    least = _VISIBLE * (end - begin) / 2
    edges: list[float] = [begin]
    places: list[int | None] = []

    def cover(until: float, place: int | None) -> None:
        if until > edges[-1]:
            edges.append(until)
            places.append(place)

    gap = between(gaps, -math.inf, first[0])
    for place, (left, right) in enumerate(zip(first, last, strict=True)):
        if gap is not None:
            cover(min(gap[1], left - least), None)
        is_last = place + 1 == len(first)
        following = math.inf if is_last else first[place + 1]
        gap = between(gaps, right, following)
        middle = end if is_last else (right + following) / 2
        cover(middle if gap is None else min(max(gap[0], right + least), middle), place)
    cover(end, None)
    return Grid(tuple(edges), tuple(places))
