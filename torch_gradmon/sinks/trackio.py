"""Trackio: local first, free, one SQLite file for each project."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..core.errors import display
from ..core.records import SpikeEvent
from .histograms import without_histograms
from .optional import require


class TrackioSink:
    """Logs to a Trackio run. Spikes are sent as alerts; what ``log2_histogram`` counts becomes a histogram.

    Args:
        run: what ``trackio.init()`` gave; by default the active run.

    Raises:
        ImportError: trackio is not installed.
        TypeError: ``run`` is no run.
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

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log ``values``. Trackio keeps a value named ``step`` as ``__step``, and takes steps in any order."""
        scalars, histograms = without_histograms(values)
        row: dict[str, Any] = dict(scalars)
        for key, found in histograms.items():
            row[key] = import_module("trackio").Histogram(np_histogram=(found.counts, found.edges))
        self.run.log(row, step=step)

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Send an alert."""
        self.run.alert(title=f"spike in {event.signal}", text=text, step=event.step)
