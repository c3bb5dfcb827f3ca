"""Optional behaviour: subclass :class:`Plugin` and pass instances to ``watch(plugins=[...])``."""

from ..step.active_step import ActiveStep, Mode, RecordedStep
from ..step.plugin import Plugin
from ..step.plugin_context import OptimizerContext, PluginContext

__all__ = ["ActiveStep", "Mode", "OptimizerContext", "Plugin", "PluginContext", "RecordedStep"]
