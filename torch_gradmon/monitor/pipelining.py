"""Pipelines of ``torch.distributed.pipelining``: each rank has some stages, and all of them together are the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..capture.hooks import WrappedMethod
from ..step.gradient_source import GradientSource
from ..step.whole_model import PipelineParts, WholeModel
from .runtime import Runtime


class PipelineSource(GradientSource):
    """Gradients of a pipeline's stages: in ``.grad``, and final when the schedule's ``step`` returns, which reduces and scales them.

    Args:
        schedule: calls the stages.
        parts: the modules of this rank's stages.
    """

    is_final_at_step = is_pipeline = True

    def __init__(self, schedule: Any, parts: PipelineParts) -> None:
        self.boundary = schedule
        self._parts = parts  # which nothing else keeps alive
        self._wrapped: list[WrappedMethod] = []

    def ignore_trials(self, runtime: Runtime) -> None:
        """Measure nothing when the schedule evaluates, or calls its stages with empty tensors to see the shapes of their outputs."""
        paused = _paused(weakref.ref(runtime))
        for name in ("eval", "_initialize_stage", "_initialize_stages"):  # the latter two are private, and may be gone
            if hasattr(self.boundary, name):
                self._wrapped.append(WrappedMethod(self.boundary, name, paused))


def _paused(reference: weakref.ref[Runtime]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runtime = reference()
        if runtime is None:
            return original(*args, **kwargs)
        before = runtime.pause(True)
        try:
            return original(*args, **kwargs)
        finally:
            runtime.pause(before)

    return around


def unpacked(schedule: Any) -> tuple[nn.Module, PipelineSource]:
    """The modules of the schedule's stages on this rank, and where their gradients are."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    parts = PipelineParts({stage.stage_index: stage.submod for stage in stages})
    return parts, PipelineSource(schedule, parts)


def meet(runtime: Runtime, parts: nn.Module) -> None:
    """Exchange with other ranks which parameters each has. Collective.

    Raises:
        ValueError: some ranks do not watch their stages.
    """
    ranks, source = runtime.captures.measurer.ranks, runtime.planner.source
    if isinstance(source, PipelineSource) and not runtime.fence.inert:
        source.ignore_trials(runtime)
    assert isinstance(parts, PipelineParts)
    if runtime.fence.inert or ranks.count == 1:
        return
    if not runtime.lifecycle.planning.exchange.exchange.all_take_part("stages"):
        raise ValueError(
            "some ranks do not watch their stages of the pipeline: call watch(schedule, optimizer) on every rank of it, in the same order "
            "as other monitors, or name its ranks by process_group="
        )
    runtime.planner.widen(WholeModel.gathered(ranks, parts.part_facts))
