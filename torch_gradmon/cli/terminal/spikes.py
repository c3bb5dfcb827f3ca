"""Spikes in a line each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...analysis.run import Run
from ...core.formatting import times
from ...core.records import SpikeEvent
from ...spikes.attribution import spike_cause
from ...spikes.episodes import Episode, largest


class Spike(NamedTuple):
    """A spike, of one step or of several in a row.

    Attributes:
        step: the worst one.
        first: the first one.
        last: the last one.
        words: which signals, and how far above what is usual, in the worst step.
        layer: the parameter that moved first, or most; empty where no single one did, or nothing is known of the gradients.
        moved: what it did, or what all parameters did together, in words.
    """

    step: int
    first: int
    last: int
    words: str
    layer: str
    moved: str


def told(run: Run, spikes: Sequence[Episode], most: int) -> list[Spike]:
    """The ``most`` largest spikes, in order."""
    return [_told(run, spike) for spike in largest(spikes, most)]


def _told(run: Run, spike: Episode) -> Spike:
    step = spike.worst.step
    found = spike_cause(run.suspects(step), step)
    return Spike(step, spike.first, spike.last, ", ".join(map(_words, spike.of_worst)), found.layer, found.did)


def _words(event: SpikeEvent) -> str:
    if not math.isfinite(event.value):
        return f"{event.signal} is {event.value}"
    if event.usual is not None and event.usual > 0:
        return f"{event.signal} {times(event.value / event.usual)} the usual"
    return f"{event.signal} is {event.value:.4g}"
