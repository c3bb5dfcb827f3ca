"""Whole-model values that need only the gradients before clipping."""

from __future__ import annotations

import math
from collections.abc import Collection

from ..core.moments import VIEWS, Column, merge_by_group
from ..core.records import StatsTable

#: Views of the elements of all gradients together; only on request, since they need more columns.
DISTRIBUTION = {"grad_mean": "mean", "grad_std": "std", "grad_sparsity": "sparsity"}


def gradient_values(before: StatsTable, wanted: Collection[str] = ()) -> dict[str, float]:
    """The values by name, without undefined ones.

    Args:
        before: statistics of the gradients before clipping, of all parameters.
        wanted: names in :data:`DISTRIBUTION` to compute as well.
    """
    values = {"grad_norm": norm_of(before), "grad_nonfinite": before.sums[Column.NONFINITE]}
    if VIEWS["max"].columns <= before.columns:
        largest = max(before.largest[Column.MAX], -before.rows[:, Column.MIN].amin().item())
        if largest >= 0:  # else it is that of no element
            values["grad_max"] = abs(largest)  # 0 for -0
    if 0 < values["grad_norm"] < float("inf"):
        values["grad_top_share"] = before.largest[Column.SQUARE_SUM] / values["grad_norm"] ** 2
    if not DISTRIBUTION.keys().isdisjoint(wanted):
        values |= _distribution(before, wanted)
    return values


def _distribution(table: StatsTable, wanted: Collection[str]) -> dict[str, float]:
    """Rows are additive, so the row of all elements is the sum of the layers' rows."""
    row = merge_by_group(table.rows, [0] * len(table.names), 1)
    views = {name: VIEWS[view] for name, view in DISTRIBUTION.items() if name in wanted}
    return {
        name: view.compute(row).item()
        for name, view in views.items()
        if view.columns <= table.columns and bool(view.defined(row).all())
    }


def norm_of(table: StatsTable) -> float:
    """The L2 norm of all elements."""
    return math.sqrt(table.sums[Column.SQUARE_SUM])
