"""Rules about parameters: weights that grow, a collapsed latent, forecasts of a divergence, and parameters that do not train."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch

from ....core import keys as n
from ....core.formatting import listed, percent
from ....core.keys import blocks_of
from ....core.loop_mistakes import ABOUT_TO_DIVERGE, DIVERGENCE_ADVICE
from ....core.records import Severity
from ..findings import Finding, NotMeasured
from ..history import History, falls_without_bound, spread
from ..series import Matrix, Series

# --- Weights that grow without bound, or sit on one ---

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


def check_bounds(history: History) -> list[Finding]:
    """Weights on the bound of a clamp: vectors of different lengths have come to one root mean square, no matrix has more."""
    rms, sizes = history.matrix(n.PARAMETER, "rms"), history.sizes(n.PARAMETER)
    if len(rms.steps) < 2 * _FEWEST_AT_END:
        return []
    ends = rms.values[-max(_FEWEST_AT_END, int(_END * len(rms.steps))) :]
    low, high, first = map(rms.by_name, (ends.amin(0), ends.amax(0), rms.values[0]))
    vectors = {name: at for name, at in low.items() if at > 0 and name not in history.matrices}
    still = [name for name, at in vectors.items() if _is_same(at, high[name]) and not _is_same(at, first[name])]
    for bound in dict.fromkeys(low[name] for name in still):
        there = [name for name in still if _is_same(low[name], bound)]
        parts = zip(*(name.split(".")[:-1] for name in there), strict=False)
        within = [each[0] for each in takewhile(lambda each: len({*each}) == 1, parts)]  # the modules that contain all
        weights = [name for name in rms.names if name in history.matrices and name.split(".")[: len(within)] == within]
        is_at_bound = all(_NEARLY * bound < low[name] and high[name] <= (1 + _ROUNDING) * bound for name in weights)
        if weights and is_at_bound and len({sizes.get(name) for name in there}) > 1:
            evidence = {"bound": bound, "smallest root mean square of a matrix": min(map(low.__getitem__, weights))}
            cause = f"All weights are about {bound:.3g} or -{bound:.3g}: they sit on the bound of a clamp."
            advice = (
                "Widen the bound, or take a penalty instead, as of the gradient's norm in a Wasserstein GAN; with a smaller learning rate "
                "they reach it later."
            )
            steps = rms.steps[-len(ends) :]
            return history.finding("weights-at-bound", weights, evidence, cause, advice, 79.0, "warning", steps)
    return []


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * one


def check_weights(history: History) -> list[Finding]:
    """By the norms of matrices; one that starts at zero, or near it, has to grow."""
    norms, sizes = history.settled(history.matrix(n.PARAMETER, "norm")), history.sizes(n.PARAMETER)
    growths = {name: _growth(norms.column(name).finite) for name in norms.names if name in history.matrices}
    grown = {name: growth for name, growth in growths.items() if growth and not _is_small(history, sizes, name, growth)}
    if not grown:
        return []
    worst = sorted(grown, key=lambda name: -grown[name].factor)
    growth = grown[worst[0]]
    runs_away = growth.factor > _FAR and growth.last / max(growth.middle, 1e-9) > _EXPONENTIAL
    harms = history.learning.is_stuck or history.learning.state == "rises"
    harms |= history.learning.state != "unknown" and falls_without_bound(history.loss.finite)
    is_cause = runs_away and _grows_by_itself(history, worst[0], growth)  # it kills units and makes the loss rise
    norm = growth.series.values
    evidence = {"norm at the beginning": norm[0], "at the end": norm[-1], "growth in the last third": math.exp(growth.last)}
    cause = f"The weights have grown by a factor of {growth.factor:.3g}, and go on growing."
    advice = "Look for a penalty or a weight decay with the wrong sign; lower the learning rate, or raise the weight decay."
    weight = 77.0 if is_cause else 69.0 if runs_away else 45.0
    severity: Severity = "warning" if harms or runs_away else "info"
    return history.finding("weight-growth", worst, evidence, cause, advice, weight, severity, growth.series.steps)


def _is_small(history: History, sizes: Mapping[str, float], name: str, growth: _Growth) -> bool:
    """Whether it began small, and still multiplies inputs by no more than usual: the root mean square times the root of the fan in."""
    outputs = sizes.get(name, 0.0) / max(history.matrices[name], 1)
    return history.matrices[name] > 0 and outputs > 0 and growth.series.values[-1] / math.sqrt(outputs) < _USUAL


def _grows_by_itself(history: History, name: str, growth: _Growth) -> bool:
    """Whether the updates of the last third point along the weights; True if updates are unknown."""
    ratios = history.ratio(n.UPDATE, n.PARAMETER)
    steps = (growth.series.steps[-1] - growth.series.steps[0]) / 3
    if name not in ratios.names:
        return True
    updates = ratios.column(name).part(2 / 3, 1).finite.values
    return growth.last > _OUTWARDS * steps * sum(updates) / max(len(updates), 1)


def _growth(norms: Series) -> _Growth | None:
    if len(norms) < _FEWEST or min(norms.values) <= 0:
        return None
    logs = [math.log(norms.at(share)) for share in (0.0, 1 / 3, 2 / 3, 1.0)]
    growth = _Growth(math.exp(logs[3] - logs[0]), logs[2] - logs[1], logs[3] - logs[2], norms)
    return growth if growth.factor > _GROWN and growth.last > max(_STILL * growth.middle, _LEAST) else None


# --- A variational autoencoder whose latent does not depend on its input ---

#: The root mean square of mean and log variance, which the prior has at 0, and how much larger both were at the beginning.
_NOTHING, _FALLEN = 0.05, 2.0
#: Steps before a latent counts as collapsed.
_STEPS_COLLAPSED = 50
#: Names of layers that give mean or log variance.
_NAMES = re.compile(r"mu\b|mean|loc\b|var|sigma|std|scale", re.IGNORECASE)


def check_latent(history: History) -> list[Finding]:
    """By the outputs of two layers alike; silent where activations were not measured, which another rule reports."""
    outputs = history.matrix(n.ACTIVATION, "rms")
    if len(outputs.steps) < _STEPS_COLLAPSED:
        return []
    first, last = outputs.part(0, 0.1).largest(), outputs.part(0.8, 1).medians()
    for pair in _pairs(history, outputs):
        if all(last.get(name, 1.0) < min(_NOTHING, first.get(name, 0.0) / _FALLEN) for name in pair):
            evidence = {f"root mean square of {name}": last[name] for name in pair}
            cause = "Mean and log variance of the latent are those of the prior, 0, for all inputs: the decoder learns nothing about them."
            advice = (
                "Give the reconstruction its full weight, summed over pixels where the divergence is summed over latents; let the weight "
                "of the divergence rise from 0."
            )
            return history.finding("posterior-collapse", pair[0], evidence, cause, advice, 79.5, "warning", outputs.steps)
    return []


def _pairs(history: History, outputs: Matrix) -> Iterator[tuple[str, str]]:
    """Neighbouring layers of one kind and shape, with others behind them, that are named or returned like the parameters of a latent; or
    a layer twice whose output has two halves, since the next layer takes half as many numbers.
    """
    layers = [name for name in outputs.names if f"{name}.weight" in history.matrices]
    sizes, fans = history.sizes(n.PARAMETER), history.matrices
    usual = outputs.medians()
    returned = {usual[name] for name in outputs.names if name.startswith(f"{n.ROOT}[")}
    for one, other in pairwise(layers):
        weights = f"{one}.weight", f"{other}.weight"
        is_alike = sizes.get(weights[0]) == sizes.get(weights[1]) and fans[weights[0]] == fans[weights[1]]
        is_sibling = one.rpartition(".")[0] == other.rpartition(".")[0] and history.kinds.get(one) == history.kinds.get(other)
        is_named = any(_NAMES.search(name.rpartition(".")[2]) for name in (one, other))
        if other != layers[-1] and is_alike and is_sibling and (is_named or {usual[one], usual[other]} <= returned):
            yield one, other
        if fans[weights[0]] and sizes.get(weights[0], 0.0) / fans[weights[0]] == 2 * fans[weights[1]]:
            yield one, one


# --- Signs of a divergence that came before the loss showed it ---

#: Steps without a sign after which it counts as over, unless the loss has risen since.
_OVER = 100
#: Losses that show what is normal.
_NORMAL_LOSSES = 20


def check_foresight(history: History) -> list[Finding]:
    found: list[Finding] = []
    for fact in (fact for fact in history.facts if fact.rule == ABOUT_TO_DIVERGE):
        lies_ahead = history.records[-1].step - fact.last <= _OVER
        has_come = _has_risen(history.loss.finite, fact.first)
        leads, others = next(iter(fact.where), ""), f", then {', '.join(fact.where[1:4])}" if len(fact.where) > 1 else ""
        when = "has risen since" if has_come else "is still normal" if lies_ahead else "has stayed normal since"
        what = f"the loss {when}" if len(history.loss.finite) else "no loss is logged"
        evidence, steps = {"signs": float(fact.count), **fact.evidence}, (fact.first, fact.last)
        cause = f"Weights or outputs have grown as they had not before, {leads} first{others}; {what}."
        severity: Severity = "warning" if lies_ahead or has_come else "info"
        found += history.finding(ABOUT_TO_DIVERGE, leads, evidence, cause, f"{DIVERGENCE_ADVICE}.", 75.0, severity, steps)
    return found


def _has_risen(loss: Series, first: int) -> bool:
    """Whether its last twentieth lies above what was normal before the first sign: the median and six deviations."""
    before = loss.before(first)
    if len(before) < _NORMAL_LOSSES:
        return False
    normal = before.part(1 - _NORMAL_LOSSES / len(before), 1)
    return loss.part(0.95, 1).median > normal.median + 6 * spread(normal)


# --- Parameters without a gradient, and frozen ones ---

#: The fewest steps after which a parameter counts as never reached.
_STEPS_UNREACHED = 20
#: Parameters without gradient matter if they have this share of all elements; an unused head or pooler is common.
_SHARE = 0.1
#: A gradient below this part of its median norm is none; for most of the last quarter of the run it has vanished.
_GONE, _MOSTLY = 1e-6, 0.5
#: A gradient that is exactly 0 in this share of all steps is gone, however early.
_NEARLY_ALL = 0.95
#: Steps with a gradient before a parameter that was frozen on the way, and without one after it where requires_grad says that it is.
_BEFORE = 5
#: A loss that has fallen to this part of the first one has nothing left to learn from.
_SOLVED = 1e-3
#: Steps without gradients are chance, as for an expert that few batches reach, unless they are less likely than this.
_CHANCE = 1e-4
_NUMBER = re.compile(r"\d+")
#: Blocks that are named.
_NAMED = 3
#: What is frozen is most of the model from this share of all elements on.
_MOST_OF_MODEL = 0.5


def check_frozen(history: History) -> list[Finding]:
    """What does not require a gradient, which may be meant: information, unless it is most of a model that has learnt nothing."""
    parameters = history.parameters
    seen = history.gradients("norm").largest()  # thawed on the way, by turns, or frozen again
    frozen = [name for name in parameters if name in history.frozen and name not in seen]
    if not frozen:
        return []
    sizes = {name: math.prod(about["shape"]) for name, about in parameters.items()}
    share = sum(sizes[name] for name in frozen) / max(sum(sizes.values()), 1)
    block_of = blocks_of(parameters)
    blocks = list(dict.fromkeys(block_of[name] for name in frozen))
    last = [name for name, about in parameters.items() if len(about["shape"]) == 2][-1:]
    adapts = _has_adapters(history, frozen)
    # adapters leave the rest frozen on purpose, unless the last layer is new
    meant = adapts and not set(frozen).issuperset(last)
    lacks = share > _MOST_OF_MODEL and history.learning.is_at_chance and not meant
    evidence = {"parameters": float(len(frozen)), "share of all elements": share}
    cause = f"{percent(share)} of all elements are frozen, by requires_grad=False: {listed(blocks, _NAMED)}."
    told = "The rest has learnt nothing: c" if lacks else "Nothing has to be done if that is meant. Otherwise c"
    advice = (
        f"{told}all requires_grad_(True) before the optimizer is made; checks=Checks(trained=...) tells when it is forgotten."
    )
    if adapts and lacks:
        advice = (
            f"Adapters train, and the last layer, {last[0].rpartition('.')[0]}, is frozen: if it is new, as a classifier is, train it too, "
            "in PEFT with task_type= or modules_to_save= in the config of the adapters."
        )
    where = last[0] if adapts and lacks else blocks[0]
    return history.finding("frozen", where, evidence, cause, advice, 1.0, "warning" if lacks else "info")


def _has_adapters(history: History, frozen: list[str]) -> bool:
    """Whether a frozen matrix ``[out, in]`` has two that train, ``[rank, in]`` and ``[out, rank]``, in or around its module."""
    shapes = {name: tuple(about["shape"]) for name, about in history.parameters.items() if len(about["shape"]) == 2}
    trained: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name not in history.frozen:
            for depth in range(1, name.count(".") + 1):
                trained.setdefault(name.rsplit(".", depth)[0], []).append(shape)
    for name in shapes.keys() & frozen:
        rows, columns = shapes[name]
        for parent in {name.rsplit(".", depth)[0] for depth in (1, 2)}:
            pairs = trained.get(parent, ())
            ranks = {shape[0] for shape in pairs if shape[1] == columns and shape[0] < min(rows, columns)}
            if any(shape[0] == rows and shape[1] in ranks for shape in pairs):
                return True
    return False


def check_unused_parameters(history: History) -> list[Finding]:
    norms = history.gradients("norm")
    if len(norms.steps) < _STEPS_UNREACHED:
        raise NotMeasured(f"fewer than {_STEPS_UNREACHED} steps with gradients were measured")
    return [*_never(history, norms), *_vanished(history, norms)]


def _never(history: History, norms: Matrix) -> list[Finding]:
    parameters = history.matrix(n.PARAMETER, "norm")
    if not parameters:
        return []
    # steps without one of the optimizers, in which gradients of its parameters are not known
    partial = {record.step for record in history.records if "rests" in record.context}
    whole = torch.tensor([step not in partial for step in parameters.steps], dtype=torch.bool)
    there = torch.isfinite(parameters.values[whole]).sum(0).tolist()
    seen = norms.by_name(norms.values.nan_to_num(0.0).amax(0))
    spoiled = history.gradients("nonfinite_count").largest()  # NaN is a gradient too, but no norm
    seen.update((name, count) for name, count in spoiled.items() if count)
    measured = dict(zip(parameters.names, there, strict=True))
    measured = {name: steps for name, steps in measured.items() if not (name in history.frozen or history.is_gone(name))}
    missed = [name for name, steps in measured.items() if steps >= _STEPS_UNREACHED and not seen.get(name)]
    if len(missed) == len(measured):
        return _all_zero(history, norms)
    found: list[Finding] = []
    if left := [name for name in missed if history.is_unowned(name)]:
        cause = (
            "No gradient reaches this parameter, and no optimizer has it, as of a target network or a teacher, which are copied, or of "
            "a reference model."
        )
        advice = (
            "If it should train, give it to the optimizer; if not, nothing has to be done, and requires_grad_(False) says so."
        )
        found = _harmless(history, norms, left, "parameters without gradient and optimizer", cause, advice)
        missed = [name for name in missed if not history.is_unowned(name)]
    return [*_not_reached(history, norms, missed, seen), *found] if missed else found


def _not_reached(history: History, norms: Matrix, missed: list[str], seen: Mapping[str, float]) -> list[Finding]:
    if all(_is_taken_out(name, norms, seen) for name in missed) and history.concern == "info":
        cause = (
            "The gradient of this bias is exactly 0 in every step, while the weight of its layer has one: what follows takes the bias "
            "out again, as the difference of two outputs of the layer does."
        )
        advice = (
            "Nothing has to be done, and bias=False would give the same model; unless a backward() of your own returns zeros."
        )
        return _harmless(history, norms, missed, "biases with a gradient of exactly 0", cause, advice)
    sizes = {name: size for name, size in history.sizes(n.PARAMETER).items() if not history.is_gone(name)}
    share = sum(sizes[name] for name in missed) / max(sum(sizes.values()), 1)
    zero = history.always_reached.intersection(missed)  # a gradient that came
    missed.sort(key=lambda name: (name in zero, name not in history.matrices))
    matters = (share > _SHARE or history.learning.is_stuck) and not _is_routed(missed[0], norms)
    evidence = {"parameters without gradient": float(len(missed)), "share of all elements": share}
    words = _words(history, len(missed), len(zero))
    return history.finding("no-gradient", missed, evidence, *words, 75.0, "warning" if matters else "info", norms.steps)


def _words(history: History, missed: int, zero: int) -> tuple[str, str]:
    """Cause and advice for parameters of which some have a gradient of exactly 0, and the others none at all."""
    none = "No gradient reached this parameter in any step, although it requires one"
    cut = (
        "Look for a detach(), .data, no_grad() or a module that forward() never calls; call requires_grad_(False) if it should not be "
        "trained"
    )
    tells = "" if history.matrix(n.ACTIVATION, "rms") else "; preset='full' tells which units are dead"
    closed = f"what follows in forward(): biases far below 0, a clamp that always acts, a factor that is 0{tells}"
    if not zero:
        return f"{none}.", f"{cut}."
    if zero == missed:
        return (
            "Its gradient was exactly 0 in every step: dead ReLUs behind it, a multiplication by 0, a mask, or an input of zeros.",
            f"Look at {closed}; and at what the model gets.",
        )
    others = f"{none}; {zero} of these parameters had one of exactly 0 in every step."
    return others, f"{cut}. For gradients of 0 look at {closed}."


def _is_taken_out(name: str, norms: Matrix, seen: Mapping[str, float]) -> bool:
    """Whether it is a bias whose gradients are there, and exactly 0, in a layer whose weight has gradients."""
    layer, kind = name[: -len("bias")], name.rpartition(".")[2]
    has_gradients = name in norms.names and bool(norms.of(norms.steps, [name]).values.isfinite().any())
    return kind == "bias" and has_gradients and bool(seen.get(f"{layer}weight"))


def _harmless(history: History, norms: Matrix, names: list[str], what: str, cause: str, advice: str) -> list[Finding]:
    return history.finding("no-gradient", names, {what: float(len(names))}, cause, advice, 20.0, "info", norms.steps)


def _all_zero(history: History, norms: Matrix) -> list[Finding]:
    """Gradients that are there, and zero. Without any there is a mistake of the loop, which another rule reports."""
    if not bool(norms.values.isfinite().any()):
        return []
    what = "the loss does not depend on the parameters"
    advice = "Look for a softmax over a single output, an argmax, a rounding, a clamp that always acts, or a product with 0."
    if len(history.loss.finite) and not any(history.loss.finite.values):
        what = "and so is the loss: nothing counts in it"
        advice = "Look for labels that are all ignored, a mask of zeros, or a margin with the wrong sign; or the task was solved before."
    evidence, cause = (
        {"parameters with a gradient of exactly 0": float(len(norms.names))},
        "All gradients are exactly 0 in every step",
    )
    return history.finding("no-gradient", "", evidence, f"{cause}, {what}.", advice, 75.0, "warning", norms.steps)


def _is_routed(missed: str, norms: Matrix) -> bool:
    """Whether it is an expert: by its name, or because its counterparts in other blocks have gradients in some steps only."""
    reached = (norms.values.nan_to_num(0.0) > 0).double().mean(0).tolist()
    some = {name for name, share in zip(norms.names, reached, strict=True) if 0 < share < 1}
    return "expert" in missed or _NUMBER.sub("*", missed) in {_NUMBER.sub("*", name) for name in some}


def _vanished(history: History, norms: Matrix) -> list[Finding]:
    severity: Severity = "info" if history.learning.last <= _SOLVED * history.learning.first else "warning"
    whole = norms.values.nan_to_num(0.0).square().sum(1).sqrt()
    at = _gone_since(whole)
    if at is not None:
        return _dropped(history, severity, [""], norms.steps[at:], whole[:at].median().item())
    columns = dict(zip(norms.names, norms.values.unbind(1), strict=True))
    reached = [name for name in norms.names if name in history.always_reached and not history.is_gone(name)]
    since = {name: _gone_since(columns[name].nan_to_num(0.0), must_stay=True) for name in reached}
    found = {name: at for name, at in since.items() if at is not None}
    if not found:
        return _frozen(history, norms)
    names = sorted(found, key=lambda name: (name not in history.matrices, found[name]))[:1]
    names += [name for name in found if name not in names]
    usual = columns[names[0]][: found[names[0]]].nanmedian().item()
    return _dropped(history, history.concern, names, norms.steps[found[names[0]] :], usual)


def _frozen(history: History, norms: Matrix) -> list[Finding]:
    """Parameters that had a gradient in nearly all steps, and from one step on have none at all."""
    if any(history.gradients("nonfinite_count").largest().values()):
        return []  # NaN is no missing gradient
    ends = {}
    for name, column in zip(norms.names, norms.values.isfinite().unbind(1), strict=True):
        rows = column.nonzero().flatten().tolist()
        if not rows or history.is_gone(name):
            continue
        first, last = rows[0], rows[-1]
        least = _BEFORE if name in history.frozen else max(len(column) // 4, _STEPS_UNREACHED)
        if len(column) - last > least and last - first >= _BEFORE and len(rows) > _NEARLY_ALL * (last - first + 1):
            ends[name] = last + 1
    if not ends or len(ends) == len(norms.names):
        return []
    again = {name: at for name, at in ends.items() if name in history.frozen}
    ends = again or ends
    names = sorted(ends, key=lambda name: (ends[name], name not in history.matrices))[:1]
    names += [name for name in ends if name not in names]
    at, usual = ends[names[0]], norms.column(names[0]).median
    cause = "There was a gradient, and from here on there is none: it was frozen, or nothing uses it any more."
    if again:
        cause = (
            f"It trained until step {norms.steps[at - 1]}, and is frozen since step {norms.steps[at]}, by requires_grad=False."
        )
    advice = (
        "If it is meant to train, look for requires_grad_(False) on the way, in a test perhaps, or in what builds the model anew for a "
        "run that resumes."
    )
    return _dropped(history, "info", names, norms.steps[at:], usual, cause, advice)


def _gone_since(norms: torch.Tensor, must_stay: bool = False) -> int | None:
    """The first step without gradient, if most of the last quarter has none and earlier steps had one."""
    alive = norms[norms > 0]
    if not len(alive):
        return None
    gone = norms <= _GONE * alive.median()
    quarter = max(len(norms) // 4, 1)
    share = gone[-quarter:].double().mean().item()
    before = gone[: len(norms) // 5].double().mean().item()
    is_early = not must_stay and (norms == 0).double().mean().item() >= _NEARLY_ALL
    if share < (1.0 if must_stay else _MOSTLY) or (before > 0.1 and not is_early):
        return None
    usual = max(gone[:-quarter].double().mean().item(), 0.01)
    if must_stay and usual**quarter > _CHANCE:
        return None
    return int(gone.nonzero()[0])


def _dropped(
    history: History,
    severity: Severity,
    names: list[str],
    steps: Sequence[int],
    usual: float,
    cause: str = "There was a gradient, and from here on there is mostly none.",
    advice: str = "Look for a clamp or a max() around the loss, a loss weight that reached zero, a satisfied hinge, or dead units.",
) -> list[Finding]:
    evidence = {"median norm before": usual}
    return history.finding("gradient-dropped-to-zero", names, evidence, cause, advice, 72.0, severity, steps)
