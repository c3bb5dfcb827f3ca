"""Whole-model values that follow from the gradients before clipping alone."""

from __future__ import annotations

from collections.abc import Collection

from ..core.moments import VIEWS, Column, merge_by_group
from ..core.records import StatsTable

#: Of the elements of all gradients together, by the name of the view; only on request, since they need more columns.
DISTRIBUTION = {"grad_mean": "mean", "grad_std": "std", "grad_sparsity": "sparsity"}


def gradient_values(before: StatsTable, wanted: Collection[str] = ()) -> dict[str, float]:
    """The values by name; what is not defined is left out.

    Args:
        before: statistics of the gradients before clipping, of all parameters.
        wanted: which of :data:`DISTRIBUTION` besides.
    """
    values = {"grad_norm": norm_of(before), "grad_nonfinite": before.rows[:, Column.NONFINITE].sum().item()}
    finite = VIEWS["max"].defined(before.rows)
    if VIEWS["max"].columns <= before.columns and bool(finite.any()):
        values["grad_max"] = VIEWS["max"].compute(before.rows[finite]).max().item()
    if 0 < values["grad_norm"] < float("inf"):
        values["grad_top_share"] = before.rows[:, Column.SQUARE_SUM].max().item() / values["grad_norm"] ** 2
    if not DISTRIBUTION.keys().isdisjoint(wanted):
        values |= _distribution(before, wanted)
    return values


def _distribution(table: StatsTable, wanted: Collection[str]) -> dict[str, float]:
    """Rows are additive: of all elements together the row is the sum of those of the layers."""
    row = merge_by_group(table.rows, [0] * len(table.names), 1)
    views = {name: VIEWS[view] for name, view in DISTRIBUTION.items() if name in wanted}
    return {
        name: view.compute(row).item()
        for name, view in views.items()
        if view.columns <= table.columns and bool(view.defined(row).all())
    }


def norm_of(table: StatsTable) -> float:
    """The L2 norm of all elements."""
    return float(table.rows[:, Column.SQUARE_SUM].sum().sqrt())
