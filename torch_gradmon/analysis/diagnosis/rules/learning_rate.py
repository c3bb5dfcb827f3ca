"""Learning rates, judged by the size of updates relative to the weights, and by the loss.

A rate is too high if, at the beginning, the updates of half of all matrices are a fifth or more of the weights and the loss rises: by
half or, where it does not fall later, beyond its noise. Where it does not fall, updates that stay so large are enough, and where it rises
far, a tenth is. A rate that leaps during the training is too high if the loss is worse from then on. It is too low if no matrix ever
moves by more than a fifty-thousandth in a step and the loss does not fall. About a thousandth works for most models (Karpathy, "A recipe
for training neural networks", 2019), but small models learn well with a hundredth, so the loss has to confirm it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ....core import keys as n
from ....core.formatting import also_in, times
from ..findings import Finding, NotMeasured
from ..history import History
from ..learning import rank_shift, spread, trend
from ..precautions import Precautions
from ..series import Matrix, lower_median
from .precision import rounding_unknown

#: The update over the weights, per step.
_HIGH, _LOW = 0.2, 2e-5
#: Updates that are this large a part of the weights are too large as well if they leave this share of the units of each ReLU silent, and
#: no more than this share was so at the first step.
_KILLS, _SILENT, _LIVE = 0.05, 0.99, 0.9
#: A loss at chance is the fault of the rate if all updates together would have moved no matrix by more than this part of itself.
_TOGETHER = 0.1
#: The same for single matrices, judged over the whole run.
_PART_HIGH, _PART_LOW = 0.1, 1e-6
#: From here on, no share but a multiple.
_MANY_TIMES = 2.0
#: A part is slow if the typical matrix moves this many times faster,
_BEHIND = 1e3
#: and only if its learning rate, not its gradient, makes it slow.
_OWN_RATE = 1e-2
#: A rate leaps if it becomes this many times the largest one before, in at least this many steps,
_LEAP, _WINDOW = 5.0, 20
#: and spoils the loss if that is then this many times what it was, by this many standard deviations of its ranks.
_WORSE, _RANKS = 1.25, 3.0
#: The largest early loss over the first one if the loss rises, and if it rises far; the fewest losses looked at; deviations of noise.
_LEFT, _FAR, _FIRST, _SPREADS = 1.5, 3.0, 5, 6.0
#: A learning rate below this share of its largest value moves nothing; it is too early if that holds for this share of the run.
_SPENT, _TOO_EARLY = 1e-3, 0.3
#: Below this share it moves too little for a loss that has not fallen by a third, and hardly falls any more: by less than this share.
_LITTLE_LEFT, _LITTLE = 0.02, 0.05
#: Of a rate that is low because it is still on its way.
_WARMS_UP = (
    "The rate still rises at the end: shorten the warm-up, to a tenth of the training at most. If that is not enough, raise"
)


def check_learning_rate(history: History) -> list[Finding]:
    """The whole model first; a part is named if the rest is fine."""
    by_itself, ratios = _leapt(history) or _ran_out(history), history.ratio(n.UPDATE, n.PARAMETER)
    if ratios is None:
        if by_itself:
            return by_itself
        raise NotMeasured("updates were not measured: attach the optimizer, and use the preset standard or full")
    names = [name for name in ratios.names if name in history.matrices] or list(ratios.names)
    ratios = ratios.of(ratios.steps, names)
    settled = history.settled(ratios)
    whole = _high(history, settled) or by_itself or _low(history, ratios)
    return [*whole, *_high_parts(history, settled, is_alone=not whole), *_low_parts(history, settled)]


def _leapt(history: History) -> list[Finding]:
    """A rate that rises at once far above all that it was before, stays there for a while, and spoils the loss."""
    rates = history.group_rates
    first = next((at for at in reversed(range(len(rates))) if len(rates[at]) != len(rates[-1])), -1) + 1  # with these groups
    groups = list(zip(*rates[first:], strict=True))
    found = [(first + leap.start, number, leap) for number, rate in enumerate(groups) if (leap := _leap(rate)) is not None]
    if not found or history.learning.state == "unknown":
        return []
    at, number, leap = min(found)
    rate, (last, step) = groups[number], history.steps[at - 1 : at + 1]
    before = history.loss.finite.before(step).values[-_WINDOW:]
    after = [value if math.isfinite(value) else math.inf for value in history.loss.since(step).values]
    end_loss = after[int(0.8 * len(after)) :]
    if min(len(before), len(after)) < _FIRST or not (_is_worse(before, after[:_WINDOW]) and _is_worse(before, end_loss)):
        return []
    of = f" of group {number}" if len(groups) > 1 and len(found) < len(groups) else ""
    when = f"in step {step}" if step == last + 1 else f"between steps {last} and {step}"
    end = history.steps[first + leap.stop - 1]
    stays = "stayed there" if end == history.steps[-1] else f"stayed there until step {end}"
    return history.finding(
        "learning-rate-high",
        "",
        {
            "learning rate before": rate[leap.start - 1],
            "from then on": rate[leap.start],
            "loss before": lower_median(before),
            "at the end": lower_median(end_loss),
        },
        f"The learning rate{of} rose to {times(rate[leap.start] / rate[leap.start - 1])} what it was {when} and {stays}, and the loss is "
        "worse since then.",
        "See what sets the rate in that step, such as a schedule, a resumed checkpoint or a rate in other units; otherwise raise it in "
        "small steps.",
        88.0,
        severity="info" if history.need_not_fall else "warning",
        steps=(step, history.steps[-1]),
    )


def _leap(rates: Sequence[float]) -> range | None:
    """The places, from the last one on from which a rate is far above any earlier one, as long as it is."""
    highest = list(accumulate(rates, max))
    for at in reversed(range(_WINDOW, len(rates))):
        if rates[at] > _LEAP * highest[at - 1] > 0:
            low = (place for place in range(at, len(rates)) if not rates[place] > _LEAP * highest[at - 1])
            end = next(low, len(rates))
            return range(at, end) if end == len(rates) or end - at >= _WINDOW else None
    return None


def _is_worse(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether losses are far above those before, or mostly no longer finite."""
    return lower_median(after) > _WORSE * lower_median(before) > 0 and rank_shift(before, after) > _RANKS


