"""The one line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import validation as check
from ..step.planner import PRESETS, PresetName, source_for
from . import replacing
from .monitor import ModuleMonitor
from .options import MonitorOptions, OnSpike, check_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .pipelining import PipelineParts


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
        preset: ``"cheap"``, ``"standard"`` or ``"full"``, see :meth:`ModuleMonitor.add_preset`.
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
        from .pipelining import unpacked as stages_of

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
        from .pipelining import meet

        meet(monitor._runtime, parts, named)
        monitor.set_module(parts)  # now that names in the whole model are known
    return replacing.attach(monitor, named, scaler=scaler, start_step=start_step)


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
