"""The content of ``gradmon summary``, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...analysis.run import Run
from ...analysis.spike_report.report import SpikeSummary
from ...core.errors import nearest
from ...core.formatting import printable
from ...core.records import TrainedPart
from ...spikes.signals import Episode, episodes, largest
from . import layer_table
from .layer_table import LayerRow
from .overview import Overview, ValueSummary, is_of_whole_model

#: Spikes and logged values that are shown.
_SPIKES, _LOGGED = 8, 8


@dataclass(frozen=True)
class RunSummary:
    """The summary of a run.

    Attributes:
        name: of the run, as given.
        overview: its steps, times and learning rates.
        segments: the first and the last step of each part that was written without interruption.
        lines: values of the whole model.
        unshown: number of logged values that are not among them.
        rows: parameters or blocks.
        spikes: the largest ones, in order.
        spiked: all of them.
        model: the model in one line.
        parts: what trained when the optimizers were attached.
    """

    name: str
    overview: Overview
    segments: Sequence[tuple[int, int]]
    lines: Sequence[ValueSummary]
    unshown: int
    rows: Sequence[LayerRow]
    spikes: Sequence[SpikeSummary]
    spiked: Sequence[Episode]
    model: str
    parts: Sequence[TrainedPart]

    def to_dict(self) -> dict[str, Any]:
        """The summary for JSON: unknown values are None, values that are not finite are strings, as in the sinks."""
        found = self.overview
        return {
            "run": self.name,
            "steps": {
                "count": found.steps,
                "first": found.first,
                "last": found.last,
                "segments": [list(part) for part in self.segments],
            },
            "time": None if not found.steps else {"first": found.began, "last": found.ended},
            "lr": None if found.rates is None else dict(zip(("smallest", "largest", "last"), found.rates, strict=True)),
            "model": self.model,
            "trains": [asdict(part) for part in self.parts],
            "not_applied": found.not_applied,
            "skipped": found.skipped,
            "values": [_value_dict(line) for line in self.lines],
            "layers": [_known_values(asdict(row)) for row in self.rows],
            "spikes": [spike._asdict() for spike in self.spikes],
            "spikes_in_all": len(self.spiked),
            "steps_with_spikes": sum(len(spike.steps) for spike in self.spiked),
        }


def summarize(
    run: Run,
    name: str,
    *,
    last: int | None = None,
    pattern: re.Pattern[str] | None = None,
    depth: int | None = None,
    everything: bool = False,
    sort: str | None = None,
) -> RunSummary:
    """The summary of a run.

    Args:
        run: the run.
        name: its name in the summary.
        last: number of the last steps to look at; None for all.
        pattern: only parameters whose names match it.
        depth: group parameters by this many parts of their paths.
        everything: whether each parameter has its own row, however many there are, and all logged values are shown.
        sort: a column of the layers; by default they are in model order.

    Raises:
        ValueError: ``pattern`` matches no parameter.
    """
    steps = run.steps
    since = steps[-last] if last is not None and last < len(steps) else None
    overview = Overview.of(run.records(since, is_of_whole_model))
    source = layer_table.gradient_source(run)
    names = [] if source is None else run.tensors(source)
    kept = [each for each in names if pattern is None or pattern.search(each)]
    if pattern is not None and not kept:
        raise ValueError(f"--filter {pattern.pattern!r} matches no parameter of the run{nearest(pattern.pattern, names)}")
    rows = layer_table.rows(run, layer_table.groups(kept, depth, everything), since)
    lines = overview.lines
    hidden = [] if everything else [line for line in lines if line.is_logged][_LOGGED:]
    spiked = episodes(overview.events, [step for step in steps if since is None or step >= since])
    return RunSummary(
        printable(name),
        overview,
        [(max(first, since or first), end) for first, end in run.segments if since is None or end >= since],
        [line for line in lines if line not in hidden],
        len(hidden),
        rows if sort is None else layer_table.sort_rows(rows, sort),
        [SpikeSummary.of(run, spike) for spike in largest(spiked, len(spiked) if everything else _SPIKES)],
        spiked,
        run.model_text,
        run.trained_parts,
    )


def _value_dict(line: ValueSummary) -> dict[str, Any]:
    ends = {name: value if math.isfinite(value) else str(value) for name, value in (("first", line.first), ("last", line.last))}
    return {**_known_values(asdict(line)), **ends}


def _known_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
