"""See what gradients, parameters, updates and activations do while a PyTorch model trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy_import import importing

if TYPE_CHECKING:
    from .analysis.comparison.diff import diff
    from .analysis.comparison.difference import Difference
    from .analysis.diagnosis import Diagnosis, Finding
    from .analysis.diagnosis.diagnose import diagnose
    from .analysis.run import Run, load_run
    from .core.errors import GradmonWarning, SpikeError
    from .monitor import testing
    from .monitor.attention import monitor_scaled_dot_product_attention
    from .monitor.coordinate_check import RefinedCoordinateCheck
    from .monitor.mixin import MonitorMixin
    from .monitor.monitor import ModuleMonitor
    from .monitor.watch import watch
    from .plugins.clipping.adagc import AdaGC
    from .plugins.clipping.zclip import ZClip
    from .plugins.foresight.plugin import Foresight
    from .plugins.headroom.plugin import Headroom
    from .plugins.replica_check.replay import Replay
    from .plugins.spike_policy.policy import Counts, Rollback, RolledBack, Skip
    from .sinks import JsonlSink, TensorBoardSink, TrackioSink, WandbSink
    from .spikes import SpikeDetector
    from .step.model_index import GradientSource, MainGradSource
__version__ = "0.1.0"

__all__ = [
    "AdaGC",
    "Counts",
    "Diagnosis",
    "Difference",
    "Finding",
    "Foresight",
    "GradientSource",
    "GradmonWarning",
    "Headroom",
    "JsonlSink",
    "MainGradSource",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "Replay",
    "Rollback",
    "RolledBack",
    "Run",
    "Skip",
    "SpikeDetector",
    "SpikeError",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "ZClip",
    "diagnose",
    "diff",
    "load_run",
    "monitor_scaled_dot_product_attention",
    "testing",
    "watch",
]

#: The modules of these names.
_HOMES = {
    "AdaGC": "plugins.clipping.adagc",
    "Counts": "plugins.spike_policy.policy",
    "Diagnosis": "analysis.diagnosis",
    "Difference": "analysis.comparison.difference",
    "Finding": "analysis.diagnosis",
    "Foresight": "plugins.foresight.plugin",
    "GradientSource": "step.model_index",
    "GradmonWarning": "core.errors",
    "Headroom": "plugins.headroom.plugin",
    "JsonlSink": "sinks",
    "MainGradSource": "step.model_index",
    "ModuleMonitor": "monitor.monitor",
    "MonitorMixin": "monitor.mixin",
    "RefinedCoordinateCheck": "monitor.coordinate_check",
    "Replay": "plugins.replica_check.replay",
    "Rollback": "plugins.spike_policy.policy",
    "RolledBack": "plugins.spike_policy.policy",
    "Run": "analysis.run",
    "Skip": "plugins.spike_policy.policy",
    "SpikeDetector": "spikes",
    "SpikeError": "core.errors",
    "TensorBoardSink": "sinks",
    "TrackioSink": "sinks",
    "WandbSink": "sinks",
    "ZClip": "plugins.clipping.zclip",
    "diagnose": "analysis.diagnosis.diagnose",
    "diff": "analysis.comparison.diff",
    "load_run": "analysis.run",
    "monitor_scaled_dot_product_attention": "monitor.attention",
    "testing": "monitor.testing",
    "watch": "monitor.watch",
}

if not TYPE_CHECKING:  # else a name that does not exist would pass
    __getattr__ = importing(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
