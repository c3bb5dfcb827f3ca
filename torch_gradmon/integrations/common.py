"""What the adapters for trainers share: the monitor that each is given or makes, and schedulers that pass over a skipped step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.hooks import Handles
from ..core import validation as check
from ..core.errors import WarningLog, display
from ..monitor import replacing
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import check_names
from ..monitor.watch import prepared
from ..spikes import SpikeDetector


class Watching:
    """The monitor of an adapter: one that was given, or one that is made when training begins.

    It is not made before, since only then the processes and the device are there; its arguments are checked at once.

    Args:
        monitor: not attached yet, with metrics, sinks and detectors as one likes; None to have one made.
        arguments: those of :func:`torch_gradmon.watch` and of :class:`torch_gradmon.ModuleMonitor` but the model, the optimizers
            and the scaler, which the trainer has; only without ``monitor``.
        detectors: that a monitor which is made gets besides those of its preset, or instead of them; only without ``monitor``.

    Raises:
        TypeError: ``monitor`` is no monitor, or an argument is unknown.
        ValueError: both are given, or an argument is not what it should be.
    """

    def __init__(
        self, monitor: ModuleMonitor | None, arguments: Mapping[str, Any], detectors: Sequence[SpikeDetector] = ()
    ) -> None:
        if monitor is not None and not isinstance(monitor, ModuleMonitor):
            raise TypeError(f"monitor must be a ModuleMonitor, or None to have one made, got {display(monitor)}")
        if monitor is not None and arguments:
            raise ValueError(f"give either a monitor or arguments to make one, got a monitor and {', '.join(sorted(arguments))}")
        if monitor is not None and detectors:
            raise ValueError(
                "a monitor that is given has detectors of its own: call monitor.add_detector(SpikeDetector(rule)) instead"
            )
        own = {"module": "the model", "scaler": "the GradScaler", "start_step": "the number of the first step"}
        for name in arguments:
            if name in own:
                raise TypeError(f"{name}= is not needed here: the trainer has {own[name]}")
        check_names(arguments, ("preset", "on_spike"))
        if arguments:  # a rehearsal, which writes nothing, raises what there is to raise
            prepared(None, **{**arguments, "run_dir": None, "compile_statistics": False})
        self.monitor = monitor
        self._is_own = monitor is None
        self._arguments = dict(arguments)
        self._detectors = tuple(detectors)
        self._model: weakref.ref[nn.Module] | None = None

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        scaler: torch.amp.GradScaler | None = None,
        start_step: int = 0,
        state: Mapping[str, Any] | None = None,
        trainer: object = None,
    ) -> ModuleMonitor:
        """Watch ``model`` from now on. A monitor of its own serves one model; a second training of the same one goes on with it. What
        :func:`torch_gradmon.watch`, or the adapter of another trainer, still watches the model with is detached.

        Args:
            model: that is trained.
            optimizers: that train it, in the order in which they step.
            scaler: the GradScaler that drives them.
            start_step: number of the first step.
            state: what :meth:`ModuleMonitor.state_dict` gave in the run that goes on; one that does not fit is left with a warning.
            trainer: whose adapter this is; it may have several for one model.

        Raises:
            TypeError, ValueError: as :meth:`ModuleMonitor.attach`.
        """
        is_new = self._model is None or self._model() is not model
        self.end()  # of a training that was broken off
        if self._is_own and is_new:
            check.optimizers(model, optimizers)  # before there is a run directory
            self.monitor = prepared(model, **self._arguments)
            for detector in self._detectors:
                self.monitor.add_detector(detector)
        assert self.monitor is not None
        if self.monitor.module is not model:
            self.monitor.set_module(model)
        self._model = weakref.ref(model)
        first = start_step if is_new else None
        replacing.attach(self.monitor, optimizers, scaler=scaler, start_step=first, owner=trainer)
        if state:
            try:
                self.monitor.load_state_dict(state)
            except (TypeError, ValueError) as error:
                WarningLog().say("the monitor's state in the checkpoint does not fit this monitor, which begins anew", error)
        return self.monitor

    def state_dict(self) -> dict[str, Any]:
        """The monitor's; empty before there is one."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def end(self) -> None:
        """Send what waits, and leave the model as it was found; the values and the story stay. May be called twice."""
        if self.monitor is not None:
            self.monitor.detach()


class HeldSchedulers:
    """Learning rates that a skipped step leaves where they were, though the trainer steps its schedulers all the same.

    What schedulers and the options of their optimizers are is remembered right after a step that was skipped, and put back when the
    trainer has gone past its schedulers. In other steps nothing is copied.

    Args:
        monitor: says whether a step was skipped.
        optimizers: whose steps they follow; plain ones, which call hooks.
        schedulers: a function that gives those that the trainer steps at this moment.
    """

    def __init__(self, monitor: ModuleMonitor, optimizers: Iterable[Optimizer], schedulers: Callable[[], Iterable[Any]]) -> None:
        self._monitor, self._schedulers = weakref.ref(monitor), schedulers
        self._kept: list[tuple[Any, dict[str, Any], list[dict[str, Any]]]] = []
        self._handles = Handles()
        for optimizer in optimizers:
            self._handles.of_optimizer(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        monitor = self._monitor()
        if monitor is not None and monitor.step_skipped:
            # a trainer's scheduler may know the optimizer by a wrapper
            own = [each for each in self._schedulers() if check.inside(getattr(each, "optimizer", None)) is optimizer]
            self._kept += [(each, copy.deepcopy(each.state_dict()), _options(optimizer)) for each in own]

    def put_back(self, again: Callable[[Any], bool] = lambda scheduler: False) -> None:
        """Undo what the schedulers did since a step that was skipped; without one it does nothing.

        Args:
            again: whether a scheduler has not moved for this step yet, so that the next call is to undo that.
        """
        kept, self._kept = self._kept, [each for each in self._kept if again(each[0])]
        for scheduler, state, options in kept:
            scheduler.load_state_dict(state)
            for group, before in zip(scheduler.optimizer.param_groups, options, strict=True):
                for name, value in before.items():
                    if isinstance(value, torch.Tensor):
                        group[name].copy_(value)  # the tensor that a compiled optimizer knows
                    else:
                        group[name] = value

    def remove(self) -> None:
        """Follow no more."""
        self._handles.remove()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: copy.deepcopy(each) for name, each in g.items() if name != "params"} for g in optimizer.param_groups]
