"""The one line."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import validation as check
from ..step.presets import PRESETS
from . import replacing
from .monitor import ModuleMonitor
from .options import MonitorOptions, OnSpike, check_names

if TYPE_CHECKING:
    from typing_extensions import Unpack


def watch(
    model: nn.Module,
    *optimizers: Any,
    scaler: torch.amp.GradScaler | None = None,
    start_step: int | None = None,
    preset: str = "standard",
    on_spike: OnSpike = "warn",
    **options: Unpack[MonitorOptions],
) -> ModuleMonitor:
    """Watch ``model`` from now on; the training loop stays as it is, also its clipping.

    A second call for the same model, whatever is wrapped around it by then, detaches the monitor of the first one, takes its place, and
    warns of that. A part of a watched model may have a monitor of its own.

    Args:
        model: to watch, after it was moved, wrapped and compiled as it will be trained.
        optimizers: that train it, in the order in which they step.
        scaler: the GradScaler that drives them, unless Accelerate's wrapper of the optimizer has it.
        start_step: number of the first step; by default 0, or where a loaded state goes on.
        preset: ``"cheap"``, ``"standard"`` or ``"full"``, see :meth:`ModuleMonitor.add_preset`.
        on_spike: ``"warn"``, ``"skip"`` (or :class:`Skip`, or :class:`Rollback`), ``"raise"``, a function of the event, or None.
        **options: all other arguments of :class:`ModuleMonitor`, such as ``run_dir="runs/first"``, where every step is kept for
            :func:`load_run`; ``layers="blocks"``; ``every=10``.

    Returns:
        The monitor, attached. It need not be kept: it lives as long as the optimizer.

    Raises:
        TypeError, ValueError: an argument is not what it should be, see :class:`ModuleMonitor`. Nothing was changed then.
    """
    check_names(options, ("scaler", "start_step", "preset", "on_spike"), "watch() has")
    check.module(model)
    check.one_of("preset", preset, tuple(PRESETS))
    check.grad_scaler(scaler)
    if start_step is not None:
        check.step_number("start_step", start_step)
    check.optimizers(model, optimizers)
    # the user's function, before anything knows of the new monitor
    check.cadence(options.get("every"), options.get("monitor_step_fn"))(start_step or 0)
    monitor = prepared(model, preset=preset, on_spike=on_spike, **options)
    return replacing.attach(monitor, optimizers, scaler=scaler, start_step=start_step)


def prepared(
    model: nn.Module | None, *, preset: str = "standard", on_spike: OnSpike = "warn", **options: Unpack[MonitorOptions]
) -> ModuleMonitor:
    """What :func:`watch` attaches: a monitor with a preset."""
    check.one_of("preset", preset, tuple(PRESETS))
    monitor = ModuleMonitor(model, on_spike=on_spike, **options)
    monitor.add_preset(preset)
    return monitor


def _signature() -> inspect.Signature:
    """With each option of the monitor by name and default, for notebooks and ``help()``; type checkers read the annotation."""
    own = inspect.signature(watch)
    *named, _ = own.parameters.values()
    monitor = inspect.signature(ModuleMonitor).parameters
    return own.replace(parameters=[*named, *(monitor[name] for name in MonitorOptions.__annotations__)])


watch.__signature__ = _signature()  # type: ignore[attr-defined]
