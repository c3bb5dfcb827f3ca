"""See what gradients, parameters, updates and activations do while a PyTorch model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy_import import importing

if TYPE_CHECKING:
    from . import plugins as plugins
    from . import sinks as sinks
    from . import testing as testing
    from .analysis.diagnosis import Diagnosis, Finding
    from .analysis.diff import diff_runs
    from .analysis.run import Run, load_run
    from .core.errors import GradmonWarning, SpikeError
    from .core.records import SpikeEvent
    from .monitor.compatibility import MonitorMixin, RefinedCoordinateCheck, monitor_scaled_dot_product_attention
    from .monitor.monitor import ModuleMonitor
    from .monitor.options import Distributed, SpikeCapture
    from .monitor.watch import watch
    from .plugins.determinism import check_determinism
    from .plugins.reactions import Rollback, Skip
    from .plugins.setup_check import Checks
    from .spikes import SpikeDetector

__version__ = "0.1.0"

__all__ = [
    "Checks",
    "Diagnosis",
    "Distributed",
    "Finding",
    "GradmonWarning",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "Rollback",
    "Run",
    "Skip",
    "SpikeCapture",
    "SpikeDetector",
    "SpikeError",
    "SpikeEvent",
    "check_determinism",
    "diff_runs",
    "load_run",
    "monitor_scaled_dot_product_attention",
    "watch",
]

#: The modules of these names.
_HOMES = {
    "Checks": "plugins.setup_check",
    "Diagnosis": "analysis.diagnosis",
    "Distributed": "monitor.options",
    "Finding": "analysis.diagnosis",
    "GradmonWarning": "core.errors",
    "ModuleMonitor": "monitor.monitor",
    "MonitorMixin": "monitor.compatibility",
    "RefinedCoordinateCheck": "monitor.compatibility",
    "Rollback": "plugins.reactions",
    "Run": "analysis.run",
    "Skip": "plugins.reactions",
    "SpikeCapture": "monitor.options",
    "SpikeDetector": "spikes",
    "SpikeError": "core.errors",
    "SpikeEvent": "core.records",
    "check_determinism": "plugins.determinism",
    "diff_runs": "analysis.diff",
    "load_run": "analysis.run",
    "monitor_scaled_dot_product_attention": "monitor.compatibility",
    "watch": "monitor.watch",
}

if not TYPE_CHECKING:  # else a name that does not exist would pass
    __getattr__ = importing(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
