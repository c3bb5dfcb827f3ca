"""See what gradients, parameters, updates and activations do while a PyTorch model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy_import import importing

if TYPE_CHECKING:
    from . import testing
    from .analysis.diagnosis import Diagnosis, Finding
    from .analysis.diagnosis.diagnose import diagnose
    from .analysis.diff import RunDiff, diff_runs
    from .analysis.run import Run, load_run
    from .core.errors import GradmonWarning, SpikeError
    from .monitor.compatibility import MonitorMixin, RefinedCoordinateCheck, monitor_scaled_dot_product_attention
    from .monitor.monitor import ModuleMonitor
    from .monitor.watch import watch
    from .plugins.clipping import AdaGC, ZClip
    from .plugins.replica_check.replay import DeterminismReport
    from .plugins.spike_policy.policy import Rollback, RollbackResult, Skip, StepCounts
    from .sinks import JsonlSink, TensorBoardSink, TrackioSink, WandbSink
    from .spikes import SpikeDetector
    from .step.model_index import GradientSource, MainGradSource
__version__ = "0.1.0"

__all__ = [
    "AdaGC",
    "DeterminismReport",
    "Diagnosis",
    "Finding",
    "GradientSource",
    "GradmonWarning",
    "JsonlSink",
    "MainGradSource",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "Rollback",
    "RollbackResult",
    "Run",
    "RunDiff",
    "Skip",
    "SpikeDetector",
    "SpikeError",
    "StepCounts",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "ZClip",
    "diagnose",
    "diff_runs",
    "load_run",
    "monitor_scaled_dot_product_attention",
    "testing",
    "watch",
]

#: The modules of these names.
_HOMES = {
    "AdaGC": "plugins.clipping",
    "StepCounts": "plugins.spike_policy.policy",
    "Diagnosis": "analysis.diagnosis",
    "RunDiff": "analysis.diff",
    "Finding": "analysis.diagnosis",
    "GradientSource": "step.model_index",
    "GradmonWarning": "core.errors",
    "JsonlSink": "sinks",
    "MainGradSource": "step.model_index",
    "ModuleMonitor": "monitor.monitor",
    "MonitorMixin": "monitor.compatibility",
    "RefinedCoordinateCheck": "monitor.compatibility",
    "DeterminismReport": "plugins.replica_check.replay",
    "Rollback": "plugins.spike_policy.policy",
    "RollbackResult": "plugins.spike_policy.policy",
    "Run": "analysis.run",
    "Skip": "plugins.spike_policy.policy",
    "SpikeDetector": "spikes",
    "SpikeError": "core.errors",
    "TensorBoardSink": "sinks",
    "TrackioSink": "sinks",
    "WandbSink": "sinks",
    "ZClip": "plugins.clipping",
    "diagnose": "analysis.diagnosis.diagnose",
    "diff_runs": "analysis.diff",
    "load_run": "analysis.run",
    "monitor_scaled_dot_product_attention": "monitor.compatibility",
    "testing": "testing",
    "watch": "monitor.watch",
}

if not TYPE_CHECKING:  # else a name that does not exist would pass
    __getattr__ = importing(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
