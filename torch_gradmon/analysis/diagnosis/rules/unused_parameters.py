"""Parameters that never receive a gradient, or no longer do, and those that are frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from ....core import keys as n
from ....core.formatting import also_in, listed, percent
from ....core.keys import blocks_of
from ....core.records import Severity
from ..findings import Finding, NotMeasured
from ..history import History
from ..series import Matrix

#: The fewest steps after which a parameter counts as never reached.
_FEWEST = 20
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
    norms, parameters = history.gradients("norm"), history.parameters
    seen = {} if norms is None else norms.largest()  # thawed on the way, by turns, or frozen again
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
    if adapts and lacks:
        advice = (
            f"Adapters train, and the last layer, {last[0].rpartition('.')[0]}, is frozen: if it is new, as a classifier is, train it too, "
            "in PEFT with task_type= or modules_to_save= in the config of the adapters."
        )
    else:
        advice = (
            f"{'The rest has learnt nothing: c' if lacks else 'Nothing has to be done if that is meant. Otherwise c'}all "
            "requires_grad_(True) before the optimizer is made; monitor.expect(trains=...) tells when it is forgotten."
        )
    return history.finding(
        "frozen",
        last[0] if adapts and lacks else blocks[0],
        {"parameters": float(len(frozen)), "share of all elements": share},
        f"{percent(share)} of all elements are frozen, by requires_grad=False: {listed(blocks, _NAMED)}.",
        advice,
        1.0,
        severity="warning" if lacks else "info",
    )


def _has_adapters(history: History, frozen: list[str]) -> bool:
    """Whether a frozen matrix ``[out, in]`` has two that train ``[rank, in]`` and ``[out, rank]`` beside it, in its module or the one
    around it.
    """
    shapes = {name: tuple(about["shape"]) for name, about in history.parameters.items() if len(about["shape"]) == 2}
    trained: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name not in history.frozen:
            for depth in range(1, name.count(".") + 1):
                trained.setdefault(name.rsplit(".", depth)[0], []).append(shape)
    for name in frozen:
        rows, columns = shapes.get(name, (0, 0))
        for parent in {name.rsplit(".", depth)[0] for depth in (1, 2)} if rows else ():
            pairs = trained.get(parent, ())
            ranks = {shape[0] for shape in pairs if shape[1] == columns and shape[0] < min(rows, columns)}
            if any(shape[0] == rows and shape[1] in ranks for shape in pairs):
                return True
    return False


def check_unused_parameters(history: History) -> list[Finding]:
    """By the gradients before clipping."""
    norms = history.gradients("norm")
    if norms is None or len(norms.steps) < _FEWEST:
        raise NotMeasured(f"fewer than {_FEWEST} steps with gradients were measured")
    return [*_never(history, norms), *_vanished(history, norms)]


def _never(history: History, norms: Matrix) -> list[Finding]:
    parameters = history.matrix(n.PARAMETER, "norm")
    if parameters is None:
        return []
    whole = torch.tensor([step not in history.partial_steps for step in parameters.steps], dtype=torch.bool)
    there = torch.isfinite(parameters.values[whole]).sum(0).tolist()
    seen = dict(zip(norms.names, norms.values.nan_to_num(0.0).amax(0).tolist(), strict=True))
    spoiled = history.gradients("nonfinite")  # NaN is a gradient too, but no norm
    if spoiled is not None:
        seen.update((name, count) for name, count in spoiled.largest().items() if count)
    measured = {
        name: steps
        for name, steps in zip(parameters.names, there, strict=True)
        if name not in history.frozen and not history.is_gone(name)
    }
    missed = [name for name, steps in measured.items() if steps >= _FEWEST and not seen.get(name)]
    if len(missed) == len(measured):
        return _all_zero(history, norms)
    found: list[Finding] = []
    if left := [name for name in missed if history.is_unowned(name)]:
        found = _harmless(
            history,
            norms,
            left,
            "parameters without gradient and optimizer",
            "No gradient reaches this parameter, and no optimizer has it, as of a target network or a teacher, which are copied, or of "
            "a reference model.",
            "If it should train, give it to the optimizer; if not, nothing has to be done, and requires_grad_(False) says so.",
        )
        missed = [name for name in missed if not history.is_unowned(name)]
    return [*_not_reached(history, norms, missed, seen), *found] if missed else found


def _not_reached(history: History, norms: Matrix, missed: list[str], seen: Mapping[str, float]) -> list[Finding]:
    if all(_is_taken_out(name, norms, seen) for name in missed) and not (history.learning.is_stuck or history.learning.is_worse):
        return _harmless(
            history,
            norms,
            missed,
            "biases with a gradient of exactly 0",
            "The gradient of this bias is exactly 0 in every step, while the weight of its layer has one: what follows takes the bias "
            "out again, as the difference of two outputs of the layer does.",
            "Nothing has to be done, and bias=False would give the same model; unless a backward() of your own returns zeros.",
        )
    sizes = {name: size for name, size in history.sizes(n.PARAMETER).items() if not history.is_gone(name)}
    share = sum(sizes[name] for name in missed) / max(sum(sizes.values()), 1)
    zero = history.always_reached.intersection(missed)  # a gradient that came
    missed.sort(key=lambda name: (name in zero, name not in history.matrices))
    matters = (share > _SHARE or history.learning.is_stuck) and not _is_routed(missed[0], norms)
    cause, advice = _words(history, len(missed), len(zero))
    return history.finding(
        "no-gradient",
        missed[0],
        {"parameters without gradient": float(len(missed)), "share of all elements": share},
        cause + also_in(missed),
        advice,
        75.0,
        severity="warning" if matters else "info",
        steps=(norms.steps[0], norms.steps[-1]),
    )


def _words(history: History, missed: int, zero: int) -> tuple[str, str]:
    """Cause and advice for parameters of which some have a gradient of exactly 0, and the others none at all."""
    none = "No gradient reached this parameter in any step, although it requires one"
    cut = (
        "Look for a detach(), .data, no_grad() or a module that forward() never calls; call requires_grad_(False) if it should not be "
        "trained"
    )
    tells = "" if history.matrix(n.ACTIVATION, "rms") is not None else "; preset='full' tells which units are dead"
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
    """Information about ``names``, of which ``what`` says what was counted."""
    return history.finding(
        "no-gradient",
        names[0],
        {what: float(len(names))},
        cause + also_in(names),
        advice,
        20.0,
        severity="info",
        steps=(norms.steps[0], norms.steps[-1]),
    )


def _all_zero(history: History, norms: Matrix) -> list[Finding]:
    """Gradients that are there, and zero. Without any there is a mistake of the loop, which another rule reports."""
    if not bool(norms.values.isfinite().any()):
        return []
    loss = history.loss.finite
    is_nothing = len(loss) > 0 and not any(loss.values)
    return history.finding(
        "no-gradient",
        "",
        {"parameters with a gradient of exactly 0": float(len(norms.names))},
        "All gradients are exactly 0 in every step, "
        f"{'and so is the loss: nothing counts in it' if is_nothing else 'the loss does not depend on the parameters'}.",
        "Look for labels that are all ignored, a mask of zeros, or a margin with the wrong sign; or the task was solved before."
        if is_nothing
        else "Look for a softmax over a single output, an argmax, a rounding, a clamp that always acts, or a product with 0.",
        75.0,
        severity="warning",
        steps=(norms.steps[0], norms.steps[-1]),
    )


def _is_routed(missed: str, norms: Matrix) -> bool:
    """Whether it is an expert of a mixture: by its name, or because its counterparts in other blocks have gradients in some steps
    only.
    """
    reached = (norms.values.nan_to_num(0.0) > 0).double().mean(0).tolist()
    some = {name for name, share in zip(norms.names, reached, strict=True) if 0 < share < 1}
    return "expert" in missed or _NUMBER.sub("*", missed) in {_NUMBER.sub("*", name) for name in some}


def _vanished(history: History, norms: Matrix) -> list[Finding]:
    severity: Severity = "info" if history.learning.last <= _SOLVED * history.learning.first else "warning"
    whole = norms.values.nan_to_num(0.0).square().sum(1).sqrt()
    at = _gone_since(whole)
    if at is not None:
        return [_vanished_finding(severity, "", norms.steps[at], norms.steps[-1], whole[:at].median().item())]
    found = {}
    for name, column in zip(norms.names, norms.values.unbind(1), strict=True):
        at = (
            None
            if name not in history.always_reached or history.is_gone(name)
            else _gone_since(column.nan_to_num(0.0), must_stay=True)
        )
        if at is not None:
            found[name] = _vanished_finding(
                history.concern, name, norms.steps[at], norms.steps[-1], column[:at].nanmedian().item()
            )
    if not found:
        return _frozen(history, norms)
    name, finding = min(found.items(), key=lambda item: (item[0] not in history.matrices, item[1].steps[0]))
    others = [name, *(other for other in found if other != name)]
    return [replace(finding, cause=finding.cause + also_in(others))]


def _frozen(history: History, norms: Matrix) -> list[Finding]:
    """Parameters that had a gradient in nearly all steps, and from one step on have none at all."""
    spoiled = history.gradients("nonfinite")
    if spoiled is not None and any(spoiled.largest().values()):
        return []  # NaN is no missing gradient
    there = norms.values.isfinite()
    ends = {}
    for name, column in zip(norms.names, there.unbind(1), strict=True):
        rows = column.nonzero().flatten().tolist()
        if not rows or history.is_gone(name):
            continue
        first, last = rows[0], rows[-1]
        least = _BEFORE if name in history.frozen else max(len(column) // 4, _FEWEST)
        if len(column) - last > least and last - first >= _BEFORE and len(rows) > _NEARLY_ALL * (last - first + 1):
            ends[name] = last + 1
    if not ends or len(ends) == len(norms.names):
        return []
    again = {name: at for name, at in ends.items() if name in history.frozen}
    ends = again or ends
    name = min(ends, key=lambda each: (ends[each], each not in history.matrices))
    others = [name, *(other for other in ends if other != name)]
    since = norms.steps[ends[name]]
    return history.finding(
        "gradient-dropped-to-zero",
        name,
        {"median norm before": norms.column(name).median},
        f"It trained until step {norms.steps[ends[name] - 1]}, and is frozen since step {since}, by requires_grad=False.{also_in(others)}"
        if again
        else f"There was a gradient, and from here on there is none: it was frozen, or nothing uses it any more.{also_in(others)}",
        "If it is meant to train, look for requires_grad_(False) on the way, in a test perhaps, or in what builds the model anew for a "
        "run that resumes.",
        72.0,
        severity="info",
        steps=(since, norms.steps[-1]),
    )


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


def _vanished_finding(severity: Severity, where: str, first: int, last: int, usual: float) -> Finding:
    return Finding(
        "gradient-dropped-to-zero",
        severity,
        where,
        (first, last),
        {"median norm before": usual},
        "There was a gradient, and from here on there is mostly none.",
        "Look for a clamp or a max() around the loss, a loss weight that reached zero, a satisfied hinge, or dead units.",
        72.0,
    )
