"""A callback for the ``Trainer`` of Hugging Face Transformers: ``Trainer(..., callbacks=[GradmonCallback()])``."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import trainer_callback

from ..capture.hooks import WrappedMethod
from ..core import validation as check
from ..core.errors import WarningLog
from ..core.fence import is_disabled
from ..core.keys import SUMMARY
from ..core.trainers import WITH_LOSS_FUNCTION
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import WatchOptions
from ..sinks.tensorboard import TensorBoardSink
from ..sinks.trackio import TrackioSink
from ..sinks.wandb import WandbSink
from .common import AdapterMonitor, HasMonitor, whole_model_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

if not hasattr(trainer_callback, "ExportableState"):
    raise ImportError(f"GradmonCallback needs transformers 4.45 or newer, and this is {transformers.__version__}")

#: The default values in the Trainer's own log line.
LOG_KEYS = ("grad_norm", "grad_norm_after_clip", "clip_fraction", "spike_score", "steps_not_applied")
#: Of the Trainer's own line: what the monitor measures itself, and what is no value of the step.
_NOT_TAKEN = frozenset({"grad_norm", "epoch", "step", "total_flos"})
_STEP = "training_step"
_RESTORE = "restore_callback_states_from_checkpoint"


# without Transformers both are Any
class GradmonCallback(HasMonitor, trainer_callback.TrainerCallback, trainer_callback.ExportableState):  # type: ignore[misc]
    """Watches the model of a ``Trainer`` while it trains. Nothing else in the script changes.

    ==========================  ===================================================================================
    where                       what
    ==========================  ===================================================================================
    the Trainer's log line      ``gradmon/{key}`` for each of ``log_keys``, on the screen and in ``log_history``
    the run of a reporter       all values that the monitor shows, per-layer values too, of every step, by ``report``
    ``trainer_state.json``      the state of the monitor, with which a resumed training continues
    :attr:`monitor`             everything else: ``get_step_metrics()``, ``why()``, ``add_sink()``
    ==========================  ===================================================================================

    Steps have the number ``state.global_step`` at their beginning, from 0, so the line of step 10 ends with the values of step 9.
    A second ``train()`` of the same model continues the count; another model gets its own monitor, unless one was given.

    Args:
        monitor: not attached yet, with any metrics, sinks and detectors; None to have one made when training begins.
        report: add the sink for each of ``args.report_to`` that is ``"wandb"``, ``"tensorboard"`` (in a directory ``gradmon``
            below the
            Trainer's, which TensorBoard shows as another run) or ``"trackio"``. False if ``monitor`` has these sinks.
        log_keys: names of whole-model values for the Trainer's log line; each has its last value since the previous line.
        watch_arguments: those of :func:`torch_gradmon.watch`, without ``monitor``.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        monitor: ModuleMonitor | None = None,
        *,
        report: bool = True,
        log_keys: Collection[str] = LOG_KEYS,
        **watch_arguments: Unpack[WatchOptions],
    ) -> None:
        self._reports = check.flag(report=report)
        log_keys = whole_model_names("log_keys", log_keys)
        self._adapter = AdapterMonitor(monitor, watch_arguments, framework="transformers")
        given = {} if monitor is None else {"monitor": monitor}
        self._arguments = {"report": report, "log_keys": list(log_keys), **given, **watch_arguments}
        self._logged = re.compile(rf"(?:^|\W|_){SUMMARY}/(?:{'|'.join(log_keys) or '(?!)'})$")
        self._line_values: dict[str, float] = {}  # the values for the next line, from steps after this one:
        self._line = -1
        self._losses: WrappedMethod | None = None
        self._complaints = WarningLog()

    # --- called by the Trainer ----------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse to be recreated from a checkpoint, which cannot hold all arguments.

        Raises:
            ValueError: the Trainer would do so.
        """
        unkept = sorted(self._arguments.keys() - _for_json(self._arguments).keys())
        if unkept and getattr(args, _RESTORE, False):
            raise ValueError(
                f"{_RESTORE}=True recreates callbacks from JSON, which cannot hold {', '.join(unkept)}; leave it out: GradmonCallback "
                "restores its state from a checkpoint anyway"
            )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Attach."""
        self._detach()  # of an interrupted training
        # without this entry, as in a checkpoint made without this callback, the Trainer fails at its next checkpoint
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if is_disabled():
            return
        source = None
        own = _trainer_of(control)
        if type(optimizer).__name__ == "DeepSpeedOptimizerWrapper":
            from ..monitor.engines import unpacked

            if not check.is_deepspeed(engine := getattr(own, "model_wrapped", None)):
                raise ValueError(
                    "the Trainer's DeepSpeed engine was not found, so GradmonCallback cannot follow it; call gradmon.watch(engine) with it "
                    "instead"
                )
            model, (optimizer,), source = unpacked(engine, [])
        saved = self._saved(kept) if state.global_step > 0 else None
        scaler, start = getattr(optimizer, "scaler", None), state.global_step
        # the name of the trial, which may be empty, in a search for hyperparameters
        trial = (state.trial_name or "") if getattr(state, "is_hyper_param_search", False) else None
        # the control object identifies the Trainer: all its callbacks get the same one
        monitor = self._adapter.begin(
            model, [optimizer], scaler=scaler, start_step=start, state=saved, trainer=control, source=source, trial=trial
        )
        bound = float(getattr(args, "max_grad_norm", None) or 0.0)
        monitor._runtime.pipeline.directory.annotate(clip_bound=bound)
        if getattr(own, "compute_loss_func", None) is not None:
            monitor._runtime.pipeline.directory.annotate(trainer=WITH_LOSS_FUNCTION)
        self._losses = None if own is None else WrappedMethod(own, _STEP, self._logged_step)
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # of Accelerate
        self._adapter.hold_schedulers([check.bare_optimizer(optimizer)], lambda: [scheduler])
        self._line_values, self._line = {}, -1
        self._adapter.add_sink(self._collect, keys=self._logged, deferred=True, on_all_ranks=True)
        for sink in self._reporters(args, state):
            self._adapter.add_sink(sink, deferred=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo the move of the scheduler in a skipped step."""
        if self._adapter.schedulers is not None:
            self._adapter.schedulers.restore()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add values to the line with the loss. Other logs of the Trainer are for reporters, which came before."""
        if not logs or is_disabled():
            return
        if "train_runtime" in logs:  # the last line; then reporters close their runs
            self.monitor.end_step()
        elif "loss" in logs and "learning_rate" in logs:
            self._collect(self.monitor.get_step_metrics(), self.monitor.current_step or 0)
            for key in logs.keys() - (_NOT_TAKEN if self._losses is None else _NOT_TAKEN | {"loss"}):
                self._adapter.log(key, logs[key])
            logs.update(self._line_values)
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1].update(self._line_values)
            self._line_values, self._line = {}, self.monitor.current_step or 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach."""
        self._detach()

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``: the arguments that JSON can hold, and the state of the monitor."""
        learned: dict[str, Any] = {}
        if not is_disabled():
            self.monitor.end_step()  # late values join the state when the step is over
            learned = self._adapter.state_dict()
            try:
                json.dumps(learned, sort_keys=True)
            except (TypeError, ValueError) as error:
                learned = {}
                message = (
                    "the monitor's state is left out of the checkpoint because it is not JSON; a custom rule may be the reason"
                )
                self._complaints.add("state", message, error)
        return {"args": _for_json(self._arguments), "attributes": {}, "monitor": learned}

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _logged_step(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record what ``training_step`` of this one Trainer returns: the part of a micro-batch in the step's loss, as the Trainer divides
        it, whatever the accumulation, and detached. Their sum is the loss that the Trainer would log for this step alone.
        """
        loss = training_step(*args, **kwargs)
        self._adapter.log("loss", loss, "sum")
        return loss

    def _saved(self, kept: Any) -> Any:
        """The monitor's state in a checkpoint.

        The Trainer stores the states of several callbacks of one name as a list, later checkpoints after earlier ones. The state of this
        callback is the last one with its arguments.
        """
        if isinstance(kept, list):
            own = [each for each in kept if isinstance(each, dict) and each.get("args") == _for_json(self._arguments)]
            if not own:
                message = (
                    "the checkpoint has several GradmonCallbacks, none with these arguments; this one starts without a state"
                )
                self._complaints.add("resume", message)
            kept = own[-1] if own else None
        return kept.get("monitor") if isinstance(kept, dict) else None

    def _collect(self, values: dict[str, float], step: int) -> None:
        if step > self._line:
            self._line_values.update({key: value for key, value in values.items() if self._logged.search(key)})

    def _detach(self) -> None:
        if self._losses is not None:
            self._losses.remove()
            self._losses = None
        self._adapter.end()

    def _reporters(self, args: Any, state: Any) -> Iterator[Any]:
        """A sink for each reporter, on the first rank only; reporters have opened their runs before this callback."""
        # the reporter names no step, so W&B takes rows at any time
        of: dict[str, Callable[[], Any]] = {
            "wandb": lambda: WandbSink(alone=True),
            "trackio": TrackioSink,
            "tensorboard": lambda: TensorBoardSink(run_directory(args, state)),
        }
        for name in args.report_to if self._reports and state.is_world_process_zero else ():
            if name in of:
                try:
                    yield of[name]()
                except (ImportError, TypeError, ValueError, OSError) as error:
                    self._complaints.add(f"report:{name}", f"GradmonCallback does not report to {name}", error)


def _trainer_of(control: Any) -> Any:
    """The Trainer that is calling, which callbacks do not get: all of its callbacks share ``control``. None if it is not found."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return next((it for it in callers if getattr(it, "control", None) is control and hasattr(it, _STEP)), None)


def _for_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that JSON can hold."""
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in arguments.items()}
    return {name: value for name, value in plain.items() if value is None or isinstance(value, (str, int, float, list))}


def run_directory(args: Any, state: Any) -> Path:
    """A directory below the one that the Trainer writes to, because TensorBoard reads one file of a directory at a time.

    The Trainer's directory has its creation time in its name, which only the Trainer's callback knows; but it has just opened a
    file there.
    """
    if own := getattr(args, "logging_dir", None):  # before Transformers 5, which asks the environment instead
        return Path(own, state.trial_name or "") / SUMMARY
    logging_dir = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if logging_dir and state.trial_name is None:
        return Path(logging_dir).expanduser() / SUMMARY
    root = Path(args.output_dir, "runs")
    files = [path for path in root.rglob("events.out.tfevents.*") if path.parent.name != SUMMARY]
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent / SUMMARY if files else root / SUMMARY
