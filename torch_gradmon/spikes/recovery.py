"""Report, some steps after a spike, whether its signal recovered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.formatting import factor_text, times
from ..core.records import SpikeEvent

#: Number of steps observed after a spike.
AFTER = 5
#: Limits of recovery: the factor above usual, and the share of the way from usual to the spike. The second matters for a loss, for which
#: a factor of 1.5 is large.
BACK, SHARE_OF_WAY = 1.5, 0.25


@dataclass
class _Case:
    events: list[SpikeEvent]
    values: list[tuple[int, float]] = field(default_factory=list)


class RecoveryTracker:
    """Follows each signal that spiked, from its first spike until its recovery has been reported."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def follow(self, event: SpikeEvent) -> None:
        """Start to follow the signal of ``event``."""
        self._cases.setdefault(event.signal, _Case([event]))

    def rewind(self, step: int) -> None:
        """Discard the spikes of ``step`` and later: the run goes back to before ``step``."""
        for signal, case in list(self._cases.items()):
            case.events = [event for event in case.events if event.step < step]
            case.values = [(known, value) for known, value in case.values if known < step]
            if not case.events:
                del self._cases[signal]

    def update(self, step: int, spikes: Mapping[str, SpikeEvent], value_of: Callable[[str], float | None]) -> list[str]:
        """Take the next step, with its ``spikes`` by signal; return reports about earlier spikes that are due.

        A spike that continues in the next step is the same spike, and the steps after its last one count. A spike that lasts longer than
        :data:`AFTER` steps is reported anyway.
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
                found.append(recovery_text(case.events, case.values))
        return found


def recovery_text(events: Sequence[SpikeEvent], values: Sequence[tuple[int, float]]) -> str:
    """Describe what became of a signal.

    Args:
        events: its spike, in one step or in consecutive ones.
        values: ``(step, value)`` of the steps after the last event; empty if the spike has not ended.
    """
    first, last = events[0], events[-1]
    if not values:
        fate = "" if math.isfinite(last.value) else ": it did not recover"
        return (
            f"the spike that began in step {first.step} continues, {first.signal} is {last.value:.4g} in step {last.step}{fate}"
        )
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
