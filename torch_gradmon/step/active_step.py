"""The step that is open: its mode, its plans, and where its values go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..core.keys import Key
from ..core.records import Metric
from .buffer import StepBuffer
from .model_index import ModelIndex
from .plan import SourcePlan


class Mode(Enum):
    """What is measured in a step."""

    IDLE = "nothing"
    RECORDED = "gradients, for a plugin that needs them in every step"
    MONITORED = "all that is due"


#: The mode of most steps of most trainings, compared in each of them: a member of an enumeration is slow to look up.
IDLE = Mode.IDLE


@dataclass
class ActiveStep:
    """The open step, or the one that closed last.

    Attributes:
        stride: the difference to the number of the step before; the next step is expected as far ahead.
        buffer: its values; None where nothing is measured, and once it has closed.
        plans: what is measured, by source of parameters.
        due: metrics of modules that are measured.
        is_overflowed: an optimizer did not apply the step; known when it closes.
        is_skipped: a plugin decided that the step changes nothing.
        sets_cadence: a live change of detail decides which steps are monitored.
        annotations: facts for the context of its record.
        values: whole-model values that plugins add to its record.
    """

    number: int
    stride: int = 1
    mode: Mode = Mode.IDLE
    buffer: StepBuffer | None = None
    plans: Mapping[str, SourcePlan] = field(default_factory=dict)
    due: tuple[Metric, ...] = ()
    is_overflowed: bool = False
    is_skipped: bool = False
    sets_cadence: bool = False
    annotations: dict[str, Any] = field(default_factory=dict)
    values: dict[Key, float] = field(default_factory=dict)

    @property
    def is_monitored(self) -> bool:
        """Whether all that is due is measured."""
        return self.buffer is not None and self.mode is Mode.MONITORED

    def set_aside(self) -> ActiveStep:
        """What is known so far, as a step of its own. This one begins anew."""
        part = replace(self, buffer=None if self.buffer is None else self.buffer.set_aside())
        self.annotations, self.values = {}, {}
        return part

    def rejoin(self, part: ActiveStep) -> None:
        """What was set aside is of this step."""
        if self.buffer is not None and part.buffer is not None:
            self.buffer.rejoin(part.buffer)
        self.annotations, self.values = {**part.annotations, **self.annotations}, {**part.values, **self.values}

    def renumber(self, number: int, mode: Mode) -> None:
        """It is another step, whose ``mode`` is as given, as far as anything was measured."""
        self.number = number
        if self.buffer is not None:
            self.mode = Mode.MONITORED if self.is_skipped else mode
            self.buffer.step = number
            self.buffer = None if self.mode is IDLE else self.buffer


@dataclass
class RecordedStep:
    """A step that closed and is not monitored, though its gradients were measured.

    Attributes:
        step: what was known when it closed.
        buffer: its values, still on the device.
        inventory: the model as it was.
        tags: facts about it, from the loop.
    """

    step: ActiveStep
    buffer: StepBuffer
    inventory: ModelIndex
    tags: dict[str, Any]
