"""Spikes of steps in a row are one: with its first, its worst and its last step, and which of several is the largest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.records import Event


def size(event: Event) -> float:
    """How large a spike is: how many times the usual, infinite for NaN and Inf.

    Where the rule does not say what is usual, or that is not above zero, how many times its threshold the score is.
    """
    if not math.isfinite(event.value):
        return math.inf
    if event.usual is not None and event.usual > 0:
        return event.value / event.usual
    return event.score / event.threshold if event.threshold > 0 else event.score


def by_size(events: Iterable[Event]) -> list[int]:
    """The steps with a spike, those with the largest ones first."""
    return list(dict.fromkeys(event.step for event in sorted(events, key=size, reverse=True)))


@dataclass(frozen=True)
class Episode:
    """One spike, of one step or of several in a row.

    Attributes:
        steps: ascending.
        events: of these steps, in order.
        worst: the largest of them; of equally large ones the first.
    """

    steps: tuple[int, ...]
    events: tuple[Event, ...]
    worst: Event

    @property
    def first(self) -> int:
        """The first step."""
        return self.steps[0]

    @property
    def last(self) -> int:
        """The last step."""
        return self.steps[-1]

    @property
    def of_worst(self) -> list[Event]:
        """The events of the worst step."""
        return [event for event in self.events if event.step == self.worst.step]

    @property
    def when(self) -> str:
        """The steps in words."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def __str__(self) -> str:
        """The worst step, and which steps belong to it."""
        row = "" if self.first == self.last else f"{self.when}, the largest in "
        return row + "; ".join(map(str, self.of_worst))


def episodes(events: Iterable[Event], steps: Sequence[int]) -> list[Episode]:
    """The spikes of a run, ascending.

    Args:
        events: what detectors found; those of other steps do not count.
        steps: of the run that are known, ascending: a row has no known step without a spike.
    """
    by_step: dict[int, list[Event]] = {}
    for event in events:
        by_step.setdefault(event.step, []).append(event)
    rows: list[list[int]] = []
    for step in sorted(by_step):
        at = bisect_left(steps, step)
        if at == len(steps) or steps[at] != step:
            continue
        if rows and at and steps[at - 1] == rows[-1][-1]:
            rows[-1].append(step)
        else:
            rows.append([step])
    return [_episode(row, [event for step in row for event in by_step[step]]) for row in rows]


def _episode(steps: Sequence[int], events: Sequence[Event]) -> Episode:
    return Episode(tuple(steps), tuple(events), max(events, key=size))


def largest(found: Sequence[Episode], most: int) -> list[Episode]:
    """The ``most`` largest of them, in the order in which they came."""
    kept = sorted(range(len(found)), key=lambda place: (-size(found[place].worst), place))[:most]
    return [found[place] for place in sorted(kept)]


def counted(found: Sequence[Episode]) -> str:
    """How many there are, in words: ``3 in 7 steps``, or only ``3`` where each is one step."""
    steps = sum(len(each.steps) for each in found)
    return str(len(found)) if steps == len(found) else f"{len(found)} in {steps} steps"
