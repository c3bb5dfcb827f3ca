"""Comet, whose experiment keeps one step for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .key_rewriting import KeyRewriter

#: Characters of a name that Comet keeps.
LONGEST = 100


class CometSink:
    """Logs to a Comet experiment, and leaves the step that the script has set as it is.

    Comet cuts names at 100 characters; here they stay apart.

    Args:
        experiment: a ``comet_ml.Experiment``, online or offline.
    """

    def __init__(self, experiment: Any) -> None:
        self.experiment = experiment
        self._name = KeyRewriter(LONGEST)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``.

        Raises:
            RuntimeError: the experiment has ended; Comet itself would say nothing.
        """
        if not self.experiment.alive:
            raise RuntimeError("the experiment has ended; detach the monitor before experiment.end()")
        before = self.experiment.curr_step
        try:
            self.experiment.log_metrics({self._name(key): value for key, value in values.items()}, step=step)
        finally:
            self.experiment.curr_step = before
