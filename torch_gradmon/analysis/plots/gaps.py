"""Ranges of steps in which nothing was measured, over which no cell and no line is drawn."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..diagnosis.series import lower_median

#: A value is due every n steps if this share of those steps has it, and at least this many steps do.
_NEARLY_ALL, _FEWEST = 0.9, 3
#: How many likely distances are tried.
_TRIED = 3
#: Recording was interrupted where two steps are more than this many usual distances apart.
_LONGER = 1.5
#: The smallest width of a cell, as a part of the axis, so that a single step stays visible.
_VISIBLE = 1 / 300
#: First and last place of a gap on the axis of steps; infinite at the ends.
Gap = tuple[float, float]


@dataclass(frozen=True)
class RecordedSteps:
    """The steps of a run, from which gaps in a value are found.

    Attributes:
        steps: ascending.
        is_whole: whether these are all recorded steps; a monitor keeps only some of many.
    """

    steps: tuple[int, ...]
    is_whole: bool = True

    @cached_property
    def stride(self) -> int:
        """The usual distance between steps."""
        return _commonest(self.steps) if self.is_whole else 1

    def gaps(self, measured: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value was due but is missing, or nothing was recorded, ascending. A step reaches half-way to the next one.

        Args:
            measured: the steps that have the value, ascending, at least one. The value is due in all steps, or in every n-th step
                if it
                has that cadence.
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
        """N for a value that is measured in every n-th step and in few others; otherwise 1."""
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
        """The steps with the same remainder modulo ``cadence`` as most measured steps."""
        ((remainder, _),) = Counter(step % cadence for step in measured).most_common(1)
        return {step for step in self.steps if step % cadence == remainder}

    @cached_property
    def _breaks(self) -> tuple[int, ...]:
        """The first steps after an interruption of the recording."""
        longest = _LONGER * self.stride if self.is_whole else math.inf
        return tuple(after for before, after in pairwise(self.steps) if after - before > longest)


def _commonest(steps: Sequence[int]) -> int:
    """The distance of more than half of the neighbours, or else their lower median."""
    distances = Counter(after - before for before, after in pairwise(steps))
    if not distances:
        return 1
    distance, count = max(distances.items(), key=lambda pair: (pair[1], -pair[0]))
    return distance if 2 * count > distances.total() else int(lower_median(distances.elements()))


def _joined(gaps: Sequence[Gap]) -> tuple[Gap, ...]:
    """The same gaps, ascending, with overlapping ones merged."""
    found: list[Gap] = []
    for low, high in gaps:
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def intersection(some: Sequence[Gap], others: Sequence[Gap]) -> tuple[Gap, ...]:
    """The gaps that both have."""
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
    """The gap between two successive measured steps; None without one."""
    place = bisect_left(gaps, (before, -math.inf))
    return gaps[place] if place < len(gaps) and gaps[place][1] <= after else None


def steps_after(gaps: Sequence[Gap], steps: Sequence[int], most: int) -> tuple[int, ...]:
    """The steps that follow a gap. If there are more than ``most`` steps, gaps too narrow for that many points are left out."""
    narrow = (steps[-1] - steps[0]) / most if len(steps) > most else 0.0
    found = ((after, between(gaps, before, after)) for before, after in pairwise(steps))
    return tuple(after for after, gap in found if gap is not None and gap[1] - gap[0] > narrow)


@dataclass(frozen=True)
class Grid:
    """The columns of a heat map, side by side.

    Attributes:
        edges: of the columns, ascending, one more than there are columns.
        places: the number of the cells in each column; None for a gap.
    """

    edges: tuple[float, ...]
    places: tuple[int | None, ...]


def grid(first: Sequence[int], last: Sequence[int], gaps: Sequence[Gap], span: tuple[int, int]) -> Grid:
    """Lay out cells over the steps from ``span[0]`` to ``span[1]``: each reaches half-way to its neighbours, or to a gap.

    Args:
        first, last: the first and the last measured step of each cell.
        gaps: see :meth:`RecordedSteps.gaps`.
        span: first and last step of the run.
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
