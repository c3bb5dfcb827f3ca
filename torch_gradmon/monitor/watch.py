"""``watch``: one line that makes a monitor, and replaces an earlier one of the model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..capture.compiled import unwrapped
from ..core import validation as check
from ..core.errors import TrainingStopped, warn_user
from ..core.keys import Pattern
from ..plugins.setup_check import Checks, card
from ..step.model_index import GradientSource, ModelIndex, PartFacts, WholeModel
from ..step.planner import PresetName, source_for
from ..step.plugin import Plugin
from .monitor import ModuleMonitor
from .options import Distributed, Layers, LogTarget, OnSpike, WatchOptions
from .runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule as PipelineSchedule
    from typing_extensions import Unpack


# --- A script has one monitor for a model: a second one replaces the first, with a warning ---


class Mark(weakref.ref[nn.Module]):
    """Of a model without its wrappers: finds its monitor, and what uses that, such as a trainer. It keeps none of them alive."""

    __slots__ = ("monitor", "owner")

    monitor: weakref.ref[ModuleMonitor]
    owner: weakref.ref[Any] | None  # None where a script called watch()


def attach(
    monitor: ModuleMonitor,
    optimizers: Sequence[Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    owner: Any = None,
) -> ModuleMonitor:
    """Attach ``monitor`` and detach earlier monitors of its model, but those of the same ``owner``, who may use several for one model, as
    a trainer with two callbacks does. All arguments are checked before that, as :meth:`ModuleMonitor.attach` does.
    """

    def before(_: nn.Module) -> None:
        module = monitor._runtime.planner.representative
        assert module is not None
        module = unwrapped(module)
        for mark in weakref.getweakrefs(module):
            if not isinstance(mark, Mark) or (owner is not None and mark.owner is not None and mark.owner() is owner):
                continue
            if (other := mark.monitor()) is not None:
                _replace(other, type(module).__name__)
        mark = Mark(module)
        mark.monitor, mark.owner = weakref.ref(monitor), None if owner is None else weakref.ref(owner)
        monitor._runtime.mark = mark

    monitor._runtime.attach(optimizers, scaler, start_step, before)
    return monitor


def _replace(other: ModuleMonitor, kind: str) -> None:
    step = other.current_step
    is_open = step is not None and step != other._runtime.state.clock.ended
    when = "before its first step" if step is None else f"{'in' if is_open else 'after'} step {step}"
    remedy = "" if step is None else f"; start_step={step + (not is_open)} continues its numbers"
    message = f"this {kind} was watched already: the earlier monitor is detached {when}, and the new one replaces it{remedy}"
    warn_user(message)
    try:
        other.detach()
    except TrainingStopped as error:  # a spike in the last step must not stop a script that starts again
        warn_user(f"the earlier monitor ended with a spike: {error}")


# --- pipelining ---


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
        kinds = {int(number): ModelIndex(part).kinds for number, part in self.named_children()}
        return [(number, name, kind) for number, of in kinds.items() for name, kind in of.items()]


def _groups(part: nn.Module, named: Sequence[Any]) -> dict[int, int]:
    """The number of each parameter's group among those of the optimizers that have any parameter of this part, by id."""
    own = set(map(id, part.parameters()))
    optimizers = [check.bare_optimizer(each).param_groups for each in named]
    members = [[set(map(id, group["params"])) for group in groups] for groups in optimizers]
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
    exchange = runtime.lifecycle.planning.exchange.between
    if not exchange.all_take_part("stages"):
        raise ValueError(
            f"some ranks do not watch their stages of the pipeline ({exchange.why_not('stages')}): call watch(schedule, optimizer) on "
            "every rank of it, in the same order as other monitors, or name its ranks by distributed=Distributed(process_group=...)"
        )
    facts = parts.facts(named)
    places = {place: (fact.stage, fact.name) for place, fact in facts.items()}
    cards = card([check.bare_optimizer(each) for each in named], places)
    runtime.planner.whole = WholeModel.gathered(ranks, list(facts.values()), parts.kinds(), cards)


# --- watch ---


class Steps(Protocol):
    """An optimizer, or a trainer's wrapper of one."""

    param_groups: Any

    def step(self) -> Any:
        """Update the parameters."""


