"""A callback for the ``Trainer`` of Hugging Face Transformers: ``Trainer(..., callbacks=[GradMonCallback()])``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from ..core import validation as check
from ..core.errors import WarningLog, display
from ..core.fence import is_disabled
from ..core.keys import SUMMARY
from ..monitor.monitor import ModuleMonitor
from ..monitor.options import WatchOptions
from ..sinks.tensorboard import TensorBoardSink
from ..sinks.trackio import TrackioSink
from ..sinks.wandb import WandbSink
from ..step.micro_batches import DOCUMENTATION as BATCHES
from ..step.summary import DOCUMENTATION, ON_REQUEST
from .common import HeldSchedulers, Watching

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: What joins the Trainer's own log line.
LOG_KEYS = ("grad_norm", "grad_norm_clipped", "clipped_share", "spike_score", "steps_not_applied")
_RESTORE = "restore_callback_states_from_checkpoint"


class GradMonCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # without Transformers they are Any
    """Watches the model of a ``Trainer`` while it trains. Nothing else in the script changes.

    ==========================  ===================================================================================
    where                       what
    ==========================  ===================================================================================
    the Trainer's log line      ``gradmon/{key}`` for each of ``log_keys``, on the screen and in ``log_history``
    the run of a reporter       all that the monitor shows, per-layer values too, of every step, by ``report``
    ``trainer_state.json``      what the monitor has learned; a training that is resumed goes on with it
    :attr:`monitor`             the rest: ``get_step_metrics()``, ``why()``, ``add_sink()``
    ==========================  ===================================================================================

    Steps are numbered as ``state.global_step`` is when they begin, from 0; so the line of step 10 ends with the values of step 9.
    A second ``train()`` of the same model goes on counting, and another model gets a monitor of its own, unless one was given.

    Args:
        monitor: not attached yet, with metrics, sinks and detectors as one likes; None to have one made when training begins.
        report: add the sink for each of ``args.report_to`` that is ``"wandb"``, ``"tensorboard"`` (in a directory ``gradmon``
            beneath the Trainer's, which TensorBoard shows as a run beside it) or ``"trackio"``. False where ``monitor`` has them.
        log_keys: whole-model values, by name, for the Trainer's log line: each as it was last since the line before.
        watch_arguments: those of :func:`torch_gradmon.watch` and of :class:`torch_gradmon.ModuleMonitor`, without ``monitor``.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
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
        if isinstance(log_keys, str) or not isinstance(log_keys, Collection):
            raise TypeError(f"log_keys must be names of whole-model values, such as {LOG_KEYS[:2]}, got {display(log_keys)}")
        for name in log_keys:
            check.one_of("log_keys", name, (*DOCUMENTATION, *ON_REQUEST, *BATCHES))
        self._watching = Watching(monitor, watch_arguments)
        given = {} if monitor is None else {"monitor": monitor}
        self._arguments = {"report": report, "log_keys": list(log_keys), **given, **watch_arguments}
        self._logged = re.compile(rf"(?:^|\W|_){SUMMARY}/(?:{'|'.join(log_keys) or '(?!)'})$")
        self._since: dict[str, float] = {}  # the values for the next line, from steps after this one:
        self._line = -1
        self._sinks: list[Any] = []
        self._held: HeldSchedulers | None = None
        self._complaints = WarningLog()

    @property
    def monitor(self) -> ModuleMonitor | None:
        """The monitor; None before training begins, unless it was given."""
        return self._watching.monitor

    # --- what the Trainer tells ----------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises ValueError if the Trainer is to make this callback anew from a checkpoint, which cannot hold all its arguments."""
        unkept = sorted(self._arguments.keys() - self._kept().keys())
        if unkept and getattr(args, _RESTORE, False):
            raise ValueError(
                f"{_RESTORE}=True makes callbacks anew from JSON, which cannot hold {', '.join(unkept)}; leave it out: what "
                "GradMonCallback has learned comes back from a checkpoint all the same"
            )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Attach."""
        self._let_go()  # of a training that was broken off
        # resumed from a checkpoint without this callback, the Trainer would fail where it saves the next one
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if is_disabled():
            return
        if type(optimizer).__name__ == "DeepSpeedOptimizerWrapper":
            raise ValueError("DeepSpeed steps by itself and keeps gradients from hooks; use FSDP2, or leave GradMonCallback out")
        saved = self._saved(kept) if state.global_step > 0 else None
        scaler, start = getattr(optimizer, "scaler", None), state.global_step
        # the Trainer itself is not told of; its control object is one for all its callbacks
        monitor = self._watching.begin(model, [optimizer], scaler=scaler, start_step=start, state=saved, trainer=control)
        scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # of Accelerate
        self._held = HeldSchedulers(monitor, [check.bare_optimizer(optimizer)], lambda: [scheduler])
        self._since, self._line = {}, -1
        self._sinks = [self._note]
        monitor.add_sink(self._note, self._logged, deferred=True, on_all_ranks=True)
        for sink in self._reporters(args, state):
            monitor.add_sink(sink, deferred=True)
            self._sinks.append(sink)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo what the scheduler did in a step that was skipped."""
        if self._held is not None:
            self._held.put_back()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Join the line with the loss. What the Trainer has of it besides is for reporters, which came before."""
        if self.monitor is None or not logs or is_disabled():
            return
        if "train_runtime" in logs:  # the last line: after it reporters close their runs
            self.monitor.end_step()
        elif "loss" in logs and "learning_rate" in logs:
            self._note(self.monitor.get_step_metrics(), self.monitor.step or 0)
            logs.update(self._since)
            if state.log_history and "loss" in state.log_history[-1]:
                state.log_history[-1].update(self._since)
            self._since, self._line = {}, self.monitor.step or 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach."""
        self._let_go()

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``: the arguments as far as JSON can hold them, and what the monitor has learned."""
        learned: dict[str, Any] = {}
        if self.monitor is not None and not is_disabled():
            self.monitor.end_step()  # what was logged late is learned when the step is over
            learned = self._watching.state_dict()
            try:
                json.dumps(learned, sort_keys=True)
            except (TypeError, ValueError) as error:
                learned = {}
                message = "the monitor's state does not go into the checkpoint, for it is not JSON: a rule of yours?"
                self._complaints.add("state", message, error)
        return {"args": self._kept(), "attributes": {}, "monitor": learned}

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _kept(self) -> dict[str, Any]:
        plain = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in self._arguments.items()}
        return {k: v for k, v in plain.items() if v is None or isinstance(v, (str, int, float, list))}

    def _saved(self, kept: Any) -> Any:
        """The monitor's state in a checkpoint. Of several callbacks of one name the Trainer puts the states into one list, those of
        later checkpoints behind those of earlier ones; there it is the last one with the arguments of this callback.
        """
        if isinstance(kept, list):
            own = [each for each in kept if isinstance(each, dict) and each.get("args") == self._kept()]
            if not own:
                message = (
                    "the checkpoint has the states of several GradMonCallbacks, none with these arguments; this one begins anew"
                )
                self._complaints.add("resume", message)
            kept = own[-1] if own else None
        return kept.get("monitor") if isinstance(kept, dict) else None

    def _note(self, values: dict[str, float], step: int) -> None:
        if step > self._line:
            self._since.update({key: value for key, value in values.items() if self._logged.search(key)})

    def _let_go(self) -> None:
        """Detach, and leave the monitor with the sinks that it had."""
        sinks, self._sinks = self._sinks, []
        if self._held is not None:
            self._held.remove()
            self._held = None
        try:
            self._watching.end()
        finally:  # where a spike in the last step is raised
            for sink in sinks:
                assert self.monitor is not None
                self.monitor.remove_sink(sink)

    def _reporters(self, args: Any, state: Any) -> Iterator[Any]:
        """A sink for each reporter, which has opened its run before this callback's turn came, on the first rank only."""
        # the reporter never names a step, so that W&B takes a row of ours at any time
        of: dict[str, Callable[[], Any]] = {
            "wandb": lambda: WandbSink(alone=True),
            "trackio": TrackioSink,
            "tensorboard": lambda: TensorBoardSink(below(args, state)),
        }
        for name in args.report_to if self._reports and state.is_world_process_zero else ():
            if name in of:
                try:
                    yield of[name]()
                except (ImportError, TypeError, ValueError, OSError) as error:
                    self._complaints.add(f"report:{name}", f"GradMonCallback does not report to {name}", error)


def below(args: Any, state: Any) -> Path:
    """A directory of its own, since TensorBoard reads one file of a directory at a time, in the one that the Trainer writes to.

    Its name holds the time at which it was made, and only the Trainer's callback knows it; but that has just opened a file there.
    """
    told = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if told and state.trial_name is None:
        return Path(told).expanduser() / SUMMARY
    root = Path(args.output_dir, "runs")
    files = [path for path in root.rglob("events.out.tfevents.*") if path.parent.name != SUMMARY]
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent / SUMMARY if files else root / SUMMARY
