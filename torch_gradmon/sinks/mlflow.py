"""MLflow, which takes at most a thousand metrics at once and few characters in their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

#: Metrics in one call of ``log_metrics``, by MLflow's own limit.
AT_ONCE = 1000
_NOT_ALLOWED = re.compile(r"[^\w/.\- :]")


class MlflowSink:
    """Logs to MLflow's active run, or to a logger with ``log_metrics`` that stands before MLflow.

    Characters that MLflow refuses in names, such as brackets, become underscores.

    Args:
        logger: by default the module ``mlflow``, and so its active run.

    Raises:
        ImportError: mlflow is not installed.
    """

    def __init__(self, logger: Any = None) -> None:
        if logger is None:
            if find_spec("mlflow") is None:
                raise ImportError("MlflowSink needs mlflow: pip install mlflow")
            logger = import_module("mlflow")
        self.logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``, a thousand at once."""
        pairs = iter(values.items())
        while part := {_NOT_ALLOWED.sub("_", key): value for key, value in islice(pairs, AT_ONCE)}:
            self.logger.log_metrics(part, step=step)