def watch(
    model: nn.Module | PipelineSchedule,
    *optimizers: Steps,
    preset: PresetName = "standard",
    layers: Layers | None = None,
    exclude: Pattern | None = None,
    every: int | Callable[[int], bool] = 1,
    log_to: LogTarget | Sequence[LogTarget] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    prefix: str = "",
    on_spike: OnSpike = "warn",
    checks: bool | Checks = True,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    max_overhead: float | None = None,
    distributed: Distributed | None = None,
    plugins: Sequence[Plugin] = (),
) -> ModuleMonitor:
    """Watch ``model`` from now on; the training loop stays unchanged, its clipping included.

    A second call for the same model, under any wrappers, detaches the monitor of the first call, replaces it and warns. A part of
    a watched model may have its own monitor. What few trainings need are options of :class:`ModuleMonitor`, which takes these, too:
    ``ModuleMonitor(model, preset="standard", zero_threshold=1e-6).attach(optimizer)``.

    Args:
        model: the model, already moved, wrapped and compiled for training; or a DeepSpeed engine, alone; or a schedule of
            ``torch.distributed.pipelining``, on every rank.
        optimizers: its optimizers, in stepping order.
        preset: whole-model values under ``gradmon/``: ``"minimal"`` (nine, of gradients only), ``"standard"`` (fourteen), or ``"full"``
            (the same, and per-layer values for the run directory).
        layers: further per-layer values to show, as ``gradient_before_clip/...``, beside those of metrics: ``"blocks"``, ``"top"``,
            ``"all"`` or a pattern.
        exclude: searched in the names of modules and parameters; metrics leave out those that match. Whole-model values still cover
            all parameters.
        every: monitor the steps that are divisible by it, or those for which this function of the step number returns True.
        log_to: where the values go, one or a list, None for nowhere: ``"wandb"``, ``"trackio"`` or ``"mlflow"`` for the active run, or
            anything that :meth:`ModuleMonitor.add_sink` takes: a run, a ``SummaryWriter``, a function of a dict and a step.
        run_dir: run directory that keeps every monitored step, for :func:`load_run`; None for none. Unless ``on_spike`` is None, a line
            on stderr says at the end what is wrong with the run.
        prefix: put before every key.
        on_spike: what to do at a spike: ``"warn"``, ``"raise"`` (:class:`SpikeError` when the step ends), a function of the
            :class:`SpikeEvent`, or None. ``"skip"``, :class:`Skip` and :class:`Rollback` decide before the optimizer steps, in every
            step regardless of the cadence, from gradients and from values logged by then; the decision waits for the device.
        checks: True, False for none of the data and the ranks, or a :class:`Checks` with what is meant to hold.
        scaler: the GradScaler that drives the optimizers, unless Accelerate's wrapper of the optimizer has it.
        start_step: number of the first step; by default 0, or the next one of a loaded state.
        max_overhead: largest share of the training time that the monitor may spend on the host, such as 0.01. Above it, the
            monitor leaves out steps of the cadence (every 2nd, 4th, ... remains) and warns.
        distributed: a :class:`Distributed`; DDP and FSDP2 need none.
        plugins: instances of subclasses of :class:`torch_gradmon.plugins.Plugin`, called after those that a monitor brings.

    Returns:
        The attached monitor. It lives as long as the optimizer, with or without a reference to it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value. Nothing has changed then.
        OSError: ``run_dir`` cannot be written.
    """
    what = WatchOptions(preset=preset, layers=layers, exclude=exclude, every=every, log_to=log_to, run_dir=run_dir, prefix=prefix)
    how = WatchOptions(on_spike=on_spike, checks=checks, max_overhead=max_overhead, distributed=distributed, plugins=plugins)
    return _watched(model, optimizers, scaler, start_step, {**what, **how})


def _watched(model: Any, named: Sequence[Any], scaler: Any, start_step: int | None, options: WatchOptions) -> ModuleMonitor:
    parts: PipelineParts | None = None
    source: GradientSource | None = None
    if check.is_schedule(model):
        model, source = parts, _ = stages_of(model, named)
    check.module(model)
    if check.is_deepspeed(model):
        from .deepspeed import unpacked

        model, named, source = unpacked(model, named)
    check.grad_scaler(scaler)
    if start_step is not None:
        check.step_number("start_step", start_step)
    check.optimizers(model, named, source_for(model, source))
    # the user's function may raise, so it runs before the monitor exists
    check.cadence(options["every"], None)(start_step or 0)
    monitor = made(model if parts is None else None, source, **options)
    if parts is not None:
        meet(monitor._runtime, parts, named)
        monitor.set_module(parts)  # now that names in the whole model are known
    return attach(monitor, named, scaler=scaler, start_step=start_step)


def made(model: nn.Module | None, source: GradientSource | None = None, **options: Unpack[WatchOptions]) -> ModuleMonitor:
    """A monitor with the defaults of :func:`watch`, not yet attached; ``source``: where gradients are."""
    given: dict[str, Any] = {"preset": "standard", "on_spike": "warn", **options}
    excluded = given.pop("exclude", None)
    return ModuleMonitor(model, excluded_modules_regex=excluded, gradient_source=source, **given)
