"""Comet, whose experiment has one step for all loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .key_rewriting import KeyRewriter

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
