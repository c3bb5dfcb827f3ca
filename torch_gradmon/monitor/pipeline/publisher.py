"""Output of records to sinks, when their steps are complete."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from ...core.errors import GradmonWarning, WarningLog
from ...core.key_formatter import KeyFormatter
from ...core.keys import Key
from ...core.process import HomeProcess
from ...core.records import StepRecord
from ...core.step_values import StepValues
from ...core.torch_modes import fresh_grad_mode

if TYPE_CHECKING:
    from ...sinks.filtered_sink import FilteredSink


class Publisher:
    """Keeps one record until the next step begins, so that sinks receive a late ``log_scalar`` with it.

    What waits to be sent may outlive the monitor, so nothing here refers to ``on_spike``, which may keep the model alive.

    Args:
        format_keys: makes the keys of values.
        complaints: where failures are reported.
        is_muted: whether another rank writes the output of this one.

    Attributes:
        sinks: those that were added.
        keep_alive: this package's sinks, which must stay alive until the last row is written. The user's sinks are not among them: they
            may hold the model, the optimizer and the monitor.
    """

    def __init__(self, format_keys: KeyFormatter, complaints: WarningLog, is_muted: Callable[[], bool]) -> None:
        self._is_closed = True  # no record has come since the sinks were closed
        self._process = HomeProcess()
        self.format_keys, self._complaints, self._is_muted = format_keys, complaints, is_muted
        self.sinks: list[FilteredSink] = []
        self.keep_alive: list[object] = []
        self._of_trainer: Set[Key] = frozenset()
        self._waiting: StepRecord | None = None

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def add(self, sink: FilteredSink) -> None:
        """Send records to ``sink`` from now on."""
        self.sinks.append(sink)
        if sink.is_of_package:
            self.keep_alive.append(sink)

    def remove(self, sink: FilteredSink) -> None:
        """Stop sending records to ``sink``, and close it."""
        self.sinks.remove(sink)
        if sink.is_of_package:
            self.keep_alive.remove(sink)
        with fresh_grad_mode():
            sink.close()

    def _receivers(self) -> list[FilteredSink]:
        """The sinks of this rank that receive records."""
        return [sink for sink in self.sinks if sink.is_on_all_ranks] if self._is_muted() else self.sinks

    def is_awaited(self, step: int) -> bool:
        """Whether a sink needs the values of ``step`` as soon as the next step begins."""
        return any(not sink.deferred and not sink.dropped and step % sink.every == 0 for sink in self._receivers())

    def leave_out(self, of_trainer: Set[Key]) -> None:
        """Leave out the values with these keys, a set that may change: a trainer has given them, and logs them itself."""
        self._of_trainer = of_trainer

    def shown(self, record: StepRecord) -> dict[str, float]:
        """The values of ``record`` that sinks receive, by key."""
        hidden = record.hidden
        shown = self.format_keys(StepValues.of(record.values).without(hidden) if hidden else record.values)
        for key in self._of_trainer:
            shown.pop(self.format_keys.text(key), None)
        return shown

    def put(self, record: StepRecord, amends: bool) -> None:
        """Take a step's record. ``amends``: it replaces the previous one."""
        if self._process.is_forked or (not self._receivers() and self._is_muted()):
            return
        if not amends:
            self.publish()
        if not amends or self._waiting is not None:
            self._waiting, self._is_closed = record, False
        elif self.sinks:
            self._complaints.add("late", f"a value for step {record.step} came after the step had gone out to the sinks")

    def publish(self) -> None:
        """Send the waiting record to the sinks."""
        if self._waiting is None or self._process.is_forked:
            return
        record, self._waiting = self._waiting, None
        receivers = self._receivers()
        values: dict[str, float] = {}
        texts = [(event, str(event)) for event in record.events] if receivers else []
        first: Warning | None = None
        for sink in receivers:
            try:
                if not values and sink.takes_values:
                    values = self.shown(record)
                with fresh_grad_mode():
                    sink.send(values, record.step)
                    for event, text in texts:
                        sink.send_spike(event, text)
            except GradmonWarning as warning:  # where warnings were made errors; the other sinks come first
                first = first or warning
        if first is not None:
            raise first

    def close(self) -> None:
        """Send the waiting record and close the sinks; another record opens them again."""
        if self._process.is_forked:
            return
        self._is_closed = True
        self.publish()
        with fresh_grad_mode():
            for sink in self.sinks:
                sink.close()
