"""Fewer columns and points than there were steps, in which every spike and every dip stays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..diagnosis.series import Series
from .reel import Panel


@dataclass(frozen=True)
class Squeezed:
    """A panel with few columns.

    Attributes:
        first: the first step of each column.
        last: the last one.
        values: float64 ``[columns, layers]``, as in :class:`Panel`.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    values: Tensor


def squeezed(panel: Panel, columns: int) -> Squeezed:
    """At most ``columns`` columns of equally many steps. Each cell has the value of its steps that lies farthest from the layer's
    median, on a logarithmic scale where the view has one: spikes and dips stay, and NaN and infinities before all. Of how far two
    runs are apart it has the largest.
    """
    steps, values = panel.steps, panel.values
    size = -(-len(steps) // max(columns, 1))
    if size <= 1:
        return Squeezed(steps, steps, values)
    count = -(-len(steps) // size)
    padded = torch.full((count * size, values.shape[1]), math.nan, dtype=values.dtype, device=values.device)
    padded[: len(steps)] = values
    far = padded.nan_to_num(nan=-1.0, posinf=math.inf) if panel.view.is_apart else _distance(padded, panel.view.is_log)
    distance = far.reshape(count, size, -1)
    chosen = distance.argmax(1, keepdim=True)
    found = padded.reshape(count, size, -1).gather(1, chosen).squeeze(1)
    return Squeezed(steps[::size], tuple(steps[min(at + size, len(steps)) - 1] for at in range(0, len(steps), size)), found)


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


def points(series: Series, most: int) -> Series:
    """At most ``most`` points of a line: of equally many steps the smallest and the largest, and every one that is not finite, up to
    as many again.
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
    odd = [place for place, value in enumerate(series.values) if not math.isfinite(value)]
    chosen.update(odd[:: -(-len(odd) // most) or 1])
    ordered = sorted(chosen)
    return Series(tuple(series.steps[p] for p in ordered), tuple(series.values[p] for p in ordered))
