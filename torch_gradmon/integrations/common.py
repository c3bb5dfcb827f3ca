"""What the adapters share: the monitor that each is given or makes, and schedulers that do not move in a skipped step."""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.hooks import Handles
from ..core import validation as check
from ..core.errors import WarningLog, display, nearest
from ..core.keys import Key, parse_key
from ..core.trainers import advice_for
from ..monitor import watch
from ..monitor.monitor import Handle, ModuleMonitor
from ..monitor.options import WatchOptions
from ..monitor.watch import made
from ..spikes import SpikeDetector
from ..step.model_index import GradientSource
from ..step.planner import source_for
from ..step.summary import BATCH_DOCUMENTATION, KEY_DOCUMENTATION, ON_REQUEST


def last_step(monitor: ModuleMonitor) -> int | None:
    """Number of the step that ended last, which reads nothing of it."""
    return monitor._runtime.state.ended


class AdapterMonitor:
    """The monitor of an adapter: a given one, not attached yet; or one that is made here, by the ``arguments`` of
    :func:`torch_gradmon.watch` and with these ``detectors`` too, whose run begins with the training, when the processes are known.
    ``framework``: a name in :data:`torch_gradmon.core.trainers.TRAINERS`, by which a diagnosis gives advice.
    """

    def __init__(
        self,
        monitor: ModuleMonitor | None,
        arguments: Mapping[str, Any],
        detectors: Sequence[SpikeDetector] = (),
        framework: str = "",
    ) -> None:
        if monitor is not None and not isinstance(monitor, ModuleMonitor):
            raise TypeError(f"monitor must be a ModuleMonitor, or None to have one made, got {display(monitor)}")
        if monitor is not None and arguments:
            raise ValueError(f"give either a monitor or arguments to make one, got a monitor and {', '.join(sorted(arguments))}")
        if monitor is not None and detectors:
            raise ValueError("a given monitor has its own detectors: call monitor.add_detector(SpikeDetector(rule)) instead")
        own = {"module": "the model", "scaler": "the GradScaler", "start_step": "the number of the first step"}
        for name in arguments:
            if name in own:
                raise TypeError(f"{name}= is not needed here: the trainer has {own[name]}")
            if name not in WatchOptions.__annotations__:
                raise TypeError(
                    f"there is no argument {name!r}{nearest(name, WatchOptions.__annotations__)}; monitor= takes a monitor with others"
                )
        self._is_made_here = monitor is None
        self._arguments = dict(arguments)
        self._detectors = tuple(detectors)
        self.monitor = self._early() if monitor is None else monitor
        self._framework = framework
        self._model: weakref.ref[nn.Module] | None = None
        self._models = 0  # for which a monitor was made
        self._complaints = WarningLog()
        self._sinks: list[Handle] = []  # of this training
        self.schedulers: SchedulerRollback | None = None

    def _early(self) -> ModuleMonitor:
        """A monitor without its run and trackers, which begin with the training: the script may add metrics to it before."""
        monitor = made(None, **{**self._arguments, "run_dir": None, "log_to": None})
        for detector in self._detectors:
            monitor.add_detector(detector)
        return monitor

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own monitor."""
        state = {**vars(self), "_sinks": [], "schedulers": None}
        return {**state, "monitor": None, "_model": None} if self._is_made_here else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._is_made_here:
            self.monitor = self._early()

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        scaler: torch.amp.GradScaler | None = None,
        start_step: int = 0,
        state: Mapping[str, Any] | None = None,
        trainer: object = None,
        source: GradientSource | None = None,
        trial: str | None = None,
    ) -> ModuleMonitor:
        """Watch ``model`` from now on, see :meth:`ModuleMonitor.attach`.

        A monitor made here serves one model, with a run directory of its own; a second training of the same model continues with it.
        A monitor of the same model from :func:`torch_gradmon.watch`, or from the adapter of another trainer, is detached. A ``state`` that
        does not fit is ignored with a warning. ``trial``: the name of this training among those of a search, which may be empty.
        """
        is_new = self._model is None or self._model() is not model
        self.end()  # of an interrupted training
        if self._is_made_here and is_new:
            # before the run directory exists
            remedy = advice_for(self._framework).another_model
            check.optimizers(model, optimizers, source_for(model, source), remedy)
            if self._models:  # each has a monitor of its own
                self.monitor = self._early()
        if source is not None:
            self.monitor._runtime.planner.use(source)
        if self.monitor.module is not model:
            self.monitor.set_module(model)
            if self._is_made_here:
                of = self._of_trial(trial)
                self.monitor._begin_run(of.get("run_dir"), of.get("log_to"))
        self._model = weakref.ref(model)
        first = start_step if is_new else None
        watch.attach(self.monitor, optimizers, scaler=scaler, start_step=first, owner=trainer)
        self.monitor._runtime.pipeline.directory.annotate(trainer=self._framework)
        if state:
            try:
                self.monitor.load_state_dict(state)
            except (TypeError, ValueError) as error:
                WarningLog().warn(
                    "the monitor's state in the checkpoint does not fit this monitor, which starts without it", error
                )
        return self.monitor

    def _of_trial(self, trial: str | None) -> dict[str, Any]:
        """The arguments for one of several models, each of which has its run directory: a run would replace the one before."""
        self._models += 1
        place = self._arguments.get("run_dir")
        if place is None or (trial is None and self._models == 1):
            return self._arguments
        name = re.sub(r"[^\w.,=+-]", "_", trial or "").lstrip(".") or f"trial-{self._models}"
        path = Path(place, name)
        message = (
            f"several models train with one callback: the run of this one is in {os.fspath(path)!r}, those of others beside it"
        )
        self._complaints.add("trial", message)
        return {**self._arguments, "run_dir": path}

    def log(self, key: str, value: Any, aggregation: str = "mean") -> None:
        """Log what the trainer knows about the step; what the script logs replaces it. Waits for no device. What is not one real number, or
        has the key of a value of the monitor, is left out.
        """
        if self._model is not None and is_number(value) and not parse_key(key).source:
            self.monitor._runtime.lifecycle.values.log(Key("", key, ""), value, aggregation, stands_in=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor; empty before the training."""
        return {} if self._model is None else self.monitor.state_dict()

    def add_sink(self, sink: Any, **options: Any) -> None:
        """See :meth:`ModuleMonitor.add_sink`; until the end of this training."""
        self._sinks.append(self.monitor.add_sink(sink, **options))

    def hold_schedulers(self, optimizers: Iterable[Optimizer], moving: Callable[[], Iterable[Any]]) -> None:
        """See :class:`SchedulerRollback`; until the end of this training."""
        self.schedulers = SchedulerRollback(self.monitor, optimizers, moving)

    def end(self) -> None:
        """Send waiting values, and leave the model as it was found; values and spike reports stay. Idempotent."""
        sinks, self._sinks = self._sinks, []
        if self.schedulers is not None:
            self.schedulers.remove()
            self.schedulers = None
        try:
            self.monitor.detach()
        finally:  # also if a spike in the last step raises
            for sink in sinks:
                sink.remove()


