"""One sink with its filter of keys and steps. :class:`Delivery` makes the calls."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from ..core.errors import WarningLog, display, nearest
from ..core.keys import compile_pattern
from ..core.records import SpikeEvent
from .delivery import Delivery, PendingCall
from .tensorboard import TensorBoardSink
from .trackio import CometSink, MlflowSink, TrackioSink
from .wandb import WandbSink

# --- adapters ---

_METHODS = ("log", "log_metrics", "log_dict")
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


def sender(sink: Any) -> Callable[..., object]:
    """The function of values and ``step=`` that sends them to ``sink``.

    Raises:
        TypeError: it has no such method and is not callable with these arguments.
    """
    methods: list[Callable[..., object]] = [method for name in _METHODS if callable(method := getattr(sink, name, None))]
    # an object with such a method is not meant to be called itself: a Lightning module is callable
    for function in methods or ([sink] if callable(sink) else []):
        if _takes_values_and_step(function):
            return function
    raise TypeError(
        "a sink needs a method log(dict, step=) or log_metrics(dict, step=), or must be callable as sink(dict, step=), with a parameter of "
        f"that name, as lambda values, step: ... has it; got {display(sink)}"
    )


def _takes_values_and_step(function: Callable[..., Any]) -> bool:
    for follow in (True, False):  # a decorator may declare another signature than its function has, as in SwanLab
        try:
            inspect.signature(function, follow_wrapped=follow).bind({}, step=0)
        except TypeError:
            continue
        except ValueError:  # a built-in function without a signature
            pass
        return True
    return False


def closer(sink: Any) -> Callable[[], object] | None:
    """The function that flushes and closes ``sink``, or None."""
    if callable(close := getattr(sink, "close", None)):
        return close  # type: ignore[no-any-return]
    is_of_lightning, save = _kind_of(sink)[0] in ("lightning", "pytorch_lightning"), getattr(sink, "save", None)
    # a logger that Trainer.fit has finalised would not write later rows by itself
    return save if is_of_lightning and hasattr(sink, "log_metrics") and callable(save) else None


def name_of(sink: Any) -> str:
    """The sink's class or the function's name, for messages."""
    name: str = getattr(sink, "__name__", type(sink).__name__)
    return name


# --- the filter ---

_NORM = "gradmon/grad_norm"
#: Suffix of the key for the largest gradient norm since the last row.
LARGEST = "_max"


class FilteredSink:
    """One sink with its filter. Raises TypeError if ``sink`` is none, see :meth:`ModuleMonitor.add_sink`, ValueError for keys or every.

    Its method ``log_spike(event, text)``, if any, is called for each spike, whatever ``keys`` and ``every`` are. If ``every`` is above 1,
    each row also has the largest ``gradmon/grad_norm`` since the row before, as ``gradmon/grad_norm_max``.
    """

    def __init__(
        self,
        sink: Any,
        keys: str | re.Pattern[str] | None,
        every: int,
        complaints: WarningLog,  # gets failures, each under ``sink:{class}``
        deferred: bool = False,  # values may come one step late, so that nothing waits for the device
        thread: bool = False,
        kept: object = "",  # where all lost rows are stored as well, see Delivery
        without: Container[str] = (),  # keys that are never sent; may grow
        given: Any = None,  # the object that the sink was made from
        is_on_all_ranks: bool = False,  # it gets values also on ranks that do not report
    ) -> None:
        self.keys = None if keys is None else compile_pattern(keys, "keys")
        self._without = without
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be a positive int, such as 10 for every tenth step")
        self.sink = sink
        self.every = every
        self.deferred = deferred
        self.given = sink if given is None else given
        self.is_on_all_ranks = is_on_all_ranks
        self.takes_values = bool(getattr(sink, "takes_values", True))  # one that does not look at values costs no dict
        self._log = sender(self.sink)
        self._complaints = complaints
        self._delivery = Delivery(name_of(sink), complaints, kept, thread)
        self._norm = ""  # the key of the gradient norm, once there was one
        self._largest: dict[str, float] = {}  # the largest since the last row, by the key that it gets
        self._lost = 0

    @property
    def is_of_package(self) -> bool:
        """Whether the sink is a class of this package, which holds nothing of the training."""
        return type(self.sink).__module__.startswith(__package__ or " ") and not getattr(self.sink, "is_of_script", False)

    @property
    def dropped(self) -> bool:
        """Whether the sink was given up."""
        return self._delivery.dropped

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Send the step's values. Never raises: a failing sink is retried with the next step, then dropped."""
        if self.every > 1:
            self._note_largest(values)
            if step % self.every:
                return
        keys, without = self.keys, self._without
        chosen = dict(values)
        if keys is not None or without:
            chosen = {key: value for key, value in values.items() if key not in without and (keys is None or keys.search(key))}
        chosen |= self._largest
        self._largest = {}
        self._delivery.put(PendingCall(step, partial(self._log, step=step), (chosen,)))
        lost = getattr(self.sink, "lost", 0)  # rows that the sink has kept back, and lost later
        if lost > self._lost:
            self._delivery.lose(lost - self._lost)
            self._lost = lost

    def _note_largest(self, values: Mapping[str, float]) -> None:
        if not self._norm:
            keys = (key for key in values if key.endswith(_NORM) and key not in self._without)
            self._norm = next((key for key in keys if self.keys is None or self.keys.search(key)), "")
        if (value := values.get(self._norm)) is not None:
            known = self._largest.get(self._norm + LARGEST, -math.inf)
            if not (math.isnan(known) or value <= known):
                self._largest[self._norm + LARGEST] = value  # NaN too, and it stays, so that it is seen

    def send_spike(self, event: SpikeEvent, text: str) -> None:
        """Send a spike, if the sink has a method for that. Never raises."""
        log_spike = getattr(self.sink, "log_spike", None)
        if callable(log_spike):
            self._delivery.put(PendingCall(event.step, partial(log_spike, event, text), rows=0))

    def close(self) -> None:
        """Send what waits and close the sink, if it can be closed. Never raises."""
        if not self._delivery.close():
            return  # its thread is blocked in the sink, and closing might block as well
        if (close := closer(self.sink)) is not None:
            try:
                close()
            except (Exception, SystemExit) as error:
                cause = f"{self._delivery.cause}:close"
                self._complaints.add(cause, f"the sink {name_of(self.sink)} could not be closed", error)
