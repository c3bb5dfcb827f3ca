"""The places of values on a colour scale, as they are or relative to the median of their layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Measured steps that show what is usual just now; of a run with at least twice as many, maps can be relative to them.
RECENT = 100
#: Medians of fewer steps are not compared with.
_ENOUGH = 10
#: The scale ends at the first of these factors that covers nearly all cells, so that one spike does not hide the others.
_FACTORS = (2, 3, 5, 10)
#: The share of cells that counts as nearly all.
_NEARLY = 0.99
#: The smallest end of a linear scale.
_LEAST = 0.01
#: Instead of infinity, which JSON lacks: a logarithm beyond each scale.
_FAR = 30.0


def medians(values: Tensor) -> Tensor:
    """The lower median of the finite values of each layer in ``[steps, layers]``; NaN for a layer without any."""
    return values.where(values.isfinite(), math.nan).nanmedian(0).values


def is_relative_by_default(steps: Sequence[int], is_log: bool) -> bool:
    """Whether a view is shown relative to medians by default. Shares are not, because most layers may have none."""
    return is_log and len(steps) >= _ENOUGH


def recent_ratios(values: Tensor, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Values relative to what was usual just before: the ratio to the median of the :data:`RECENT` measured steps before its column.

    The first columns, with fewer than ten steps before them, are compared with the first ten.

    Args:
        values: of layers in ``[steps, layers]``.
        begins, ends: the first and the last place of the steps of each column.

    Returns:
        float64 ``[columns, layers]``: the ratio farthest from one in the column; infinity for values that are not finite, 0 for those that
        are exactly 0, NaN where there is no value, or none before it.
    """
    finite = values.where(values.isfinite(), math.nan)
    found = []
    for begin, end in zip(begins, ends, strict=True):
        usual = finite[max(0, begin - RECENT) : max(begin, _ENOUGH)].nanmedian(0).values
        part = values[begin : end + 1]
        ratios = (part / usual).clamp(10**-_FAR, 10**_FAR)
        ratios = torch.where(part == 0, 0.0, torch.where(part.isinf(), math.inf, ratios))
        farthest = ratios.log10().abs().nan_to_num(nan=-1.0, posinf=math.inf).argmax(0, keepdim=True)
        found.append(ratios.gather(0, farthest))
    return torch.cat(found)


def shades(values: Tensor, is_log: bool) -> Tensor:
    """The places of values on the colour scale; NaN for those that are missing, not finite, or without a logarithm."""
    found = values.log10() if is_log else values
    return found.where(found.isfinite(), math.nan)


def deviations(values: Tensor, usual: Tensor, is_log: bool) -> Tensor:
    """The distance of values from the median of their layer: the logarithm of the ratio, or the difference on a linear scale.

    NaN where there is no finite value, or no median, and for the logarithm of a zero: a map has a colour of its own for it. If a layer is
    mostly zero, its median is zero, and all else deviates most.
    """
    if not is_log:
        return (values - usual).where(values.isfinite(), math.nan)
    far = (values / usual).log10().clamp(-_FAR, _FAR)
    return far.where(values.isfinite() & (values != 0) & usual.isfinite(), math.nan)


def scale_limit(far: Tensor, is_log: bool) -> float:
    """The end of the scale of :func:`deviations` on both sides; values beyond it have the colour of the end."""
    known = far[far.isfinite()].abs().sort().values
    nearly = float(known[min(int(_NEARLY * len(known)), len(known) - 1)]) if len(known) else 0.0
    if not is_log:
        return max(nearly, _LEAST)
    return next((end for end in map(math.log10, _FACTORS) if end >= nearly), math.log10(_FACTORS[-1]))


def scale_labels(most: float, is_log: bool) -> dict[float, str]:
    """The labels of a diverging scale: at both ends and in the middle."""
    low, high = (f"1/{10**most:.0f}", f"{10**most:.0f}x") if is_log else (f"-{most:.2g}", f"+{most:.2g}")
    return {-most: f"\N{LESS-THAN OR EQUAL TO} {low}", 0.0: "median", most: f"\N{GREATER-THAN OR EQUAL TO} {high}"}
