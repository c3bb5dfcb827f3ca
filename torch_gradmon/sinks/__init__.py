"""Where records go."""

from .jsonl import JsonlSink
from .mlflow import MlflowSink
from .outlet import Outlet
from .tensorboard import TensorBoardSink
from .trackio import TrackioSink
from .wandb import WandbSink

__all__ = ["JsonlSink", "MlflowSink", "Outlet", "TensorBoardSink", "TrackioSink", "WandbSink"]
