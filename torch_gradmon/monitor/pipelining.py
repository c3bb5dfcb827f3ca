"""Pipelines of ``torch.distributed.pipelining``: each rank has some stages, and all of them together are the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..core import validation as check
from ..plugins.setup_check.optimizers import card
from ..step.model_index import GradientSource, ModelIndex, PartFacts, WholeModel
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

    def facts(self, named: Sequence[Any]) -> dict[int, PartFacts]:
        """What other ranks have to know of each parameter, by its id; ``named`` are the optimizers of this rank. A parameter that two
        parts share is one.
        """
        found: dict[int, PartFacts] = {}
        for number, part in self.named_children():
            index, groups = ModelIndex(part), _groups(part, named)
            for (name, about), reference in zip(index.parameters.items(), index.references, strict=True):
                place, is_trained = id(reference()), name in index.trainable.names
                fan_in, group = index.matrices.get(name, -1), groups.get(place, -1)
                found.setdefault(place, PartFacts(int(number), name, about["shape"], about["dtype"], is_trained, fan_in, group))
        return found

    def kinds(self) -> list[tuple[int, str, str]]:
        """The number of the stage, the name within it and the class of each module."""
        kinds = {int(number): ModelIndex(part).kinds for number, part in self.named_children()}
        return [(number, name, kind) for number, of in kinds.items() for name, kind in of.items()]


def _cards(facts: Mapping[int, PartFacts], named: Sequence[Any]) -> list[dict[str, Any]]:
    """The settings of each group of the optimizers, and stage and name of its parameters."""
    return card([check.bare_optimizer(each) for each in named], {place: (fact.stage, fact.name) for place, fact in facts.items()})


def _groups(part: nn.Module, named: Sequence[Any]) -> dict[int, int]:
    """The number of each parameter's group among those of the optimizers that have any parameter of this part, by id."""
    own = set(map(id, part.parameters()))
    optimizers = [check.bare_optimizer(each).param_groups for each in named]
    members = [[set(map(id, group["params"])) for group in groups] for groups in optimizers]
    groups = [group for of in members if not own.isdisjoint(set().union(*of)) for group in of]
    return {place: number for number, group in enumerate(groups) for place in group}


class PipelineSource(GradientSource):
    """Gradients of a pipeline's stages: in ``.grad``, and final when the schedule's ``step`` returns, which reduces and scales them.

    Args:
        schedule: calls the stages.
        parts: the modules of this rank's stages.
    """

    is_final_at_step = is_pipeline = True
    # with empty tensors, to see the shapes of outputs; private, and one or the other may be missing
    trials = ("eval", "_initialize_stage", "_initialize_stages")

    def __init__(self, schedule: Any, parts: PipelineParts) -> None:
        self.boundary = schedule
        self._parts = parts  # which nothing else keeps alive


def unpacked(schedule: Any, named: Sequence[Any]) -> tuple[PipelineParts, PipelineSource]:
    """The modules of the schedule's stages on this rank, and where their gradients are.

    Raises:
        ValueError: no optimizer ends the steps of this rank, whose stages are frozen.
    """
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    parts = PipelineParts({stage.stage_index: stage.submod for stage in stages})
    if not named and not any(parameter.requires_grad for parameter in parts.parameters()):
        raise ValueError(
            "the stages of this rank are frozen and have no optimizer, whose step would end the step of the monitor: pass one that changes "
            "nothing, such as torch.optim.SGD(part.parameters()), and step it where other ranks step theirs"
        )
    return parts, PipelineSource(schedule, parts)


def meet(runtime: Runtime, parts: PipelineParts, named: Sequence[Any]) -> None:
    """Exchange with other ranks which parameters and modules each has. Collective.

    Raises:
        ValueError: some ranks do not watch their stages.
    """
    ranks = runtime.captures.measurer.ranks
    if runtime.fence.inert:
        return
    exchange = runtime.lifecycle.planning.exchange.exchange
    if not exchange.all_take_part("stages"):
        raise ValueError(
            f"some ranks do not watch their stages of the pipeline ({exchange.why_not('stages')}): call watch(schedule, optimizer) on "
            "every rank of it, in the same order as other monitors, or name its ranks by process_group="
        )
    facts = parts.facts(named)
    runtime.planner.widen(WholeModel.gathered(ranks, list(facts.values()), parts.kinds(), _cards(facts, named)))
