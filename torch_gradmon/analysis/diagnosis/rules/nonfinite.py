"""Rules about numbers: underflow in half precision, mistakes that a few steps prove, NaN and infinity."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core import keys as n
from ....core.loop_mistakes import OF_THE_BATCH
from ....core.moments import Column
from ....core.records import Severity, StatsTable, StepRecord, is_loss_of_network
from ....spikes.attribution import innermost
from ..findings import Finding, NotMeasured
from ..history import History, Precautions
from ..series import Series

# --- Gradients that half precision rounds to zero ---

#: The smallest float16, a divisor of all others, and the smallest with all digits (IEEE 754).
_SMALLEST, _SMALLEST_NORMAL = 2.0**-24, 2.0**-14
#: Share of the matrices whose gradients were float16 and that small, and share of zeros in the worst of them.
_TENSORS, _ZEROS = 0.25, 0.3
#: Share of the elements whose update is lost, and of those whose gradient is zero at most.
_LOST, _REACHED = 0.7, 0.3
#: As in the facts about a run.
_HALVES = frozenset({"torch.float16", "torch.bfloat16"})
#: Share of the modules whose outputs are all float16 numbers.
_HALF = 0.5


def check_precision(history: History) -> list[Finding]:
    """Gradients and outputs are judged by their extremes: no statistic keeps their dtype, but float16 numbers have few digits."""
    steps, names, extremes = _extremes(history, n.GRADIENT_BEFORE_CLIP)
    not_applied = {record.step for record in history.records if not record.applied}
    extremes = extremes[:, [row for row, step in enumerate(steps) if step not in not_applied]]
    if not extremes.shape[1]:
        raise NotMeasured("the extremes of gradients were not measured")
    tiny = _tiny_halves(names, extremes)
    known = list(history.matrices) or list(names)
    matrices = [name for name in tiny if name in known]
    zeros = history.gradients("sparsity").medians()
    if len(matrices) >= max(_TENSORS * len(known), 1):
        name = max(matrices, key=lambda each: zeros.get(each, 1.0))
        if zeros.get(name, 1.0) >= _ZEROS:
            return _finding(history, name, tiny[name], zeros.get(name, math.nan), len(matrices))
    elif lost := _lost_updates(history):
        return _lost_finding(history, lost)
    elif not extremes.nan_to_num(0.0).any() and _computes_in_float16(history):
        return _finding(history, "", 0.0, 1.0, len(known))
    if not_judged := rounding_unknown(history):
        raise NotMeasured(not_judged)
    return []


def _finding(history: History, where: str, largest: float, zeros: float, matrices: int) -> list[Finding]:
    evidence = {"largest gradient element": largest, "share of zeros": zeros, "matrices like this": float(matrices)}
    cause = "Gradients were computed in float16 and are too small for it; most are rounded to zero."
    advice = "Scale the loss with torch.amp.GradScaler, or use bfloat16."
    if (scale := Precautions(history).scale) is not None:
        advice = f"Raise the GradScaler's scale, {scale:g} at the end, by init_scale or growth_interval, or use bfloat16."
    return history.finding("low-precision-underflow", where, evidence, cause, advice, 82.0, "warning")


def _lost_updates(history: History) -> dict[str, float]:
    """The share of zeros in updates of matrices in half precision with few in gradients; empty if these are few of all."""
    updates, gradients = history.matrix(n.UPDATE, "sparsity"), history.gradients("sparsity")
    lost, reached = updates.part(0.25, 1).medians(), gradients.medians()
    known = [name for name in _halves(history) if reached.get(name, 1.0) < _REACHED]
    found = {name: lost[name] for name in known if lost.get(name, 0.0) > _LOST}
    return found if len(found) >= max(_TENSORS * len(history.matrices), 1) else {}


def rounded_away(history: History) -> set[str]:
    """The matrices that no step changes as long as rounding takes most updates of those that are kept in half precision."""
    lost, updates = _lost_updates(history), history.matrix(n.UPDATE, "norm")
    is_off = bool(history.groups) and all(group["settings"].get("lr") == 0 for group in history.groups)
    if not lost or is_off:
        return set()
    moved = updates.medians()
    return {name for name in _halves(history) if not moved.get(name, 1.0)}


def rounding_unknown(history: History) -> str:
    """Why it is unknown whether rounding takes the updates of weights in half precision; empty if known, or if these are few."""
    halves = _halves(history)
    measured = {n.UPDATE: history.matrix(n.UPDATE, "sparsity"), n.GRADIENT: history.gradients("sparsity")}
    missing = [f"monitor.add_{source}_metric('sparsity')" for source, matrix in measured.items() if not matrix]
    if not missing or len(halves) < max(_TENSORS * len(history.matrices), 1):
        return ""
    return (
        f"{len(halves)} matrices are kept in half precision, and whether its rounding takes their updates shows in the share of zeros, "
        f"which was not measured: give run_dir=, or call {' and '.join(missing)}"
    )


def _halves(history: History) -> list[str]:
    return [name for name in history.matrices if history.parameters.get(name, {}).get("dtype") in _HALVES]


def _lost_finding(history: History, lost: dict[str, float]) -> list[Finding]:
    worst, still = max(lost, key=lambda name: lost[name]), rounded_away(history)
    evidence = {"share of elements that do not move": lost[worst], "matrices like this": float(len(lost))}
    if still:
        evidence["matrices whose update is exactly zero"] = float(len(still))
    cause = (
        "Parameters are kept in half precision, and most of their elements do not move in a step: updates below half a unit of the last "
        "digit are rounded to nothing."
    )
    advice = "Keep parameters in float32 and compute under torch.autocast, or use an optimizer with float32 copies or stochastic rounding."
    return history.finding("low-precision-underflow", worst, evidence, cause, advice, 82.0, "warning")


def _extremes(history: History, source: str) -> tuple[tuple[int, ...], tuple[str, ...], Tensor]:
    """Steps, names, and the smallest and the largest finite element ``[2, steps, tensors]``; NaN without any."""
    largest = history.matrix(source, "max_value")
    smallest = history.matrix(source, "min_value").of(largest.steps, largest.names)
    return largest.steps, largest.names, torch.stack([smallest.values, largest.values])


def _tiny_halves(names: Sequence[str], extremes: Tensor) -> dict[str, float]:
    """The usual largest element of each tensor whose nonzero extremes were always float16 numbers without all digits."""
    largest = extremes.abs().amax(0)
    largest = largest.where(largest > 0, math.nan)
    are_halves = ((extremes / _SMALLEST).frac() == 0).all(0) & (largest < _SMALLEST_NORMAL)
    always = (are_halves | largest.isnan()).all(0) & are_halves.any(0)
    usual = -(-largest).nanmedian(0).values  # the upper one of two
    return {name: size for name, size, is_tiny in zip(names, usual.tolist(), always.tolist(), strict=True) if is_tiny}


def _computes_in_float16(history: History) -> bool:
    """Whether the extremes of most outputs are float16 numbers, and not all of them also bfloat16, which has fewer digits."""
    _, names, extremes = _extremes(history, n.ACTIVATION)
    half, fewer = (
        int(((extremes.to(dtype).double() == extremes) | extremes.isnan()).all(1).all(0).sum())
        for dtype in (torch.float16, torch.bfloat16)
    )
    return half > _HALF * max(len(names), 1) and fewer < half


# --- Mistakes that a few steps prove ---

#: Steps that have to show it, and the share of them.
_FEWEST, _MOSTLY = 3, 0.9
#: Deviation of elements from their mean, relative to it, that is rounding; and the smallest matrix that counts.
_EQUAL, _LEAST = 1e-5, 16
#: A gradient that is this small a part of its weights has vanished on its way: no optimizer is at fault.
_VANISHED = 1e-12
#: The epsilon over the root mean square of the gradient.
_DAMPED = 10.0
#: An epsilon above all defaults is a mistake, whatever the loss does, if it outweighs the first gradients, too.
_CHOSEN = 1e-5
#: The decay over the gradient of most matrices, and over one step: weights that lose half a percent in each are forgotten in 200.
_DECAY, _FORGET = 3.0, 5e-3
#: The norm at the end over that at the beginning of weights that have decayed away.
_GONE = 0.01
#: A decay up to this is in use in any optimizer.
_COUPLED = 1e-3
#: A decoupled decay up to this is in use.
_USUAL = 0.5
#: Optimizers whose weight decay is not part of the gradient.
_DECOUPLED = frozenset({"AdamW", "NAdamW", "Adafactor", "Lion", "Muon", "SGDW"})


def check_certain(history: History) -> list[Finding]:
    if not history.gradients("norm"):
        raise NotMeasured("gradients were not measured")
    return [*_cleared(history), *_no_update(history), *_equal(history), *_epsilon(history), *_decay(history)]


def _cleared(history: History) -> list[Finding]:
    came, used = (
        Series(norms.steps, tuple(norms.values.nan_to_num(0.0).amax(1).tolist()) if norms else ())
        for norms in (history.matrix(n.GRADIENT_BEFORE_CLIP, "norm"), history.matrix(n.GRADIENT, "norm"))
    )
    both = [pair for pair in came.beside(used) if pair[1] > 0]
    gone = {step: norm for step, norm, left in both if left == 0}
    if len(gone) < _FEWEST or len(gone) < _MOSTLY * len(both):
        return []
    evidence = {"steps": float(len(gone)), "largest norm before": max(gone.values())}
    cause = "The backward pass brings gradients, and the optimizer steps with zeros."
    advice = "Move optimizer.zero_grad() before loss.backward(), with nothing between that and optimizer.step()."
    return history.finding("gradients-cleared", "", evidence, cause, advice, 121.0, "error", list(gone))


def _no_update(history: History) -> list[Finding]:
    updates, gradients = history.matrix(n.UPDATE, "norm"), history.used_gradients("norm")
    applied = {record.step for record in history.records if record.applied}
    updates = updates.of([step for step in updates.steps if step in applied], updates.names)
    if len(updates.steps) < _FEWEST:
        return []
    still = updates.by_name((updates.values == 0).double().sum(0) / (~updates.values.isnan()).double().sum(0).clamp(min=1))
    live = gradients.by_name((gradients.values > 0).double().mean(0))
    usual = (history.ratio(n.GRADIENT, n.PARAMETER) or history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER)).medians()
    known = [name for name, share in still.items() if share >= _MOSTLY and name in history.matrices]
    driven = [name for name in known if live.get(name, 0.0) >= _MOSTLY and usual.get(name, 1.0) > _VANISHED]
    rounded = rounded_away(history)  # another finding has these
    if not (names := [name for name in driven if name not in rounded]):
        return []
    groups = [group for group in history.groups if not set(names).isdisjoint(group["parameters"])]
    rates = {float(group["settings"].get("lr", math.nan)) for group in groups}
    why = "its learning rate is 0"
    if rates != {0.0}:
        why = "its steps are smaller than the rounding of the weights, or it is not stepped"
    evidence = {"matrices that do not move": float(len(names)), "learning rate": max(rates, default=math.nan)}
    cause = f"The optimizer's change is exactly zero, step after step, though there are gradients: {why}."
    advice = (
        "Raise the learning rate of this group, look at what a scheduler makes of it, keep float32 weights under a low precision, or "
        "freeze it with requires_grad_(False)."
    )
    where = "" if len(names) == sum(name in history.matrices for name in updates.names) else names
    return history.finding("zero-update", where, evidence, cause, advice, 79.0, "warning", updates.steps)


def _equal(history: History) -> list[Finding]:
    """Matrices of one value at the first step. Zeros alone are usual in the last layer of a branch, which gets a gradient."""
    sizes, rms = history.sizes(n.PARAMETER), history.matrix(n.PARAMETER, "rms")
    means, first = history.at_beginning(history.matrix(n.PARAMETER, "mean")), history.at_beginning(rms)
    matrices = (name for name in first if name in means and name in history.matrices and sizes[name] >= _LEAST)
    known = {name: (first[name] ** 2, means[name] ** 2) for name in matrices if not math.isnan(means[name])}
    zero = [name for name, (square, _) in known.items() if square == 0]
    constant = [name for name, (square, part) in known.items() if square and square - part <= _EQUAL * square]
    norms = history.at_beginning(history.gradients("norm"))
    blocks = 2 * len(zero) > len(known) and not all(norms.get(name, 0.0) > 0 for name in zero)
    found = constant or (zero if blocks else [])
    if not found:
        return []
    evidence = {"matrices like this": float(len(found)), "of": float(len(known))}
    cause = "All elements of this matrix begin with the same value, so all its units compute the same and get the same gradient."
    advice = "Draw weights at random, as torch's layers do by default, and keep constants for biases and gains."
    steps = rms.steps[history.beginning(rms.steps) or 0 :][:1]
    return history.finding("equal-units", found, evidence, cause, advice, 88.0, "warning", steps)


def _settings(history: History, key: str) -> dict[str, tuple[Mapping[str, Any], float]]:
    found = {}
    for group in history.groups:
        value = group["settings"].get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.update({name: (group, float(value)) for name in group["parameters"]})
    return found


def _epsilon(history: History) -> list[Finding]:
    sizes = history.used_gradients("rms")
    settings = _settings(history, "eps")
    usual = {name: value for name, value in sizes.medians().items() if name in history.matrices and value > 0}
    adaptive = [name for name in usual if name in settings and "Ada" in settings[name][0]["optimizer"]]
    damped = [name for name in adaptive if settings[name][1] > _DAMPED * usual[name]]
    if not damped or 2 * len(damped) <= len(usual):
        return []
    epsilon = settings[damped[0]][1]
    # one that was chosen, and outweighs gradients from the beginning, slows down what it does not stop
    early = sizes.part(0, 0.1).medians()
    is_chosen = epsilon > _CHOSEN and history.beginning(sizes.steps) is not None
    is_chosen &= all(epsilon > _DAMPED * early.get(name, math.inf) for name in damped)
    learns = history.learning.has_fallen and not is_chosen
    evidence = {"epsilon": epsilon, "root mean square of the gradient": usual[damped[0]]}
    cause = (
        "The optimizer divides by a root of the mean square of gradients plus epsilon, and epsilon is far larger: steps shrink with the "
        "gradient."
    )
    advice = "Lower eps, 1e-8 is usual, or scale up the loss if gradients are this small."
    return history.finding("epsilon-dominates", damped, evidence, cause, advice, 74.0, "info" if learns else "warning")


def _decay(history: History) -> list[Finding]:
    settings = _settings(history, "weight_decay")
    weights, gradients = history.matrix(n.PARAMETER, "norm"), history.used_gradients("norm")
    early, pull, last = weights.part(0, 0.1).medians(), gradients.part(0, 0.1).medians(), weights.part(0.9, 1).medians()
    shares, names, forgets = dict[str, float](), list[str](), False
    for name in history.matrices:
        group, decay = settings.get(name, ({}, 0.0))
        if decay <= 0 or not early.get(name) or not pull.get(name):
            continue
        shares[name] = decay * early[name] / pull[name]
        per_step = decay * float(group["settings"].get("lr") or 0.0)
        is_decoupled = group["optimizer"] in _DECOUPLED or bool(group["settings"].get("decoupled_weight_decay"))
        # with a usual decay it is the rate that is too high
        is_strong = per_step > _FORGET and decay > _USUAL if is_decoupled else shares[name] > _DECAY
        if is_strong or (decay > _COUPLED and last.get(name, math.inf) < _GONE * early[name]):
            names.append(name)
        forgets |= is_decoupled and per_step > 2 * _FORGET
    if not names or 2 * len(names) <= len(shares):
        return []
    shrinks = sum(last.get(name, 0.0) < 0.5 * early[name] for name in names) * 2 > len(names)
    end = last.get(names[0], math.nan) / early[names[0]]
    evidence = {
        "weight decay": settings[names[0]][1],
        "decay / gradient": settings[names[0]][1] * early[names[0]] / pull[names[0]],
    }
    evidence["norm of the weights at the end / at the beginning"] = end
    cause = "Weight decay moves the weights more than the gradient does."
    advice = "Lower weight_decay; 0.01 to 0.1 is usual with AdamW, 1e-4 to 1e-3 with SGD and Adam."
    severity: Severity = "warning" if shrinks or forgets or history.learning.is_stuck else "info"
    return history.finding("weight-decay-high", names, evidence, cause, advice, 83.0, severity, weights.steps)


# --- NaN and infinity: which came first ---

#: This many overflowed steps in a row at the end are no search for a loss scale: GradScaler starts at 2**16 and halves it, so
#: that the scale is 1 after 16 of them.
_STUCK = 16
#: A loss that has grown this many times before the first NaN, in this number of steps at least, has run away.
_GREW, _LOSSES_BEFORE = 5.0, 3


#: Modules whose outputs are finite if their parameters and inputs are, up to an overflow: sums of products, and functions without a pole.
_FINITE = re.compile(
    r"Linear|Bilinear|Conv(Transpose)?[123]d|Identity|Flatten|Dropout[123]?d?|(Adaptive)?(Avg|Max)Pool[123]d|ReLU6?|(Leaky|P|R)ReLU|C?ELU|"
    r"SELU|GELU|SiLU|Mish|Hard(tanh|sigmoid|swish)|(Log)?Sigmoid|Tanh|Softsign|Softplus"
)


class _Stage(NamedTuple):
    rule: str
    source: str
    cause: str
    advice: str


_DERIVATIVES = (
    "look for functions that are finite but have an infinite derivative (sqrt, norm and pow at 0, torch.where around a division)"
)
#: In the order of the step: the first stage with NaN is the cause, and the rest follows from it.
_STAGES = (
    _Stage(
        "non-finite-parameter",
        n.PARAMETER,
        "parameters were NaN or infinite before the forward pass, and no gradient of the step before was",
        "look at what else writes to parameters: the learning rate and eps of the optimizer, weight decay, an average of models, a "
        "checkpoint",
    ),
    _Stage(
        "non-finite-activation",
        n.ACTIVATION,
        "the forward pass has its first NaN or Inf in the output of this module, while parameters are finite",
        "make its computation safe (clamp before log, exp and sqrt, eps in divisions, float32 instead of float16), or look at the batch "
        "of this step",
    ),
    _Stage(
        "non-finite-loss",
        "",
        "the loss is the first value that is NaN or infinite; parameters and all measured outputs are finite",
        "look at the loss function on this batch: log(0), 0/0, a mask that leaves nothing, a target out of range",
    ),
    _Stage(
        "non-finite-gradient",
        n.GRADIENT_BEFORE_CLIP,
        "the loss is finite, and the backward pass produces NaN or Inf",
        _DERIVATIVES,
    ),
    _Stage(
        "non-finite-gradient",
        n.GRADIENT,
        "all gradients were finite when backward() ended, and NaN or infinite when the optimizer used them",
        "look at what the loop does to gradients between backward() and step(): a division by a number of tokens that is 0, a clip of its "
        "own that divides by a norm of 0, noise, an unscaling",
    ),
)


def check_nonfinite(history: History) -> list[Finding]:
    """The first applied step with NaN or Inf, by the stage that had it first; and a GradScaler that never applies a step."""
    found, losses = _stuck(history), dict(history.loss.pairs())
    steps = [_Step(record, losses.get(record.step), history) for record in history.records if record.applied]
    applied = [step for step in steps if step.stage is not None]
    if not applied:
        return found
    first = applied[0]
    number, stage = first.record.step, first.stage
    if stage is None or any(fact.rule in OF_THE_BATCH and fact.first <= number <= fact.last for fact in history.facts):
        return found  # the rest follows from the batch
    tensors = {"tensors": float(len(first.places))} if stage.source else {}
    cause, advice = first.words_of_networks(stage) or first.words(stage)
    known = [loss for step, loss in losses.items() if step < number and math.isfinite(loss)]
    if len(known) >= _LOSSES_BEFORE and known[-1] > _GREW * known[0] > 0:
        cause += f"; the loss had grown from {known[0]:.3g} to {known[-1]:.3g} before"
        advice = "lower the learning rate first, since the training had left its range; if that changes nothing, " + advice
    if stage.rule != "non-finite-parameter" and not Precautions(history).skips:
        advice += ", or skip such steps: on_spike='skip'"
    cause, advice = (f"{text[0].upper()}{text[1:]}." for text in (cause, advice))
    evidence, span = {**tensors, "steps": float(len(applied))}, (number, applied[-1].record.step)
    return [*found, *history.finding(stage.rule, first.origin(stage), evidence, cause, advice, 100.0, "error", span)]


def _nonfinite_names(table: StatsTable | None) -> list[str]:
    """The tensors with NaN or Inf, or whose sum of squares overflows."""
    if table is None:
        return []
    bad = table.rows[:, Column.NONFINITE] > 0
    if Column.SQUARE_SUM in table.columns:
        bad |= ~table.rows[:, Column.SQUARE_SUM].isfinite()
    return [name for name, is_bad in zip(table.names, bad.tolist(), strict=True) if is_bad]


class _Step:
    """One step: the first stage with NaN or Inf, None without any, and the names of its tensors that have them."""

    def __init__(self, record: StepRecord, loss: float | None, history: History) -> None:
        self.record, self._tables, self._loss, self._history = record, record.tables, loss, history
        # of several networks, each with an optimizer and perhaps a loss of its own
        losses = {key.name: value for key, value in record.values.items() if is_loss_of_network(key)}
        self._finite = [name for name, value in losses.items() if math.isfinite(value)]
        self._bad = [name for name in losses if name not in self._finite]
        self._take_turns = "by_turns" in record.context  # the step has the steps of several of their optimizers
        names = _nonfinite_names(self._tables.get(n.GRADIENT_BEFORE_CLIP, self._tables.get(n.GRADIENT)))
        # gradients of several of these have NaN or Inf: the others' went through what the first one wrote
        self._spread = len(history.first_to_step(names, record)) < len(names)
        self.places: list[str] = []
        self.stage = next(filter(self._begins_in, _STAGES), None)

    def _begins_in(self, stage: _Stage) -> bool:
        """Whether the stage has NaN or Inf; sets :attr:`places`."""
        has_finite_loss = None if self._loss is None else math.isfinite(self._loss)
        if self._finite and self._bad and self._take_turns:
            has_finite_loss = self._spread  # that of the network that had NaN or Inf first
        if not stage.source:
            return has_finite_loss is False
        self.places = _nonfinite_names(self._tables.get(stage.source))
        if self.places and stage.source == n.ACTIVATION:
            comes_after = self._spread and has_finite_loss
            # harmless if all that follows is finite, as for logits that a mask sets to minus infinity
            later = [self._tables[source] for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if source in self._tables]
            is_spoiled = not later or any(map(_nonfinite_names, later)) or not (self._loss is None or math.isfinite(self._loss))
            self.places = innermost(self.places) if is_spoiled and not comes_after else []
        return bool(self.places)

    def words_of_networks(self, stage: _Stage) -> tuple[str, str] | None:
        finite, bad = " and ".join(self._finite), " and ".join(self._bad)
        turns = self.record.context.get("by_turns", 0)
        if stage.rule == "non-finite-loss" and self._spread and turns > 1:
            return (
                f"the loss and the gradients of several optimizers are NaN or infinite; one of these stepped {turns:.0f} times in this "
                "step, of which the last one alone is known, so that the gradients of an earlier one may have been the first",
                f"watch each network by a monitor of its own, so that each of its steps has a record; {stage.advice}; and {_DERIVATIVES}",
            )
        if stage.rule == "non-finite-loss" and finite and bad and self._take_turns:
            return f"{bad} came first with NaN or Inf; parameters and {finite} are finite", stage.advice
        if stage.source == n.GRADIENT_BEFORE_CLIP and self._spread:
            return (
                f"{finite or 'the loss'} had no NaN or Inf, and the backward pass produces them; the optimizer of this parameter steps "
                "before the others, whose gradients then went through what it wrote",
                stage.advice,
            )
        if stage.source == n.GRADIENT_BEFORE_CLIP and finite and bad:
            return (
                f"gradients are NaN or infinite while parameters and {finite} are finite, unlike {bad}: if this network is trained by "
                f"{finite}, its backward pass produces them, and if by {bad}, they came with this loss",
                f"{stage.advice}; or at what went into {bad}",
            )
        return None

    def words(self, stage: _Stage) -> tuple[str, str]:
        """Cause and advice, by what was recorded of the step: what comes before may be finite, or only unknown."""
        cause, advice = stage.cause, stage.advice
        look = (
            "look for NaN and Inf in the batch with torch.isfinite, then watch with preset='full', which measures outputs, to see whether "
            "a module makes it; if none does, "
        )
        if stage.source == n.PARAMETER:
            cause = self._after_unseen_steps(cause)
        elif stage.source == n.GRADIENT and n.GRADIENT_BEFORE_CLIP not in self._tables:
            cause = "the gradients that the optimizer used are NaN or infinite; those of the backward pass are not known"
        elif stage.source == n.ACTIVATION:
            return self._made_before(self.places[0]) or (cause, advice)
        elif stage.source != n.GRADIENT and n.ACTIVATION not in self._tables:
            if stage.rule == "non-finite-loss":
                cause = "the loss is NaN or infinite while parameters are finite; outputs of modules were not measured"
                advice = look + advice
            elif self._loss is None:
                cause = "gradients are NaN or infinite while parameters are finite; neither the loss nor outputs of modules were recorded"
                advice = f"{'' if self._history.loss else f'{self._history.advice.loss}, and '}{look}{advice}"
        return cause, advice

    def _made_before(self, name: str) -> tuple[str, str] | None:
        """Cause and advice for a module that cannot have made NaN or Inf itself; None if it can, or its parameters are not known."""
        kind, inputs = self._history.kinds.get(name, ""), self._tables.get(n.INPUT)
        if n.PARAMETER not in self._tables or not _FINITE.fullmatch(kind):
            return None
        if inputs is not None and name in inputs.names and name not in _nonfinite_names(inputs):
            return None  # its sums overflow
        outputs = self._tables[n.ACTIVATION]
        spoiled = {*_nonfinite_names(outputs)}
        before = [each for each in outputs.names[: outputs.names.index(name)] if each not in spoiled]
        article = "an" if kind[0] in "AEIU" else "a"
        if not before:  # the first module that is called
            return (
                f"the first output that is measured has NaN or Inf, and {name} is {article} {kind} whose parameters are finite: what it "
                "got was not finite, the batch or what forward() makes of it before, or so large that its sums overflow",
                "look for NaN and Inf in the inputs with torch.isfinite, in the file and after each transform, and drop or fill these "
                f"examples; then at what forward() computes before {name}",
            )
        where = f"between {before[-1]}, whose output is the last finite one, and {name}"
        return (
            f"the forward pass has its first NaN or Inf in the output of this module, but {name} is {article} {kind} whose parameters are "
            "finite: what it got was not finite, or so large that its sums overflow",
            f"look at what forward() computes {where}: clamp before log, exp and sqrt, add an eps in divisions, and use float32 where "
            "float16 overflows",
        )

    def _after_unseen_steps(self, cause: str) -> str:
        """The cause, without a word about steps whose gradients are not in the records."""
        last = max((step for step in self._history.steps if step < self.record.step), default=None)
        if last is None:
            return "parameters were NaN or infinite before the forward pass of the first step that is known"
        if self.record.step - last == 1:
            return cause
        unseen = f"gradients were finite in step {last}, and later ones are not known"
        return f"parameters were NaN or infinite before the forward pass; {unseen}"

    def origin(self, stage: _Stage) -> str:
        """The first name in the order of the pass; a backward pass reaches the last parameters first. A clip spreads NaN to all."""
        table, history = self._tables.get(n.GRADIENT), self._history
        if not self.places or (stage.source == n.GRADIENT and table is not None and len(self.places) == len(table.names)):
            return ""
        if stage.source not in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT):
            return self.places[0]
        first = history.first_to_step(self.places, self.record)
        matrices = [name for name in reversed(first) if name in history.matrices and stage.source == n.GRADIENT_BEFORE_CLIP]
        return next(iter(matrices), first[0] if stage.source == n.GRADIENT else first[-1])


def _stuck(history: History) -> list[Finding]:
    overflowed = list(
        takewhile(lambda record: not (record.applied or record.skipped or record.interrupted), reversed(history.records))
    )
    if len(overflowed) < _STUCK:
        return []
    evidence, steps = {"overflowed steps in a row": float(len(overflowed))}, history.steps[-len(overflowed) :]
    cause = "The GradScaler skips every step: the gradients overflow at any scale."
    advice = "The forward or backward pass itself overflows: use bfloat16, or keep the layers that overflow in float32."
    return history.finding("non-finite-gradient", "", evidence, cause, advice, 100.0, "error", steps)
