"""Mistakes that single numbers show for certain, whatever the loss does: updates of exactly zero, gradients that are gone before the step,
units that are all the same, settings of an optimizer that outweigh its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....core import keys as n
from ....core.formatting import also_in
from ....core.moments import Column
from ..findings import Finding, NotMeasured
from ..history import History
from .precision import rounded_away

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
#: A decoupled decay up to this is in use.
_USUAL = 0.5
#: Optimizers whose weight decay is not part of the gradient.
_DECOUPLED = frozenset({"AdamW", "NAdamW", "Adafactor", "Lion", "Muon", "SGDW"})


def check_certain(history: History) -> list[Finding]:
    """Each by its own numbers; what was not measured is left out."""
    if history.gradients("norm") is None:
        raise NotMeasured("gradients were not measured")
    return [*_cleared(history), *_no_update(history), *_equal(history), *_epsilon(history), *_decay(history)]


def _cleared(history: History) -> list[Finding]:
    before, after = history.matrix(n.GRADIENT_BEFORE_CLIP, "norm"), history.matrix(n.GRADIENT, "norm")
    if before is None or after is None:
        return []
    came = dict(zip(before.steps, before.values.nan_to_num(0.0).amax(1).tolist(), strict=True))
    used = dict(zip(after.steps, after.values.nan_to_num(0.0).amax(1).tolist(), strict=True))
    both = [step for step in came if step in used and came[step] > 0]
    gone = [step for step in both if used[step] == 0]
    if len(gone) < _FEWEST or len(gone) < _MOSTLY * len(both):
        return []
    return history.finding(
        "gradients-cleared",
        "",
        {"steps": float(len(gone)), "largest norm before": max(came[step] for step in gone)},
        "The backward pass brings gradients, and the optimizer steps with zeros.",
        "Move optimizer.zero_grad() before loss.backward(), with nothing between that and optimizer.step().",
        121.0,
        severity="error",
        steps=(gone[0], gone[-1]),
    )


def _no_update(history: History) -> list[Finding]:
    updates, gradients = history.matrix(n.UPDATE, "norm"), history.used_gradients("norm")
    if updates is None or gradients is None:
        return []
    live = dict(zip(gradients.names, (gradients.values > 0).double().mean(0).tolist(), strict=True))
    applied = {record.step for record in history.records if record.applied}
    rows = [place for place, step in enumerate(updates.steps) if step in applied]
    if len(rows) < _FEWEST:
        return []
    values = updates.values[rows]
    still = (values == 0).double().sum(0) / (~values.isnan()).double().sum(0).clamp(min=1)
    pulls = history.ratio(n.GRADIENT, n.PARAMETER) or history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER)
    usual = {} if pulls is None else pulls.medians()
    names = [
        name
        for name, share in zip(updates.names, still.tolist(), strict=True)
        if share >= _MOSTLY and live.get(name, 0.0) >= _MOSTLY and name in history.matrices and usual.get(name, 1.0) > _VANISHED
    ]
    rounded = rounded_away(history)  # another finding has these
    names = [name for name in names if name not in rounded]
    if not names:
        return []
    whole = len(names) == sum(name in history.matrices for name in updates.names)
    rates = {
        float(rate)
        for group in history.groups
        if set(group["parameters"]) & set(names)
        for rate in [group["settings"].get("lr", math.nan)]
    }
    cause = (
        "its learning rate is 0"
        if rates == {0.0}
        else "its steps are smaller than the rounding of the weights, or it is not stepped"
    )
    return history.finding(
        "zero-update",
        "" if whole else names[0],
        {"matrices that do not move": float(len(names)), "learning rate": max(rates, default=math.nan)},
        f"The optimizer's change is exactly zero, step after step, though there are gradients: {cause}."
        f"{'' if whole else also_in(names)}",
        "Raise the learning rate of this group, look at what a scheduler makes of it, keep float32 weights under a low precision, or "
        "freeze it with requires_grad_(False).",
        79.0,
        severity="warning",
        steps=(updates.steps[rows[0]], updates.steps[rows[-1]]),
    )


def _equal(history: History) -> list[Finding]:
    """Matrices whose elements are all the same at the first step. Zeros alone are usual in the last layer of a branch, which gets a
    gradient.
    """
    measured = [record for record in history.records if n.PARAMETER in record.tables]
    at = history.beginning([record.step for record in measured])
    if at is None:
        return []
    first = measured[at]
    table = first.tables[n.PARAMETER]
    if not {Column.SUM, Column.SQUARE_SUM, Column.COUNT} <= table.columns:
        return []
    constant, zero, known = [], [], 0
    for name, row in zip(table.names, table.rows.tolist(), strict=True):
        count = row[Column.COUNT]
        if name not in history.matrices or count < _LEAST:
            continue
        known += 1
        mean, square = row[Column.SUM] / count, row[Column.SQUARE_SUM] / count
        if square == 0:
            zero.append(name)
        elif square - mean**2 <= _EQUAL * square:
            constant.append(name)
    gradients = history.gradients("norm")
    row = None if gradients is None else history.beginning(gradients.steps)
    norms = {} if gradients is None or row is None else dict(zip(gradients.names, gradients.values[row].tolist(), strict=True))
    blocks = 2 * len(zero) > known and not all(norms.get(name, 0.0) > 0 for name in zero)
    found = constant if constant else zero if blocks else []
    if not found:
        return []
    return history.finding(
        "equal-units",
        found[0],
        {"matrices like this": float(len(found)), "of": float(known)},
        f"All elements of this matrix begin with the same value, so all its units compute the same and get the same gradient."
        f"{also_in(found)}",
        "Draw weights at random, as torch's layers do by default, and keep constants for biases and gains.",
        88.0,
        severity="warning",
        steps=(first.step, first.step),
    )


def _settings(history: History, key: str) -> dict[str, tuple[Mapping[str, Any], float]]:
    """The group of each parameter, and the value of ``key`` there; of groups that have it."""
    found = {}
    for group in history.groups:
        value = group["settings"].get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.update({name: (group, float(value)) for name in group["parameters"]})
    return found


def _epsilon(history: History) -> list[Finding]:
    sizes = history.used_gradients("rms")
    settings = _settings(history, "eps")
    if sizes is None:
        return []
    usual = {name: value for name, value in sizes.medians().items() if name in history.matrices and value > 0}
    damped = [
        name
        for name, value in usual.items()
        if name in settings and "Ada" in settings[name][0]["optimizer"] and settings[name][1] > _DAMPED * value
    ]
    if not damped or 2 * len(damped) <= len(usual):
        return []
    epsilon = settings[damped[0]][1]
    # one that was chosen, and outweighs gradients from the beginning, slows down what it does not stop
    early = sizes.part(0, 0.1).medians()
    is_chosen = epsilon > _CHOSEN and history.beginning(sizes.steps) is not None
    is_chosen &= all(epsilon > _DAMPED * early.get(name, math.inf) for name in damped)
    learns = history.learning.has_fallen and not is_chosen
    return history.finding(
        "epsilon-dominates",
        damped[0],
        {"epsilon": epsilon, "root mean square of the gradient": usual[damped[0]]},
        f"The optimizer divides by a root of the mean square of gradients plus epsilon, and epsilon is far larger: steps shrink with the "
        f"gradient.{also_in(damped)}",
        "Lower eps, 1e-8 is usual, or scale up the loss if gradients are this small.",
        74.0,
        severity="info" if learns else "warning",
    )


def _decay(history: History) -> list[Finding]:
    settings = _settings(history, "weight_decay")
    weights, gradients = history.matrix(n.PARAMETER, "norm"), history.used_gradients("norm")
    if weights is None or gradients is None or not settings:
        return []
    early, pull = weights.part(0, 0.1).medians(), gradients.part(0, 0.1).medians()
    strong, forgets = {}, False
    for name in history.matrices:
        group, decay = settings.get(name, ({}, 0.0))
        if decay <= 0 or not early.get(name) or not pull.get(name):
            continue
        share = decay * early[name] / pull[name]
        per_step = decay * float(group["settings"].get("lr") or 0.0)
        is_decoupled = group["optimizer"] in _DECOUPLED or bool(group["settings"].get("decoupled_weight_decay"))
        # with a usual decay it is the rate that is too high
        strong[name] = per_step > _FORGET and decay > _USUAL if is_decoupled else share > _DECAY
        forgets |= is_decoupled and per_step > 2 * _FORGET
    names = [name for name, is_strong in strong.items() if is_strong]
    if not names or 2 * len(names) <= len(strong):
        return []
    last = weights.part(0.9, 1).medians()
    shrinks = sum(last.get(name, 0.0) < 0.5 * early[name] for name in names) * 2 > len(names)
    return history.finding(
        "weight-decay-high",
        names[0],
        {
            "weight decay": settings[names[0]][1],
            "decay / gradient": settings[names[0]][1] * early[names[0]] / pull[names[0]],
            "norm of the weights at the end / at the beginning": last.get(names[0], math.nan) / early[names[0]],
        },
        f"Weight decay moves the weights more than the gradient does.{also_in(names)}",
        "Lower weight_decay; 0.01 to 0.1 is usual with AdamW, 1e-4 to 1e-3 with SGD and Adam.",
        83.0,
        severity="warning" if shrinks or forgets or history.learning.is_stuck else "info",
        steps=(weights.steps[0], weights.steps[-1]),
    )
