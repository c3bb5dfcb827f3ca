"""Sinks for Comet, MLflow and Trackio."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from ..core.errors import display
from ..core.records import SpikeEvent
from .delivery import require
from .tensorboard import with_histograms_of

# --- Unique names for trackers that restrict length or characters ---


class KeyRewriter:
    """Gives each key a unique name of ``longest`` characters at most; ``clean`` may map two keys to one name."""

    def __init__(self, longest: int, clean: Callable[[str], str] = str) -> None:
        self._longest, self._clean = longest, clean
        self._names: dict[str, str] = {}  # by key
        self._taken: set[str] = set()

    def __call__(self, key: str) -> str:
        """The name for ``key``, always the same."""
        if key not in self._names:
            name = start = self._clean(key)
            number = zlib.crc32(key.encode())
            while len(name) > self._longest or name in self._taken:
                mark = f"_{number:08x}"
                name = start[: self._longest - len(mark)] + mark
                number = (number + 1) % 2**32
            self._names[key] = name
            self._taken.add(name)
        return self._names[key]


# --- Comet, whose experiment has one step for all loggers ---

#: Characters of a name that Comet keeps.
LONGEST = 100


class CometSink:
    """Logs to a Comet experiment without changing the step that the script has set.

    Comet cuts names at 100 characters; here cut names stay distinct.

    Args:
        experiment: a ``comet_ml.Experiment``, online or offline.
    """

    def __init__(self, experiment: Any) -> None:
        self.experiment = experiment
        self._name = KeyRewriter(LONGEST)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``.

        Raises:
            RuntimeError: the experiment has ended, which Comet itself would not report.
        """
        if not self.experiment.alive:
            raise RuntimeError("the experiment has ended; detach the monitor before experiment.end()")
        before = self.experiment.curr_step
        try:
            self.experiment.log_metrics({self._name(key): value for key, value in values.items()}, step=step)
        finally:
            self.experiment.curr_step = before


# --- MLflow, which takes at most a thousand metrics at once and few characters in their names ---

#: Metrics in one call of ``log_metrics``, and characters in a name, by MLflow's own limits.
AT_ONCE, MLFLOW_LONGEST = 1000, 250
_NOT_ALLOWED = re.compile(r"[^\w/.\- ]")


class MlflowSink:
    """Logs to an MLflow run, or to a logger with ``log_metrics`` in front of MLflow.

    Names that MLflow rejects are changed: brackets become underscores, empty parts of a path are removed, long names are cut. Two names
    never become one.

    Args:
        logger: by default MLflow itself with the run that is active now, whichever thread sends the rows, even after the run has ended.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: no run is active.
    """

    def __init__(self, logger: Any = None) -> None:
        if logger is not None:
            self._log: Callable[..., Any] = logger.log_metrics
        else:
            require("mlflow", self)
            mlflow = import_module("mlflow")
            run = mlflow.active_run()
            if run is None:
                raise ValueError("no MLflow run is active: call mlflow.start_run() before MlflowSink()")
            # the active run is thread-local, and without one MLflow starts another
            self._log = partial(mlflow.log_metrics, run_id=run.info.run_id)
        self._name = KeyRewriter(MLFLOW_LONGEST, _allowed)
        #: Step and number of the values of the row that failed half-way.
        self._done = (-1, 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``, a thousand at once. A retry of a partly failed row continues where it stopped."""
        done = self._done[1] if self._done[0] == step else 0
        pairs = islice(values.items(), done, None)
        while part := {self._name(key): value for key, value in islice(pairs, AT_ONCE)}:
            self._log(part, step=step)
            done += len(part)
            self._done = step, done
        self._done = -1, 0


def _allowed(key: str) -> str:
    parts = [part for part in _NOT_ALLOWED.sub("_", key).split("/") if part.strip(".")]
    name = "/".join(parts) or "_"
    return f"_{name}" if name.startswith("..") else name


# --- Trackio: local, one SQLite file for each project ---


class TrackioSink:
    """Logs to a Trackio run. Spikes are sent as alerts; ``log2_histogram`` becomes a histogram.

    Args:
        run: the result of ``trackio.init()``; by default the active run.

    Raises:
        ImportError: trackio is not installed.
        TypeError: ``run`` is not a run.
        ValueError: there is no active run.
    """

    def __init__(self, run: Any = None) -> None:
        require("trackio", self)
        if run is None:
            run = import_module("trackio.context_vars").current_run.get()
            if run is None:
                raise ValueError("no Trackio run is active: call trackio.init() before TrackioSink(), or give it a run")
        if not all(callable(getattr(run, method, None)) for method in ("log", "alert")):
            raise TypeError(f"run must be what trackio.init() gives, got {display(run)}")
        self.run = run

    def __repr__(self) -> str:
        return f"TrackioSink({display(getattr(self.run, 'name', ''))})"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``. Trackio stores a value named ``step`` as ``__step``, and takes steps in any order."""
        self.run.log(with_histograms_of("trackio", values), step=step)

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Send an alert."""
        self.run.alert(title=f"spike in {event.signal}", text=text, step=event.step)
