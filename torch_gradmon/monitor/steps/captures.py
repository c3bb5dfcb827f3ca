"""The sources of values: gradients, parameters, and what modules take and return."""

from __future__ import annotations

import re

from ...capture.gradients import GradientCapture
from ...capture.measurer import Measurer
from ...capture.modules.source import ModuleSource
from ...capture.parameters import ParameterCapture
from ...core.fence import Fence
from ...step.active_step import ActiveStep, Mode
from ...step.planner import Planner


class Captures:
    """All sources of one monitor, begun and ended together.

    Attributes:
        gradients: of micro-batches, before clipping, and as the optimizer uses them.
        parameters: and what the optimizer changes of them.
        modules: outputs, inputs, their gradients, attention, the reference module.
        had_root_inputs: a hook was on what the model takes before the open step began.
    """

    def __init__(self, measurer: Measurer, fence: Fence, update_sample: int | re.Pattern[str] | None) -> None:
        self.measurer = measurer
        self.gradients = GradientCapture(measurer)
        self.parameters = ParameterCapture(measurer, update_sample)
        self.modules = ModuleSource(measurer, fence)
        self.had_root_inputs = False

    def seal(self) -> None:
        """A step is about to open; what it needs may be registered with it."""
        self.had_root_inputs = self.modules.hooks.on_root_inputs

    def begin(self, step: ActiveStep, planner: Planner, by_hand: bool) -> None:
        """Begin a step that takes values."""
        assert step.buffer is not None
        assert planner.inventory is not None
        references, source = planner.inventory.references, planner.inventory.source
        if planner.inventory.homes:
            self.measurer.ranks.count_at(planner.inventory.homes)
        step.buffer.used.update(planner.inventory.foreign)  # their ranks use them
        by_batch = planner.measures_each_batch and step.mode is Mode.MONITORED
        self.gradients.begin(step.buffer, step.plans, references, planner.inventory.trainable.doubtful, by_batch, source)
        self.parameters.begin(step.buffer, step.plans, references, source)
        self.modules.begin(step.buffer, step.due, planner.inventory, by_hand)

    def end(self) -> None:
        """End the step, and let go of everything that it held."""
        for source in (self.gradients, self.parameters, self.modules):
            source.end()
