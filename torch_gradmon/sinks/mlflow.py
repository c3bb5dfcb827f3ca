"""MLflow, which takes at most a thousand metrics at once and few characters in their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from .key_rewriting import KeyRewriter
from .optional import require

#: Metrics in one call of ``log_metrics``, and characters in a name, by MLflow's own limits.
AT_ONCE, LONGEST = 1000, 250
_NOT_ALLOWED = re.compile(r"[^\w/.\- ]")


class MlflowSink:
    """Logs to an MLflow run, or to a logger with ``log_metrics`` that stands before MLflow.

    Names that MLflow refuses are made into such as it takes: brackets become underscores, empty parts of a path go, long ones
    are cut. Two names never become one.

    Args:
        logger: by default MLflow itself, and the run that is active now, also when another thread sends the rows or the run
            has been ended before the last one.

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
            # which run is active is a matter of the thread, and without one MLflow starts another
            self._log = partial(mlflow.log_metrics, run_id=run.info.run_id)
        self._name = KeyRewriter(LONGEST, _allowed)
        #: Step and number of the values of the row that failed half-way.
        self._done = (-1, 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``, a thousand at once. Where that failed half-way, the same row goes on where it stopped."""
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
