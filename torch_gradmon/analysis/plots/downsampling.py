"""Fewer columns and points than there were steps, in which every spike and every dip stays."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..diagnosis.series import Series
from .panels import Panel


@dataclass(frozen=True)
class Squeezed:
    """A panel with few columns.

    Attributes:
        first: the first step of each column that was measured.
        last: the last one.
        values: float64 ``[columns, layers]``, as in :class:`Panel`.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    values: Tensor


def squeezed(panel: Panel, columns: int) -> Squeezed:
    """At most ``columns`` columns, each of a stretch of steps of the same length; one without a measured step is left out.

    Each cell has the value of its steps that lies farthest from the layer's median, on a logarithmic scale where the view has one: spikes
    and dips stay, and NaN and infinities before all. Of how far two runs are apart it has the largest.
    """
    steps, values = panel.steps, panel.values
    if len(steps) <= columns:
        return Squeezed(steps, steps, values)
    far = values.nan_to_num(nan=-1.0, posinf=math.inf) if panel.view.is_apart else _distance(values, panel.view.is_log)
    width = -(-(steps[-1] - steps[0] + 1) // columns)
    first, last, found = [], [], []
    for _, stretch in groupby(range(len(steps)), key=lambda place: (steps[place] - steps[0]) // width):
        begin, *rest = stretch
        end = rest[-1] if rest else begin
        chosen = far[begin : end + 1].argmax(0, keepdim=True)
        first.append(steps[begin])
        last.append(steps[end])
        found.append(values[begin : end + 1].gather(0, chosen))
    return Squeezed(tuple(first), tuple(last), torch.cat(found))


def _distance(values: Tensor, is_log: bool) -> Tensor:
    """From the median of each column; -1 where there is no value, infinity where it is not finite."""
    scale = values
    if is_log:
        positive = torch.where(values > 0, values, math.inf)
        floor = positive.amin(0, keepdim=True).nan_to_num(posinf=1.0)
        scale = torch.where(values > 0, values.log(), floor.log() - 1)  # zero is farther off than the smallest value that is none
    finite = torch.where(values.isfinite(), scale, math.nan)
    distance = (finite - finite.nanmedian(0, keepdim=True).values).abs()
    return torch.where(values.isinf(), math.inf, distance.nan_to_num(nan=-1.0, posinf=0.0))


def points(series: Series, most: int, begins: Collection[int] = ()) -> Series:
    """At most ``most`` points of a line: of equally many steps the smallest and the largest, and every one that is not finite, up to
    as many again. Besides, the points on both sides of each gap: ``begins`` are the steps behind one.
    """
    if len(series) <= most:
        return series
    bins = max(most // 2, 1)
    size = -(-len(series) // bins)
    chosen: set[int] = {0, len(series) - 1}
    for begin in range(0, len(series), size):
        places = [p for p in range(begin, min(begin + size, len(series))) if math.isfinite(series.values[p])]
        if places:
            chosen.update((min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)))
    behind = [place for place, step in enumerate(series.steps) if step in begins]
    chosen.update(place - before for place in behind for before in (0, 1))
    odd = [place for place, value in enumerate(series.values) if not math.isfinite(value)]
    chosen.update(odd[:: -(-len(odd) // most) or 1])
    ordered = sorted(chosen)
    return Series(tuple(series.steps[p] for p in ordered), tuple(series.values[p] for p in ordered))
