"""Find the first tensor of a step that holds NaN or Inf, as far as its statistics show."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.keys import ACTIVATION, ACTIVATION_GRADIENT, PARAMETER, ROOT
from ..core.moments import Column
from ..core.records import StatsTable, StepRecord


def nonfinite_origin(record: StepRecord, forward_only: bool = False) -> str:
    """Describe where NaN or Inf began in this step; empty if no measured tensor holds any.

    The search follows the computation: parameters, then outputs in forward order, then gradients of outputs in backward order. A module
    that contains others is skipped if one of these holds NaN or Inf, since their outputs are part of its own.

    Args:
        forward_only: ignore gradients, as while a gradient scaler searches for its scale.
    """
    parameters = _spoiled(record.tables.get(PARAMETER))
    if parameters:
        more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
        names = ", ".join(name for name, _, _ in parameters[:3])
        return f"parameters hold NaN or Inf, as a step leaves them that is applied with such gradients: {names}{more}"
    outputs = _innermost(_spoiled(record.tables.get(ACTIVATION)))
    if outputs:
        return f"the forward pass has its first NaN or Inf in the output of {_counted(outputs[0])}"
    gradients = [] if forward_only else _innermost(_spoiled(record.tables.get(ACTIVATION_GRADIENT)))
    if gradients:
        name = _counted(gradients[0])
        return (
            f"the forward pass is finite, and the backward pass has its first NaN or Inf in the gradient of the output of {name}"
        )
    return ""


def _spoiled(table: StatsTable | None) -> list[tuple[str, int, int]]:
    """Name, non-finite elements and all elements of each tensor that has non-finite ones."""
    if table is None:
        return []
    counts = zip(table.names, table.rows[:, Column.NONFINITE].tolist(), table.rows[:, Column.COUNT].tolist(), strict=True)
    return [(name, int(bad), int(count)) for name, bad, count in counts if bad]


def _innermost(spoiled: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    kept = set(innermost([name for name, _, _ in spoiled]))
    return [each for each in spoiled if each[0] in kept]


def innermost(names: Sequence[str]) -> list[str]:
    """Drop modules that contain another one of ``names``; the root contains all."""
    return [
        name for name in names if not any(other != name and (name == ROOT or other.startswith(f"{name}.")) for other in names)
    ]


def _counted(spoiled: tuple[str, int, int]) -> str:
    name, bad, count = spoiled
    return f"{name} ({bad:,} of {count:,} elements)"
