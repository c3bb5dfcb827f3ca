"""PyTorch-Ignite: ``GradMonHandler().attach(trainer, model, optimizer)``."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from ignite.engine import Engine, Events
from torch import nn

from ..core import validation as check
from ..core.errors import WarningLog, display
from ..core.keys import compile_pattern
from ..core.records import SpikeEvent
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import WatchOptions
from ..spikes import Rule, SpikeDetector
from .common import Watching

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradMonHandler:
    """Watches what an Ignite trainer trains, whatever its update function does.

    After each iteration ``engine.state.unhealthy_spike`` says whether a step that ended in it was a spike, on all ranks alike, and
    ``engine.state.metrics`` has the values of that step, if it was monitored, for the loggers that are attached later; this waits
    for the device. Steps are numbered from 1, so that without accumulation a step has the number of its iteration and ``every=10``
    means the iterations of ``Events.ITERATION_COMPLETED(every=10)``; with accumulation step 3 ends in the iteration 3 times as many.
    A second run of the same model goes on counting.

    Args:
        monitor: one of yours, with metrics, sinks and detectors as you like; by default one is made with ``watch_arguments``.
        rule: for the norm of all gradients before clipping: any of :mod:`torch_gradmon.spikes`, one of your own, a function of the
            norm that says whether it is a spike, or a :class:`SpikeDetector`, for any signal. By default a limit that follows the
            signal. It learns a value only after it has judged it.
        callback: called as ``callback(engine, event)`` for each spike, at the end of its iteration.
        keys: a pattern; values in whose key it is found go to ``engine.state.metrics``. By default those of the whole model, and with
            ``keys="."`` per-layer values too, as far as the monitor has them (``layers="all"``).
        watch_arguments: of :func:`torch_gradmon.watch` and :class:`torch_gradmon.ModuleMonitor`: ``on_spike="skip"``,
            ``layers="blocks"``, ``run_dir=...``.

    Ignite's ``Checkpoint`` saves and loads it like an optimizer: ``Checkpoint({"model": model, "gradmon": handler}, ...)``.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        monitor: ModuleMonitor | None = None,
        *,
        rule: Rule | Callable[[float], Any] | SpikeDetector | None = None,
        callback: Callable[[Engine, SpikeEvent], Any] | None = None,
        keys: str | re.Pattern[str] = "gradmon/",
        **watch_arguments: Unpack[WatchOptions],
    ) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be a function of the engine and the event, got {display(callback)}")
        self._keys = compile_pattern(keys, "keys")
        detectors = [] if rule is None else [rule if isinstance(rule, SpikeDetector) else SpikeDetector(rule)]
        self._watching = Watching(monitor, watch_arguments, detectors)
        self._callback, self._complaints = callback, WarningLog()
        self._trainer: weakref.ref[Engine] | None = None
        self._runs = False
        self._spiked = False  # in this iteration
        self._handles: list[Any] = []
        self._loaded: Mapping[str, Any] = {}
        self._published: dict[str, float] = {}
        self._seen: int | None = None

    @property
    def monitor(self) -> ModuleMonitor | None:
        """The monitor; unless you gave one it is None before the first run begins. It may be asked after the run, too."""
        return self._watching.monitor

    def attach(
        self, trainer: Engine, model: nn.Module, *optimizers: Any, scaler: torch.amp.GradScaler | None = None
    ) -> Attachment:
        """Watch ``model`` in the runs of ``trainer``, before the loggers that are to see its values are attached.

        Args:
            trainer: whose update function steps the optimizers.
            model: that is trained, after it was moved and wrapped.
            optimizers: in the order in which they step.
            scaler: the GradScaler that drives them; by default the one in ``trainer.state.scaler``, where Ignite keeps its own.

        Returns:
            What ends it again, as of an Ignite handler: ``.remove()``, or a ``with`` block.

        Raises:
            TypeError, ValueError: an argument is not what it should be, or this handler is attached already.
        """
        if not isinstance(trainer, Engine):
            raise TypeError(f"trainer must be an ignite.engine.Engine, got {display(trainer)}")
        if self._handles:
            raise ValueError("this handler is attached already; name all optimizers in one attach() call, or call detach() first")
        check.module(model)
        check.optimizers(model, optimizers)
        check.grad_scaler(scaler)
        self._trainer, self._model, self._scaler = weakref.ref(trainer), weakref.ref(model), scaler
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        trainer.state.unhealthy_spike = False  # type: ignore[attr-defined]
        for event, method in (
            (Events.STARTED, self._started),
            (Events.ITERATION_STARTED, self._iteration_started),
            (Events.ITERATION_COMPLETED, self._iteration_completed),
            (Events.TERMINATE, self._ended),
            (Events.COMPLETED, self._ended),
            (Events.EXCEPTION_RAISED, self._failed),
        ):
            self._handles.append(trainer.add_event_handler(event, method))
        return Attachment(self)

    def detach(self) -> None:
        """Send what waits, and leave the model and the trainer as they were found. May be called twice."""
        self._end()
        trainer = None if self._trainer is None else self._trainer()
        while self._handles:
            self._handles.pop().remove()
        if trainer is not None:
            self._withdraw(trainer)
            trainer.state.unhealthy_spike = False  # type: ignore[attr-defined]
            if not trainer._event_handlers.get(Events.EXCEPTION_RAISED, True):
                del trainer._event_handlers[Events.EXCEPTION_RAISED]  # an empty list there makes Ignite swallow exceptions

    def unless_skipped(self, engine: Engine, event: int) -> bool:
        """Whether the last step was not skipped: ``Events.ITERATION_STARTED(event_filter=handler.unless_skipped)`` for a scheduler."""
        return self.monitor is None or not self.monitor.step_skipped

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor, as plain numbers and lists; empty before the first run."""
        return dict(self._loaded) if self._loaded else self._watching.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, from the next run on or, within a run, from the next step on.

        Raises:
            TypeError, ValueError: not such a state; between runs what is wrong with its contents is a warning of the next one.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of GradMonHandler.state_dict(), got {display(state)}")
        if self._runs and state and self.monitor is not None:
            self.monitor.load_state_dict(state)
        else:
            self._loaded = dict(state)

    # --- what Ignite calls ---------------------------------------------------------------------------------------------------

    def _started(self, engine: Engine) -> None:
        self._begin(engine, engine.state.iteration + 1)

    def _begin(self, engine: Engine, first: int) -> None:
        model = self._model()
        if model is None:
            return  # nobody can train it
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        scaler = self._scaler if self._scaler is not None else getattr(engine.state, "scaler", None)
        scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        loaded, self._loaded = self._loaded, {}
        monitor = self._watching.begin(model, optimizers, scaler=scaler, start_step=first, state=loaded, trainer=engine)
        self._runs, self._seen = True, monitor.last_step

    def _iteration_started(self, engine: Engine) -> None:
        if not self._runs:  # attached in the middle of a run, or an exception was handled and the run goes on
            self._begin(engine, engine.state.iteration)
        self._withdraw(engine)
        self._spiked = False

    def _iteration_completed(self, engine: Engine) -> None:
        monitor = self.monitor
        if monitor is None or not self._runs:
            return
        ended = monitor.last_step
        if ended == self._seen:  # no step in this iteration
            self._flag(engine)
            return
        self._seen, events = ended, monitor.last_events
        self._spiked = bool(events) or monitor.step_skipped
        self._flag(engine)
        self._publish(engine, monitor.get_step_metrics())
        for event in events if self._callback is not None else ():
            try:
                self._callback(engine, event)  # type: ignore[misc]
            except Exception as error:
                self._complaints.add("callback", "the callback of GradMonHandler failed; training goes on", error)

    @staticmethod
    def _flag(engine: Engine) -> None:
        """Of several handlers on one trainer, each with a model of its own, none takes back what another one has said."""
        owners = (getattr(handler, "__self__", None) for handler, *_ in engine._event_handlers[Events.ITERATION_COMPLETED])
        spiked = any(isinstance(owner, GradMonHandler) and owner._spiked for owner in owners)
        engine.state.unhealthy_spike = spiked  # type: ignore[attr-defined]

    def _publish(self, engine: Engine, values: Mapping[str, float]) -> None:
        metrics = engine.state.metrics
        for key, value in values.items():
            if self._keys.search(key) and key in metrics:
                message = f"engine.state.metrics has another {key!r}, which stays; choose another prefix= for the monitor"
                self._complaints.add("metrics", message)
            elif self._keys.search(key):
                metrics[key] = self._published[key] = value

    def _withdraw(self, engine: Engine) -> None:
        """Values of an earlier iteration would be stale in the next one."""
        published, self._published = self._published, {}
        for key, value in published.items():
            if engine.state.metrics.get(key) is value:
                del engine.state.metrics[key]

    def _ended(self, engine: Engine) -> None:
        self._end()

    def _end(self) -> None:
        if self._runs:
            self._runs = False
            self._watching.end()

    def _failed(self, engine: Engine, error: BaseException) -> None:
        """Whoever handles this event keeps Ignite from raising, so without another handler the last of ours raises in its place."""
        self._end()
        owners = [getattr(handler, "__self__", None) for handler, *_ in engine._event_handlers[Events.EXCEPTION_RAISED]]
        if owners[-1] is self and all(isinstance(owner, GradMonHandler) for owner in owners):
            raise error


class Attachment:
    """What :meth:`GradMonHandler.attach` returns: it ends the watching of this trainer, as a RemovableEventHandle of Ignite would."""

    def __init__(self, handler: GradMonHandler) -> None:
        self._handler = handler

    def remove(self) -> None:
        """The same as :meth:`GradMonHandler.detach`."""
        self._handler.detach()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
