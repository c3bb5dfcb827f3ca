"""``watch``: one line that makes a monitor, and replaces an earlier one of the model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..capture.compiled import unwrapped
from ..core import validation as check
from ..core.errors import SpikeError, warn_user
from ..plugins.setup_check import card
from ..step.model_index import GradientSource, ModelIndex, PartFacts, WholeModel
from ..step.planner import PRESETS, PresetName, source_for
from .monitor import ModuleMonitor
from .options import MonitorOptions, OnSpike, check_names
from .runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack


# --- A script has one monitor for a model: a second one replaces the first, with a warning ---


class Mark(weakref.ref[nn.Module]):
    """A weak reference to a model without its wrappers, which finds the monitor of that model. It keeps neither alive.

    Attributes:
        monitor: the monitor of the model.
        owner: the object that uses the monitor, such as a trainer; None where a script called :func:`torch_gradmon.watch`.
    """

    __slots__ = ("monitor", "owner")

    monitor: weakref.ref[ModuleMonitor]
    owner: weakref.ref[Any] | None

    def __new__(cls, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> Mark:
        """Mark ``model``."""
        mark = super().__new__(cls, model)
        mark.monitor, mark.owner = weakref.ref(monitor), None if owner is None else weakref.ref(owner)
        return mark

    def __init__(self, model: nn.Module, monitor: ModuleMonitor, owner: Any) -> None:
        """Do nothing, because ``__new__`` sets everything."""

    def is_of(self, owner: Any) -> bool:
        """Whether this is the mark of a monitor of ``owner``, who may use several for one model."""
        return owner is not None and self.owner is not None and self.owner() is owner


def earlier(model: nn.Module, owner: Any = None) -> list[ModuleMonitor]:
    """The monitors of ``model`` under any wrappers, except those of the same ``owner``."""
    marks = [mark for mark in weakref.getweakrefs(unwrapped(model)) if isinstance(mark, Mark) and not mark.is_of(owner)]
    return [monitor for mark in marks if (monitor := mark.monitor()) is not None]


def attach(
    monitor: ModuleMonitor,
    optimizers: Sequence[Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    owner: Any = None,
) -> ModuleMonitor:
    """Attach ``monitor`` and detach earlier monitors of its model. All arguments are checked before that.

    Args:
        monitor: a monitor with a model.
        optimizers, scaler, start_step: see :meth:`ModuleMonitor.attach`.
        owner: the object that uses the monitor; it may use several for one model, as a trainer with two callbacks does.

    Raises:
        TypeError, ValueError: as :meth:`ModuleMonitor.attach`.
    """

    def before(_: nn.Module) -> None:
        module = monitor._runtime.planner.representative
        assert module is not None
        for other in earlier(module, owner):
            _replace(other, type(unwrapped(module)).__name__)
        monitor._runtime.mark = Mark(unwrapped(module), monitor, owner)

    monitor._runtime.attach(optimizers, scaler, start_step, before)
    return monitor


def _replace(other: ModuleMonitor, kind: str) -> None:
    step = other.step
    is_open = step is not None and step != other.last_step
    when = "before its first step" if step is None else f"{'in' if is_open else 'after'} step {step}"
    remedy = "" if step is None else f"; start_step={step + (not is_open)} continues its numbers"
    message = f"this {kind} was watched already: the earlier monitor is detached {when}, and the new one replaces it{remedy}"
    warn_user(message)
    try:
        other.detach()
    except SpikeError as error:  # a spike in the last step must not stop a script that starts again
        warn_user(f"the earlier monitor ended with a spike: {error}")


# --- pipelining ---


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


def stages_of(schedule: Any, named: Sequence[Any]) -> tuple[PipelineParts, PipelineSource]:
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
    runtime.planner.whole = WholeModel.gathered(ranks, list(facts.values()), parts.kinds(), _cards(facts, named))


# --- watch ---


def watch(
    model: nn.Module,
    *optimizers: Any,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    preset: PresetName = "standard",
    on_spike: OnSpike = "warn",
    **options: Unpack[MonitorOptions],
) -> ModuleMonitor:
    """Watch ``model`` from now on; the training loop stays unchanged, its clipping included.

    A second call for the same model, under any wrappers, detaches the monitor of the first call, replaces it and warns. A part of
    a watched model may have its own monitor.

    Args:
        model: the model, already moved, wrapped and compiled for training; or a DeepSpeed engine, alone; or a schedule of
            ``torch.distributed.pipelining``, on every rank.
        optimizers: its optimizers, in stepping order.
        scaler: the GradScaler that drives them, unless Accelerate's wrapper of the optimizer has it.
        start_step: number of the first step; by default 0, or the next one of a loaded state.
        preset: ``"minimal"``, ``"standard"`` or ``"full"``, see :meth:`ModuleMonitor.add_preset`.
        on_spike: ``"warn"``, ``"skip"`` (or :class:`Skip`, or :class:`Rollback`), ``"raise"``, a function of the event, or None.
            Unless it is None, a line on stderr says at the end what is wrong with the run in ``run_dir``.
        **options: all other arguments of :class:`ModuleMonitor`, such as ``run_dir="runs/first"``, where every step is kept for
            :func:`load_run`; ``layers="blocks"``; ``every=10``. ``help(torch_gradmon.ModuleMonitor)`` explains each.

    Returns:
        The attached monitor. It lives as long as the optimizer, with or without a reference to it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, see :class:`ModuleMonitor`. Nothing has changed then.
        OSError: ``run_dir`` cannot be written.
    """
    check_names(options, ("scaler", "start_step", "preset", "on_spike"), "watch() has")
    named: Sequence[Any] = optimizers
    parts: PipelineParts | None = None
    if check.is_schedule(model):
        if options.get("gradient_source") is not None:
            raise ValueError("a schedule brings a gradient_source of its own, so leave that argument out")
        model, options["gradient_source"] = parts, _ = stages_of(model, named)
    check.module(model)
    if check.is_deepspeed(model):
        from .deepspeed import unpacked

        model, named, source = unpacked(model, optimizers)
        options.setdefault("gradient_source", source)
    check.one_of("preset", preset, tuple(PRESETS))
    check.grad_scaler(scaler)
    if start_step is not None:
        check.step_number("start_step", start_step)
    check.optimizers(model, named, source_for(model, options.get("gradient_source")))
    # the user's function may raise, so it runs before the monitor exists
    check.cadence(options.get("every"), options.get("monitor_step_fn"))(start_step or 0)
    monitor = prepared(model if parts is None else None, preset=preset, on_spike=on_spike, **options)
    if parts is not None:
        meet(monitor._runtime, parts, named)
        monitor.set_module(parts)  # now that names in the whole model are known
    return attach(monitor, named, scaler=scaler, start_step=start_step)


def prepared(
    model: nn.Module | None, *, preset: PresetName = "standard", on_spike: OnSpike = "warn", **options: Unpack[MonitorOptions]
) -> ModuleMonitor:
    """A monitor with a preset, as :func:`watch` attaches it."""
    check.one_of("preset", preset, tuple(PRESETS))
    monitor = ModuleMonitor(model, on_spike=on_spike, **options)
    monitor.add_preset(preset)
    return monitor


def _signature() -> inspect.Signature:
    """The signature with each option of the monitor, for notebooks and ``help()``; type checkers read the annotation."""
    own = inspect.signature(watch)
    *named, _ = own.parameters.values()
    monitor = inspect.signature(ModuleMonitor).parameters
    return own.replace(parameters=[*named, *(monitor[name] for name in MonitorOptions.__annotations__)])


watch.__signature__ = _signature()  # type: ignore[attr-defined]
