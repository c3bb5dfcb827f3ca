"""Weights & Biases: rows that get on with whatever else the script logs to the run.

A run has one counter. ``run.log(row)`` closes the open row and moves on, ``run.log(row, step=s)`` moves to ``s``, and a row for a
step that lies behind is dropped with no more than a warning. Who logs beside somebody else loses rows, or makes him lose
his, in three of six ways to do it. So the sink never names a step of its own: its rows have their own axis,
``gradmon/step``, join the row that is open, and open a new one only where that cannot overtake the script.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import GradmonWarning, display
from ..names import NAME_SOURCES, SUMMARY, TENSOR_SOURCES
from ..record import Event
from .histograms import Histogram, without_histograms

#: The axis of everything the sink logs: the monitor's step.
AXIS = f"{SUMMARY}/step"
#: Up to the slash that ends the section, where it is one of per-layer values: ``gradient/``, ``gradient_norm/``.
_SECTION = re.compile(rf"^.*?\b(?:{'|'.join(sorted((*TENSOR_SOURCES, *NAME_SOURCES), key=len, reverse=True))})(?:_\w+)?/")
#: Values that are kept back at most; beyond that the oldest rows go.
_MOST = 1_000_000


class WandbSink:
    """Logs to a W&B run.

    Rows are never lost, neither these nor the script's, whether that logs with ``step=`` or without. Until the script has logged
    something itself the first ``patience`` rows are kept back, for its first ``step=`` decides which steps are free. Where its
    ``step=`` counts more slowly than training steps do, as epochs do, there is no room for rows between: they wait until the
    monitor is detached or closed, which therefore comes before ``run.finish()``, and a warning says so.

    What ``log2_histogram`` counts becomes a W&B histogram. Per-layer values stay out of the run's summary. A spike is sent as an
    alert, at most one a minute for a signal.

    Args:
        run: what ``wandb.init()`` gave; by default the active run.
        patience: rows kept back at most while the script has not logged anything.

    Raises:
        ImportError: wandb is not installed.
        TypeError: ``run`` is no run.
        ValueError: there is no active run.
    """

    def __init__(self, run: Any = None, *, patience: int = 100) -> None:
        if find_spec("wandb") is None:
            raise ImportError("WandbSink needs wandb: pip install wandb")
        if run is None:
            run = import_module("wandb").run
            if run is None:
                raise ValueError("no W&B run is active: call wandb.init() before WandbSink(), or give it a run")
        if not all(callable(getattr(run, method, None)) for method in ("log", "define_metric", "alert")):
            raise TypeError(f"run must be what wandb.init() gives, got {display(run)}")
        self.run = run
        self._pace = _Pace(patience)
        self._held: deque[dict[str, Any]] = deque()
        self._known: set[str] = set()
        self._warned = False
        #: Where we left the run, and the step of our row in the row that was open; None where it had none.
        self._place = -1
        self._ours: float | None = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values`` now, or when there is room for them."""
        scalars, histograms = without_histograms(values)
        row = {**scalars, **{key: _native(found) for key, found in histograms.items()}}
        self._define(row)
        self._held.append({AXIS: step, **row})
        moved = self._look()
        self._pace.see(step, self._place, moved, _names_steps(self.run))
        if moved or (self._ours is None and not self._pace.is_free):
            self._put(commit=False)  # what is open is the script's row, or empty: it keeps its numbers
        while self._held and self._pace.allows(self._place + 1, step, len(self._held)):
            self._close_row()
            self._put(commit=self._pace.is_free)
        self._keep_small()

    def log_spike(self, event: Event, text: str) -> None:
        """Send an alert."""
        self.run.alert(title=f"spike in {event.signal}"[:63], text=text, level="WARN")

    def close(self) -> None:
        """Log what was kept back; the run stays open, it is not ours."""
        while self._held:
            self._look()
            self._close_row()
            self._put(commit=False)

    def _look(self) -> bool:
        """Whether the script has moved the run since we left it."""
        counter = counter_of(self.run)
        moved = counter != self._place
        if moved:
            self._place, self._ours = counter, None
        return moved

    def _put(self, commit: bool) -> None:
        """Our oldest row goes into the row that is open; with ``commit`` that is closed."""
        row = self._held.popleft()
        self.run.log(row, commit=commit)
        self._place, self._ours = (self._place + 1, None) if commit else (self._place, row[AXIS])

    def _close_row(self) -> None:
        """Close the open row if it has one of ours."""
        if self._ours is not None:
            self.run.log({AXIS: self._ours}, commit=True)
            self._place, self._ours = self._place + 1, None

    def _define(self, values: Mapping[str, Any]) -> None:
        if not self._known:
            self.run.define_metric(AXIS, hidden=True)
            self.run.define_metric(f"{SUMMARY}/*", step_metric=AXIS)
        for key in values.keys() - self._known:
            self._known.add(key)
            if section := _SECTION.match(key):
                # a value for each layer would rewrite the summary with every row
                pattern = f"{section[0]}*"
                if pattern not in self._known:
                    self._known.add(pattern)
                    self.run.define_metric(pattern, step_metric=AXIS, summary="none")
                if "." in key:  # takes part in no pattern, and has to be escaped
                    self.run.define_metric(key.replace(".", r"\."), step_metric=AXIS, summary="none")
            elif not key.startswith(f"{SUMMARY}/"):
                self.run.define_metric(key.replace(".", r"\."), step_metric=AXIS)

    def _keep_small(self) -> None:
        if len(self._held) <= self._pace.patience:
            return
        if not self._warned:
            self._warned = True
            warnings.warn(
                "torch_gradmon: this script's run.log(step=...) counts more slowly than training steps, so that W&B has no place for "
                f"rows between; those of the monitor are kept back until it is detached, {_MOST:,} values at most. Log without "
                "step= to have them at once, and the epoch as a metric (run.define_metric('*', step_metric='epoch'))",
                GradmonWarning,
                stacklevel=2,
            )
        lost = 0
        while sum(map(len, self._held)) > _MOST:
            self._held.popleft()
            lost += 1
        if lost:
            raise OverflowError(f"{lost} rows could be kept back no longer")


