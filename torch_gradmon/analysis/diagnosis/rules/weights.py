"""Weights that grow without bound, or sit on one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple

from ....core import keys as n
from ....core.formatting import also_in
from ..findings import Finding
from ..history import History
from ..learning import falls_without_bound
from ..series import Series

#: Growth of a matrix, far growth, and the fewest steps that show it.
_GROWN, _FAR, _FEWEST = 4.0, 8.0, 30
#: In the last third of the run it still grows by this share of the growth in the middle third, both as logarithms, and by a
#: fifth: no bound is near. Weights that only their own size holds back grow with the root of the steps, which gives 0.58;
#: exponential growth gives 1.
_STILL, _EXPONENTIAL, _LEAST = 0.6, 0.85, math.log(1.2)
#: Layers begin with a gain of 0.5 to 1.4; one that reaches no more than this has grown to a usual size.
_USUAL = 2.0
#: Updates that make weights grow by this part of their own length point along the weights, as a decay with the wrong sign does.
#: Updates of too high a rate point back and forth, and give a quarter of that or less.
_OUTWARDS = 0.4
#: The last steps in which root mean squares are the same, their least number, and the rounding; and their share of the bound where nearly
#: all elements are on it: it is 0.58 where these are spread evenly below it.
_END, _FEWEST_AT_END, _ROUNDING, _NEARLY = 0.2, 8, 1e-6, 0.85


class _Growth(NamedTuple):
    factor: float
    middle: float
    last: float
    series: Series

    @property
    def steadiness(self) -> float:
        return self.last / max(self.middle, 1e-9)


def check_bounds(history: History) -> list[Finding]:
    """All weights of a network sit on the bound of a clamp, or nearly all: vectors of different lengths have one root mean square now and
    keep it, and had others at the beginning; and all matrices beside them have hardly less, and never more.
    """
    rms, sizes = history.matrix(n.PARAMETER, "rms"), history.sizes(n.PARAMETER)
    if rms is None or len(rms.steps) < 2 * _FEWEST_AT_END:
        return []
    ends = rms.values[-max(_FEWEST_AT_END, int(_END * len(rms.steps))) :]
    low, high = (dict(zip(rms.names, found.tolist(), strict=True)) for found in (ends.amin(0), ends.amax(0)))
    first = dict(zip(rms.names, rms.values[0].tolist(), strict=True))
    vectors = {name: at for name, at in low.items() if at > 0 and name not in history.matrices}
    still = [name for name, at in vectors.items() if _is_same(at, high[name]) and not _is_same(at, first[name])]
    for bound in dict.fromkeys(low[name] for name in still):
        there = [name for name in still if _is_same(low[name], bound)]
        if len({sizes.get(name) for name in there}) < 2:
            continue
        within = _common([name.split(".")[:-1] for name in there])
        weights = [name for name in rms.names if name in history.matrices and name.split(".")[: len(within)] == within]
        if weights and all(_NEARLY * bound < low[name] and high[name] <= (1 + _ROUNDING) * bound for name in weights):
            return history.finding(
                "weights-at-bound",
                weights[0],
                {"bound": bound, "smallest root mean square of a matrix": min(map(low.__getitem__, weights))},
                f"All weights are about {bound:.3g} or -{bound:.3g}: they sit on the bound of a clamp.{also_in(weights)}",
                "Widen the bound, or take a penalty instead, as of the gradient's norm in a Wasserstein GAN; with a smaller learning rate "
                "they reach it later.",
                79.0,
                severity="warning",
                steps=(rms.steps[-len(ends)], rms.steps[-1]),
            )
    return []


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * one


def _common(paths: list[list[str]]) -> list[str]:
    """The modules that contain all of these."""
    return [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))]


def check_weights(history: History) -> list[Finding]:
    """By the norms of matrices; one that starts at zero, or near it, has to grow."""
    norms = history.matrix(n.PARAMETER, "norm")
    if norms is None:
        return []
    norms, sizes = history.settled(norms), history.sizes(n.PARAMETER)
    grown = {
        name: growth
        for name in norms.names
        if name in history.matrices
        and (growth := _growth(norms.column(name).finite))
        and not _is_small(history, sizes, name, growth)
    }
    if not grown:
        return []
    worst = sorted(grown, key=lambda name: -grown[name].factor)
    growth = grown[worst[0]]
    runs_away = growth.factor > _FAR and growth.steadiness > _EXPONENTIAL
    harms = history.learning.is_stuck or history.learning.state == "rises"
    harms |= history.learning.state != "unknown" and falls_without_bound(history.loss.finite)
    is_cause = runs_away and _grows_by_itself(history, worst[0], growth)  # it kills units and makes the loss rise
    return history.finding(
        "weight-growth",
        worst[0],
        {
            "norm at the beginning": growth.series.values[0],
            "at the end": growth.series.values[-1],
            "growth in the last third": math.exp(growth.last),
        },
        f"The weights have grown by a factor of {growth.factor:.3g}, and go on growing.{also_in(worst)}",
        "Look for a penalty or a weight decay with the wrong sign; lower the learning rate, or raise the weight decay.",
        77.0 if is_cause else 69.0 if runs_away else 45.0,
        severity="warning" if harms or runs_away else "info",
        steps=(growth.series.steps[0], growth.series.steps[-1]),
    )


def _is_small(history: History, sizes: Mapping[str, float], name: str, growth: _Growth) -> bool:
    """Whether it began small, and still multiplies inputs by no more than usual: the root mean square times the root of the fan in."""
    outputs = sizes.get(name, 0.0) / max(history.matrices[name], 1)
    return history.matrices[name] > 0 and outputs > 0 and growth.series.values[-1] / math.sqrt(outputs) < _USUAL


def _grows_by_itself(history: History, name: str, growth: _Growth) -> bool:
    """Whether the updates of the last third point along the weights; True if updates are unknown."""
    ratios = history.ratio(n.UPDATE, n.PARAMETER)
    steps = (growth.series.steps[-1] - growth.series.steps[0]) / 3
    if ratios is None or name not in ratios.names:
        return True
    updates = ratios.column(name).part(2 / 3, 1).finite.values
    return growth.last > _OUTWARDS * steps * sum(updates) / max(len(updates), 1)


def _growth(norms: Series) -> _Growth | None:
    if len(norms) < _FEWEST or min(norms.values) <= 0:
        return None
    logs = [math.log(norms.at(share)) for share in (0.0, 1 / 3, 2 / 3, 1.0)]
    growth = _Growth(math.exp(logs[3] - logs[0]), logs[2] - logs[1], logs[3] - logs[2], norms)
    return growth if growth.factor > _GROWN and growth.last > max(_STILL * growth.middle, _LEAST) else None
