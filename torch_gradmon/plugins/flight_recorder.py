"""The flight recorder: statistics of steps that are not monitored stay on the device until a spike asks for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.records import StepRecord
from ..step.buffer import StepBuffer
from ..step.layer_values import LayerSelection
from ..step.model_index import ModelIndex
from ..step.pending_step import PendingStep
from ..step.plan import SourcePlan
from ..step.registry import Registry
from ..step.summary import Summary


@dataclass
class _Kept:
    """A step that was not monitored."""

    buffer: StepBuffer
    plans: Mapping[str, SourcePlan]
    inventory: ModelIndex
    refused: bool
    tags: dict[str, Any]
    ended: float = field(default_factory=time.time)

    def depart(self) -> PendingStep:
        return PendingStep(
            self.buffer.start_readback(), self.plans, self.inventory, lambda _: {}, self.refused, [], self.tags, None
        )


class Recorder:
    """Keeps the last steps that were not monitored, and gives their records where a spike makes them interesting: those before
    it at once, and as many after it.

    Args:
        size: how many steps; with 0 none is recorded.
        registry: the metrics.
        summary: that of the monitored steps.
    """

    def __init__(self, size: int, registry: Registry, summary: Summary) -> None:
        self.size = size
        self._registry, self._summary = registry, summary
        self._kept: deque[_Kept] = deque()
        self._is_open = False  # late values may come for the last one
        self._due = 0  # of the steps to come, so many belong to a spike

    def keep(
        self,
        buffer: StepBuffer,
        plans: Mapping[str, SourcePlan],
        inventory: ModelIndex,
        refused: bool,
        tags: dict[str, Any],
        in_flight: int | None,
    ) -> list[StepRecord]:
        """A step that is not monitored has ended; its values stay where they are. Does not synchronise.

        ``in_flight``: the oldest monitored step of which it is not known yet whether it has a spike. What came before it is kept.

        Returns:
            The records of those that came after a spike, once there are enough of them; this waits for the device.
        """
        self._due -= self._due > 0
        after = self._bring() if self._due == 1 else []  # the last one is closed by now
        self._kept.append(_Kept(buffer, plans, inventory, refused, tags))
        self._is_open = True
        before = sum(in_flight is None or step.buffer.step < in_flight for step in self._kept)
        for _ in range(before - self.size):
            self._kept.popleft()
        return after

    def close(self) -> None:
        """The next step begins, so that nothing more can come for the last one."""
        self._is_open = False

    def open_buffer(self, step: int | None) -> StepBuffer | None:
        """Where a late value of ``step`` belongs, if that was the last step kept."""
        is_last = self._is_open and bool(self._kept) and self._kept[-1].buffer.step == step
        return self._kept[-1].buffer if is_last else None

    def tag(self, step: int | None, tags: Mapping[str, Any]) -> bool:
        """Late facts about ``step``; whether it was the last step kept."""
        is_kept = self.open_buffer(step) is not None
        if is_kept:
            self._kept[-1].tags.update(tags)
        return is_kept

    def spiked(self) -> list[StepRecord]:
        """A spike was found: the records of what is kept, and later those that come after it. Waits for the device, once."""
        brought = self._bring()
        self._due = self.size + 2 - len(self._kept) if self.size else 0
        return brought

    def rest(self) -> list[StepRecord]:
        """The run ends, or is asked for its story: the records of what came after a spike so far."""
        return self._bring() if self._due else []

    def forget(self) -> None:
        """The steps that are kept come again."""
        self._kept.clear()
        self._due = 0

    def _bring(self) -> list[StepRecord]:
        kept = list(self._kept)
        self._kept.clear()
        if kept and self._is_open:  # it will be told of again, with what comes late
            self._kept.append(kept[-1])
        flights = [step.depart() for step in kept]  # all copies are started before the first one is waited for
        records = [flight.record(self._summary.of_one_step(), LayerSelection(None), self._registry)[0] for flight in flights]
        return [
            replace(record, time=step.ended, context={**record.context, "monitored": False})
            for record, step in zip(records, kept, strict=True)
            if record.tables or record.values
        ]
