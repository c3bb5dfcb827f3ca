"""See what gradients, parameters, updates and activations do while a PyTorch model trains."""

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
from .plugins.spike_policy.policy import Counts, Rollback, RolledBack, Skip
from .sinks import JsonlSink, TensorBoardSink, TrackioSink, WandbSink
from .spikes import SpikeDetector

__version__ = "0.1.0"

__all__ = [
    "AdaGC",
    "Counts",
    "Diagnosis",
    "Difference",
    "Finding",
    "GradmonWarning",
    "JsonlSink",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
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
