"""Fewer columns and points than steps, with every spike and dip kept."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..diagnosis.series import Series
from .views import Panel


@dataclass(frozen=True)
class Downsampled:
    """A panel with fewer columns.

    Attributes:
        first, last: the first and the last measured step of each column.
        values: float64 ``[columns, layers]``, as in :class:`Panel`.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    values: Tensor


def downsampled(panel: Panel, columns: int) -> Downsampled:
    """At most ``columns`` columns, each of the same number of steps; columns without a measured step are left out.

    Each cell has the value farthest from the layer's median, on a logarithmic scale if the view has one. NaN and infinities come
    first. Of the difference between two runs, each cell has the largest.
    """
    steps, values = panel.steps, panel.values
    if len(steps) <= columns:
        return Downsampled(steps, steps, values)
    far = values.nan_to_num(nan=-1.0, posinf=math.inf) if panel.view.is_difference else _distance(values, panel.view.is_log)
    width = -(-(steps[-1] - steps[0] + 1) // columns)
    first, last, found = [], [], []
    for _, stretch in groupby(range(len(steps)), key=lambda place: (steps[place] - steps[0]) // width):
        begin, *rest = stretch
        end = rest[-1] if rest else begin
        chosen = far[begin : end + 1].argmax(0, keepdim=True)
        first.append(steps[begin])
        last.append(steps[end])
        found.append(values[begin : end + 1].gather(0, chosen))
    return Downsampled(tuple(first), tuple(last), torch.cat(found))


def _distance(values: Tensor, is_log: bool) -> Tensor:
    """The distance from the median of each column; -1 for no value, infinity for values that are not finite."""
    scale = values
    if is_log:
        positive = torch.where(values > 0, values, math.inf)
        floor = positive.amin(0, keepdim=True).nan_to_num(posinf=1.0)
        scale = torch.where(values > 0, values.log(), floor.log() - 1)  # zero is farther away than the smallest positive value
    finite = torch.where(values.isfinite(), scale, math.nan)
    distance = (finite - finite.nanmedian(0, keepdim=True).values).abs()
    return torch.where(values.isinf(), math.inf, distance.nan_to_num(nan=-1.0, posinf=0.0))


def points(series: Series, most: int, after_gaps: Collection[int] = ()) -> Series:
    """At most ``most`` points of a line: the smallest and the largest value of equally many steps each.

    It also keeps up to ``most`` values that are not finite, and the points on both sides of each gap; ``after_gaps`` are the steps
    that follow one.
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
    behind = [place for place, step in enumerate(series.steps) if step in after_gaps]
    chosen.update(place - before for place in behind for before in (0, 1))
    odd = [place for place, value in enumerate(series.values) if not math.isfinite(value)]
    chosen.update(odd[:: -(-len(odd) // most) or 1])
    ordered = sorted(chosen)
    return Series(tuple(series.steps[p] for p in ordered), tuple(series.values[p] for p in ordered))
