"""Gradient clipping that always acts, or never does."""

from __future__ import annotations

import math

from ..findings import Finding, Unseen
from ..history import History
from ..precautions import Precautions
from ..series import Series

#: Of the last steps, so many are clipped: all but a few.
_ALWAYS = 0.95
#: Where the median norm is so many times the bound, the bound is too low for a start; and far too low.
_LOW, _FAR_TOO_LOW = 10.0, 100.0
#: An outlier is so many times the median norm of so many steps before and after it.
_OUTLIER, _AROUND = 10.0, 20
#: and so many times that of the first steps: where the loss is near zero, norms leap.
_ABOVE = 2.0


def clips(history: History) -> list[Finding]:
    """Judged by the steps that were applied."""
    norms = history.applied("grad_norm").finite
    if not norms:
        raise Unseen("no gradient norm before clipping was measured")
    shares = history.applied("clipped_share")
    if not shares or shares.steps[-1] < norms.part(0.9, 1).steps[0]:  # a scaling, taken for a clip at first
        return []
    if shares.values[-1] >= _ALWAYS:
        return _always(history, norms, shares)
    return _never(history, norms) if max(shares.values) == 0 else []


def _always(history: History, norms: Series, shares: Series) -> list[Finding]:
    clipped = history.applied("grad_norm_clipped").finite
    after = dict(zip(clipped.steps, clipped.values, strict=True))
    ratios = sorted(value / after[step] for step, value in zip(norms.steps, norms.values, strict=True) if after.get(step))
    usual = ratios[len(ratios) // 2] if ratios else math.nan
    if not usual > _LOW:
        return []
    run = Precautions.of(history)
    costs = history.learning.is_stuck or (usual > _FAR_TOO_LOW and not history.learning.is_learning)
    return [
        Finding(
            "always-clipped",
            "warning" if costs else "info",
            "",
            (norms.steps[0], norms.steps[-1]),
            {
                "share of clipped steps": shares.values[-1],
                "median norm": norms.median,
                "norm after it" if run.bound is None else "bound": clipped.median,
            },
            f"Nearly every step is clipped, to {usual:.3g} times less than its norm: "
            "the bound sets the step's length, not the gradient.",
            f"Raise {_named(run)} until a gradient of the median norm, {norms.median:.2g}, passes it, so that it acts on outliers only.",
            68.0,
        )
    ]


def _named(run: Precautions) -> str:
    """The bound of the clip, as the loop calls it."""
    return "the limit of the adaptive clip" if run.adaptive else "the bound of the clip" if run.bound is None else "max_norm"


def _never(history: History, norms: Series) -> list[Finding]:
    run = Precautions.of(history)
    far = _outliers(norms)
    spiky = 2 <= len(far) < len(norms) / 10
    return [
        Finding(
            "never-clipped",
            "warning" if spiky and not history.learning.has_fallen else "info",
            "",
            (far[0], far[-1]) if spiky else (norms.steps[0], norms.steps[-1]),
            {"median norm": norms.median, "largest": max(norms.values), "outliers": float(len(far))},
            "The clip never acts"
            + (f", though {len(far)} steps had more than ten times the norm of those around them." if spiky else "."),
            f"Lower {_named(run)} to two or three times the median norm, {norms.median:.2g}.",
            77.5 if spiky else 5.0,  # weights leap and the loss rises because of what passes
        )
    ]


def _outliers(norms: Series) -> list[int]:
    """Steps whose norm is far above those around them; the first tenth of a run is above what follows by itself."""
    found = []
    beginning = norms.part(0, 0.1).median
    for place in range(len(norms) // 10, len(norms)):
        around = sorted(norms.values[max(place - _AROUND, 0) : place + _AROUND + 1])
        if norms.values[place] > max(_OUTLIER * around[len(around) // 2], _ABOVE * beginning):
            found.append(norms.steps[place])
    return found
