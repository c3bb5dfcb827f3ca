"""What a monitor may warn of, each with the fact that makes the warning true of a program. Any other warning is a failure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from torch import Tensor

from .. import oracle
from .oracle import belongs, norm_of
from .program import Program
from .truth import Record, Truth

Fact = Callable[[Program, Record, re.Match[str]], bool]


def _is_spike(p: Program, record: Record, words: re.Match[str]) -> bool:
    """Whether the number in the message is that of the step that it names."""
    truth = record.steps.get(int(words["step"]))
    if truth is None:
        return False
    if words["signal"] == "grad_norm":
        true = norm_of(truth.before.values()).value or 0.0
    elif words["signal"] in truth.logged:
        true = sum(truth.logged[words["signal"]]) / len(truth.logged[words["signal"]])
    else:
        return False
    return f"{true:.4g}" == words["value"] or str(true) == words["value"] or abs(true - float(words["value"])) <= 1e-3 * true


def _is_bad(tensors: Iterable[Tensor]) -> bool:
    return not all(bool(oracle.reals(tensor).isfinite().all()) for tensor in tensors)


def _has_no_norm(truth: Truth) -> bool:
    return not math.isfinite(norm_of(truth.before.values()).value or 0.0)


def _output_is_bad(p: Program, record: Record, words: re.Match[str]) -> bool:
    outputs = record.steps[int(words["step"])].outputs
    told = re.sub(r"@\d+$", "", words["name"])  # of a single call
    name = next((name for name in record.modules if p.name(name) == told), told)
    return any(_is_bad(tensors) for path, tensors in outputs.items() if belongs(path, name, record))


def _matches_nothing(p: Program, record: Record, words: re.Match[str]) -> bool:
    return not any(re.search(words["pattern"], name) for name in (*record.names, *record.modules))


def _has_modes(p: Program, record: Record) -> bool:
    return p.dropout > 0 or any("BatchNorm" in kind for kind in record.modules.values())


def _clips_scaled(p: Program) -> bool:
    # a fused optimizer unscales in its own step, which comes after the hooks before it
    if p.mistake == "clip_micro":
        return p.scaler
    return p.scaler and bool(p.edit) and (p.mistake == "clip_scaled" or (p.edit_at != "loop" and p.optimizer.endswith("_fused")))


def _steps_without(record: Record) -> bool:
    """Whether no parameter of an optimizer had a gradient when it stepped, as where the only one of a half was dropped."""
    return any(record.owners[each].isdisjoint(t.used) for t in record.steps.values() for each in t.stepped)


REMARKS: list[tuple[str, Fact]] = [
    (r"step (?P<step>\d+): (?P<signal>\w+) = (?P<value>\S+) (is|lies above)", _is_spike),
    (r"step (?P<step>\d+): (?P<signal>\w+) is (?P<value>nan|inf)", _is_spike),
    (
        r"the spike that began in step \d+ continues, grad_norm is (nan|inf) in step (?P<step>\d+)",
        lambda p, r, w: p.on_spike == "warn" and _has_no_norm(r.steps[int(w["step"])]),
    ),
    (
        r"after the spike of steps? \d+ .*grad_norm is (nan|NaN)",
        lambda p, r, w: p.on_spike == "warn" and any(map(_has_no_norm, r.steps.values())),
    ),
    (r"has nothing to judge: the gradients before clipping were not seen", lambda p, r, w: p.mistake == "step_twice"),
    (r"after the spike of step (?P<step>\d+) ", lambda p, r, w: int(w["step"]) in r.steps and p.on_spike == "warn"),
    (r"step (?P<step>\d+): the forward pass has its first NaN or Inf in the output of (?P<name>.+?) \(", _output_is_bad),
    (
        r"step (?P<step>\d+): the forward pass is finite, and the backward pass has its first NaN or Inf in the gradient of the output of",
        lambda p, r, w: any(_is_bad(tensors) for tensors in r.steps[int(w["step"])].output_gradients.values()),
    ),
    (r"step (?P<step>\d+): parameters hold NaN or Inf", lambda p, r, w: _is_bad(r.steps[int(w["step"])].parameters.values())),
    (r"step (?P<step>\d+): (NaN|Inf|all gradients|the loss)", lambda p, r, w: _is_bad(r.steps[int(w["step"])].before.values())),
    (r"the pattern '(?P<pattern>.*)' of the .* metric '.*' matches nothing", _matches_nothing),
    (r"the sink Failing", lambda p, r, w: "failing" in p.sinks),
    (r"Gradients are not cleared between two steps", lambda p, r, w: p.zero == "never"),
    (r"monitoring took more than max_overhead", lambda p, r, w: p.max_overhead > 0),
    (r"requires_grad=False still move", lambda p, r, w: p.has_event("freeze")),
    (
        r"came after the step had gone out to the sinks",
        lambda p, r, w: (bool(p.hand) or p.has_event("detach_attach", "leave")) and bool({"start", "step", "late"} & {*p.log}),
    ),
    (r"while the monitor is detached, and is dropped", lambda p, r, w: p.has_event("leave") and bool(p.log)),
    (r"Gradients are clipped while they are still multiplied by the scale", lambda p, r, w: _clips_scaled(p)),
    (r"optimizers step within the backward pass", lambda p, r, w: p.players == "in_backward" and p.on_spike == "skip"),
    (r"Gradients are changed after the optimizer's step and then dropped", lambda p, r, w: p.mistake == "clip_after_step"),
    (r"The optimizer steps twice on the same gradient", lambda p, r, w: p.mistake == "step_twice"),
    (r"The optimizer steps when all gradients are None", lambda p, r, w: p.mistake == "zero_before_step" or _steps_without(r)),
    (r"A forward pass goes backward more than once", lambda p, r, w: bool(p.twice)),
    (r"The model trains in evaluation mode, so dropout is off", lambda p, r, w: p.trains_in_eval and _has_modes(p, r)),
]


#: What a diagnosis may say of a loop, with the fact that makes it true. Findings of other rules are about the training.
FINDINGS: dict[str, Callable[[Program], bool]] = {
    "missing-zero-grad": lambda p: p.zero == "never",
    "step-without-gradients": lambda p: p.mistake == "zero_before_step" or (p.edit == "drop_one" and p.players == "halves"),
    "stepped-twice": lambda p: p.mistake == "step_twice",
    "backward-twice": lambda p: bool(p.twice),
    "never-stepped": lambda p: False,
    "micro-batch-discarded": lambda p: (
        p.has_event("skip", "raise_backward", "raise_closure") or p.players in ("turns", "gan") or p.optimizer == "lbfgs"
    ),
    "clip-after-step": lambda p: p.mistake == "clip_after_step",
    "clip-per-micro-batch": lambda p: p.mistake == "clip_micro" or p.edit != "" or p.hooks == "accumulated",
    "clipped-while-scaled": lambda p: p.mistake == "clip_scaled" or _clips_scaled(p),
    "backward-after-unscale": lambda p: False,
    "not-in-optimizer": lambda p: p.optimizer == "muon",
    "optimizer-never-steps": lambda p: False,
    "optimizer-before-sharding": lambda p: False,
    "frozen-but-moving": lambda p: p.has_event("freeze"),
    "weights-untied": lambda p: False,
    "sync-every-micro-batch": lambda p: False,
    "dead-hooks": lambda p: False,
    "eval-mode": lambda p: p.trains_in_eval,
}


def is_true(message: str, p: Program, record: Record) -> bool | None:
    """Whether a warning holds; None where no such warning is known."""
    for pattern, fact in REMARKS:
        if (words := re.search(pattern, message)) is not None:
            return fact(p, record, words)
    return None
