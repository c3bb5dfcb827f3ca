"""What became of a signal after a spike: told once, some steps later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..record import Event
from .arguments import times

#: Steps after a spike that are waited for.
AFTER = 5
#: A signal is back up to so many times what was usual, and so much of the way up to the spike: of a loss a rise by half is much.
BACK, SHARE_OF_WAY = 1.5, 0.25


@dataclass
class _Case:
    event: Event
    values: list[tuple[int, float]] = field(default_factory=list)


class Aftermath:
    """Follows each signal that spiked, from its first spike on until that was told of."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def follow(self, event: Event) -> None:
        """A spike."""
        self._cases.setdefault(event.signal, _Case(event))

    def forget(self, step: int) -> None:
        """This step comes again, or for the first time: spikes of it and of later ones are forgotten."""
        self._cases = {signal: case for signal, case in self._cases.items() if case.event.step < step}

    def see(self, step: int, value_of: Callable[[str], float | None]) -> list[tuple[Event, str]]:
        """A step came; what there is to tell of earlier spikes, in words."""
        told = []
        for signal, case in list(self._cases.items()):
            value = value_of(signal) if step > case.event.step else None
            if value is not None:
                case.values.append((step, value))
            if len(case.values) >= AFTER:
                del self._cases[signal]
                told.append((case.event, in_words(case.event, case.values)))
        return told


def in_words(event: Event, values: list[tuple[int, float]]) -> str:
    """What became of the signal of ``event``, given its values in the steps after it."""
    last, now = values[-1]
    start = f"after the spike of step {event.step} {event.signal}"
    if not math.isfinite(now):
        return f"{start} is {now} in step {last}: it did not recover"
    if event.usual is None or event.usual <= 0:
        return f"{start} is {now:.4g} in step {last}"
    back = None
    way = event.value - event.usual
    limit = min(BACK * event.usual, event.usual + SHARE_OF_WAY * way) if math.isfinite(way) else BACK * event.usual
    for step, value in reversed(values):
        if not value <= limit:
            break
        back = step
    if back is not None:
        return f"{start} is back to normal since step {back} ({now:.4g} in step {last}, usual was {event.usual:.4g})"
    return f"{start} is still {times(now / event.usual)} what was usual ({now:.4g} in step {last}, usual was {event.usual:.4g})"
