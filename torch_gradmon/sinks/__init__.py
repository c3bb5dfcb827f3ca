"""Where records go."""

from .filtered_sink import Outlet
from .jsonl import JsonlSink
from .mlflow import MlflowSink
from .tensorboard import TensorBoardSink
from .trackio import TrackioSink
from .wandb import WandbSink

__all__ = ["JsonlSink", "MlflowSink", "Outlet", "TensorBoardSink", "TrackioSink", "WandbSink"]
