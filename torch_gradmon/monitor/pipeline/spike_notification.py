"""What is done about the spikes of a record: warnings, the script's ``on_spike``, and a request for more detail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...core.errors import SpikeError, WarningLog
from ...core.records import SpikeEvent, StepRecord
from ...core.torch_modes import fresh_grad_mode
from ...plugins.spike_policy.policy import Policy, policy_of
from ...spikes.detector_set import DetectorSet
from ..plugin_set import PluginSet

#: Of skipped steps in a row, those with a warning.
_WITH_WARNING = frozenset({1, 2, 3, 4, 10, 30, 100, 300, 1000, 3000, 10_000})


class SpikeNotification:
    """Reports spikes when all consumers have the record.

    Args:
        on_spike: the option of :class:`torch_gradmon.ModuleMonitor`.
        detectors: know which spikes are new.
        plugins: get an alert for a step that calls for more detail.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.

    Attributes:
        awaits_records: ``on_spike`` needs each record when the next step begins.
    """

    def __init__(
        self,
        on_spike: str | Policy | Callable[[SpikeEvent], Any] | None,
        detectors: DetectorSet,
        plugins: PluginSet,
        complaints: WarningLog,
        is_muted: Callable[[], bool],
    ) -> None:
        self._on_spike, self._detectors, self._plugins = on_spike, detectors, plugins
        self._complaints, self._is_muted = complaints, is_muted
        self._acts = policy_of(on_spike) is not None  # something is done about spikes before they change the model
        self._warns = on_spike == "warn" or self._acts
        self.awaits_records = on_spike not in (None, "warn")

    def warn(self, messages: Iterable[str]) -> None:
        """Warn with each message, where the script has warnings of spikes."""
        for message in messages if self._warns and not self._is_muted() else ():
            self._complaints.warn(message)

    def notify(self, record: StepRecord | None, events: Sequence[SpikeEvent], action: str = "") -> None:
        """Report new ``events`` of the last record, and the ``action`` on its step.

        Raises:
            SpikeError: the script asks for it.
        """
        messages = self._detectors.follow_up.alerts(events) if events else []
        if record is not None and action:  # as a rank knows it, though not hundreds in a row
            if record.context["in_a_row"] not in _WITH_WARNING:
                return
            reasons = [event.reason for event in events] or [record.skipped]
            where = next((event.where for event in events if event.where), "")
            messages = [f"step {record.step}: " + "; ".join(filter(None, (*reasons, where, action)))]
        elif self._acts:
            self._report_missed([event for event in events if event.signal not in self._detectors.predicted])
        if (self._detectors.needs_detail() or messages) and record is not None:
            self._plugins.call("on_alert", record.step)
        self._detectors.warn_of_failures(self._complaints)
        self.warn(messages)
        for event in events:
            self._call(event)

    def _report_missed(self, events: Sequence[SpikeEvent]) -> None:
        """Warn about spikes that nothing could be done about."""
        if events:
            signals = ", ".join(event.signal for event in events)
            self._complaints.add(
                f"late:{signals}",
                f"that {signals} spiked in step {events[0].step} became known only when the optimizer had stepped, so that nothing was "
                "done about it; what is logged has to be logged before optimizer.step()",
            )

    def _call(self, event: SpikeEvent) -> None:
        if callable(self._on_spike):
            try:
                with fresh_grad_mode():
                    self._on_spike(event)
            except Exception as error:
                self._complaints.add("on_spike", "the function on_spike failed; training continues", error)
        elif self._on_spike == "raise":
            raise SpikeError(str(event))
