"""The one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import check
from .acting.policy import Policy
from .monitor import ModuleMonitor
from .presets import PRESETS
from .record import Event


def watch(
    model: nn.Module,
    *optimizers: Any,
    scaler: torch.amp.GradScaler | None = None,
    preset: str = "standard",
    layers: str | re.Pattern[str] | None = None,
    on_spike: str | Policy | Callable[[Event], Any] | None = "warn",
    run_dir: str | os.PathLike[str] | None = None,
    every: int = 1,
    compile_statistics: bool = False,
    overhead_budget: float | None = None,
    flight_recorder: int = 0,
) -> ModuleMonitor:
    """Watch ``model`` from now on; the training loop stays as it is, also its clipping.

    Args:
        model: to watch, after it was moved, wrapped and compiled as it will be trained.
        optimizers: that train it, in the order in which they step.
        scaler: the GradScaler that drives them, unless Accelerate's wrapper of the optimizer has it.
        preset: ``"cheap"``, ``"standard"`` or ``"full"``, see :meth:`ModuleMonitor.add_preset`.
        layers: per-layer values to show: ``"blocks"``, ``"top"``, ``"all"`` or a pattern; the run directory has all of them.
        on_spike: ``"warn"``, ``"skip"`` (or :class:`Skip`, or :class:`Rollback`), ``"raise"``, a function of the event, or None.
        run_dir: where every step is kept, for :func:`load_run`.
        every: monitor the steps that are divisible by it.
        compile_statistics: compile a kernel for statistics on the CPU first, see :class:`ModuleMonitor`.
        overhead_budget: share of the time that monitoring may take, such as 0.01; it leaves out steps to keep to it.
        flight_recorder: with ``every``, how many of the steps in between are kept for the story of a spike, see
            :class:`ModuleMonitor`.

    Returns:
        The monitor, attached. It need not be kept: it lives as long as the optimizer.

    Raises:
        TypeError, ValueError: an argument is not what it should be, see :class:`ModuleMonitor`.
    """
    check.module(model)
    check.one_of("preset", preset, tuple(PRESETS))
    check.grad_scaler(scaler)
    check.optimizers(model, optimizers)
    monitor = prepared(
        model,
        preset=preset,
        every=every,
        layers=layers,
        on_spike=on_spike,
        run_dir=run_dir,
        compile_statistics=compile_statistics,
        overhead_budget=overhead_budget,
        flight_recorder=flight_recorder,
    )
    return monitor.attach(*optimizers, scaler=scaler)


def prepared(model: nn.Module | None, *, preset: str = "standard", **arguments: Any) -> ModuleMonitor:
    """What :func:`watch` attaches: a monitor with a preset. A spike warns unless ``arguments``, those of the monitor, say otherwise."""
    check.one_of("preset", preset, tuple(PRESETS))
    monitor = ModuleMonitor(model, **{"on_spike": "warn", **arguments})
    monitor.add_preset(preset)
    return monitor
