"""The flight recorder: statistics of steps that are not monitored stay on the device until a spike asks for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .flight import Flight
from .inventory import Inventory
from .layers import Layers
from .plan import SourcePlan
from .record import StepRecord
from .registry import Registry
from .step import StepBuffer
from .summary import CHEAP, Summary

#: Whole-model values that take no memory of other steps.
_OF_ONE_STEP = tuple(name for name in CHEAP if name.startswith("grad_"))


@dataclass
class _Kept:
    """A step that was not monitored."""

    buffer: StepBuffer
    plans: Mapping[str, SourcePlan]
    inventory: Inventory
    refused: bool
    tags: dict[str, Any]
    ended: float = field(default_factory=time.time)

    def depart(self) -> Flight:
        return Flight(self.buffer.depart(), self.plans, self.inventory, lambda _: {}, self.refused, [], self.tags, None)


class Recorder:
    """Keeps the last steps that were not monitored, and gives their records where a spike makes them interesting: those before
    it at once, and as many after it.

    Args:
        size: how many steps; with 0 none is recorded.
        registry: the metrics.
    """

    def __init__(self, size: int, registry: Registry) -> None:
        self.size = size
        self._registry = registry
        self._kept: deque[_Kept] = deque(maxlen=size)
        self._due = 0  # of the steps to come, so many belong to a spike

    def keep(
        self,
        buffer: StepBuffer,
        plans: Mapping[str, SourcePlan],
        inventory: Inventory,
        refused: bool,
        tags: dict[str, Any],
    ) -> list[StepRecord]:
        """A step that is not monitored has ended; its values stay where they are. Does not synchronise.

        Returns:
            The records of those that came after a spike, once there are enough of them; this waits for the device.
        """
        self._due -= self._due > 0
        # by the next step, what was logged after the end of the last of them has come too
        after = self._bring() if self._due == 1 else []
        self._kept.append(_Kept(buffer, plans, inventory, refused, tags))
        return after

    def open_buffer(self, step: int | None) -> StepBuffer | None:
        """Where a late value of ``step`` belongs, if that was the last step kept."""
        return self._kept[-1].buffer if self._kept and self._kept[-1].buffer.step == step else None

    def tag(self, step: int | None, tags: Mapping[str, Any]) -> bool:
        """Late facts about ``step``; whether it was the last step kept."""
        is_kept = self.open_buffer(step) is not None
        if is_kept:
            self._kept[-1].tags.update(tags)
        return is_kept

    def spiked(self) -> list[StepRecord]:
        """A spike was found: the records of what is kept, and later those that come after it. Waits for the device, once."""
        self._due = self.size + 2
        return self._bring()

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
        flights = [step.depart() for step in kept]  # all copies are started before the first one is waited for
        records = [flight.record(Summary(_OF_ONE_STEP), Layers(None), self._registry)[0] for flight in flights]
        return [
            replace(record, time=step.ended, context={**record.context, "monitored": False})
            for record, step in zip(records, kept, strict=True)
        ]
