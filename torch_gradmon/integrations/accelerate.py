"""Hugging Face Accelerate: ``Accelerator(log_with=[GradMonTracker(monitor), ...])``.

Nothing else is needed for it: :func:`torch_gradmon.watch` takes what ``accelerator.prepare`` returns, with its GradScaler,
``monitor.add_sink(accelerator)`` feeds all trackers, and ``accelerator.register_for_checkpointing(monitor)`` saves the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from ..core.errors import WarningLog, display
from ..monitor.monitor import ModuleMonitor


class GradMonTracker(GeneralTracker):  # type: ignore[misc]
    """What a loop logs by ``accelerator.log`` becomes part of the monitor's record of the step.

    So it is in the run directory and in the story of a spike, and ``SpikeDetector(signal="loss")`` watches it. The values belong to
    the step in flight or, between its end and the next forward, to the step that just ended, whatever ``step=`` says, which is for
    the other trackers. Accelerate logs on the main process only: where several processes are to judge a loss together, or it is to
    decide about a skip, log it by ``monitor.log_scalar`` on each of them, before the optimizer steps.

    What is no number is left out, with one warning, and so are values that come from the monitor. Name it first: the end of
    training sends what waits to the other trackers before they close. The configuration given to ``init_trackers`` is not kept.

    Args:
        monitor: which may get its model and its optimizer later, by ``set_module`` and ``attach``.

    Attributes:
        logged_anyhow: keys that the other trackers have from ``accelerator.log``; ``monitor.add_sink(accelerator)`` leaves them out.

    Raises:
        TypeError: ``monitor`` is no monitor.
    """

    name = "gradmon"
    requires_logging_directory = False

    def __init__(self, monitor: ModuleMonitor) -> None:
        if not isinstance(monitor, ModuleMonitor):
            raise TypeError(f"monitor must be a ModuleMonitor, got {display(monitor)}")
        self.monitor = monitor
        self.logged_anyhow: set[str] = set()
        self._own: set[str] = set()
        self._taken: set[str] = set()
        self._complaints = WarningLog()
        super().__init__()

    @property
    def tracker(self) -> ModuleMonitor:
        """The monitor, for ``accelerator.get_tracker("gradmon", unwrap=True)``."""
        return self.monitor

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Give what is a number to the monitor. Waits for the device only where a key comes for the first time."""
        self.logged_anyhow.update(values)
        for key, value in values.items():
            if self._is_own(key):
                continue
            try:
                self.monitor.log_scalar(key, value)
                self._taken.add(key)
            except (TypeError, ValueError) as error:
                self._complaints.add(
                    "value", f"what accelerator.log has under {key!r} is left out of the monitor's record", error
                )

    def _is_own(self, key: str) -> bool:
        """Whether it is a value of the monitor's, as where a loop logs ``monitor.get_step_metrics()``."""
        if key not in self._taken and key not in self._own and key in self.monitor.get_step_metrics():
            self._own.add(key)
        return key in self._own

    def finish(self) -> None:
        """Training has ended: send what waits, and leave the model as it was found."""
        self.monitor.detach()
