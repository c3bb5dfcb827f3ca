"""What somebody gives as a sink, as a function of values and step; trackers that need more get the sink made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..errors import display
from .mlflow import MlflowSink
from .tensorboard import TensorBoardSink
from .trackio import TrackioSink
from .wandb import WandbSink

Log = Callable[[Mapping[str, float], int], object]


def adapted(sink: Any) -> Any:
    """``sink``, or the one of this package that knows how to feed it."""
    if isinstance(sink, ModuleType):
        of_module = {"wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink}.get(sink.__name__)
        return sink if of_module is None else of_module()
    package, _, _ = type(sink).__module__.partition(".")
    kind = package, type(sink).__name__
    if kind == ("wandb", "Run"):
        return WandbSink(sink)
    if kind == ("trackio", "Run"):
        return TrackioSink(sink)
    if type(sink).__name__ == "SummaryWriter" and hasattr(sink, "add_scalar"):
        return TensorBoardSink(sink)
    return sink


def sender(sink: Any) -> Log:
    """How to give values and a step to ``sink``.

    Raises:
        TypeError: it has no method for that and is not callable.
    """
    for method in ("log", "log_metrics"):
        function = getattr(sink, method, None)
        if callable(function):
            return lambda values, step: function(values, step=step)
    if callable(sink):
        return lambda values, step: sink(values, step=step)
    raise TypeError(
        f"a sink needs a method log(dict, step=) or log_metrics(dict, step=), or must be callable, got {display(sink)}"
    )


def name_of(sink: Any) -> str:
    """The sink's class or the function's name, for messages."""
    name: str = getattr(sink, "__name__", type(sink).__name__)
    return name
