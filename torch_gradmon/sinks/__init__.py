"""Where records go."""

from typing import TYPE_CHECKING

from ..core.lazy_import import importing

if TYPE_CHECKING:
    from .alerts import Alert, AlertSink
    from .dashboards import tensorboard_layout, wandb_workspace
    from .delivery import FilteredSink
    from .jsonl import JsonlSink
    from .prometheus import OpenTelemetrySink, PrometheusSink
    from .tensorboard import TensorBoardSink
    from .trackio import MlflowSink, TrackioSink
    from .wandb import WandbSink

__all__ = [
    "Alert",
    "AlertSink",
    "FilteredSink",
    "JsonlSink",
    "MlflowSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "tensorboard_layout",
    "wandb_workspace",
]

#: The modules of these names.
_HOMES = {
    "Alert": "alerts",
    "AlertSink": "alerts",
    "FilteredSink": "delivery",
    "JsonlSink": "jsonl",
    "MlflowSink": "trackio",
    "OpenTelemetrySink": "prometheus",
    "PrometheusSink": "prometheus",
    "TensorBoardSink": "tensorboard",
    "TrackioSink": "trackio",
    "WandbSink": "wandb",
    "tensorboard_layout": "dashboards",
    "wandb_workspace": "dashboards",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _HOMES)
