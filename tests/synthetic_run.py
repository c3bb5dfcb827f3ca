"""Records of a training that never was, with statistics that are written down by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_gradmon.analysis.diagnosis.history import History
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import ALL_COLUMNS
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.spikes.attribution import ParameterAttribution
from torch_gradmon.spikes.detector_set import GradientNormHistory

#: A root mean square, or several statistics; the same in each step, or by step. None where a tensor has no row.
Row = float | Mapping[str, float] | None
Rows = Mapping[str, Row | Callable[[int], Row]]
COUNT = 100


def row(given: float | Mapping[str, float]) -> list[float]:
    """Sufficient statistics of a tensor of ``COUNT`` elements with this rms, mean, share of zeros, minimum and maximum."""
    stats = {"rms": given} if isinstance(given, (int, float)) else dict(given)
    rms, mean, count = stats["rms"], stats.get("mean", 0.0), stats.get("count", COUNT)
    low, high = stats.get("min", -2 * rms), stats.get("max", 2 * rms)
    return [
        count,
        mean * count,
        rms * count,
        rms**2 * count,
        stats.get("zero_count", 0.0) * count,
        stats.get("nonfinite_count", 0),
        low,
        high,
    ]


def table(rows: Rows, step: int) -> StatsTable | None:
    """The rows of one step; None without any."""
    now = {name: given(step) if callable(given) else given for name, given in rows.items()}
    there = {name: row(given) for name, given in now.items() if given is not None}
    if not there:
        return None
    return StatsTable(tuple(there), torch.tensor(list(there.values()), dtype=torch.float64), ALL_COLUMNS)


def history(
    steps: int = 100,
    *,
    loss: Callable[[int], float] | None = lambda step: 2.0 - step / 100,
    values: Mapping[str, Callable[[int], float | None]] | None = None,
    heads: Mapping[tuple[str, str, str], Callable[[int], float]] | None = None,
    context: Callable[[int], Mapping[str, Any]] = lambda step: {},
    applied: Callable[[int], bool] = lambda step: True,
    matrices: Mapping[str, int] | None = None,
    kinds: Mapping[str, str] | None = None,
    every: int = 1,
    **sources: Rows,
) -> History:
    """A run of so many records; ``sources`` are rows by name, ``values`` whole-model values, ``heads`` those of attention."""
    records = []
    for number in range(steps):
        step = number * every
        found: dict[Key, float] = {} if loss is None else {Key("", "loss", ""): loss(step)}
        for name, value in (values or {}).items():
            if (now := value(step)) is not None:
                found[Key("gradmon", "", name)] = now
        for key, value_of in (heads or {}).items():
            found[Key(*key)] = value_of(step)
        tables = {source: made for source, rows in sources.items() if (made := table(rows, step)) is not None}
        records.append(StepRecord(step, 0.0, applied(step), found, tables, dict(context(step))))
    names = {name for rows in sources.values() for name in rows}
    if matrices is None:
        matrices = {name: 100 for name in names if name.endswith("weight")}

    def suspects(step: int) -> list[ParameterAttribution]:
        gradients = GradientNormHistory()
        for record in records:
            if record.step <= step:
                gradients.add(record.step, record.tables)
        return gradients.suspects(step)

    return History(records, matrices=matrices, kinds=kinds or {}, suspects=suspects)
