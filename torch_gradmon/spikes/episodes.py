"""Group spikes of consecutive steps into episodes, and rank them by size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.records import SpikeEvent


def size(event: SpikeEvent) -> float:
    """How large a spike is: its factor above usual, infinite for NaN and Inf.

    If the usual value is unknown or not positive, the ratio of score to threshold is used.
    """
    if not math.isfinite(event.value):
        return math.inf
    if event.usual is not None and event.usual > 0:
        return event.value / event.usual
    return event.score / event.threshold if event.threshold > 0 else event.score


def by_size(events: Iterable[SpikeEvent]) -> list[int]:
    """The steps with a spike, largest spikes first."""
    return list(dict.fromkeys(event.step for event in sorted(events, key=size, reverse=True)))


@dataclass(frozen=True)
class Episode:
    """One spike, in one step or in consecutive ones.

    Attributes:
        steps: ascending.
        events: of these steps, in order.
        worst: the largest event; the first of equally large ones.
    """

    steps: tuple[int, ...]
    events: tuple[SpikeEvent, ...]
    worst: SpikeEvent

    @property
    def first(self) -> int:
        """The first step."""
        return self.steps[0]

    @property
    def last(self) -> int:
        """The last step."""
        return self.steps[-1]

    @property
    def of_worst(self) -> list[SpikeEvent]:
        """The events of the worst step."""
        return [event for event in self.events if event.step == self.worst.step]

    @property
    def when(self) -> str:
        """The steps as text."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def __str__(self) -> str:
        """The worst step, and the range of steps."""
        row = "" if self.first == self.last else f"{self.when}, the largest in "
        return row + "; ".join(map(str, self.of_worst))


def episodes(events: Iterable[SpikeEvent], steps: Sequence[int]) -> list[Episode]:
    """The spikes of a run, ascending.

    Args:
        events: what detectors found; events of steps that are not in ``steps`` are ignored.
        steps: the known steps of the run, ascending. Two spikes belong together if no known step lies between them.
    """
    by_step: dict[int, list[SpikeEvent]] = {}
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


def _episode(steps: Sequence[int], events: Sequence[SpikeEvent]) -> Episode:
    return Episode(tuple(steps), tuple(events), max(events, key=size))


def largest(found: Sequence[Episode], most: int) -> list[Episode]:
    """The ``most`` largest episodes, in order of time."""
    kept = sorted(range(len(found)), key=lambda place: (-size(found[place].worst), place))[:most]
    return [found[place] for place in sorted(kept)]


def counted(found: Sequence[Episode]) -> str:
    """The number of episodes: ``3 in 7 steps``, or only ``3`` if each has one step."""
    steps = sum(len(each.steps) for each in found)
    return str(len(found)) if steps == len(found) else f"{len(found)} in {steps} steps"
