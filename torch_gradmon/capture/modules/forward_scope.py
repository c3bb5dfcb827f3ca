"""The parts of one training forward of the root other than module calls: the reference, the check, attention."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from ...core.fence import Fence
from ...core.metric import Metric
from ...step.buffer import StepBuffer
from ...step.model_index import ModelIndex
from ..attention.source import AttentionRecorder
from ..coordinate_check.source import CoordinateCheck
from ..measurer import Measurer
from ..reference.loop_run import LoopRun
from ..reference.source import ReferencePass
from .calls import ModuleCalls, OutputDifferences
from .pass_tracker import PassTracker
from .values import ModuleValues


class ForwardScope:
    """Runs the reference before the model, then enables the coordinate check and the recording of attention.

    Args:
        measurer: measures.
        fence: counts the time.
        passes: paused while the reference runs.
        values: measures activations.
    """

    def __init__(self, measurer: Measurer, fence: Fence, passes: PassTracker, values: ModuleValues) -> None:
        self._fence, self._passes = fence, passes
        self.reference = ReferencePass(measurer.complaints)
        self.attention = AttentionRecorder(measurer.complaints, values, fence, passes.in_forward)
        self._differences = OutputDifferences(self.reference, values, passes)
        self.calls = ModuleCalls(measurer, fence, passes, self._differences, values)
        self.check = CoordinateCheck(measurer, fence, passes, self.reference)
        self._loop_run = LoopRun(passes, fence)

    def begin_step(self, buffer: StepBuffer, metrics: tuple[Metric, ...], inventory: ModelIndex, by_hand: bool) -> None:
        """Start a step with the metrics due in it."""
        self.calls.begin(buffer, metrics, inventory)
        self.attention.begin(buffer, metrics, inventory)
        self.check.begin(buffer, metrics, inventory)
        if by_hand and self._needs_reference and (module := self.reference.module) is not None:
            parts = self.reference.parts().items()
            self._loop_run.begin(module, {n: p for n, p in parts if self.check.wants(n) or self._differences.wants(n)})

    def end_step(self, has_compiled_parts: bool, has_graphs: bool) -> None:
        """End the step; its values can still be evaluated."""
        self.calls.end()
        self._loop_run.end()
        self.attention.end(has_graphs)
        self.check.end(has_compiled_parts or has_graphs)
        self.reference.forget()

    @property
    def _needs_reference(self) -> bool:
        return bool(self.reference) and (self._differences.due or self.check.due)

    def start(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a training forward of ``root`` with these arguments."""
        start = time.perf_counter()
        if self._needs_reference:
            self._run_reference(root, args, kwargs)
        self.attention.enter()
        self._fence.add_time(time.perf_counter() - start)

    def _run_reference(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (ran := self._loop_run.take()) is not None:
            self.reference.adopt(ran.outputs)
            self.check.behind(root, ran.run)
            return
        with self.check.beside(root) as note, self._passes.pause():  # the two may share modules
            self.reference.run(root, self._differences.wants, args, kwargs, note)

    def leave(self) -> None:
        """End the forward. Idempotent."""
        self.attention.leave()
        self.check.leave()
