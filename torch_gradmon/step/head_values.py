"""From the statistics of attention heads to values: one for each head, and the smallest, mean and largest over a layer's heads."""

from __future__ import annotations

import re
from collections.abc import Set

import torch

from ..core import keys as n
from ..core.keys import Key
from ..core.moments import Column
from ..core.records import StatsTable

_HEAD = re.compile(r"\.head_\d+$")


def head_values(tables: dict[str, StatsTable], unshown: Set[tuple[str, str]]) -> tuple[dict[Key, float], frozenset[Key]]:
    """The values of all attention metrics, and the keys of those that are for the run directory only.

    Args:
        tables: by source; those of attention are taken out, since no metric is a view of them.
        unshown: source and name of heads whose own values are not for a dashboard.
    """
    values: dict[Key, float] = {}
    layers: dict[tuple[str, str], list[float]] = {}
    for source in n.ATTENTION_SOURCES.values():
        table = tables.pop(source, None)
        if table is None:
            continue
        counts = table.rows[:, Column.COUNT]
        # means are over queries, and so are weighted by them when calls merge; of the largest logit it is the largest finite one
        some = torch.where(counts > table.rows[:, Column.NONFINITE], table.rows[:, Column.MAX], torch.nan)
        numbers = some if source == n.ATTENTION_MAX_LOGIT else table.rows[:, Column.SUM] / counts
        for name, count, number in zip(table.names, counts.tolist(), numbers.tolist(), strict=True):
            if count:
                values[Key(source, name, "")] = number
                layers.setdefault((source, _HEAD.sub("", name)), []).append(number)
    for (source, layer), heads in layers.items():
        found = torch.tensor(heads, dtype=torch.float64, device="cpu")
        values[Key(source, layer, "min")] = found.min().item()
        values[Key(source, layer, "mean")] = found.mean().item()
        if source == n.ATTENTION_MAX_LOGIT:
            values[Key(source, layer, "max")] = found.max().item()
    return values, frozenset(key for key in values if not key.metric and (key.source, key.name) in unshown)
