"""What happens after a spike: whether it is new, whether its signal recovered, and where NaN or Inf began."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..core.records import SpikeEvent, StepRecord
from .episodes import size
from .nonfinite_origin import nonfinite_origin
from .recovery import RecoveryTracker
from .signals import value_of

#: Numbers of consecutive steps not applied that call for more detail: fewer are a gradient scaler's search for its scale.
_REJECTED = (3, 30, 300)


class FollowUp:
    """The state of the current spikes.

    Attributes:
        rejected: consecutive steps that were not applied.
        complete: the last record that nothing more can come for.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._detail_at = 0  # the value of ``rejected`` when detail was requested last
        self._recovery = RecoveryTracker()
        self._largest: dict[str, float] = {}  # by signal that spiked in the step before, its largest spike without a break
        self._origin_reported = False
        self.complete: StepRecord | None = None
        self._added: list[str] = []

    def is_new(self, event: SpikeEvent) -> bool:
        """Whether the signal did not spike in the step before. NaN and Inf pass from one signal to all others."""
        goes_on = not math.isfinite(event.value) and math.inf in self._largest.values()
        return event.signal not in self._largest and not goes_on

    def is_largest(self, event: SpikeEvent) -> bool:
        """Whether the signal had no spike as large in the steps directly before."""
        return size(event) > self._largest.get(event.signal, 0.0)

    def alerts(self, events: Sequence[SpikeEvent]) -> list[str]:
        """One warning for all new spikes of a step; empty without any."""
        fresh = [event for event in events if self.is_new(event)]
        return [str(replace(fresh[0], reason="; ".join(event.reason for event in fresh)))] if fresh else []

    def step_ended(self, applied: bool) -> None:
        """Count a step, monitored or not."""
        self.rejected = 0 if applied else self.rejected + 1
        self._detail_at = 0 if applied else self._detail_at

    def rejections_need_detail(self) -> bool:
        """Whether a limit of steps not applied was reached; true once for each limit."""
        if not self.rejected:
            return False
        due = max((limit for limit in _REJECTED if limit <= self.rejected), default=0)
        is_due, self._detail_at = due > self._detail_at, max(due, self._detail_at)
        return is_due

    def rewind(self, step: int) -> None:
        """Discard the spikes of ``step`` and later."""
        self._recovery.rewind(step)

    def reports(self, record: StepRecord, whole: Mapping[str, float]) -> list[str]:
        """Take a complete ``record``; return what there is to report on this spike's origin and on earlier ones."""
        spikes = {event.signal: event for event in record.events}
        recovered = self._recovery.update(record.step, spikes, lambda signal: value_of(signal, record, whole))
        for event in record.events:
            if self.is_new(event):
                self._recovery.follow(event)
        self._largest = {signal: max(size(event), self._largest.get(signal, 0.0)) for signal, event in spikes.items()}
        self.complete, added, self._added = record, self._added, []
        return [*added, *self._origin(record), *recovered]

    def add_report(self, text: str) -> None:
        """Something to report with the next record that is complete."""
        self._added.append(text)

    def _origin(self, record: StepRecord) -> Iterator[str]:
        """Where NaN or Inf began, once for consecutive steps with any."""
        rejected = self.rejected > _REJECTED[0]
        spoiled = rejected or any(not math.isfinite(event.value) for event in record.events)
        # while the scaler searches for its scale, gradients are infinite although the forward pass is finite
        text = nonfinite_origin(record, forward_only=rejected) if spoiled and not self._origin_reported else ""
        if text:
            since = f"; {self.rejected} steps in a row were not applied" if rejected else ""
            yield f"step {record.step}: {text}{since}"
        self._origin_reported = spoiled and (self._origin_reported or bool(text))
