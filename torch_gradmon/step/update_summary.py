"""Whole-model values of updates, and comparisons of the statistics of two moments."""

from __future__ import annotations

import math
from collections.abc import Set

import torch

from ..core.moments import Column
from ..core.records import StatsTable
from .gradient_summary import norm_of

_TENTHS = torch.tensor([0.1, 0.9], dtype=torch.float64, device="cpu")


def update_values(update: StatsTable, base: StatsTable, matrices: Set[str], absent: dict[str, str]) -> dict[str, float]:
    """The values of updates by name.

    Args:
        update: statistics of the updates.
        base: of the updated parameters before the update.
        matrices: names of the parameters of two or more dimensions.
        absent: gets a reason for each missing value.
    """
    values = {"update_norm": norm_of(update)}
    if (norm := norm_of(base)) > 0:
        values["update_ratio"] = values["update_norm"] / norm
    else:
        absent["update_ratio"] = f"the norm of the updated parameters was {norm} before the update"
    changed, there = (table.rows[:, Column.SQUARE_SUM].tolist() for table in (update, base))
    ratios = [
        math.sqrt(new / old) for name, new, old in zip(update.names, changed, there, strict=True) if name in matrices and old > 0
    ]
    if ratios:
        low, high = torch.quantile(torch.tensor(ratios, dtype=torch.float64, device="cpu"), _TENTHS).tolist()
        values["update_ratio_p10"], values["update_ratio_p90"] = low, high
    else:
        reason = "no updated parameter of two or more dimensions has a norm above zero"
        absent.update({"update_ratio_p10": reason, "update_ratio_p90": reason})
    return values


def rows_of(table: StatsTable, names: Set[str]) -> StatsTable:
    """The rows of ``table`` for ``names``."""
    if names >= set(table.names):
        return table
    kept = [row for row, name in enumerate(table.names) if name in names]
    return StatsTable(tuple(table.names[row] for row in kept), table.rows[kept], table.columns)


def differ(before: StatsTable, after: StatsTable, rounding: float = 0.0) -> bool:
    """Whether any statistic that both have differs by more than rounding: that of each element by ``rounding``, of its square by twice as
    much, and that of the sums.
    """
    slack = 1e-6 + 2.5 * rounding
    place = {name: row for row, name in enumerate(before.names)}
    then, now = before.rows[[place[name] for name in after.names]], after.rows
    for column in (before.columns & after.columns) - {Column.NEAR_ZERO}:
        # a sum may cancel; by Cauchy-Schwarz this bounds the sum of its terms
        scale = (then[:, Column.COUNT] * then[:, Column.SQUARE_SUM]).sqrt() if column is Column.SUM else then[:, column].abs()
        same = (now[:, column] - then[:, column]).abs() <= slack * scale
        same |= (now[:, column] == then[:, column]) | (now[:, column].isnan() & then[:, column].isnan())
        if not bool(same.all()):
            return True
    return False
