"""What is watched is not a plain model: an engine of DeepSpeed, or the stages of a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import validation as check
from ..core.errors import display
from ..plugins.setup_check import card
from ..step.model_index import GradientSource, ModelIndex, PartFacts, WholeModel
from .runtime import Runtime

# --- DeepSpeed: its optimizers step flat tensors, and each rank has a part of them from ZeRO 1 on ---


class DeepSpeedSource(GradientSource):
    """Parameters and gradients of a DeepSpeed engine. Without ZeRO and in float32 they are in their usual places."""

    is_final_at_step = True

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    @property
    def outer(self) -> Any:
        return self._engine()

    def is_due(self) -> bool:
        engine = self._engine()
        return engine is not None and bool(engine.is_gradient_accumulation_boundary())

    @property
    def _optimizer(self) -> Any:
        return getattr(self._engine(), "optimizer", None)

    def scale(self) -> float | Tensor | None:
        scale = getattr(self._optimizer, "loss_scale", None)
        return None if scale is None or (not isinstance(scale, Tensor) and scale == 1) else scale

    def searches_scale(self) -> bool:
        """In fp16. In other types it leaves out steps with infinite gradients as well, which no scale will mend."""
        engine = self._engine()
        return engine is not None and bool(engine.fp16_enabled())

    def has_overflowed(self) -> bool:
        return bool(getattr(self._optimizer, "overflow", False))


class MasterSource(DeepSpeedSource):
    """Without ZeRO in bfloat16: the optimizer steps float32 copies, each of one parameter, whose gradients are reduced as a whole."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        found = [(id(model), master) for of_model, masters in pairs for model, master in zip(of_model, masters, strict=True)]
        self._masters: dict[int, Tensor] = dict(found)

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The copy; the parameter itself where it is not trained."""
        return self._masters.get(id(parameter), parameter)


class ZeroSource(DeepSpeedSource):
    """Under ZeRO 1 and 2, and in bfloat16: the optimizer's flat tensors; a rank has the elements of some parameters."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        groups = getattr(engine.optimizer, "bit16_groups", None) or engine.optimizer.bf16_groups
        self._groups = {id(parameter): number for number, group in enumerate(groups) for parameter in group}

    def _flats(self) -> Sequence[Tensor]:
        optimizer = self._optimizer
        found = getattr(optimizer, "single_partition_of_fp32_groups", None)
        return getattr(optimizer, "fp32_groups_flat_partition", ()) if found is None else found

    def groups_of(self, optimizer: Optimizer) -> Sequence[Sequence[Tensor]]:
        """A flat tensor each: while one of them is stepped the others are out of the groups."""
        return [[flat] for flat in self._flats()]

    def is_part(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._groups

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor of the parameter's group; the parameter itself where it is not trained."""
        return self._flats()[self._groups[id(parameter)]] if self.is_part(parameter) else parameter

    def value(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part, in float32, which may be empty."""
        if not self.is_part(parameter):
            return parameter
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        return _nothing(parameter) if mapping is None else mapping.hp_fragment

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        if not self.is_part(parameter):
            return parameter.grad
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # a row without elements, so that all ranks have the same rows
            return _nothing(parameter)
        gradients = mapping.offload_gradient_dict if mapping.use_offload else mapping.gradient_dict
        if gradients.get(mapping.param_group_index) is None:
            return None
        gradient: Tensor | None = gradients[mapping.param_group_index][parameter._index_in_param_group]  # type: ignore[attr-defined]
        where = mapping.lp_fragment_address
        if gradient is not None and gradient.numel() > where.numel:  # in bfloat16 each rank accumulates the whole parameter
            gradient = gradient.detach().view(-1).narrow(0, where.start, where.numel)
        return gradient

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self.stepped(parameter).grad
        if gradient is None or not self.is_part(parameter):
            return gradient
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        where = None if mapping is None else mapping.hp_fragment_address
        return _nothing(parameter) if where is None else gradient.detach().narrow(0, where.start, where.numel)


class Zero3Source(DeepSpeedSource):
    """Under ZeRO 3 each rank has the same share of every parameter, filled up with zeros at the end."""

    def groups_of(self, optimizer: Optimizer) -> Sequence[Sequence[Tensor]]:
        """Flat tensors, which are in the groups only while they are stepped."""
        found: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for number, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
            found[self._optimizer.sub_group_to_group_id[number]].append(flat)
        return found

    def is_part(self, parameter: nn.Parameter) -> bool:
        return hasattr(parameter, "ds_id")

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """That of the whole parameter, also while a rank has its share only."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor with this rank's share."""
        place = self._place(parameter)
        return parameter if place is None else place[0]

    def value(self, parameter: nn.Parameter) -> Tensor:
        """This rank's share of the optimizer's tensor, or of the parameter itself where it is not trained."""
        place = self._place(parameter)
        if place is not None:
            return place[0].detach().narrow(0, *place[1])
        share: Any = getattr(parameter, "ds_tensor", None)
        return parameter if share is None else share.detach().view(-1)[: _length(parameter, share.numel())]

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        place = self._place(parameter)
        if place is None or place[0].grad is None:
            return None
        return place[0].grad.detach().narrow(0, *place[1])

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        place = self._place(parameter)
        if place is None:
            return None
        gradient: Tensor | None = self._optimizer.get_local_fp32_grad_for_param(parameter)
        return None if gradient is None else gradient.detach().view(-1)[: place[1][1]]

    def _place(self, parameter: Any) -> tuple[Tensor, tuple[int, int]] | None:
        """The flat tensor, and where this rank's share is in it, without the zeros behind the end of the parameter."""
        optimizer = self._optimizer
        known = optimizer.grad_position.get(optimizer.get_param_id(parameter)) if self.is_part(parameter) else None
        if known is None:
            return None
        group, start, size = known
        return optimizer.fp32_partitioned_groups_flat[group], (start, _length(parameter, size))


def _length(parameter: Any, size: int) -> int:
    before = torch.distributed.get_rank(parameter.ds_process_group) * size
    return max(0, min(size, int(parameter.ds_numel) - before))


def _nothing(parameter: nn.Parameter) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=parameter.device)


def source_of(engine: Any) -> DeepSpeedSource:
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        return Zero3Source(engine)
    if hasattr(optimizer, "single_partition_of_fp32_groups") or hasattr(optimizer, "fp32_groups_flat_partition"):
        return ZeroSource(engine)
    if isinstance(optimizer, Optimizer):
        return DeepSpeedSource(engine)
    if hasattr(optimizer, "fp32_groups") and hasattr(optimizer, "fp16_groups") and engine.bfloat16_enabled():
        return MasterSource(engine)
    raise ValueError(
        f"a DeepSpeed engine with {type(optimizer).__name__} without ZeRO cannot be watched: its releases differ in "
        "whether they scale the loss, or it flattens all gradients; use ZeRO 1, 2 or 3, which is as exact with one rank"
    )


def unpacked(engine: Any, optimizers: Sequence[Any]) -> tuple[nn.Module, Sequence[Any], GradientSource]:
    """The model of an engine, the optimizer inside, and where gradients are."""
    inner = getattr(engine, "basic_optimizer", None)
    for each in optimizers:
        # Accelerate has a wrapper around it
        if not any(one is engine.optimizer or one is inner for one in (each, getattr(each, "optimizer", None))):
            raise ValueError(f"a DeepSpeed engine steps its own optimizer, not {display(each)}; call watch(engine) alone")
    if check.is_of(engine, "PipelineEngine", "deepspeed."):
        raise ValueError(
            "a PipelineEngine of DeepSpeed cannot be watched: each rank has some layers of the model, and the engine shows neither their "
            "names in the whole nor when their gradients are final; schedules of torch.distributed.pipelining can be watched"
        )
    if inner is None or engine.optimizer is None:
        raise ValueError(
            "this DeepSpeed engine has no optimizer, so it does not train; pass optimizer= to deepspeed.initialize()"
        )
    return engine.module, [inner], source_of(engine)


# --- Pipelines of torch.distributed: the stages of this rank ---


class PipelineParts(nn.Module):
    """The parts of a pipeline on one rank, by the numbers of their stages. It is never called."""

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
        return [(int(at), name, kind) for at, part in self.named_children() for name, kind in ModelIndex(part).kinds.items()]


def _groups(part: nn.Module, named: Sequence[Any]) -> dict[int, int]:
    """The number of each parameter's group among those of the optimizers that have any parameter of this part, by id."""
    own = set(map(id, part.parameters()))
    members = [[set(map(id, group["params"])) for group in check.bare_optimizer(each).param_groups] for each in named]
    groups = [group for of in members if not own.isdisjoint(set().union(*of)) for group in of]
    return {place: number for number, group in enumerate(groups) for place in group}


class PipelineSource(GradientSource):
    """Gradients of a pipeline's stages: in ``.grad``, and final when the schedule's ``step`` returns, which reduces and scales them."""

    is_final_at_step = is_pipeline = True
    # with empty tensors, to see the shapes of outputs; private, and one or the other may be missing
    trials = ("eval", "_initialize_stage", "_initialize_stages")

    def __init__(self, schedule: Any, parts: PipelineParts) -> None:
        self.boundary = schedule
        self._parts = parts  # which nothing else keeps alive


def stages_of(schedule: Any, named: Sequence[Any]) -> tuple[PipelineParts, PipelineSource]:
    """The modules of the schedule's stages on this rank, and where their gradients are."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    parts = PipelineParts({stage.stage_index: stage.submod for stage in stages})
    if not named and not any(parameter.requires_grad for parameter in parts.parameters()):
        raise ValueError(
            "the stages of this rank are frozen and have no optimizer, whose step would end the step of the monitor: pass one that changes "
            "nothing, such as torch.optim.SGD(part.parameters()), and step it where other ranks step theirs"
        )
    return parts, PipelineSource(schedule, parts)


def meet(runtime: Runtime, parts: PipelineParts, named: Sequence[Any]) -> None:
    """Exchange with other ranks which parameters and modules each has. Collective."""
    ranks = runtime.captures.measurer.ranks
    if runtime.fence.inert:
        return
    exchange = runtime.lifecycle.exchange.between
    if not exchange.all_take_part("stages"):
        raise ValueError(
            f"some ranks do not watch their stages of the pipeline ({exchange.why_not('stages')}): call watch(schedule, optimizer) on "
            "every rank of it, in the same order as other monitors, or name its ranks by distributed=Distributed(process_group=...)"
        )
    facts = parts.facts(named)
    places = {place: (fact.stage, fact.name) for place, fact in facts.items()}
    cards = card([check.bare_optimizer(each) for each in named], places)
    found = ranks.gathered([list(facts.values()), parts.kinds(), cards])
    by_rank = [[PartFacts(*fact) for fact in of] for of, _, _ in found]
    modules, settings = ([each for of in found for each in of[place]] for place in (1, 2))
    runtime.planner.whole = WholeModel(by_rank, ranks.members, modules, settings)
