"""Optional behaviour: subclass :class:`Plugin` and pass instances to ``watch(plugins=[...])``; what plugins and callbacks get; and where
gradients are.
"""

from ..core.errors import TrainingStopped
from ..core.keys import Key
from ..core.records import SpikeEvent, StepRecord, StepView
from ..step.active_step import ActiveStep, Mode
from ..step.model_index import GradientSource, MainGradSource
from ..step.plugin import OptimizerContext, Plugin, PluginContext

__all__ = [
    "ActiveStep",
    "GradientSource",
    "Key",
    "MainGradSource",
    "Mode",
    "OptimizerContext",
    "Plugin",
    "PluginContext",
    "SpikeEvent",
    "StepRecord",
    "StepView",
    "TrainingStopped",
]
