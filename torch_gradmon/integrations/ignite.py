"""PyTorch-Ignite: ``GradmonHandler().attach(trainer, model, optimizer)``."""

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
from ..monitor.monitor import Handle, ModuleMonitor
from ..monitor.options import WatchOptions
from ..spikes import Rule, SpikeDetector
from ..step.planner import source_for
from .common import AdapterMonitor, HasMonitor, last_step

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradmonHandler(HasMonitor):
    """Watches what an Ignite trainer trains, whatever its update function does.

    After each iteration ``engine.state.unhealthy_spike`` is whether a step that ended in it was a spike, on all ranks alike, and
    ``engine.state.metrics`` has the values of that step, if it was monitored, for loggers that are attached later; this waits for the
    device. Steps are numbered from 1: without accumulation, a step has the number of its iteration, and ``every=10`` means the iterations
    of ``Events.ITERATION_COMPLETED(every=10)``. With accumulation over 3 iterations, step n ends in iteration 3 n. A second run of the same
    model continues the count.

    Args:
        monitor: your monitor, with any metrics, sinks and detectors; by default one is made with ``watch_arguments``.
        rule: for the norm of all gradients before clipping: one of :mod:`torch_gradmon.spikes`, a custom rule, a function of the norm that
            returns whether it is a spike, or a :class:`SpikeDetector` for any signal. By default a limit that follows the signal.
        callback: called as ``callback(engine, event)`` for each spike, at the end of its iteration.
        keys: a pattern for the keys of values in ``engine.state.metrics``. By default those of the whole model; ``keys="."`` adds per-layer
            values, if the monitor has them (``layers="all"``).
        watch_arguments: of :func:`torch_gradmon.watch`, without ``monitor``: ``on_spike="skip"``,
            ``layers="blocks"``, ``run_dir=...``.

    Ignite's ``Checkpoint`` saves and loads it like an optimizer: ``Checkpoint({"model": model, "gradmon": handler}, ...)``.

    Raises:
        TypeError, ValueError: an argument is wrong.
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
        self._adapter = AdapterMonitor(monitor, watch_arguments, detectors, framework="ignite")
        self._callback, self._complaints = callback, WarningLog()
        # of all but the scaler weak references
        self._trainer: weakref.ref[Engine] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref[Any]] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._runs = self._spiked = False  # the second: in this iteration
        self._handles: list[Any] = []
        self._loaded: Mapping[str, Any] = {}
        self._published: dict[str, float] = {}  # values of the last step in engine.state.metrics
        self._last_step: int | None = None

    def attach(self, trainer: Engine, model: nn.Module, *optimizers: Any, scaler: torch.amp.GradScaler | None = None) -> Handle:
        """Watch ``model`` in the runs of ``trainer``. Attach loggers that read its values afterwards.

        Args:
            trainer: whose update function steps the optimizers.
            model: after it was moved and wrapped.
            optimizers: in the order in which they step.
            scaler: GradScaler that drives them; by default the one in ``trainer.state.scaler``, where Ignite keeps its own.

        Returns:
            A handle that detaches it: ``.remove()``, or a ``with`` block.

        Raises:
            TypeError, ValueError: an argument is wrong, or this handler is attached already.
        """
        if not isinstance(trainer, Engine):
            raise TypeError(f"trainer must be an ignite.engine.Engine, got {display(trainer)}")
        if self._handles:
            raise ValueError("this handler is attached already; name all optimizers in one attach() call, or call detach() first")
        check.module(model)
        check.optimizers(model, optimizers, source_for(model, None))
        check.grad_scaler(scaler)
        self._trainer, self._model, self._scaler = weakref.ref(trainer), weakref.ref(model), scaler
        self._optimizers = [weakref.ref(each) for each in optimizers]
        trainer.state.unhealthy_spike = False  # type: ignore[attr-defined]
        for event, method in (
            (Events.STARTED, lambda engine: self._begin(engine, engine.state.iteration + 1)),
            (Events.ITERATION_STARTED, self._iteration_started),
            (Events.ITERATION_COMPLETED, self._iteration_completed),
            (Events.TERMINATE, self._end),
            (Events.COMPLETED, self._end),
            (Events.EXCEPTION_RAISED, self._failed),
        ):
            self._handles.append(trainer.add_event_handler(event, method))
        return Handle(self.detach)

    def detach(self) -> None:
        """Send waiting values, and leave the model and the trainer as they were found. Idempotent."""
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
        """Whether the last step was not skipped, for a scheduler:
        ``Events.ITERATION_STARTED(event_filter=handler.unless_skipped)``.
        """
        return not self.monitor.step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor, as plain numbers and lists; empty before the first run."""
        return dict(self._loaded) if self._loaded else self._adapter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, from the next run on or, within a run, from the next step on.

        Raises:
            TypeError, ValueError: it is not such a state. Between runs, wrong contents give a warning in the next run.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of GradmonHandler.state_dict(), got {display(state)}")
        if self._runs and state:
            self.monitor.load_state_dict(state)
        else:
            self._loaded = dict(state)

    # --- called by Ignite ------------------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine, first: int) -> None:
        model = None if self._model is None else self._model()
        if model is None:
            return  # it was garbage-collected
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        scaler = self._scaler or getattr(engine.state, "scaler", None)
        scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        loaded, self._loaded = self._loaded, {}
        monitor = self._adapter.begin(model, optimizers, scaler=scaler, start_step=first, state=loaded, trainer=engine)
        self._runs, self._last_step = True, last_step(monitor)

    def _iteration_started(self, engine: Engine) -> None:
        if not self._runs:  # attached during a run, or the run continues after a handled exception
            self._begin(engine, engine.state.iteration)
        self._withdraw(engine)
        self._spiked = False

    def _iteration_completed(self, engine: Engine) -> None:
        monitor = self.monitor
        if not self._runs:
            return
        output = engine.state.output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, int):  # such as a count of the iteration
            self._adapter.log("loss", loss)
        last, record = last_step(monitor), monitor.last_record
        has_step = last != self._last_step
        self._last_step, events = last, record.spikes if has_step and record is not None else ()
        self._spiked |= bool(events) or (has_step and monitor.step_was_skipped)
        # with several handlers, each for its own model, a spike of any of them sets it
        owners = (getattr(handler, "__self__", None) for handler, *_ in engine._event_handlers[Events.ITERATION_COMPLETED])
        spiked = any(isinstance(owner, GradmonHandler) and owner._spiked for owner in owners)
        engine.state.unhealthy_spike = spiked  # type: ignore[attr-defined]
        if not has_step:
            return
        metrics = engine.state.metrics
        for key, value in monitor.get_step_metrics().items():
            if self._keys.search(key) and key not in metrics:
                metrics[key] = self._published[key] = value
            elif self._keys.search(key):
                message = f"engine.state.metrics has another {key!r}, which stays; choose another prefix= for the monitor"
                self._complaints.add("metrics", message)
        for event in events if self._callback is not None else ():
            try:
                self._callback(engine, event)  # type: ignore[misc]
            except Exception as error:
                self._complaints.add("callback", "the callback of GradmonHandler failed; training continues", error)

    def _withdraw(self, engine: Engine) -> None:
        """Remove the values of the last step, which are stale in the next one."""
        values, self._published = self._published, {}
        for key, value in values.items():
            if engine.state.metrics.get(key) is value:
                del engine.state.metrics[key]

    def _end(self, *_: Engine) -> None:
        if self._runs:
            self._runs = False
            self._adapter.end()

    def _failed(self, engine: Engine, error: BaseException) -> None:
        """Ignite does not raise if this event has handlers, so without other handlers the last of ours raises instead."""
        self._end()
        owners = [getattr(handler, "__self__", None) for handler, *_ in engine._event_handlers[Events.EXCEPTION_RAISED]]
        if owners[-1] is self and all(isinstance(owner, GradmonHandler) for owner in owners):
            raise error
