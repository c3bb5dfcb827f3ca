"""The flight recorder: statistics of unmonitored steps stay on the device until a spike makes them relevant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.records import StepRecord
from ..step.active_step import RecordedStep
from ..step.buffer import PendingReadback, StepBuffer
from ..step.plan import Registry
from ..step.plugin import Plugin
from ..step.record_builder import PendingStep, RecordFactory
from ..step.summary import LayerSelection, Summary


class FlightRecorder(Plugin):
    """Keeps the last ``size`` unmonitored steps, and provides the records of those around a spike: those before it at once, as many after
    it later.
    """

    name = "flight_recorder"

    def __init__(self, size: int, registry: Registry, summary: Summary) -> None:
        self.size = size
        self._registry, self._summary = registry, summary
        self._kept: deque[tuple[RecordedStep, float]] = deque()
        self._is_open = False  # late values may come for the last one
        self._due = 0  # how many of the next steps belong to a spike
        self.requires_gradients = bool(size)

    def keep(self, recorded: RecordedStep, oldest_pending: int | None) -> list[StepRecord]:
        """Keep the step, on the device. Returns the steps after a spike once there are enough of them, which waits for the device."""
        self._due -= self._due > 0
        after = self._bring() if self._due == 1 else []  # the last one is closed by now
        self._kept.append((recorded, time.time()))
        self._is_open = True
        # a pending step may still turn out to be a spike: the steps before it are kept
        before = sum(oldest_pending is None or each.buffer.step < oldest_pending for each, _ in self._kept)
        for _ in range(before - self.size):
            self._kept.popleft()
        return after

    def seal(self) -> None:
        self._is_open = False

    def late_buffer(self, step: int | None) -> StepBuffer | None:
        last = self._kept[-1][0].buffer if self._is_open and self._kept else None
        return last if last is not None and last.step == step else None

    def tag_late(self, step: int | None, tags: Mapping[str, Any]) -> bool:
        is_kept = self.late_buffer(step) is not None
        if is_kept:
            self._kept[-1][0].tags.update(tags)
        return is_kept

    def fetch_recorded(self) -> list[StepRecord]:
        """The records of the kept steps, after a spike; later ones follow. Waits for the device once."""
        brought = self._bring()
        self._due = self.size + 2 - len(self._kept) if self.size else 0
        return brought

    def look(self) -> list[StepRecord]:
        """The records of the kept steps that take no more values, which stay kept. Waits for the device once."""
        return self._records(list(self._kept)[: -1 if self._is_open else None])

    def rest(self) -> list[StepRecord]:
        return self._bring() if self._due else []

    def on_rewind(self, step: int) -> None:
        self._kept.clear()
        self._due = 0

    def on_detach(self) -> None:
        self.on_rewind(0)

    end_run = on_detach

    def _bring(self) -> list[StepRecord]:
        kept = list(self._kept)
        self._kept.clear()
        if kept and self._is_open:  # its late values complete it
            self._kept.append(kept[-1])
        return self._records(kept)

    def _records(self, kept: Sequence[tuple[RecordedStep, float]]) -> list[StepRecord]:
        # all copies start before the first one is waited for
        pending = [
            PendingStep(PendingReadback(of.buffer), of.step, of.inventory, lambda _: [], [], of.tags, None) for of, _ in kept
        ]
        layers, summary = LayerSelection(None), self._summary
        records = [RecordFactory(self._registry, layers, summary.of_one_step()).make(each)[0] for each in pending]
        return [
            record._replace(time=ended, context={**record.context, "monitored": False})
            for record, (_, ended) in zip(records, kept, strict=True)
            if record.tables or record.values
        ]
