"""Where records go."""

from .filtered_sink import FilteredSink
from .jsonl import JsonlSink
from .mlflow import MlflowSink
from .tensorboard import TensorBoardSink
from .trackio import TrackioSink
from .wandb import WandbSink

__all__ = ["FilteredSink", "JsonlSink", "MlflowSink", "TensorBoardSink", "TrackioSink", "WandbSink"]
