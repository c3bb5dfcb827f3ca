"""Optional behaviour: subclass :class:`Plugin` and pass instances to ``watch(plugins=[...])``; and what plugins and callbacks get."""

from ..core.keys import Key
from ..core.records import SpikeEvent, StepRecord
from ..step.active_step import ActiveStep, Mode, RecordedStep
from ..step.plugin import OptimizerContext, Plugin, PluginContext

__all__ = [
    "ActiveStep",
    "Key",
    "Mode",
    "OptimizerContext",
    "Plugin",
    "PluginContext",
    "RecordedStep",
    "SpikeEvent",
    "StepRecord",
]