def _ran_out(history: History) -> list[Finding]:
    """A schedule that has brought all rates down long before the end, from where the loss hardly falls."""
    loss = history.loss.finite
    if history.learning.state == "unknown" or history.need_not_fall:
        return []
    share, since = _SPENT, _below(history, _SPENT, _TOO_EARLY)
    if since is None and not history.learning.has_fallen:
        share, since = _LITTLE_LEFT, _below(history, _LITTLE_LEFT, 1 - _TOO_EARLY)
    if since is not None and trend(rest := loss.since(since))[0] == "falls":
        head = rest.part(0, 0.2).median
        since = None if head - rest.part(0.8, 1).median > _LITTLE * abs(head) else since
    if since is None:
        return []
    return history.finding(
        "learning-rate-low",
        "",
        {"loss then": loss.since(since).part(0, 0.2).median, "loss at the end": loss.part(0.8, 1).median},
        f"The learning rate fell below a {'thousandth' if share == _SPENT else 'fiftieth'} of its largest value long before the end, "
        "and since then the loss hardly falls.",
        "Step the schedule less often, once per epoch if it was made for epochs, or let it end higher.",
        60.0,
        severity="warning",
        steps=(since, loss.steps[-1]),
    )


def _below(history: History, share: float, least: float) -> int | None:
    """The step from which the rate of each group was below this ``share`` of its largest one, for the ``least`` share of the run."""
    rates = history.group_rates
    if len(set(map(len, rates))) != 1:
        rates = [[max(each)] for each in rates]
    largest = [max(of) for of in zip(*rates, strict=True)]
    left = [max(rate / most if most else 0.0 for rate, most in zip(each, largest, strict=True)) for each in rates]
    since = next((place for place in reversed(range(len(left))) if left[place] >= share), -1) + 1
    return history.steps[since] if 0 < since < (1 - least) * len(left) else None


