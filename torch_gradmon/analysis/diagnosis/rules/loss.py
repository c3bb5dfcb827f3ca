"""Rules about learning: learning rate, silent and saturated units, mistakes of the loop, skipped steps, and the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median_high

import torch

from ....core import keys as n
from ....core.formatting import listed, times
from ....core.loop_mistakes import MISTAKES, RANK_FAULTS, SETUP_MISTAKES, LoopFinding
from ....core.records import NON_FINITE_INPUT, Severity
from ..findings import Finding, NotMeasured
from ..history import PERHAPS, History, Precautions, falls_without_bound, may_fall, rank_shift, spread, trend
from ..series import Matrix, Series, lower_median
from .nonfinite import rounding_unknown

# --- Learning rates, judged by the size of updates relative to the weights, and by the loss ---

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
    by_itself, ratios = _leapt(history) or _crawls(history) or _ran_out(history), history.ratio(n.UPDATE, n.PARAMETER)
    if not ratios:
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
    low, high = rate[leap.start - 1], rate[leap.start]
    losses = {"loss before": lower_median(before), "at the end": lower_median(end_loss)}
    cause = f"The learning rate{of} rose to {times(high / low)} what it was {when} and {stays}, and the loss is worse since then."
    advice = (
        "See what sets the rate in that step, such as a schedule, a resumed checkpoint or a rate in other units; otherwise raise it in "
        "small steps."
    )
    evidence, span = {"learning rate before": low, "from then on": high, **losses}, (step, history.steps[-1])
    return history.finding("learning-rate-high", "", evidence, cause, advice, 88.0, history.alarm, span)


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
    share, since = "thousandth", _below(history, _SPENT, _TOO_EARLY)
    if since is None and not history.learning.has_fallen:
        share, since = "fiftieth", _below(history, _LITTLE_LEFT, 1 - _TOO_EARLY)
    if since is None:
        return []
    head, end = loss.since(since).part(0, 0.2).median, loss.since(since).part(0.8, 1).median
    if trend(loss.since(since))[0] == "falls" and head - end > _LITTLE * abs(head):
        return []
    evidence = {"loss then": head, "loss at the end": loss.part(0.8, 1).median}
    cause = (
        f"The learning rate fell below a {share} of its largest value long before the end, and since then the loss hardly falls."
    )
    advice = "Step the schedule less often, once per epoch if it was made for epochs, or let it end higher."
    return history.finding("learning-rate-low", "", evidence, cause, advice, 60.0, "warning", (since, loss.steps[-1]))


def _crawls(history: History) -> list[Finding]:
    """A warm-up that was made for steps, and is stepped once per epoch: it rises by stairs, and ends far below the rate that was set."""
    meant = max((float(group["settings"].get("initial_lr") or 0.0) for group in history.groups), default=0.0)
    stairs = [0, *(place for place, (before, after) in enumerate(pairwise(history.rates), 1) if before != after)]
    rates = [history.rates[place] for place in stairs]
    width = min((after - before for before, after in pairwise(stairs)), default=0)
    is_stairs = len(stairs) > 2 and width >= _WINDOW and rates == sorted(rates)
    if not is_stairs or not rates[-1] < _LITTLE * meant or history.learning.has_fallen:
        return []
    evidence = {
        "learning rate that was set": meant,
        "learning rate at the end": rates[-1],
        "steps between two rises": float(width),
    }
    cause = "The warm-up rises once in many steps, as if its steps were epochs, so the learning rate stays far below the one that was set."
    advice = 'Call scheduler.step() after each optimizer.step(); in Lightning, return the scheduler with "interval": "step".'
    return history.finding("learning-rate-low", "", evidence, cause, advice, 70.0, "warning")


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
    typical = median_high(ratios.part(0, 0.1).largest().values() or [0.0])
    worst, fails = _harm(history)
    is_stuck = history.learning.is_stuck and not history.rests_at_chance
    stays = lower_median(ratios.part(0.25, 1).medians().values()) > _PART_HIGH
    loss = history.loss.finite  # whose noise at rest the early losses exceed, or of which that is unknown
    rises = not loss or (worst - 1) * loss.values[0] > _SPREADS * spread(loss.part(0.8, 1)) or not loss.values[0] > 0
    is_high = typical > _HIGH and (worst > _LEFT or (is_stuck and (stays or rises)))
    is_high |= typical > _PART_HIGH and worst > _FAR
    if not is_high and not (typical > _KILLS and history.learning.is_stuck and _died(history)):
        return []
    is_late = history.misses_beginning(ratios.steps)
    first = f"The first measured updates, from step {ratios.steps[0]} on," if is_late else "The first updates"
    evidence = {"update / weight": typical, "learning rate": max(history.rates) or math.nan, "worst loss / first loss": worst}
    cause = f"{first} are a large part of the weights themselves, and the loss suffers."
    advice = (
        "Lower the learning rate, by ten to begin with, until updates are about a thousandth of the weights"
        f"{Precautions(history).warm_up_advice}."
    )
    severity: Severity = "warning" if worst > _FAR or fails else "info"
    return history.finding("learning-rate-high", "", evidence, cause, advice, 85.0, severity)


def _low(history: History, ratios: Matrix) -> list[Finding]:
    if rounding_unknown(history):  # it may leave nothing of the updates that a sound rate makes
        return []
    largest = max(ratios.largest().values(), default=0.0)
    # updates may point one way, and are measured on some steps only
    together = largest * (history.steps[-1] - history.steps[0] + 1)
    is_slow = (history.learning.is_at_chance or history.learning.is_worse) and together < _TOGETHER
    if not largest > 0 or not (is_slow or (largest < _LOW and history.learning.state in ("flat", "rises"))):
        return []
    evidence = {"update / weight": largest, "learning rate": max(history.rates) or math.nan}
    cause = "No weight moves by more than a tiny part of itself in a step, and the loss does not fall."
    raised = _WARMS_UP if Precautions(history).raises else "Raise"
    advice = f"{raised} the learning rate, by ten at a time, until updates are about a thousandth of the weights."
    return history.finding("learning-rate-low", "", evidence, cause, advice, 60.0)


def _died(history: History) -> bool:
    silent = history.matrix(n.ACTIVATION, "sparsity")
    names = [name for name in silent.names if history.kinds.get(name) == "ReLU"]
    if not names:
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


def _high_parts(history: History, ratios: Matrix, is_alone: bool) -> list[Finding]:
    """``is_alone``: no rate of the whole model is at fault."""
    usual = ratios.part(0.25, 1).medians()
    high = {name: value for name, value in usual.items() if value > _PART_HIGH}
    # the loss left upwards at the beginning
    is_early = not high and is_alone and _harm(history)[0] > _FAR and not history.misses_beginning(ratios.steps)
    if is_early:
        usual = ratios.part(0, 0.1).largest()
        high = {name: value for name, value in usual.items() if value > _HIGH}
    if not high:
        return []
    worst = sorted(high, key=lambda name: -high[name])
    evidence = {"update / weight": high[worst[0]], "typical of all": lower_median(usual.values())}
    cause = f"Each step changes these weights by {_part(high[worst[0]])}, so they forget within a few steps."
    if is_early:
        cause = f"The first steps change these weights by {_part(high[worst[0]])}, and the loss rises."
    of_some = "" if 2 * len(high) > len(usual) > 1 else f" of {_group(history)}"
    severity: Severity | None = "warning" if is_early else "info" if history.rests_at_chance else None
    advice = f"Lower the learning rate{of_some}."
    return history.finding("update-ratio-high", worst, evidence, cause, advice, 70.0, severity, ratios.steps)


def _part(ratio: float) -> str:
    return f"{ratio:.0%} of themselves" if ratio < _MANY_TIMES else f"{times(ratio)} their own size"


def _low_parts(history: History, ratios: Matrix) -> list[Finding]:
    usual = ratios.medians()
    gradients = history.ratio(n.GRADIENT, n.PARAMETER) or history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER)
    typical = max(usual.values(), default=0.0)
    candidates = history.always_reached.intersection(usual)
    # update over gradient, the effective rate
    steps = {name: usual[name] / gradient for name, gradient in gradients.medians().items() if gradient and name in candidates}
    slow, fast = min(_PART_LOW, typical / _BEHIND), _OWN_RATE * max(steps.values(), default=0.0)
    low = sorted((name for name in steps if usual[name] < slow and steps[name] < fast), key=usual.__getitem__)
    if not low:
        return []
    evidence = {"update / weight": usual[low[0]], "largest of the others": typical, "parameters like this": float(len(low))}
    cause = "These weights have gradients but hardly move, while others do."
    advice = f"Raise the learning rate of {_group(history)}; if it should not change, freeze it with requires_grad_(False)."
    return history.finding("update-ratio-low", low, evidence, cause, advice, 55.0, steps=ratios.steps)


def _group(history: History) -> str:
    return "this parameter's group" if Precautions(history).groups > 1 else "this parameter, in a group of its own"


# --- Units that are always zero, and units at the ends of their range ---

#: Share of a layer's units that are dead, by gradients and by activations.
_DEAD, _SILENT_OUTPUTS = 0.5, 0.85
#: A layer without a unit that fires matters, however the loss falls, if it keeps all gradients from this share of the elements.
_CUT_OFF = 0.1
#: Below this largest element, a gradient has rows of zeros for other reasons.
_CLEAR = 1e-5
#: Mean square of tanh, or of a sigmoid rescaled to its range; 0.8 if outputs are within 0.1 of the ends.
_SATURATED = 0.8
_TANH = frozenset({"Tanh", "RNN", "Hardtanh", "Softsign"})
_SIGMOID = frozenset({"Sigmoid", "Hardsigmoid"})
_RELU = frozenset({"ReLU", "ReLU6", "Threshold"})
_NEVER_FLAT = frozenset({"GELU", "LeakyReLU", "SiLU", "ELU", "PReLU", "Mish"})


def check_units(history: History) -> list[Finding]:
    """By activations if they were measured; dead units also by gradients alone."""
    dead, saturated = _dead(history), _saturated(history)
    if not history.matrix(n.ACTIVATION, "rms") and not dead:
        raise NotMeasured("activations were not measured: preset='full'")
    return [*dead, *saturated]


def _dead(history: History) -> list[Finding]:
    sparsity, outputs = history.gradients("sparsity"), history.matrix(n.ACTIVATION, "sparsity")
    sizes = history.gradients("max").part(0.5, 1).medians()
    # gradients that vanished altogether also count as near zero
    usual = {name: share for name, share in sparsity.part(0.5, 1).medians().items() if sizes.get(name, 0.0) > _CLEAR}
    rows = {  # a dead unit leaves a row of zeros in the gradient, and a zero in that of the bias
        name.rpartition(".")[0]: min(usual[name], usual[bias])
        for name in usual
        if name in history.matrices and (bias := f"{name.rpartition('.')[0]}.bias") in usual
    }
    kinds = set(history.kinds.values())
    if kinds & (_NEVER_FLAT | _TANH | _SIGMOID) and not kinds & _RELU:  # zeros in gradients have other reasons
        rows = {}
    found = {name: share for name, share in rows.items() if _DEAD < share < 1}  # all zeros may have other reasons
    usual = outputs.part(0.5, 1).medians()
    silent = {name: share for name, share in usual.items() if history.kinds.get(name) in _RELU and share > _SILENT_OUTPUTS}
    found |= silent
    if not found:
        return []
    worst = sorted(found, key=lambda name: -found[name])
    share, steps = found[worst[0]], (outputs if worst[0] in silent else sparsity).part(0.5, 1).steps
    evidence = {"share of silent units": share, "layers like this": float(len(worst))}
    cause = "Most units of this layer are zero for all inputs; no gradient reaches them, so they stay so."
    advice = "Start biases at 0, use LeakyReLU or GELU, or lower the learning rate."
    severity: Severity | None = "warning" if share == 1 and _cut_off(history) > _CUT_OFF else None
    return history.finding("dead-units", worst, evidence, cause, advice, 76.0, severity, steps)


def _cut_off(history: History) -> float:
    """The share of all elements whose gradients are exactly 0 in the second half of the run; 0 if it is all of them."""
    norms, sizes = history.gradients("norm"), history.sizes(n.PARAMETER)
    largest = norms.part(0.5, 1).largest()
    share = sum(sizes.get(name, 0) for name, norm in largest.items() if norm == 0) / max(sum(sizes.values()), 1)
    return share if share < 1 else 0.0


def saturated(history: History) -> dict[str, float]:
    """The mean square of the outputs of layers that lie at the ends of their range; empty where outputs were not measured."""
    sizes = history.matrix(n.ACTIVATION, "rms").part(0.25, 1)
    means = history.matrix(n.ACTIVATION, "mean").of(sizes.steps, sizes.names)
    kinds = [history.kinds.get(name.partition("[")[0], "") for name in means.names]  # one name for each of several outputs
    is_sigmoid = torch.tensor([kind in _SIGMOID for kind in kinds], dtype=torch.bool, device="cpu")
    squares = sizes.values.square()
    stretched = torch.where(is_sigmoid, 4 * (squares - means.values) + 1, squares)  # 2 x - 1 lies between -1 and 1
    # the upper median
    usual = means.by_name(-(-stretched).nanmedian(0).values) if means else {}
    return {
        name: usual[name]
        for name, kind in zip(means.names, kinds, strict=True)
        if kind in _TANH | _SIGMOID and usual[name] > _SATURATED
    }


def _saturated(history: History) -> list[Finding]:
    usual = saturated(history)
    worst = sorted(usual, key=lambda name: -usual[name])
    if not worst:
        return []
    evidence = {"mean square of outputs, at most 1": usual[worst[0]], "layers like this": float(len(worst))}
    cause = "The outputs of this layer lie at the ends of their range, where its slope is zero."
    advice = "Normalise the inputs, draw the weights smaller, or put a norm before it."
    steps = history.matrix(n.ACTIVATION, "rms").part(0.25, 1).steps
    return history.finding("saturated-units", worst, evidence, cause, advice, 77.0, steps=steps)


# --- Mistakes of the loop ---

#: What is at most this many times too large is as large as it should be; counts of tokens differ from batch to batch.
_ABOUT = 2.0
#: Modules that are named.
_NAMED = 3
_KNOWN = {**MISTAKES, **RANK_FAULTS, **SETUP_MISTAKES}


def check_loop(history: History) -> list[Finding]:
    return [_finding(fact, history) for fact in history.facts if fact.rule in _KNOWN and not _is_mended(fact, history)]


def _is_mended(fact: LoopFinding, history: History) -> bool:
    """Whether the loop divides the gradients of a summed loss after backward, where the fact is about the loss that went backward."""
    if fact.rule != "loss-scale":
        return False
    times = fact.evidence.get("times the gradient of the mean", 1.0) * lower_median(history.edit.scales.values() or [1.0])
    return bool(history.edit.scales) and 1 / _ABOUT < times < _ABOUT


def _only_frozen(history: History) -> list[str]:
    """The modules of an optimizer that has parameters, and none that requires a gradient."""
    owned: dict[int, list[str]] = {}
    for place, group in enumerate(history.groups):
        owned.setdefault(group.get("number", place), []).extend(group.get("parameters", ()))
    found = next((names for names in owned.values() if names and history.frozen.issuperset(names)), [])
    return [*dict.fromkeys(name.rpartition(".")[0] or name for name in found)]


def _finding(fact: LoopFinding, history: History) -> Finding:
    mistake = _KNOWN[fact.rule]
    severity: Severity = history.concern if mistake.matters_if_stuck else mistake.severity
    cause, advice = mistake.cause, history.advice.remedies.get(fact.rule, mistake.advice)
    if "temperature between output and loss" in fact.evidence:
        advice = "Divide the logits by a temperature of 0.01 to 1 once, and do not multiply by it"
    elif "times the gradient of the mean" in fact.evidence and fact.rule not in history.advice.remedies:
        advice = "Use reduction='mean', and divide it by nothing but the number of micro-batches"
    if fact.rule == "not-in-optimizer" and fact.evidence.get("old parameters in the optimizer"):
        severity = "error"  # certain: these parameters are no longer part of the model
        cause = f"{cause}; it has others, which are no part of the model any more"
        again = "call optimizer.add_param_group() with the new parameters"
        advice = f"Make the optimizer after the last change of the model, or {again}"
    elif fact.rule == "not-in-optimizer" and (frozen := _only_frozen(history)):
        cause = f"{cause}; instead an optimizer has only frozen ones, of {listed(frozen, _NAMED)}"
        advice = "Make that optimizer of the parameters that are to train; a copy that follows them belongs in none"
    if fact.rule == NON_FINITE_INPUT and not any(r.applied for r in history.records if r.step in (fact.first, fact.last)):
        severity = "info"  # it has changed no parameter
    if fact.rule == "targets-out-of-range" and saturated(history):
        severity = "warning"  # it is not their noise alone that lies there
    evidence, where, steps = {"times seen": float(fact.count), **fact.evidence}, "".join(fact.where[:1]), (fact.first, fact.last)
    return Finding(fact.rule, severity, where, steps, evidence, f"{cause}.", f"{advice}.", mistake.weight)


# --- Steps that a spike policy has left out ---

#: Steps that are named one by one.
_STEPS_NAMED = 8


def check_skipped(history: History) -> list[Finding]:
    """Which steps were skipped, whatever for: what such a step would have done is no part of the training, but its batch is lost."""
    steps = [record.step for record in history.records if record.skipped]
    if not steps:
        return []
    bad = {event.step for event in history.events if not math.isfinite(event.value)}.intersection(steps)
    which = "in all of them" if len(bad) == len(steps) else f"in {len(bad)} of them"
    what = f"; {which} a gradient was NaN or infinite" if bad else ""
    those = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
    evidence = {"skipped steps": float(len(steps)), "with NaN or Inf": float(len(bad))}
    cause = f"{those} skipped, {listed(map(str, steps), _STEPS_NAMED)}{what}: their gradients changed no parameter."
    advice = "Nothing has to be done if they are few; otherwise look at their batches, or raise the threshold of the detector."
    if bad:
        advice = "Look for NaN and Inf in the batches of these steps with torch.isfinite, since each epoch brings them again."
    return history.finding("steps-skipped", "", evidence, cause, advice, 14.0, "info", steps)


# --- The loss ---

#: The last fifth of the losses lies above the best fifth or tenth by this factor, by this many standard deviations of its ranks,
#: and by this many of its noise.
_ABOVE, _RANKS_ABOVE, _NOISES_ABOVE = 1.25, 3.0, 6.0
#: A loss that ends this many times above its beginning diverges, whatever its noise,
_FAR_ABOVE = 2.0
#: and so does one that ends this many times above its best.
_LOST = 8.0
#: A loss that loses this share of its fall again diverges, too.
_AGAIN = 0.25
#: The fewest rates that have a course.
_MANY_RATES = 20
#: A rate that never fell, and ends this many times above the middle of the run.
_RAISED = 1.5
#: The plateau of a loss with more noise relative to its level means nothing, as with a policy gradient.
_NOISE = 0.5
#: A learning rate that ends at its largest value, this many times the usual one, is still warming up.
_UP = 1.5
#: A loss that may well fall is no plateau, unless it fell by less than this share of it, in this many losses: far too little. In fewer
#: losses the share is as much smaller.
_PLATEAU_FALL, _MANY = 0.05, 200
#: A loss whose last fifth lies below this part of its first one has fallen; one of a kind that is not recognised, which may have a floor,
#: from this part of its beginning on.
_RESTS, _FELL = 2 / 3, 0.85
#: A loss that rises, and ends below this share of chance, has hardly forgotten anything.
_HARDLY = 0.2
_NEED_NOT_FALL = (
    "Nothing, if this is the loss of one network that another one works against, or the data depend on the model: then judge by what the "
    "model makes. Otherwise: "
)
#: The fewest losses in a part that can rank three standard deviations apart.
_RANKED = 7
#: The fewest learning rates that show a warm-up.
_FEWEST_RATES = 7
#: A loss that still falls after this share of the run, and rests later, may have learnt all there is.
_BEGINNING = 0.1


def check_loss(history: History) -> list[Finding]:
    """Divergence first; a loss that rises is not reported as a plateau too."""
    loss = history.loss
    if history.learning.state == "unknown":
        few = f"the loss is known and finite in {len(loss.finite)} steps of {len(history.records)}, and has to be in twenty"
        raise NotMeasured(few if loss else f"{history.advice.loss}, twenty steps of it at least")
    rules = _unbounded, _raised, _divergence, _at_chance, _plateau
    return next((found for rule in rules if (found := rule(history, loss.finite))), [])


def _at_chance(history: History, loss: Series) -> list[Finding]:
    chance, tail = history.chance.get("loss", 0.0), loss.part(0.8, 1)
    if not history.learning.is_at_chance or _is_warming_up(history):
        return []
    what = "the mean square around the targets' mean" if history.chance.get("is square") else "the entropy of the labels"
    evidence = {"loss at the end": tail.median, "of a constant answer": chance, "examples seen": history.chance["examples"]}
    cause = (
        f"{history.the_loss} ends where that of a model lies which gives all inputs the same answer, {what}: little or nothing is learnt "
        "about the targets."
    )
    advice = (
        "Check that inputs and targets belong together, that no mask or reshape mixes examples, and that the loss depends on the inputs. "
        "Overfit one batch, then try another learning rate. If the targets are mostly noise, this may be all there is to learn."
    )
    is_open = history.is_resumed or _is_unclear(loss, loss.part(0.5, 0.75), loss.part(0.75, 1))
    return history.finding("loss-at-chance", "", evidence, cause, advice, 62.0, "info" if is_open else "warning", loss.steps)


def _unbounded(history: History, loss: Series) -> list[Finding]:
    if not falls_without_bound(loss):
        return []
    times = {"at the beginning": 0.0, "in the middle": 0.4, "at the end": 0.8}
    evidence = {f"loss {when}": loss.part(at, at + 0.2).median for when, at in times.items()}
    cause = f"{history.the_loss} falls below 0, and ever faster: nothing bounds it."
    advice = (
        "Look at the sign of each term, at a penalty that is subtracted, and at a loss that takes logarithms of probabilities."
    )
    return history.finding("loss-divergence", "", evidence, cause, advice, 86.0, history.alarm, loss.steps)


def _raised(history: History, loss: Series) -> list[Finding]:
    """A loss that has turned, and risen since its best fifth, with a learning rate that never fell and still rises."""
    rates, best, tail = history.largest_rates.values, _best(loss, 5), loss.part(0.8, 1)
    if len(rates) < _MANY_RATES or history.need_not_fall:
        return []
    if any(later < rate for rate, later in pairwise(rates)) or not rates[-1] > _RAISED * rates[len(rates) // 2] > 0:
        return []
    if not (tail.median > _ABOVE * best.median > 0 and rank_shift(best.values, tail.values) > _RANKS_ABOVE):
        return []
    evidence = {"learning rate": max(history.rates), "loss at its best": best.median, "at the end": tail.median}
    cause = f"{history.the_loss} has stopped falling, and the learning rate still rises."
    advice = "End the warm-up, or end the schedule that raises it, about where the loss was at its best."
    span = best.steps[-1], history.steps[-1]
    return history.finding("loss-divergence", "", evidence, cause, advice, 86.0, "warning", span)


def _divergence(history: History, loss: Series) -> list[Finding]:
    tail, first = loss.part(0.8, 1), loss[:5].median
    fifth, tenth = _best(loss, 5), _best(loss, 10)
    is_far = tail.median > _FAR_ABOVE * first
    # for example, a wrong sign makes the loss rise at once and then rest; one that falls from there has a teacher that has moved away
    rose = tail.median - first > max((_ABOVE - 1) * first, _NOISES_ABOVE * spread(tail)) and first > 0
    rose &= is_far or trend(loss.part(_BEGINNING, 1))[0] != "falls"
    best = next((part for part in (fifth, tenth) if _is_above(tail, part, first)), None)
    if best is None and not rose:
        return []
    best, is_back = best or fifth, tail.median <= first
    is_lost = is_far or is_back or tail.median > _LOST * best.median > 0
    is_lost |= _is_steady(loss) and not tail.median < _HARDLY * history.chance.get("loss", 0.0)
    evidence = {"loss at the beginning": first, "at its best": best.median, "at the end": tail.median}
    fate = "rises again, and loses a good part of its fall" if is_back else "rises, and ends above where it began"
    schedule = ", or end the schedule that raises it" if Precautions(history).raises else ""
    advice = (
        f"{_NEED_NOT_FALL if history.need_not_fall else ''}Lower the learning rate{schedule}; look at the sign of the loss and of each "
        "penalty, and for maximize=True."
    )
    severity, span = history.alarm if is_lost else "info", (best.steps[-1], tail.steps[-1])
    return history.finding("loss-divergence", "", evidence, f"{history.the_loss} {fate}.", advice, 75.5, severity, span)


def _best(loss: Series, parts: int) -> Series:
    """The part with the lowest level, among equal ones before the last fifth."""
    return min((loss.part(at / parts, (at + 1) / parts) for at in range(parts - parts // 5)), key=lambda part: part.median)


def _is_above(tail: Series, best: Series, first: float) -> bool:
    """Whether the last losses lie above the best ones, beyond their noise, and have lost a good part of the fall from ``first``."""
    rise = max(2 * min(spread(best), spread(tail)), _AGAIN * max(first - best.median, 0.0))
    is_far = tail.median > max(_ABOVE * best.median, best.median + rise)
    return is_far and rank_shift(best.values, tail.values) > _RANKS_ABOVE and best.median > 0


def _plateau(history: History, loss: Series) -> list[Finding]:
    is_flat = history.learning.state in ("flat", "rises") or history.learning.is_stuck
    if history.alternates or not is_flat:
        return []
    head, tail = loss.part(0, 0.2), loss.part(0.8, 1)
    shift = rank_shift(head.values, tail.values) if tail.median < head.median else 0.0
    is_little = len(loss) >= _MANY and head.median - tail.median < _PLATEAU_FALL * abs(head.median)
    is_open = history.learning.state == "flat" and (_is_unclear(loss, head, tail) or (shift < -PERHAPS and not is_little))
    is_open |= _is_warming_up(history)
    at_rest = history.may_rest and history.learning.state == "flat"
    fell, later, is_unusual = history.learning.state == "falls", loss.part(_BEGINNING, 1), not history.chance.get("loss")
    is_open |= fell and is_unusual and tail.median < _FELL * max(loss.values[0], head.median)
    begins, ends = later.part(0, 0.2), later.part(0.8, 1)
    is_open |= fell and (_is_unclear(loss, begins, ends) or rank_shift(begins.values, ends.values) < -PERHAPS)
    noise = ", as far as its noise and the few steps show" if is_open else ""
    rest = "; the training began earlier, and may have converged" if at_rest else ""
    fate = f"does not fall{noise}{rest}"
    if tail.median < _RESTS * head.median:
        fate = "fell at the beginning, and rests since then"
    elif fell:
        fate = "fell by less than a third, and does not fall any more"
    evidence = {"loss at the beginning": head.median, "at the end": tail.median, "its noise": spread(tail)}
    advice = (
        "If nothing else is found, check that inputs and targets belong together and that the loss depends on the model. "
        "Overfit one batch, then try another learning rate."
    )
    severity = "info" if is_open or at_rest or not _is_steady(loss) else history.alarm
    return history.finding("loss-plateau", "", evidence, f"{history.the_loss} {fate}.", advice, 20.0, severity, loss.steps)


def _is_unclear(loss: Series, before: Series, after: Series) -> bool:
    """Whether the losses are so few and noisy that the fall of a sound training may hide between these parts."""
    if len(before) < _RANKED:
        return True
    return len(loss) < _MANY and may_fall(before, after, _PLATEAU_FALL * len(loss) / _MANY * abs(before.median))


def _is_steady(loss: Series) -> bool:
    """Whether the loss has a level: it is positive, with less noise than that."""
    tail = loss.part(0.8, 1)
    return min(loss.values) >= 0 and spread(tail) < _NOISE * abs(tail.median)


def _is_warming_up(history: History) -> bool:
    rates = history.rates
    return len(rates) >= _FEWEST_RATES and rates[-1] == max(rates) > _UP * median_high(rates)
