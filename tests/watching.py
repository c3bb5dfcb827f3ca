"""``watch`` with the options that few trainings need, too."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_gradmon import ModuleMonitor
from torch_gradmon.monitor.watch import attach


def watch_with(
    model: nn.Module, *optimizers: Any, scaler: Any = None, start_step: int | None = None, **options: Any
) -> ModuleMonitor:
    """A monitor with the defaults of ``watch`` and any options of ``ModuleMonitor``, attached as ``watch`` does."""
    monitor = ModuleMonitor(model, **{"preset": "standard", "on_spike": "warn", **options})
    return attach(monitor, optimizers, scaler=scaler, start_step=start_step)
