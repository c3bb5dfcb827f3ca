"""What became of a signal after a spike: said once, some steps later, of all steps since."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.formatting import factor_text, times
from ..core.records import Event

#: Steps after a spike that are waited for.
AFTER = 5
#: A signal is back up to so many times what was usual, and so much of the way up to the spike: of a loss a rise by half is much.
BACK, SHARE_OF_WAY = 1.5, 0.25


@dataclass
class _Case:
    events: list[Event]
    values: list[tuple[int, float]] = field(default_factory=list)


class Aftermath:
    """Follows each signal that spiked, from its first spike on until what became of it was said."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def follow(self, event: Event) -> None:
        """A spike."""
        self._cases.setdefault(event.signal, _Case([event]))

    def forget(self, step: int) -> None:
        """This step comes again, or for the first time: spikes of it and of later ones are forgotten."""
        for signal, case in list(self._cases.items()):
            case.events = [event for event in case.events if event.step < step]
            case.values = [(known, value) for known, value in case.values if known < step]
            if not case.events:
                del self._cases[signal]

    def see(self, step: int, spikes: Mapping[str, Event], value_of: Callable[[str], float | None]) -> list[str]:
        """A step came, with ``spikes`` by signal; what there is to say of earlier ones.

        A spike that goes on in the next step is the same one, and what came after it comes after its last step; but it is not waited
        for longer than for what comes after it.
        """
        found = []
        for signal, case in list(self._cases.items()):
            if step <= case.events[-1].step:
                continue
            if signal in spikes and not case.values:
                case.events.append(spikes[signal])
            elif (value := value_of(signal)) is not None:
                case.values.append((step, value))
            if len(case.values) >= AFTER or len(case.events) > AFTER:
                del self._cases[signal]
                found.append(in_words(case.events, case.values))
        return found


def in_words(events: Sequence[Event], values: Sequence[tuple[int, float]]) -> str:
    """What became of a signal.

    Args:
        events: its spike, in one step or in several in a row.
        values: by step, of the steps after the last of these. Without any the spike had not ended.
    """
    first, last = events[0], events[-1]
    if not values:
        fate = "" if math.isfinite(last.value) else ": it did not recover"
        return f"the spike that began in step {first.step} goes on, {first.signal} is {last.value:.4g} in step {last.step}{fate}"
    when = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
    return f"after the spike of {when} {first.signal} {_fate(first.usual, max(event.value for event in events), values)}"


def _fate(usual: float | None, worst: float, values: Sequence[tuple[int, float]]) -> str:
    count, end = len(values), f"step {values[-1][0]}"
    span = f"the {count} steps to {end}" if count > 1 else end
    finite = [value for _, value in values if math.isfinite(value)]
    if len(finite) < count and not math.isfinite(values[-1][1]):
        return f"is NaN or infinite in {count - len(finite)} of {span}: it did not recover"
    if usual is None or usual <= 0:
        return f"is {_range(finite)} in {span}"
    limit = min(BACK * usual, usual + SHARE_OF_WAY * (worst - usual)) if math.isfinite(worst) else BACK * usual
    high = [place for place, (_, value) in enumerate(values) if not value <= limit]
    calm = count - len(high)
    was = f"usual was {usual:.4g}"
    if 2 * calm >= count and (not high or high == list(range(len(high)))):
        return f"is back to normal since step {values[len(high)][0]} ({_range(finite[-calm:])} until {end}, {was})"
    if not calm:
        lowest, highest = min(finite) / usual, max(finite) / usual
        alike = factor_text(lowest) == factor_text(highest)
        factors = times(highest) if alike else f"{factor_text(lowest)} to {times(highest)}"
        return f"is still {factors} what was usual in {'all of ' if count > 1 else ''}{span} ({was})"
    top = max(values[place][1] for place in high)
    others = f"up to {times(top / usual)} what was usual" if math.isfinite(top) else "NaN or infinite"
    return f"is normal in {calm} of {span}, and {others} in the {'others' if len(high) > 1 else 'other one'} ({was})"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"
