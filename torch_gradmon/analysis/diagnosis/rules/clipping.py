"""Gradient clipping that always acts, or never does."""

from __future__ import annotations

import math

from ..findings import Finding, NotMeasured
from ..history import History
from ..learning import trend
from ..precautions import Precautions
from ..series import Series

#: The share of the last steps that are clipped if nearly all are.
_ALWAYS = 0.95
#: The median norm over the bound if the bound is too low, and if it is far too low.
_LOW, _FAR_TOO_LOW = 10.0, 100.0
#: And if it is for plain SGD, whose loss still falls: Adam divides by the size of the gradient anyway.
_SHORT = 30.0
#: Norms before and after a clip that does not act differ by rounding only, of float16 gradients at most by this part.
_SAME = 1e-3
#: An outlier has this many times the median norm of this many steps before and after it,
_OUTLIER, _AROUND = 10.0, 20
#: and this many times that of the first steps: norms jump where the loss is near zero.
_ABOVE = 2.0


def check_clipping(history: History) -> list[Finding]:
    """Judged by the applied steps: by the norms that the clip gets, and those that it leaves."""
    norms = history.edit.before_clip(history.applied("grad_norm").finite)
    if not norms:
        raise NotMeasured("no gradient norm before clipping was measured")
    shares = history.applied("clipped_share")
    if not shares or shares.steps[-1] < norms.part(0.9, 1).steps[0]:  # a scaling that was first taken for a clip
        return []
    if shares.values[-1] >= _ALWAYS:
        return _always(history, norms, shares)
    return _never(history, norms) if max(shares.values) == 0 else []


def _always(history: History, norms: Series, shares: Series) -> list[Finding]:
    clipped = history.applied("grad_norm_clipped").finite
    run = Precautions.of(history)
    is_clip = run.bound is not None or run.adaptive
    norms = norms if is_clip else history.applied("grad_norm").finite  # with what may be a scaling
    ratios = sorted(before / after for before, after in _pairs(norms, clipped) if after)
    usual = ratios[len(ratios) // 2] if ratios else math.nan
    if not usual > _LOW:
        return []
    if not is_clip:
        return _reduced(history, norms, usual)
    costs = history.learning.is_stuck or (usual > _FAR_TOO_LOW and not history.learning.is_learning)
    is_plain = bool(history.groups) and all(group["optimizer"] == "SGD" for group in history.groups)
    costs |= is_plain and usual > _SHORT and trend(history.loss.finite.part(0.5, 1))[0] == "falls"
    return history.finding(
        "always-clipped",
        "",
        {
            "share of clipped steps": shares.values[-1],
            "median norm": norms.median,
            "norm after it" if run.adaptive else "bound": clipped.median,
        },
        f"Nearly every step is clipped, to {usual:.3g} times less than its norm: "
        "the bound sets the length of the step, not the gradient.",
        f"Raise {'the limit of the adaptive clip' if run.adaptive else 'max_norm'} until a gradient of the median norm, "
        f"{norms.median:.2g}, passes it and only outliers are clipped.",
        68.0,
        severity="warning" if costs else "info",
        steps=(norms.steps[0], norms.steps[-1]),
    )


def _reduced(history: History, norms: Series, usual: float) -> list[Finding]:
    """Steps that have no norm in common: clipped by parameters or elements, or by a bound that changes; or divided, masked and so on."""
    return history.finding(
        "always-clipped",
        "",
        {"median norm": norms.median, "times less": usual},
        f"In nearly every step the gradient is made {usual:.3g} times smaller between backward and the optimizer's step, and not to one "
        "norm, as by a clip with one bound.",
        "If it is a clip of single parameters or elements, or one whose bound changes, raise that bound. A division or another edit "
        "needs nothing.",
        4.0,
        severity="info",
        steps=(norms.steps[0], norms.steps[-1]),
    )


def _pairs(norms: Series, clipped: Series) -> list[tuple[float, float]]:
    """The norms before and after of the steps that have both."""
    after = dict(zip(clipped.steps, clipped.values, strict=True))
    return [(norm, after[step]) for step, norm in zip(norms.steps, norms.values, strict=True) if step in after]


def _never(history: History, norms: Series) -> list[Finding]:
    pairs = _pairs(history.applied("grad_norm").finite, history.applied("grad_norm_clipped").finite)
    if any(abs(before - after) > _SAME * before for before, after in pairs):  # what changes norms, and reduces none, is no clip
        return []
    far = _outliers(norms)
    spiky = 2 <= len(far) < len(norms) / 10
    limit, bound = history.clip_bound, f"two or three times the median norm, {norms.median:.2g}"
    if limit is not None and not spiky and not (limit and far):
        return []  # a bound that nothing has to reach, or a norm that the trainer only measures
    made = (
        "The loop writes to gradients between backward and the optimizer's step, as a clip does, and never makes them smaller"
        if limit is None
        else f"No gradient reaches the bound of the clip, {limit:g}"
        if limit
        else "Gradients are not clipped"
    )
    return history.finding(
        "never-clipped",
        "",
        {"median norm": norms.median, "largest": max(norms.values), "outliers": float(len(far))},
        made + (f", though {len(far)} steps had more than ten times the norm of those around them." if spiky else "."),
        f"Clip the norm of all gradients to {bound}"
        + ("; a clip that is there has a bound above all norms, or an infinite one." if limit is None else ".")
        if spiky
        else "Nothing has to be done: no step has an outlier for a bound to stop, and one above all norms only measures them."
        if not far
        else f"Nothing has to be done: a bound above all norms only measures them. One that is to stop outliers is {bound}.",
        77.5 if spiky else 0.5,  # below all that it might be taken for a cause of
        severity="warning" if spiky and not history.learning.has_fallen else "info",
        steps=(far[0], far[-1]) if spiky else (norms.steps[0], norms.steps[-1]),
    )


def _outliers(norms: Series) -> list[int]:
    """Steps whose norm is far above those around them. Skips the first tenth, which is above the rest in most runs."""
    found = []
    beginning = norms.part(0, 0.1).median
    for place in range(len(norms) // 10, len(norms)):
        around = sorted(norms.values[max(place - _AROUND, 0) : place + _AROUND + 1])
        if norms.values[place] > max(_OUTLIER * around[len(around) // 2], _ABOVE * beginning):
            found.append(norms.steps[place])
    return found
