"""Pipelines of ``torch.distributed.pipelining``: each rank has some stages, and all of them together are the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..capture.hooks import WrappedMethod
from ..step.gradient_source import GradientSource
from ..step.model_index import ModelIndex
from ..step.whole_model import PartFacts, WholeModel
from .runtime import Runtime


class PipelineParts(nn.Module):
    """The parts of a pipeline on one rank, by the numbers of their stages. It is never called.

    Args:
        parts: of this rank.
    """

    def __init__(self, parts: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for stage, part in parts.items():
            self.add_module(str(stage), part)

    @property
    def part_facts(self) -> list[PartFacts]:
        """What other ranks have to know of them."""
        found = []
        for number, part in self.named_children():
            index = ModelIndex(part)
            for name, about in index.parameters.items():
                is_trained = name in index.trainable.names
                found.append(
                    PartFacts(int(number), name, about["shape"], about["dtype"], is_trained, index.matrices.get(name, -1))
                )
        return found


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
