"""Gradients that half precision rounds to zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....core import keys as n
from ....core.moments import Column
from ....core.records import StatsTable
from ..findings import Finding, NotMeasured
from ..history import History
from ..precautions import Precautions

#: The smallest float16, a divisor of all others, and the smallest with all digits (IEEE 754).
_SMALLEST, _SMALLEST_NORMAL = 2.0**-24, 2.0**-14
#: Share of the matrices whose gradients were float16 and that small, and share of zeros in the worst of them.
_TENSORS, _ZEROS = 0.25, 0.3
#: Share of the elements whose update is lost, and of those whose gradient is zero at most.
_LOST, _REACHED = 0.7, 0.3
#: As in the facts about a run.
_HALVES = frozenset({"torch.float16", "torch.bfloat16"})
#: Share of the modules whose outputs are all float16 numbers.
_HALF = 0.5


def check_precision(history: History) -> list[Finding]:
    """Gradients and outputs are judged by their extremes: no statistic keeps their dtype, but float16 numbers have few digits."""
    tables = [r.tables[n.GRADIENT_BEFORE_CLIP] for r in history.records if r.applied and n.GRADIENT_BEFORE_CLIP in r.tables]
    tables = [table for table in tables if {Column.MIN, Column.MAX} <= table.columns]
    if not tables:
        raise NotMeasured("the extremes of gradients were not measured")
    tiny = _tiny_halves(tables)
    known = list(history.matrices) or list(tables[0].names)
    matrices = [name for name in tiny if name in known]
    sparsity = history.gradients("sparsity")
    zeros = {} if sparsity is None else sparsity.medians()
    if len(matrices) >= max(_TENSORS * len(known), 1):
        name = max(matrices, key=lambda each: zeros.get(each, 1.0))
        if zeros.get(name, 1.0) >= _ZEROS:
            return [_finding(history, name, tiny[name], zeros.get(name, math.nan), len(matrices))]
    elif lost := _lost_updates(history):
        return [_lost_finding(history, lost)]
    elif all(not (table.rows[:, [Column.MIN, Column.MAX]] != 0).any() for table in tables) and _computes_in_float16(history):
        return [_finding(history, "", 0.0, 1.0, len(known))]
    if not_judged := rounding_unknown(history):
        raise NotMeasured(not_judged)
    return []


def _finding(history: History, where: str, largest: float, zeros: float, matrices: int) -> Finding:
    return Finding(
        "low-precision-underflow",
        "warning",
        where,
        (history.steps[0], history.steps[-1]),
        {"largest gradient element": largest, "share of zeros": zeros, "matrices like this": float(matrices)},
        "Gradients were computed in float16 and are too small for it; most are rounded to zero.",
        "Scale the loss with torch.amp.GradScaler, or use bfloat16."
        if (scale := Precautions.of(history).scale) is None
        else f"Raise the GradScaler's scale, {scale:g} at the end, by init_scale or growth_interval, or use bfloat16.",
        82.0,
    )


def _lost_updates(history: History) -> dict[str, float]:
    """The usual share of zeros in the update of matrices that are kept in half precision, and whose gradients have few; empty if these are
    a small part of all.
    """
    updates, gradients = history.matrix(n.UPDATE, "sparsity"), history.gradients("sparsity")
    if updates is None or gradients is None:
        return {}
    lost, reached = updates.part(0.25, 1).medians(), gradients.medians()
    known = [name for name in _halves(history) if reached.get(name, 1.0) < _REACHED]
    found = {name: lost[name] for name in known if lost.get(name, 0.0) > _LOST}
    return found if len(found) >= max(_TENSORS * len(history.matrices), 1) else {}


def rounded_away(history: History) -> set[str]:
    """The matrices that no step changes as long as rounding takes most updates of those that are kept in half precision."""
    lost, updates = _lost_updates(history), history.matrix(n.UPDATE, "norm")
    is_off = bool(history.groups) and all(group["settings"].get("lr") == 0 for group in history.groups)
    if not lost or updates is None or is_off:
        return set()
    moved = updates.medians()
    return {name for name in _halves(history) if not moved.get(name, 1.0)}


def rounding_unknown(history: History) -> str:
    """Why it is unknown whether rounding takes the updates of weights that are kept in half precision; empty if it is known, or if
    these are a small part of all.
    """
    halves = _halves(history) if history.parameters else []  # extremes alone say little
    if len(halves) < max(_TENSORS * len(history.matrices), 1):
        return ""
    missing = [
        f"monitor.add_{source}_metric('sparsity')"
        for source, matrix in ((n.UPDATE, history.matrix(n.UPDATE, "sparsity")), (n.GRADIENT, history.gradients("sparsity")))
        if matrix is None
    ]
    if not missing:
        return ""
    return (
        f"{len(halves)} matrices are kept in half precision, and whether its rounding takes their updates shows in the share of zeros, "
        f"which was not measured: give run_dir=, or call {' and '.join(missing)}"
    )


def _halves(history: History) -> list[str]:
    """The matrices that are kept in half precision: by their dtype, or by extremes where it is unknown."""
    if history.parameters:
        return [name for name in history.matrices if history.parameters.get(name, {}).get("dtype") in _HALVES]
    tables = [record.tables[n.PARAMETER] for record in history.records if n.PARAMETER in record.tables]
    tables = [table for table in tables if {Column.MIN, Column.MAX} <= table.columns]
    halves = dict.fromkeys(tables[0].names, True) if tables else {}
    for table in tables:
        extremes = table.rows[:, [Column.MIN, Column.MAX]]
        either = [any(holds) for holds in zip(_holds(extremes, torch.bfloat16), _holds(extremes, torch.float16), strict=True)]
        halves.update((name, halves.get(name, False) and is_half) for name, is_half in zip(table.names, either, strict=True))
    return [name for name in history.matrices if halves.get(name)]


def _lost_finding(history: History, lost: dict[str, float]) -> Finding:
    worst, still = max(lost, key=lambda name: lost[name]), rounded_away(history)
    evidence = {"share of elements that do not move": lost[worst], "matrices like this": float(len(lost))}
    if still:
        evidence["matrices whose update is exactly zero"] = float(len(still))
    return Finding(
        "low-precision-underflow",
        "warning",
        worst,
        (history.steps[0], history.steps[-1]),
        evidence,
        "Parameters are kept in half precision, and most of their elements do not move in a step: updates below half a unit of the last "
        "digit are rounded to nothing.",
        "Keep parameters in float32 and compute under torch.autocast, or use an optimizer with float32 copies or stochastic rounding.",
        82.0,
    )


def _tiny_halves(tables: list[StatsTable]) -> dict[str, float]:
    """The usual largest element of each tensor whose nonzero extremes were always float16 numbers without all digits."""
    sizes: dict[str, list[float]] = {}
    others: set[str] = set()
    for table in tables:
        extremes = table.rows[:, [Column.MIN, Column.MAX]]
        largest = extremes.abs().amax(1)
        are_halves = ((extremes / _SMALLEST).frac() == 0).all(1) & (largest < _SMALLEST_NORMAL)
        for name, is_half, size in zip(table.names, are_halves.tolist(), largest.tolist(), strict=True):
            if size > 0 and is_half:
                sizes.setdefault(name, []).append(size)
            elif size > 0:
                others.add(name)
    return {name: sorted(found)[len(found) // 2] for name, found in sizes.items() if name not in others}


def _computes_in_float16(history: History) -> bool:
    """Whether the extremes of most outputs are float16 numbers, and not all of them also bfloat16, which has fewer digits."""
    half: dict[str, bool] = {}
    fewer: dict[str, bool] = {}
    for record in history.records:
        if (table := record.tables.get(n.ACTIVATION)) is not None and {Column.MIN, Column.MAX} <= table.columns:
            extremes = table.rows[:, [Column.MIN, Column.MAX]]
            for found, dtype in ((half, torch.float16), (fewer, torch.bfloat16)):
                for name, holds in zip(table.names, _holds(extremes, dtype), strict=True):
                    found[name] = found.get(name, True) and holds
    return sum(half.values()) > _HALF * max(len(half), 1) and sum(fewer.values()) < sum(half.values())


def _holds(values: Tensor, dtype: torch.dtype) -> list[bool]:
    return (values.to(dtype).double() == values).all(1).tolist()
