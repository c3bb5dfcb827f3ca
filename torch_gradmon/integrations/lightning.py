"""PyTorch Lightning: ``Trainer(callbacks=[GradmonCallback()])``."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core import validation as check
from ..core.errors import WarningLog, display
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import WatchOptions
from .common import AdapterMonitor, HasMonitor, is_number, last_step, whole_model_names

if TYPE_CHECKING:
    from typing_extensions import Unpack


# --- Means over the steps of an epoch ---

#: The largest of this whole-model value in an epoch is kept, under its name with ``_max``.
_NORM = "gradmon/grad_norm"
#: Counters of the whole run; an epoch keeps their last values.
_COUNTERS = ("gradmon/steps_not_applied", "gradmon/steps_skipped")


class EpochMeans:
    """Collects the values of steps, each step once, and gives the mean of each key over the steps that had it.

    Values that are not finite, as in an overflowed step of a GradScaler, are left out of means.
    """

    def __init__(self) -> None:
        self.last = -1  # number of the last added step
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.kept: dict[str, float] = {}

    def add(self, values: Mapping[str, float], step: int) -> bool:
        """Add the values of ``step``; returns False, without effect, if it was added before."""
        if step <= self.last:
            return False
        self.last = step
        for key, value in values.items():
            if key.endswith(_COUNTERS):
                self.kept[key] = value
            elif math.isfinite(value):
                self.sums[key] = self.sums.get(key, 0.0) + value
                self.counts[key] = self.counts.get(key, 0) + 1
                if key.endswith(_NORM):
                    self.kept[f"{key}_max"] = max(value, self.kept.get(f"{key}_max", value))
        return True

    def values(self) -> dict[str, float]:
        """The means by key, the largest gradient norm and the counters; empty without a step."""
        return {key: total / self.counts[key] for key, total in self.sums.items()} | self.kept

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain numbers."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        vars(self).update({name: copy.deepcopy(state[name]) for name in vars(self)})


def with_prefix(values: Mapping[str, float], prefix: str, everything: bool = False) -> dict[str, float]:
    """Whole-model values with ``prefix`` instead of ``gradmon/``; with ``everything``, it is also prepended to other keys."""
    found = {}
    for key, value in values.items():
        before, section, name = key.rpartition("gradmon/")
        found[before + prefix + name if section else (prefix if everything else "") + key] = value
    return found


#: The default prefixes of the values of a step and of an epoch.
SECTION, EPOCH = "gradmon/", "gradmon_epoch/"


class GradmonCallback(HasMonitor, Callback):
    """Watches what a Lightning ``Trainer`` trains.

    Gradients are those of the optimizer's step: accumulated, reduced over ranks, unscaled; ``grad_norm`` is before clipping. Rows of values
    go directly to the trainer's loggers, at a fraction of the cost of ``log_dict``; only ``summary`` goes through ``self.log``, for the
    progress bar and ``ModelCheckpoint(monitor="gradmon/grad_norm")``. Rows are numbered by optimizer steps from 0, as Lightning's own; if
    several optimizers alternate, all of them make one step.

    Args:
        monitor: your monitor, with any metrics and detectors; by default one is made with ``watch_arguments``.
        log_every_n_steps: steps from one row to the next; by default the trainer's ``log_every_n_steps``; 0 for no rows of steps.
        track_epochs: log the mean over all steps of each epoch, and the largest ``grad_norm``, whatever the cadence of rows. Values that
            are not finite, as in an overflowed step of a GradScaler, are left out of the means.
        summary: names of whole-model values for ``self.log``, in steps that have a row; this waits for the device.
        prog_bar: those of them on the progress bar.
        explosion_threshold: warn the first time that the gradient norm before clipping is larger, or not finite; None for never. The spike
            detector, which is active anyway, needs no such number.
        step_prefix: replaces ``gradmon/`` in the keys of rows; ``"train/"`` gives those of Lightning's ``GradientStatsMonitor``.
        epoch_prefix: the same for the values of an epoch. If a trainer has two callbacks, one needs another ``prefix=`` or other values of
            these two, which distinguish their keys and their states in checkpoints.
        watch_arguments: of :func:`torch_gradmon.watch`, without ``monitor``: ``on_spike="skip"``, ``layers="all"``,
            ``run_dir=...``.

    Override :meth:`step_values` and :meth:`epoch_values` to add, remove or rename logged values. Schedulers do not move in a
    skipped step.
    The state of the monitor and of the epoch is part of Lightning's checkpoints.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        monitor: ModuleMonitor | None = None,
        *,
        log_every_n_steps: int | None = None,
        track_epochs: bool = True,
        summary: Collection[str] = ("grad_norm", "update_ratio", "spike_score"),
        prog_bar: Collection[str] = ("grad_norm",),
        explosion_threshold: float | None = None,
        step_prefix: str = SECTION,
        epoch_prefix: str = EPOCH,
        **watch_arguments: Unpack[WatchOptions],
    ) -> None:
        if log_every_n_steps is not None:
            check.step_number("log_every_n_steps", log_every_n_steps)
        if explosion_threshold is not None:
            if not isinstance(explosion_threshold, (int, float)) or isinstance(explosion_threshold, bool):
                raise TypeError(f"explosion_threshold must be a number, such as 1e4, or None, got {display(explosion_threshold)}")
            if not explosion_threshold > 0:
                raise ValueError(f"explosion_threshold={explosion_threshold!r} must be positive, such as 1e4, or None")
        self._log_every, self._threshold = log_every_n_steps, explosion_threshold
        self._track_epochs = check.flag(track_epochs=track_epochs)
        self._summary, self._prog_bar = whole_model_names("summary", summary), whole_model_names("prog_bar", prog_bar)
        for name, prefix in (("step_prefix", step_prefix), ("epoch_prefix", epoch_prefix)):
            if not isinstance(prefix, str):
                raise TypeError(f"{name} must be a str, such as 'train/', got {display(prefix)}")
        self._prefixes = {"prefix": watch_arguments.get("prefix", ""), "step_prefix": step_prefix, "epoch_prefix": epoch_prefix}
        self._adapter = AdapterMonitor(monitor, watch_arguments, framework="lightning")
        self._epoch, self._complaints = EpochMeans(), WarningLog()
        self._loaded: Mapping[str, Any] = {}
        self._shown = -1

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints, with the prefixes that are not the default, because Lightning refuses two of one name."""
        given = zip(self._prefixes.items(), ("", SECTION, EPOCH), strict=True)
        return type(self).__qualname__ + "".join(f" {name}={own!r}" for (name, own), default in given if own != default)

    @property
    def step_prefix(self) -> str:
        """Replaces ``gradmon/`` in rows. A subclass may override it."""
        return self._prefixes["step_prefix"]

    @property
    def epoch_prefix(self) -> str:
        """The same for the values of an epoch."""
        return self._prefixes["epoch_prefix"]

    def step_values(self, values: dict[str, float]) -> dict[str, float]:
        """The values of a row for the loggers. Override it to add, remove or rename."""
        return values

    def epoch_values(self, values: dict[str, float]) -> dict[str, float]:
        """The values that are logged for an epoch, by default all means. Override it to add, remove or rename."""
        return values

    # --- called by Lightning --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start: the model is where it will be trained, and the checkpoint is loaded."""
        if all(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers):
            return  # configure_optimizers() gave no optimizer
        start, loaded = trainer.global_step // len(trainer.optimizers), self._loaded
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state, self._loaded = loaded.get("monitor"), {}
        self._adapter.begin(pl_module, trainer.optimizers, scaler=scaler, start_step=start, state=state, trainer=trainer)
        self._epoch, self._shown = EpochMeans(), -1
        if "epoch" in loaded:
            self._epoch.load_state_dict(loaded["epoch"])
        self._every: int = trainer.log_every_n_steps if self._log_every is None else self._log_every  # type: ignore[attr-defined]
        for logger in trainer.loggers if self._every else ():
            self._adapter.add_sink(_LoggerSink(logger, self), every=self._every)
        self._adapter.add_sink(self._take_values, on_all_ranks=True)
        self._adapter.hold_schedulers(trainer.optimizers, lambda: _moving_each_step(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an epoch with its first batch, unless it is resumed in the middle."""
        if self._adapter.schedulers is not None:
            self._adapter.schedulers.restore()
        if batch_idx == 0:
            self._catch_up()
            self._epoch.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Record the loss, and pass values for the progress bar to Lightning."""
        if self._adapter.schedulers is None:
            return
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if is_number(loss):
            # automatic optimisation returns a part of the mean over micro-batches
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._adapter.log("loss", loss if parts == 1 else loss * parts)
        # schedulers that follow a value move after the validation, which comes later
        self._adapter.schedulers.restore(
            again=lambda each: pl_module.automatic_optimization and isinstance(each, ReduceLROnPlateau)
        )
        step = last_step(self.monitor)
        if step is not None and step > self._shown and self._every and step % self._every == 0:
            self._shown = step
            self._log_summary(pl_module, self.monitor.get_step_metrics(), self.step_prefix, of_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the means over the steps of the epoch."""
        if self._adapter.schedulers is None:
            return
        self._adapter.schedulers.restore()
        if not self._track_epochs:
            return
        self._catch_up()
        values = self._epoch.values()
        row = self.epoch_values(with_prefix(values, self.epoch_prefix, everything=True)) if values else {}
        for logger in trainer.loggers if row else ():
            logger.log_metrics(row, self._epoch.last)
        self._log_summary(pl_module, values, self.epoch_prefix, of_epoch=True)

    def on_train_end(self, *_: Any) -> None:
        """Send waiting values, and leave the model as it was found."""
        if self._adapter.schedulers is not None:
            self._adapter.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, when training is interrupted."""
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor and of the epoch, as plain numbers and lists."""
        self._catch_up()
        state = self._adapter.state_dict()
        return {"monitor": state, "epoch": self._epoch.state_dict()} if state else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training begins."""
        self._loaded = dict(state_dict)

    # --- values --------------------------------------------------------------------------------------------------------------

    def _take_values(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of each step, on every rank."""
        if not self._epoch.add(values, step) or self._threshold is None:
            return
        norm = next((value for key, value in values.items() if key.endswith(_NORM)), 0.0)
        if not norm <= self._threshold:  # nor NaN
            message = (
                f"step {step}: the gradient norm before clipping is {norm:.4g}, above explosion_threshold={self._threshold:g}"
            )
            self._complaints.add("explosion", message)

    def _catch_up(self) -> None:
        """Add the values of the step that has just ended, which sinks get when the next one begins."""
        if (step := last_step(self.monitor)) is not None:
            self._take_values(self.monitor.get_step_metrics(), step)

    def _log_summary(self, pl_module: LightningModule, values: Mapping[str, float], prefix: str, of_epoch: bool) -> None:
        for key, value in values.items():
            before, section, name = key.rpartition(SECTION)
            if section and (name in self._summary or name.removesuffix("_max") in self._summary):
                on_bar = not of_epoch and name in self._prog_bar
                name = before + prefix + name
                pl_module.log(name, value, prog_bar=on_bar, logger=False, on_step=not of_epoch, on_epoch=of_epoch)


class _LoggerSink:
    """One of Lightning's loggers as a sink."""

    def __init__(self, logger: Any, callback: GradmonCallback) -> None:
        self.logger, self._callback = logger, callback

    def log(self, values: dict[str, float], step: int) -> None:
        self.logger.log_metrics(self._callback.step_values(with_prefix(values, self._callback.step_prefix)), step)

    def close(self) -> None:
        self.logger.save()


def _moving_each_step(trainer: Trainer, pl_module: LightningModule) -> list[Any]:
    """The schedulers that move with each step.

    Those of epochs, or of every n-th batch, follow the trainer's count, which also counts skipped batches. Undoing their move in
    a skipped batch would delay it by an epoch.
    """
    is_manual = not pl_module.automatic_optimization
    configs = trainer.lr_scheduler_configs
    return [config.scheduler for config in configs if is_manual or (config.interval == "step" and config.frequency == 1)]