class HasMonitor:
    """An adapter, by its monitor."""

    _adapter: AdapterMonitor

    @property
    def monitor(self) -> ModuleMonitor:
        """The monitor, which takes metrics, sinks and detectors from the start: ``monitor.add_gradient_metric("norm")``. It stays
        readable after the training; each of several models has its own.
        """
        return self._adapter.monitor

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.monitor!r})"


def is_number(value: Any) -> bool:
    """Whether it is one real number, on whatever device."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real) and not isinstance(value, bool)


class SchedulerRollback:
    """Undoes the moves of learning rate schedulers in skipped steps, in which the trainer moves them all the same.

    Right after a skipped step, the states of the schedulers that the trainer moves now and the options of their optimizers are stored; they
    are restored after the trainer has moved its schedulers. Other steps copy nothing. Optimizers are unwrapped ones, which call hooks.
    """

    def __init__(self, monitor: ModuleMonitor, optimizers: Iterable[Optimizer], schedulers: Callable[[], Iterable[Any]]) -> None:
        self._monitor, self._schedulers = weakref.ref(monitor), schedulers
        self._kept: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = []
        self._handles = Handles()
        for optimizer in optimizers:
            self._handles.of_optimizer(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        monitor = self._monitor()
        if monitor is not None and monitor.step_was_skipped:
            # a scheduler of a trainer may hold its optimizer in a wrapper
            own = [each for each in self._schedulers() if check.inside(getattr(each, "optimizer", None)) is optimizer]
            options = [{name: copy.deepcopy(of) for name, of in g.items() if name != "params"} for g in optimizer.param_groups]
            self._kept += [(each, copy.deepcopy(each.state_dict()), options) for each in own]

    def restore(self, again: Callable[[Any], bool] = lambda scheduler: False) -> None:
        """Undo the moves of the schedulers since a skipped step. ``again``: whether a scheduler has not moved for this step yet, so that
        the next call has to undo its move.
        """
        kept, self._kept = self._kept, [each for each in self._kept if again(each[0])]
        for scheduler, state, options in kept:
            scheduler.load_state_dict(state)
            for group, before in zip(scheduler.optimizer.param_groups, options, strict=True):
                for name, value in before.items():
                    if isinstance(value, torch.Tensor):
                        group[name].copy_(value)  # a compiled optimizer uses this tensor
                    else:
                        group[name] = value

    def remove(self) -> None:
        """Remove the hooks."""
        self._handles.remove()


def whole_model_names(argument: str, names: Any) -> tuple[str, ...]:
    """Check ``names``, an argument with names of whole-model values."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"{argument} must be names of whole-model values, such as ('grad_norm',), got {display(names)}")
    for name in names:
        check.one_of(argument, name, (*KEY_DOCUMENTATION, *ON_REQUEST, *BATCH_DOCUMENTATION))
    return tuple(names)
