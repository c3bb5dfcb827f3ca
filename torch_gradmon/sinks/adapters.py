"""Turn what the user gives as a sink into a function of values and step, by a sink of this package where one is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from ..core.errors import display
from .comet import CometSink
from .mlflow import MlflowSink
from .tensorboard import TensorBoardSink
from .trackio import TrackioSink
from .wandb import WandbSink

Log = Callable[[Mapping[str, float], int], object]
_METHODS = ("log", "log_metrics", "log_dict")


def adapted(sink: Any) -> list[Any]:
    """``sink``, or the sink of this package that feeds it; for an Accelerator, one for each tracker."""
    if isinstance(sink, ModuleType):
        of_module = {"wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink}.get(sink.__name__)
        return [sink if of_module is None else of_module()]
    package, _, _ = type(sink).__module__.partition(".")
    kind = type(sink).__name__
    if package == "wandb" and kind in ("Run", "NoopRun"):
        return [WandbSink(sink)]
    if (package, kind) == ("trackio", "Run"):
        return [TrackioSink(sink)]
    if package == "comet_ml" and hasattr(sink, "curr_step"):
        return [CometSink(sink)]
    if kind == "SummaryWriter" and hasattr(sink, "add_scalar"):
        return [TensorBoardSink(sink)]
    if _is_accelerator(sink):
        others = [tracker for tracker in sink.trackers if not hasattr(tracker, "logged_anyhow")]
        return [each for tracker in others for each in adapted(_unwrapped(tracker))] if sink.is_main_process else []
    return [sink]


def logged_anyhow(sink: Any) -> Container[str]:
    """Keys that the trackers of an Accelerator get from the loop, if one of the trackers feeds a monitor. The container may grow."""
    known = (
        [tracker.logged_anyhow for tracker in sink.trackers if hasattr(tracker, "logged_anyhow")] if _is_accelerator(sink) else []
    )
    return known[0] if known else ()


def _is_accelerator(sink: Any) -> bool:
    return (type(sink).__module__.partition(".")[0], type(sink).__name__) == ("accelerate", "Accelerator")


def _unwrapped(tracker: Any) -> Any:
    """The tracker behind Accelerate's wrapper, if there is a sink for it."""
    if tracker.name == "mlflow":
        return MlflowSink()
    return tracker.tracker if tracker.name in ("wandb", "tensorboard", "trackio", "comet_ml") else tracker


def sender(sink: Any) -> Log:
    """The function that sends values and a step to ``sink``.

    Raises:
        TypeError: it has no such method and is not callable with these arguments.
    """
    methods = [method for name in _METHODS if callable(method := getattr(sink, name, None))]
    # an object with such a method is not meant to be called itself: a Lightning module is callable
    for function in methods or ([sink] if callable(sink) else []):
        if _takes_values_and_step(function):
            return partial(_call, function)
    raise TypeError(
        "a sink needs a method log(dict, step=) or log_metrics(dict, step=), or must be callable as sink(dict, step=), with a parameter of "
        f"that name, as lambda values, step: ... has it; got {display(sink)}"
    )


def _call(function: Callable[..., object], values: Mapping[str, float], step: int) -> object:
    return function(values, step=step)


def _takes_values_and_step(function: Callable[..., Any]) -> bool:
    for follow in (True, False):  # a decorator may declare another signature than its function has, as in SwanLab
        try:
            inspect.signature(function, follow_wrapped=follow).bind({}, step=0)
        except TypeError:
            continue
        except ValueError:  # a built-in function without a signature
            return True
        return True
    return False


def closer(sink: Any) -> Callable[[], object] | None:
    """The function that flushes and closes ``sink``, or None."""
    if callable(close := getattr(sink, "close", None)):
        return close  # type: ignore[no-any-return]
    is_of_lightning = type(sink).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    save = getattr(sink, "save", None)
    # a logger that Trainer.fit has finalised would not write later rows by itself
    return save if is_of_lightning and hasattr(sink, "log_metrics") and callable(save) else None


def name_of(sink: Any) -> str:
    """The sink's class or the function's name, for messages."""
    name: str = getattr(sink, "__name__", type(sink).__name__)
    return name
