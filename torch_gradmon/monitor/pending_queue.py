"""The steps whose values are on their way to the host, in order."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from ..core.fence import Fence
from ..step.buffer import StepBuffer
from ..step.pending_step import PendingStep
from ..step.reasons import ReasonContext
from ..step.registry import Registry
from .pipeline.ledger import Ledger
from .plugin_set import PluginSet


class Flights:
    """The steps whose records are not made yet, at most two of them: the one that ended last and the one before.

    Args:
        ledger: where records are entered.
        registry: the metrics.
        guard: receives the time that others spent.
        plugins: may have unwritten records when the run ends.
    """

    def __init__(self, ledger: Ledger, registry: Registry, guard: Fence, plugins: PluginSet) -> None:
        self._plugins = plugins
        self.lockstep = False  # with other ranks, the steps' numbers decide when values are fetched, not the device
        self.now = 0  # the step that begins
        self.ledger, self._registry, self._guard = ledger, registry, guard
        self._flying: deque[PendingStep] = deque()

    def __del__(self) -> None:
        # collected without detach(): what is still on its way reaches the run directory
        with contextlib.suppress(Exception):
            rest = [record for records in self._plugins.call("rest") for record in records]
            if self._flying or rest:
                self.land(None, open_to_late_values=False)
                self.ledger.fill(rest)
                self.ledger.outbox.close()

    def newest(self, step: int | None) -> PendingStep | None:
        """The flight of ``step``, if it is the one that departed last."""
        return self._flying[-1] if self._flying and self._flying[-1].step == step else None

    @property
    def oldest(self) -> int | None:
        """The oldest step whose values are on their way."""
        return self._flying[0].step if self._flying else None

    def start(self, flight: PendingStep) -> None:
        """Take charge of ``flight``; where its values are on the host already, its record is made at once."""
        self._flying.append(flight)
        if flight.departure.arrival.is_local:
            self.land(flight.step, open_to_late_values=True)

    def add(self, flight: PendingStep, late: StepBuffer) -> None:
        """Values that were logged after the step ended."""
        if flight.late is None:
            flight.late = flight.departure.buffer.scalars()
        flight.late.absorb(late)

    def seal(self) -> None:
        """The next step begins: late values depart now, while they are not yet behind its work."""
        for flight in self._flying:
            if flight.late is not None and flight.late_departure is None:
                flight.late_departure = flight.late.start_readback()

    def count_refusal(self) -> None:
        """A step that was not monitored was not applied."""
        if self._flying:
            self._flying[-1].refusals_after += 1
        else:
            self.ledger.summary.count_rejected(1)

    def _may_land(self, flight: PendingStep) -> bool:
        return self.now >= flight.step + 2 if self.lockstep else flight.departure.arrival.is_ready()

    def land(self, ended: int | None, open_to_late_values: bool, waiting: bool = True) -> None:
        """Make the records of steps that have departed.

        Args:
            ended: number of the step that ended last; the ledger's last record is of that one, or there is none.
            open_to_late_values: that step is the latest, so that values may still be added to it.
            waiting: wait for values; otherwise only for those of the step before the last one.
        """
        while self._flying:
            if not waiting and len(self._flying) < 2 and not self._may_land(self._flying[0]):
                return
            start = time.perf_counter()
            self._flying[0].departure.arrival.wait()  # interrupted here, the flight is still there
            if not waiting:
                # the device is two steps behind, and it is the training that waits here rather than elsewhere
                self._guard.exclude_time(time.perf_counter() - start)
            flight = self._flying.popleft()
            self._enter(flight)
            if flight.step != ended or not open_to_late_values:
                self.ledger.finish()
            if flight.step != ended:
                self.ledger.last = None

    def _enter(self, flight: PendingStep) -> None:
        """Make the record and enter it."""
        ledger, refused = self.ledger, flight.departure.buffer.refused
        ledger.knows(flight.inventory.facts)
        ledger.situation = ReasonContext(
            flight.inventory, flight.active.plans, flight.active.due, ledger.summary.shown, flight.attached, refused
        )
        record, signals = flight.record(ledger.summary, ledger.layers, self._registry)
        try:
            ledger.enter(record, signals, flight.departure.buffer)
        finally:  # where a spike raises
            if flight.late is not None:
                departure = flight.late_departure or flight.late.start_readback()
                ledger.amend(flight.late, departure.land()[1])
            ledger.summary.count_rejected(flight.refusals_after)
