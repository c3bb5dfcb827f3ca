"""PyTorch Lightning: ``Trainer(callbacks=[GradMonCallback()])``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core import validation as check
from ..core.errors import WarningLog, display
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import WatchOptions
from ..step.micro_batches import DOCUMENTATION as BATCHES
from ..step.summary import DOCUMENTATION, ON_REQUEST
from .common import HeldSchedulers, Watching
from .epoch import Epoch, renamed

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SECTION, _EPOCH = "gradmon/", "gradmon_epoch/"


class GradMonCallback(Callback):
    """Watches what a Lightning ``Trainer`` trains.

    Gradients are those that the optimizer's step had: accumulated, reduced over ranks, unscaled; ``grad_norm`` is before clipping.
    Rows of values go straight to the trainer's loggers, at a small part of the cost of ``log_dict``; only ``summary`` goes through
    ``self.log``, for the progress bar and for ``ModelCheckpoint(monitor="gradmon/grad_norm")``. Rows are numbered by optimizer
    steps from 0, as Lightning's own; where several optimizers step by turns, all of them make one step.

    Args:
        monitor: one of yours, with metrics and detectors as you like; by default one is made with ``watch_arguments``.
        log_every_n_steps: steps from one row to the next; by default the trainer's ``log_every_n_steps``; 0 for no rows of steps.
        track_epochs: log the mean over all steps of each epoch, and the largest ``grad_norm``, whatever the cadence of rows. What is
            not finite, as in a step that a GradScaler refused, is left out of the means.
        summary: names of the whole-model values for ``self.log``, in steps that have a row, which waits for the device.
        prog_bar: which of these are on the progress bar.
        explosion_threshold: warn the first time that the gradient norm before clipping is larger, or not finite; None for never. The
            spike detector, which is there anyway, needs no such number.
        step_prefix: takes the place of ``gradmon/`` in the keys of rows; with ``"train/"`` they are those of Lightning's
            ``GradientStatsMonitor``.
        epoch_prefix: the same for the values of an epoch. Of two callbacks in one trainer one needs another ``prefix=`` or other
            values of these two, by which keys and states in checkpoints differ.
        watch_arguments: of :func:`torch_gradmon.watch` and :class:`torch_gradmon.ModuleMonitor`: ``on_spike="skip"``,
            ``layers="all"``, ``run_dir=...``.

    Override :meth:`step_values` and :meth:`epoch_values` to add, remove or rename what is logged. For schedulers too a step that is
    skipped did not happen. The state of the monitor and of the epoch is part of Lightning's checkpoints.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
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
        step_prefix: str = _SECTION,
        epoch_prefix: str = _EPOCH,
        **watch_arguments: Unpack[WatchOptions],
    ) -> None:
        if log_every_n_steps is not None:
            check.step_number("log_every_n_steps", log_every_n_steps)
        if explosion_threshold is not None:
            if not isinstance(explosion_threshold, (int, float)) or isinstance(explosion_threshold, bool):
                raise TypeError(f"explosion_threshold must be a number, such as 1e4, or None, got {display(explosion_threshold)}")
            if not explosion_threshold > 0:
                raise ValueError(f"explosion_threshold={explosion_threshold!r} must be positive, such as 1e4, or None")
        check.flag(track_epochs=track_epochs)
        for name, keys in (("summary", summary), ("prog_bar", prog_bar)):
            if isinstance(keys, str) or not isinstance(keys, Collection):
                raise TypeError(f"{name} must be names of whole-model values, such as ('grad_norm',), got {display(keys)}")
            for key in keys:
                check.one_of(name, key, (*DOCUMENTATION, *ON_REQUEST, *BATCHES))
        for name, value in (("step_prefix", step_prefix), ("epoch_prefix", epoch_prefix)):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a str, such as 'train/', got {display(value)}")
        self._watching = Watching(monitor, watch_arguments)
        self._log_every, self._track_epochs = log_every_n_steps, track_epochs
        self._summary, self._prog_bar, self._threshold = tuple(summary), frozenset(prog_bar), explosion_threshold
        self._step_prefix, self._epoch_prefix = step_prefix, epoch_prefix
        prefixes = {"prefix": watch_arguments.get("prefix", ""), "step_prefix": step_prefix, "epoch_prefix": epoch_prefix}
        usual = ("", _SECTION, _EPOCH)
        self._prefixes = [each for each, own in zip(prefixes.items(), usual, strict=True) if each[1] != own]
        self._epoch, self._complaints = Epoch(), WarningLog()
        self._held: HeldSchedulers | None = None
        self._sinks: list[Any] = []
        self._loaded: Mapping[str, Any] = {}
        self._shown = -1

    @property
    def state_key(self) -> str:
        """Under which its state is in checkpoints; Lightning refuses two of one name, so each prefix makes another one."""
        return type(self).__qualname__ + "".join(f" {name}={value!r}" for name, value in self._prefixes)

    @property
    def monitor(self) -> ModuleMonitor | None:
        """The monitor; unless you gave one it is None before the training begins. It may be asked after the training, too."""
        return self._watching.monitor

    @property
    def step_prefix(self) -> str:
        """What takes the place of ``gradmon/`` in rows. A subclass may override it."""
        return self._step_prefix

    @property
    def epoch_prefix(self) -> str:
        """The same for the values of an epoch."""
        return self._epoch_prefix

    def step_values(self, values: dict[str, float]) -> dict[str, float]:
        """What a row for the loggers has. Override it to add, remove or rename."""
        return values

    def epoch_values(self, values: dict[str, float]) -> dict[str, float]:
        """What is logged of an epoch with values, by default the means of all. Override it to add, remove or rename."""
        return values

    # --- what Lightning calls ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch: by now everything is where it will be trained, and the checkpoint is loaded."""
        if all(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers):
            return  # there is none: configure_optimizers() gave nothing to train with
        start, loaded = trainer.global_step // len(trainer.optimizers), self._loaded
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state, self._loaded = loaded.get("monitor"), {}
        monitor = self._watching.begin(
            pl_module, trainer.optimizers, scaler=scaler, start_step=start, state=state, trainer=trainer
        )
        self._epoch, self._shown = Epoch(), -1
        if "epoch" in loaded:
            self._epoch.load_state_dict(loaded["epoch"])
        self._every: int = trainer.log_every_n_steps if self._log_every is None else self._log_every  # type: ignore[attr-defined]
        self._sinks = [_Rows(logger, self) for logger in trainer.loggers] if self._every else []
        for rows in self._sinks:
            monitor.add_sink(rows, every=self._every)
        monitor.add_sink(self._see, on_all_ranks=True)
        self._held = HeldSchedulers(monitor, trainer.optimizers, lambda: _stepped_by(trainer, pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """With its first batch an epoch begins, be it one that a checkpoint was taken before; in the middle of one it goes on."""
        if self._held is not None:
            self._held.put_back()
        if batch_idx == 0:
            self._catch_up()
            self._epoch.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Give what belongs on the progress bar to Lightning."""
        if self._held is None or self.monitor is None:
            return
        # those that follow a value move after the validation, which comes later
        self._held.put_back(again=lambda each: pl_module.automatic_optimization and isinstance(each, ReduceLROnPlateau))
        step = self.monitor.last_step
        if step is not None and step > self._shown and self._every and step % self._every == 0:
            self._shown = step
            self._log(pl_module, self.monitor.get_step_metrics(), self.step_prefix, of_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the means over the steps of the epoch."""
        if self._held is not None:
            self._held.put_back()
        if self._held is None or self.monitor is None or not self._track_epochs:
            return
        self._catch_up()
        values = self._epoch.values()
        row = self.epoch_values(renamed(values, self.epoch_prefix, everything=True)) if values else {}
        for logger in trainer.loggers if row else ():
            logger.log_metrics(row, self._epoch.last)
        self._log(pl_module, values, self.epoch_prefix, of_epoch=True)

    def on_train_end(self, *_: Any) -> None:
        """Send what waits, and leave the model as it was found."""
        monitor = self.monitor
        if self._held is None or monitor is None:
            return
        self._watching.end()
        self._held.remove()
        self._held = None
        for sink in (*self._sinks, self._see):
            monitor.remove_sink(sink)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, when training breaks off."""
        self.on_train_end()

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor and of the epoch, as plain numbers and lists."""
        self._catch_up()
        state = self._watching.state_dict()
        return {"monitor": state, "epoch": self._epoch.state_dict()} if state else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep it until the training begins."""
        self._loaded = dict(state_dict)

    # --- what comes of it ----------------------------------------------------------------------------------------------------

    def _see(self, values: Mapping[str, float], step: int) -> None:
        """The values of each step, on every rank."""
        if not self._epoch.take(values, step) or self._threshold is None:
            return
        norm = next((value for key, value in values.items() if key.endswith(f"{_SECTION}grad_norm")), 0.0)
        if not norm <= self._threshold:
            message = (
                f"step {step}: the gradient norm before clipping is {norm:.4g}, above explosion_threshold={self._threshold:g}"
            )
            self._complaints.add("explosion", message)

    def _catch_up(self) -> None:
        """Take the values of the step that has just ended, which sinks get when the next one begins."""
        if self.monitor is not None and self.monitor.last_step is not None:
            self._see(self.monitor.get_step_metrics(), self.monitor.last_step)

    def _log(self, pl_module: LightningModule, values: Mapping[str, float], prefix: str, of_epoch: bool) -> None:
        for key, value in values.items():
            before, section, name = key.rpartition(_SECTION)
            if section and (name in self._summary or name.removesuffix("_max") in self._summary):
                on_bar = not of_epoch and name in self._prog_bar
                pl_module.log(
                    before + prefix + name, value, prog_bar=on_bar, logger=False, on_step=not of_epoch, on_epoch=of_epoch
                )


class _Rows:
    """One of Lightning's loggers as a sink."""

    def __init__(self, logger: Any, callback: GradMonCallback) -> None:
        self.logger, self._callback = logger, callback

    def log(self, values: dict[str, float], step: int) -> None:
        self.logger.log_metrics(self._callback.step_values(renamed(values, self._callback.step_prefix)), step)

    def close(self) -> None:
        self.logger.save()


def _stepped_by(trainer: Trainer, pl_module: LightningModule) -> list[Any]:
    """The schedulers that move with each step. Those of epochs, or of every so many batches, follow the trainer's count, which goes on:
    what they do in a batch that is skipped would come a whole epoch later if it were undone.
    """
    by_hand = not pl_module.automatic_optimization
    configs = trainer.lr_scheduler_configs
    return [config.scheduler for config in configs if by_hand or (config.interval == "step" and config.frequency == 1)]
