"""Which sink of this package feeds what a script gives as one: a tracker's name, a run, a writer, an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Container
from types import ModuleType
from typing import Any

from ..core.errors import nearest
from .tensorboard import TensorBoardSink
from .trackio import CometSink, MlflowSink, TrackioSink
from .wandb import WandbSink

#: By the names of their modules.
_TRACKERS: dict[str, Callable[[], Any]] = {"wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink}


def adapted(sink: Any) -> list[Any]:
    """``sink``, or the sink of this package that feeds it; for an Accelerator, one for each tracker.

    Raises:
        ValueError: a tracker is named that is unknown or has no active run.
        ImportError: it is not installed.
    """
    if isinstance(sink, str):
        if sink not in _TRACKERS:
            raise ValueError(
                f"{sink!r} is none of {', '.join(_TRACKERS)}{nearest(sink, _TRACKERS)}; or pass a run, a writer or a function"
            )
        return [_TRACKERS[sink]()]
    if isinstance(sink, ModuleType):
        of_module = _TRACKERS.get(sink.__name__)
        return [sink if of_module is None else of_module()]
    package, kind = _kind_of(sink)
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
    trackers = sink.trackers if _is_accelerator(sink) else ()
    return next((tracker.logged_anyhow for tracker in trackers if hasattr(tracker, "logged_anyhow")), ())


def _kind_of(sink: Any) -> tuple[str, str]:
    return type(sink).__module__.partition(".")[0], type(sink).__name__


def _is_accelerator(sink: Any) -> bool:
    return _kind_of(sink) == ("accelerate", "Accelerator")


def _unwrapped(tracker: Any) -> Any:
    """The tracker behind Accelerate's wrapper, if there is a sink for it."""
    if tracker.name == "mlflow":
        return MlflowSink()
    return tracker.tracker if tracker.name in ("wandb", "tensorboard", "trackio", "comet_ml") else tracker