def _high(history: History, ratios: Matrix) -> list[Finding]:
    early = sorted(ratios.part(0, 0.1).largest().values())
    typical = early[len(early) // 2] if early else 0.0
    worst, fails = _harm(history)
    is_stuck = history.learning.is_stuck and not history.rests_at_chance
    stays = lower_median(ratios.part(0.25, 1).medians().values()) > _PART_HIGH
    is_high = typical > _HIGH and (worst > _LEFT or (is_stuck and (stays or _rises(history, worst))))
    is_high |= typical > _PART_HIGH and worst > _FAR
    if is_high or (typical > _KILLS and history.learning.is_stuck and _died(history)):
        is_late = history.misses_beginning(ratios.steps)
        first = f"The first measured updates, from step {ratios.steps[0]} on," if is_late else "The first updates"
        return history.finding(
            "learning-rate-high",
            "",
            {"update / weight": typical, "learning rate": _largest_rate(history), "worst loss / first loss": worst},
            f"{first} are a large part of the weights themselves, and the loss suffers.",
            "Lower the learning rate, by ten to begin with, until updates are about a thousandth of the weights"
            f"{Precautions.of(history).warm_up_advice}.",
            85.0,
            severity="warning" if worst > _FAR or fails else "info",
        )
    return []


def _low(history: History, ratios: Matrix) -> list[Finding]:
    if rounding_unknown(history):  # it may leave nothing of the updates that a sound rate makes
        return []
    largest = max(ratios.largest().values(), default=0.0)
    # updates may point one way, and are measured on some steps only
    together = largest * (history.steps[-1] - history.steps[0] + 1)
    is_slow = (history.learning.is_at_chance or history.learning.is_worse) and together < _TOGETHER
    if largest > 0 and (is_slow or (largest < _LOW and history.learning.state in ("flat", "rises"))):
        return history.finding(
            "learning-rate-low",
            "",
            {"update / weight": largest, "learning rate": _largest_rate(history)},
            "No weight moves by more than a tiny part of itself in a step, and the loss does not fall.",
            f"{_WARMS_UP if Precautions.of(history).raises else 'Raise'} the learning rate, by ten at a time, until updates are about a "
            "thousandth of the weights.",
            60.0,
        )
    return []


def _died(history: History) -> bool:
    """Whether units of all ReLUs, live at the first step, were soon silent."""
    silent = history.matrix(n.ACTIVATION, "sparsity")
    names = [] if silent is None else [name for name in silent.names if history.kinds.get(name) == "ReLU"]
    if silent is None or not names:
        return False
    shares, at = silent.of(silent.steps, names), history.beginning(silent.steps)
    return at is not None and max(shares.values[at].tolist()) < _LIVE and min(shares.part(0.1, 1).medians().values()) > _SILENT


def _harm(history: History) -> tuple[float, bool]:
    """The worst early loss over the first one, and whether the model fails to learn."""
    loss = history.loss.finite
    fails = not history.learning.has_fallen and history.learning.state != "unknown"
    if not loss or not loss.values[0] > 0:
        return 1.0, fails
    early = (*loss.part(0, 0.3).values, *loss.values[:_FIRST])  # a run that ends in NaN may have only a few
    return max(early) / loss.values[0], fails


def _rises(history: History, worst: float) -> bool:
    """Whether the early loss is ever above the first one by more than the noise of a loss that rests. Unknown counts as yes."""
    loss = history.loss.finite
    return not loss or (worst - 1) * loss.values[0] > _SPREADS * spread(loss.part(0.8, 1)) or not loss.values[0] > 0


def _high_parts(history: History, ratios: Matrix, is_alone: bool) -> list[Finding]:
    """``is_alone``: no rate of the whole model is at fault."""
    usual = ratios.part(0.25, 1).medians()
    high = sorted((name for name, value in usual.items() if value > _PART_HIGH), key=lambda name: -usual[name])
    # the loss left upwards at the beginning
    is_early = not high and is_alone and _harm(history)[0] > _FAR and not history.misses_beginning(ratios.steps)
    if is_early:
        usual = ratios.part(0, 0.1).largest()
        high = sorted((name for name, value in usual.items() if value > _HIGH), key=lambda name: -usual[name])
    if not high:
        return []
    return history.finding(
        "update-ratio-high",
        high[0],
        {"update / weight": usual[high[0]], "typical of all": lower_median(usual.values())},
        f"The first steps change these weights by {_part(usual[high[0]])}, and the loss rises.{also_in(high)}"
        if is_early
        else f"Each step changes these weights by {_part(usual[high[0]])}, so they forget within a few steps.{also_in(high)}",
        "Lower the learning rate." if 2 * len(high) > len(usual) > 1 else f"Lower the learning rate of {_group(history)}.",
        70.0,
        severity="warning" if is_early else "info" if history.rests_at_chance else None,
        steps=(ratios.steps[0], ratios.steps[-1]),
    )


def _part(ratio: float) -> str:
    return f"{ratio:.0%} of themselves" if ratio < _MANY_TIMES else f"{times(ratio)} their own size"


def _low_parts(history: History, ratios: Matrix) -> list[Finding]:
    usual = ratios.medians()
    gradients = history.ratio(n.GRADIENT, n.PARAMETER) or history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER)
    if gradients is None:
        return []
    typical = max(usual.values(), default=0.0)
    candidates = history.always_reached.intersection(usual)
    # update over gradient, the effective rate
    steps = {name: usual[name] / gradient for name, gradient in gradients.medians().items() if gradient and name in candidates}
    low = [
        name
        for name in steps
        if usual[name] < min(_PART_LOW, typical / _BEHIND) and steps[name] < _OWN_RATE * max(steps.values())
    ]
    if not low:
        return []
    low.sort(key=lambda name: usual[name])
    return history.finding(
        "update-ratio-low",
        low[0],
        {"update / weight": usual[low[0]], "largest of the others": typical, "parameters like this": float(len(low))},
        f"These weights have gradients but hardly move, while others do.{also_in(low)}",
        f"Raise the learning rate of {_group(history)}; if it should not change, freeze it with requires_grad_(False).",
        55.0,
        steps=(ratios.steps[0], ratios.steps[-1]),
    )


def _group(history: History) -> str:
    return "this parameter's group" if Precautions.of(history).groups > 1 else "this parameter, in a group of its own"


def _largest_rate(history: History) -> float:
    """The largest rate of all steps and groups; NaN if no rate is known."""
    return max(history.rates) or math.nan