class _Pace:
    """How far the counter of a run may go without overtaking the script's own ``step=``."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._logs = self._names = self._keeps_up = False
        self._first = True
        #: Our step and the run's counter when the script was last seen to move it.
        self._seen: tuple[int, int] | None = None

    def see(self, step: int, counter: int, moved: bool, names: bool) -> None:
        """At our ``step`` the run stands at ``counter``, ``moved`` by the script or not; it ``names`` its steps or it does not."""
        self._logs |= names or (moved and not self._first)
        if names and (moved or not self._names):
            if self._seen is not None and step > self._seen[0]:
                self._keeps_up = counter - self._seen[1] >= step - self._seen[0]
            elif self._seen is None:
                self._keeps_up = counter == step > 1  # of 0 and 1 epochs have the look of steps
            self._seen = step, counter
        self._names = names
        self._first = False

    def allows(self, position: int, step: int, waiting: int) -> bool:
        """Whether at our ``step`` the counter may go to ``position``, for one of so many rows ``waiting``."""
        if self._names:
            return self._keeps_up and self._seen is not None and position - step <= self._seen[1] - self._seen[0]
        self._logs |= waiting > self.patience  # it does not seem to log at all
        return self._logs

    @property
    def is_free(self) -> bool:
        """Whether the script takes whatever place is next."""
        return self._logs and not self._names


def _native(histogram: Histogram) -> Any:
    return import_module("wandb").Histogram(np_histogram=(histogram.counts, histogram.edges))


def counter_of(run: Any) -> int:
    """Where the run stands. It keeps count itself; asking for it costs half a millisecond."""
    count: int | None = getattr(run, "_local_step", None)
    return run.step if count is None else count


def _names_steps(run: Any) -> bool:
    """Whether ``step=`` was ever given to ``run.log``; W&B notes that for itself."""
    try:
        return bool(run._telemetry_obj.feature.set_step_log)
    except AttributeError:
        return False
