"""What ``gradmon summary`` tells of a run, as facts without a form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...analysis.run import Run
from ...core.errors import nearest
from ...spikes.episodes import Episode, episodes
from . import layer_table as layers
from . import spikes
from .layer_table import Row
from .overview import Line, Overview, is_of_the_whole
from .spikes import Spike

#: Spikes that are told, and values that were logged by hand.
_TOLD, _LOGGED = 8, 8


@dataclass(frozen=True)
class Summary:
    """All of it.

    Attributes:
        name: what the run was called when it was asked for.
        overview: its steps, times and learning rates.
        segments: the first and the last step of what was written without a break.
        lines: values of the whole model.
        unshown: values that were logged by hand and are not among them.
        rows: parameters or blocks.
        spikes: the largest ones, in order.
        spiked: all of them.
    """

    name: str
    overview: Overview
    segments: Sequence[tuple[int, int]]
    lines: Sequence[Line]
    unshown: int
    rows: Sequence[Row]
    spikes: Sequence[Spike]
    spiked: Sequence[Episode]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what is not known is None, values that are not finite are strings, as in the sinks."""
        told = self.overview
        return {
            "run": self.name,
            "steps": {
                "count": told.steps,
                "first": told.first,
                "last": told.last,
                "segments": [list(part) for part in self.segments],
            },
            "time": None if not told.steps else {"first": told.began, "last": told.ended},
            "lr": None if told.rates is None else dict(zip(("smallest", "largest", "last"), told.rates, strict=True)),
            "not_applied": told.not_applied,
            "skipped": told.skipped,
            "values": [_line(line) for line in self.lines],
            "layers": [{name: _known(value) for name, value in asdict(row).items()} for row in self.rows],
            "spikes": [spike._asdict() for spike in self.spikes],
            "spikes_in_all": len(self.spiked),
            "steps_with_spikes": sum(len(spike.steps) for spike in self.spiked),
        }


def summarised(
    run: Run,
    name: str,
    *,
    last: int | None = None,
    pattern: re.Pattern[str] | None = None,
    depth: int | None = None,
    everything: bool = False,
    sort: str | None = None,
) -> Summary:
    """The summary of a run.

    Args:
        run: to be summarised.
        name: how it is called.
        last: look at so many steps only, the last ones.
        pattern: only parameters in whose names it is found.
        depth: group parameters by so many parts of their paths.
        everything: each parameter by itself, however many there are, and all that was logged.
        sort: a column of the layers; by default they are in model order.

    Raises:
        ValueError: ``pattern`` is found in no parameter.
    """
    steps = run.steps
    since = steps[-last] if last is not None and last < len(steps) else None
    overview = Overview.of(run.records(since, is_of_the_whole))
    source = layers.gradient_source(run)
    names = [] if source is None else run.tensors(source)
    kept = [name for name in names if pattern is None or pattern.search(name)]
    if pattern is not None and not kept:
        raise ValueError(f"--filter {pattern.pattern!r} matches no parameter of the run{nearest(pattern.pattern, names)}")
    rows = layers.rows(run, layers.groups(kept, depth, everything), since)
    lines = overview.lines
    logged = [line for line in lines if line.is_logged]
    hidden = [] if everything else logged[_LOGGED:]
    spiked = episodes(overview.events, [step for step in steps if since is None or step >= since])
    return Summary(
        name,
        overview,
        [(max(first, since or first), end) for first, end in run.segments if since is None or end >= since],
        [line for line in lines if line not in hidden],
        len(hidden),
        rows if sort is None else layers.arranged(rows, sort),
        spikes.told(run, spiked, len(spiked) if everything else _TOLD),
        spiked,
    )


def _line(line: Line) -> dict[str, Any]:
    found = {name: _known(value) for name, value in asdict(line).items()}
    return {
        **found,
        **{name: value if math.isfinite(value) else str(value) for name, value in (("first", line.first), ("last", line.last))},
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
