"""``watch``: one line that makes a monitor, and replaces an earlier one of the model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..capture.hooks import unwrapped
from ..core import validation as check
from ..core.errors import TrainingStopped, warn_user
from ..core.keys import Pattern
from ..plugins.setup_check import Checks
from ..step.model_index import GradientSource
from ..step.planner import PresetName, source_for
from ..step.plugin import Plugin
from .monitor import ModuleMonitor
from .options import Distributed, Layers, LogTarget, OnSpike, WatchOptions

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule as PipelineSchedule
    from typing_extensions import Unpack

    from .engines import PipelineParts


# --- A script has one monitor for a model: a second one replaces the first, with a warning ---


class Mark(weakref.ref[nn.Module]):
    """Of a model without its wrappers: finds its monitor, and what uses that, such as a trainer. It keeps none of them alive."""

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
    is_open = step is not None and step != other._runtime.state.ended
    when = "before its first step" if step is None else f"{'in' if is_open else 'after'} step {step}"
    remedy = "" if step is None else f"; start_step={step + (not is_open)} continues its numbers"
    message = f"this {kind} was watched already: the earlier monitor is detached {when}, and the new one replaces it{remedy}"
    warn_user(message)
    try:
        other.detach()
    except TrainingStopped as error:  # a spike in the last step must not stop a script that starts again
        warn_user(f"the earlier monitor ended with a spike: {error}")


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
        from .engines import meet, stages_of

        model, source = parts, _ = stages_of(model, named)
    check.module(model)
    if check.is_deepspeed(model):
        from .engines import unpacked

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
