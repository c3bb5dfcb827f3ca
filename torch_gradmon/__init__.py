"""See what gradients, parameters, updates and activations do while a PyTorch model trains."""

from .acting.policy import Counts, Rollback, RolledBack, Skip
from .adaptive_clipping import AdaGC, ZClip
from .attention import monitor_scaled_dot_product_attention
from .comparison.result import Difference
from .coordinate_check import RefinedCoordinateCheck
from .diagnosis import Diagnosis, Finding
from .diagnosis.diagnose import diagnose
from .diff import diff
from .errors import GradmonWarning, SpikeError
from .mixin import MonitorMixin
from .monitor import ModuleMonitor
from .run import Run, load_run
from .sinks import JsonlSink, TensorBoardSink, TrackioSink, WandbSink
from .spikes import SpikeDetector
from .watch import watch

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
    "watch",
]
