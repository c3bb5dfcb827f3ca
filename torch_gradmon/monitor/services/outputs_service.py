"""Where the values of a monitor go: sinks and spike detectors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.errors import display
from ...core.loop_mistakes import LoopFinding
from ...spikes.detector import SpikeDetector
from ..pipeline.record_pipeline import RunDirectory
from ..runtime import Runtime, at_exit
from .queries import Queries


@dataclass(slots=True)
class OutputsService:
    """Adds sinks and detectors to a runtime, and removes sinks."""

    runtime: Runtime

    def add_sink(
        self, sink: Any, keys: str | re.Pattern[str] | None, every: int, deferred: bool, thread: bool, on_all_ranks: bool
    ) -> None:
        """Send the values of each step to ``sink``."""
        from ...sinks.filtered_sink import FilteredSink, adapted, logged_anyhow
        from ...sinks.wandb import WandbSink

        pipeline, complaints = self.runtime.pipeline, self.runtime.fence.complaints
        for each in adapted(sink):
            if thread and isinstance(each, WandbSink):
                raise ValueError(
                    "W&B takes rows without delay, and those of another thread would come between; leave thread=True out"
                )
            kept = _Kept(weakref.ref(pipeline.directory))
            filtered = FilteredSink(each, keys, every, complaints, deferred, thread, kept, logged_anyhow(sink))
            filtered.stand_for(sink, on_all_ranks)
            if callable(before_finish := getattr(each, "before_finish", None)):
                before_finish(partial(at_exit, weakref.ref(self.runtime)))
            pipeline.publisher.add(filtered)

    def add_alert(self, target: str | Callable[[Any], object], on: Iterable[str]) -> None:
        """Call ``target`` about spikes and findings."""
        from ...sinks.alerts import AlertSink

        place = self.runtime.pipeline.directory.path
        sink = AlertSink(target, on, "" if place is None else str(place), partial(_findings, weakref.ref(self.runtime)))
        self.add_sink(sink, None, 1, deferred=True, thread=False, on_all_ranks=False)

    def remove_sink(self, sink: Any) -> None:
        """Send waiting rows to ``sink``, and close it."""
        Queries(self.runtime).settle_now()
        publisher = self.runtime.pipeline.publisher
        own = [filtered for filtered in publisher.sinks if filtered.given == sink]
        if not own:
            raise ValueError(f"this sink was not added, got {display(sink)}")
        publisher.publish()
        for filtered in own:
            publisher.remove(filtered)

    def add_detector(self, detector: SpikeDetector) -> None:
        """Feed ``detector`` with its signal."""
        if not isinstance(detector, SpikeDetector):
            raise TypeError(f"expected a SpikeDetector, got {display(detector)}; a rule goes into one: SpikeDetector(rule)")
        self.runtime.pipeline.detection.add(detector)
        self.runtime.planner.changed()


@dataclass(frozen=True)
class _Kept:
    """The run directory as text, while it has all rows and its monitor lives."""

    directory: Callable[[], RunDirectory | None]

    def __str__(self) -> str:
        directory = self.directory()
        return "" if directory is None or directory.has_lost else directory.description


def _findings(runtime: Callable[[], Runtime | None]) -> list[LoopFinding]:
    """What the plugins of a runtime have found, while it lives."""
    return [] if (alive := runtime()) is None else Queries(alive).findings()
