"""Hugging Face Accelerate: ``Accelerator(log_with=[GradmonTracker(monitor), ...])``.

Nothing else is needed: :func:`torch_gradmon.watch` takes what ``accelerator.prepare`` returns, with its GradScaler;
``monitor.add_sink(accelerator)`` feeds all trackers, and ``accelerator.register_for_checkpointing(monitor)`` saves the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from ..core.errors import WarningLog, display
from ..monitor.monitor import ModuleMonitor


class GradmonTracker(GeneralTracker):  # type: ignore[misc]
    """Adds what a loop logs by ``accelerator.log`` to the monitor's record of the step.

    The values are then in the run directory and in the report on a spike, and ``SpikeDetector(signal="loss")`` watches them. They belong to
    the open step or, between its end and the next forward, to the step that just ended; ``step=`` is for the other trackers. Accelerate
    logs on the main process only. If several processes judge a loss together, or a loss decides about a skip, log it by
    ``monitor.log_scalar`` on each of them before the optimizer steps.

    Values that are not numbers are left out, with one warning, and so are values of the monitor. Name this tracker first: at the end of
    training it sends waiting values to the other trackers before they close. The configuration given to ``init_trackers`` is not used.

    Args:
        monitor: may get its model and its optimizer later, by ``set_module`` and ``attach``.

    Attributes:
        logged_anyhow: keys that the other trackers get from ``accelerator.log``; ``monitor.add_sink(accelerator)`` leaves them
            out.

    Raises:
        TypeError: ``monitor`` is not a monitor.
    """

    name = "gradmon"
    requires_logging_directory = False

    def __init__(self, monitor: ModuleMonitor) -> None:
        if not isinstance(monitor, ModuleMonitor):
            raise TypeError(f"monitor must be a ModuleMonitor, got {display(monitor)}")
        self.monitor = monitor
        monitor._runtime.pipeline.directory.annotate(trainer="accelerate")
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
        """Add numbers to the monitor. Waits for the device only for a new key."""
        self.logged_anyhow.update(values)
        for key, value in values.items():
            if self._is_own(key):
                continue
            try:
                self.monitor.log_scalar(key, value)
                self._taken.add(key)
            except (TypeError, ValueError) as error:
                self._complaints.add("value", f"the monitor's record leaves out {key!r} of accelerator.log", error)

    def _is_own(self, key: str) -> bool:
        """Whether it is a value of the monitor, as in a loop that logs ``monitor.get_step_metrics()``."""
        if key not in self._taken and key not in self._own and key in self.monitor.get_step_metrics():
            self._own.add(key)
        return key in self._own

    def finish(self) -> None:
        """Send waiting values, and leave the model as it was found."""
        self.monitor.detach()
