"""Spikes in a line each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..record import Event
from ..run import Run
from ..spikes.arguments import times


class Spike(NamedTuple):
    """A step with a spike.

    Attributes:
        step: its number.
        words: which signals, and how far above what is usual.
        layer: the parameter that moved first, or most; empty where none moved by itself, or nothing is known of its gradients.
        moved: which of that it did, in words.
    """

    step: int
    words: str
    layer: str
    moved: str


def steps_of(events: Iterable[Event]) -> list[int]:
    """The steps with a spike, ascending."""
    return sorted({event.step for event in events})


def told(run: Run, events: Iterable[Event], most: int) -> list[Spike]:
    """The last ``most`` steps with a spike."""
    events = list(events)
    return [
        Spike(step, ", ".join(map(_words, (event for event in events if event.step == step))), *_layer(run, step))
        for step in steps_of(events)[-most:]
    ]


def _words(event: Event) -> str:
    if not math.isfinite(event.value):
        return f"{event.signal} is {event.value}"
    if event.usual is not None and event.usual > 0:
        return f"{event.signal} {times(event.value / event.usual)} the usual"
    return f"{event.signal} is {event.value:.4g}"


def _layer(run: Run, step: int) -> tuple[str, str]:
    suspects = run.suspects(step)
    if not suspects or (not suspects[0].nonfinite and suspects[0].since is None):
        return "", ""
    first = suspects[0]
    if first.nonfinite:
        return first.name, "has NaN or Inf"
    return first.name, "moved most" if first.since == step else f"moved first, in step {first.since}"
