"""Weights that grow without bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class _Growth(NamedTuple):
    factor: float
    middle: float
    last: float
    series: Series

    @property
    def steadiness(self) -> float:
        return self.last / max(self.middle, 1e-9)


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
