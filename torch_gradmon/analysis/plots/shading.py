"""From values to places on a scale of colours: as they are, or relative to the median of their layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: A view with fewer steps has no median worth comparing with.
_ENOUGH = 10
#: The scale ends at the first of these factors that has nearly all cells within, so that one spike does not flatten all others.
_FACTORS = (2, 3, 5, 10)
#: The part of the cells that is nearly all.
_NEARLY = 0.99
#: On a linear scale it ends at such a difference at least.
_LEAST = 0.01
#: Instead of infinity, which JSON lacks: as a logarithm, beyond each scale.
_FAR = 30.0


def medians(values: Tensor) -> Tensor:
    """The lower median of the finite values of each layer, ``[steps, layers]``; NaN for one without any."""
    return values.where(values.isfinite(), math.nan).nanmedian(0).values


def is_worth_it(steps: Sequence[int], is_log: bool) -> bool:
    """Whether a view is shown relative to medians where it is not said how: not a share, of which most layers may have none."""
    return is_log and len(steps) >= _ENOUGH


def shades(values: Tensor, is_log: bool) -> Tensor:
    """Where values lie on the scale of colours; NaN for those that are not there, are not finite, or have no logarithm."""
    found = values.log10() if is_log else values
    return found.where(found.isfinite(), math.nan)


def departures(values: Tensor, usual: Tensor, is_log: bool) -> Tensor:
    """How far values lie from the medians of their layers: the logarithm of the ratio, or the difference on a linear scale.

    A layer that is mostly zero has the median zero: its zeros are as usual, and anything else is as far above as the scale goes. NaN
    where there is no finite value, and so no median.
    """
    if not is_log:
        return (values - usual).where(values.isfinite(), math.nan)
    far = (values / usual).log10().clamp(-_FAR, _FAR)
    far = torch.where(values == usual, 0.0, far)  # both may be zero
    return far.where(values.isfinite() & usual.isfinite(), math.nan)


def limit(far: Tensor, is_log: bool) -> float:
    """Where the scale of :func:`departures` ends on both sides; what lies beyond has the colour of its end."""
    known = far[far.isfinite()].abs().sort().values
    nearly = float(known[min(int(_NEARLY * len(known)), len(known) - 1)]) if len(known) else 0.0
    if not is_log:
        return max(nearly, _LEAST)
    return next((end for end in map(math.log10, _FACTORS) if end >= nearly), math.log10(_FACTORS[-1]))


def ends(most: float, is_log: bool) -> dict[float, str]:
    """What stands beside the colours at the ends and in the middle."""
    low, high = (f"1/{10**most:.0f}", f"{10**most:.0f}x") if is_log else (f"-{most:.2g}", f"+{most:.2g}")
    return {-most: f"\N{LESS-THAN OR EQUAL TO} {low}", 0.0: "median", most: f"\N{GREATER-THAN OR EQUAL TO} {high}"}
