"""Why a value may be absent, in the monitor's words, each with the fact that makes the words true of a program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import oracle
from .edits import SCALINGS, UNSEEN
from .oracle import Key, belongs, is_excluded, norm_of, updates
from .program import Program
from .truth import Record, Truth
from .whole_model import UPDATE_EVERY, block_of, is_cut, is_doubtful, norms


@dataclass
class Case:
    """An absent value: the key, the step, and the monitored steps up to it."""

    p: Program
    record: Record
    truth: Truth
    earlier: Sequence[Truth]
    key: Key
    words: re.Match[str] | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether this parameter was frozen when the optimizer stepped."""
        return self.key.name in self.truth.frozen or self.key.name in self.record.frozen_for_good

    def in_any(self, *kinds: str) -> bool:
        """Whether any of these tensors of the step has this name or is inside of what has it."""
        return any(belongs(path, self.key.name, self.record) for kind in kinds for path in getattr(self.truth, kind))


Fact = Callable[[Case], bool]
_MODULE = ("outputs", "inputs")

#: What a reason looks like, and when it is true.
TRUE_REASONS: list[tuple[str, Fact]] = [
    # of when something is measured
    (r"updates are measured on every (\d+)th step", lambda c: c.truth.number % UPDATE_EVERY != 0),
    (r"measured on (?:every|steps divisible by) (\d+)", lambda c: c.truth.number % int(c.words[1]) != 0),  # type: ignore[index]
    (r"it was asked for after the step had begun", lambda c: c.p.has_event("detail_minimal", "detail_full")),
    (r"it takes 100 monitored steps, and (\d+) were seen", lambda c: int(c.words[1]) < 100),  # type: ignore[index]
    (r"detector('s rule gave no score|has not seen enough)", lambda c: _few(c)),
    (r"the detector has not seen enough steps yet", lambda c: _few(c)),
    (r"not measured in this step", lambda c: c.key.metric == "spike_score" and c.p.preset == "none"),
    (r"the step was not applied", lambda c: not c.truth.applied),
    (r"measured by hooks(?: on it| on the optimizer)?, which attach\(\) installs", lambda c: not c.p.attached),
    # of gradients
    (r"no gradient of it was measured(:| before clipping:) (clip with|call) monitor", lambda c: not c.p.attached),
    (r"it is frozen(?:: its requires_grad|, and no attached optimizer has it)", lambda c: c.is_frozen),
    (r"no gradient in this step, or nothing was measured", lambda c: c.key.name not in c.truth.used),
    (r"no gradient before clipping was seen: no backward pass ran", lambda c: c.key.name not in c.truth.before),
    (
        r"it had no gradient: the loss does not depend on it, or its gradient was removed",
        lambda c: c.key.name not in c.truth.before or c.key.name not in c.truth.used,
    ),
    (r"its gradient was gone when", lambda c: c.key.name in c.truth.before and c.key.name not in c.truth.used),
    (
        r"the gradients before clipping were not seen: no backward pass ran",
        lambda c: not c.truth.before or bool(c.truth.used.keys() - c.truth.before.keys()),
    ),
    (
        r"no backward pass brought a gradient for it|no gradient of a micro-batch was seen",
        lambda c: c.key.name not in c.truth.local,
    ),
    (r"the gradient norm is (\S+)$", lambda c: str(norm_of(c.truth.before.values()).value) == c.words[1]),  # type: ignore[index]
    (r"no gradient has a finite element", lambda c: not any(g.isfinite().any() for g in _strided(c))),
    (
        r"nothing clipped in (the last 100|[1-9]\d?) steps?|no step so far had gradients that were seen before a clip and after it",
        lambda c: c.p.edit in UNSEEN or not any(_shows_edit(c, place) for place in range(len(c.earlier))),
    ),
    (
        r"gradients are multiplied by (\S+) after backward, whatever their norm",
        lambda c: (c.p.edit in SCALINGS and c.words[1] == "0.5") or (c.p.edit == "noise" and _repeats(c, c.words[1])),  # type: ignore[index]
    ),
    (r"the optimizer used other gradients than those of the last backward pass", lambda c: is_doubtful(c.p, c.truth, c.earlier)),
    (r"not every attached optimizer stepped", lambda c: is_cut(c.record, c.truth)),
    (r"all gradients were gone when the optimizers stepped", lambda c: not c.truth.used),
    # of parameters, updates and the optimizer's state
    (r"no attached optimizer changes it", lambda c: not c.p.attached or c.key.name not in c.truth.base),
    (r"no attached optimizer has it", lambda c: not any(c.key.name in owned for owned in c.record.owners)),
    (r"its optimizer did not step", lambda c: c.key.name not in c.truth.base),
    (r"no attached optimizer changed a parameter", lambda c: not c.p.attached or not c.truth.base),
    (r"the parameters were not measured", lambda c: not c.p.attached or not c.truth.parameters),
    (r"the norm of the updated parameters was (\S+) before", lambda c: str(norm_of(_bases(c).values()).value) == c.words[1]),  # type: ignore[index]
    (
        r"no updated parameter of two or more",
        lambda c: not any(c.record.names[n] > 1 and _has_norm(t) for n, t in _bases(c).items()),
    ),
    (r"the norm of its parameters was zero or NaN", lambda c: any(not _has_norm(t) for t in _of_row(c))),
    (r"the norm of the parameter was zero or NaN", lambda c: not _has_norm(c.truth.base[c.key.name])),
    (r"the optimizer keeps no such state for it", lambda c: not _keeps(c)),
    (r"the gradient or the momentum is zero", lambda c: True),
    (r"update_regex='.*' leaves it out", lambda c: re.search(c.p.update_sample, c.p.name(c.key.name)) is None),
    # of tensors as such
    (
        r"the tensor has no (finite )?elements|it has no elements|it has no finite element|all its elements are equal",
        lambda c: True,
    ),
    # of modules
    (r"its output, a \w+, holds no tensor of real numbers|which is not an activation", lambda c: _is_index(c)),
    (r"the module was not called in a training forward", lambda c: _goes_by_mode(c) or not c.in_any(*_MODULE)),
    (r"no hook on a module was called: none of these modules ran", lambda c: _goes_by_mode(c) or not c.in_any(*_MODULE)),
    (r"the model was called in evaluation mode, as it was not before", lambda c: c.p.trains_in_eval),
    (r"a module of TorchScript", lambda c: "Script" in c.record.modules.get(c.key.name, "")),
    (
        r"no backward pass that ends in parameters brought a gradient for its (output|input) in a training forward",
        lambda c: _goes_by_mode(c) or not _came(c),
    ),
    (r"it needs no gradient: nothing that it is computed from is trained", lambda c: not _came(c)),
    (r"its module is no .*, whose outputs have bounds", lambda c: c.record.modules.get(c.key.name) != "Tanh"),
    (r"passes was interrupted, as by an exception, and its values cannot be told", lambda c: c.truth.mixed),
    (r"the forward or backward pass of this step was interrupted", lambda c: c.truth.lost and not _is_measured(c)),
    (
        r"no call of scaled_dot_product_attention was seen in training",
        lambda c: _goes_by_mode(c) or all(is_excluded(c.p, each) for each in c.truth.attention),
    ),
    (r"the reference module runs when the whole model is called", lambda c: c.p.players == "gan"),
    (r"no reference module is set", lambda c: "difference" not in c.p.metrics),
]


def _shows_edit(c: Case, place: int) -> bool:
    """Whether it shows in a monitored step that the loop writes to gradients."""
    truth = c.earlier[place]
    return truth.edited and truth.applied and bool(truth.before) and not is_doubtful(c.p, truth, c.earlier[: place + 1])


def _repeats(c: Case, factor: str) -> bool:
    """Whether noise has changed the norms of several steps by this same factor."""
    pairs = [norms(each) for each in c.earlier if each.edited and each.applied]
    return sum(before > 0 and f"{used / before:.4g}" == factor for before, used in pairs) > 1


def _goes_by_mode(c: Case) -> bool:
    """Whether a forward in evaluation mode is none of training, as in steps by hand."""
    return c.p.trains_in_eval and bool(c.p.hand)


def _strided(c: Case) -> list[oracle.Tensor]:
    return [oracle.reals(g) for g in c.truth.before.values()]


def _few(c: Case) -> bool:
    """Whether a detector has seen few norms that it can learn from: eight before the first score."""
    return sum(all(bool(oracle.reals(g).isfinite().all()) for g in e.before.values()) for e in c.earlier if e.applied) <= 9


def _is_index(c: Case) -> bool:
    kind = c.truth.inputs if c.key.source.startswith("input") else c.truth.outputs
    tensors = [ts[0] for path, ts in kind.items() if belongs(path, c.key.name, c.record)]
    return all(not (t.is_floating_point() or t.is_complex()) for t in tensors)


def _came(c: Case) -> bool:
    return c.in_any("output_gradients" if c.key.source == "activation_gradient" else "input_gradients")


def _is_measured(c: Case) -> bool:
    """Whether a pass has measured anything of this kind in this step."""
    if "gradient" in c.key.source:
        return bool(c.truth.output_gradients)
    return bool(c.truth.attention if c.key.source.startswith("attention") else c.truth.outputs)


def _keeps(c: Case) -> bool:
    state = c.truth.states.get(c.key.name, {})
    moments = {"exp_avg_sq_norm": ("exp_avg_sq", "square_avg")}.get(c.key.metric, ("exp_avg", "momentum_buffer"))
    return any(name in state for name in moments) and not (c.key.metric == "grad_momentum_cosine" and state["grad"] is None)


def _bases(c: Case) -> dict[str, oracle.Tensor]:
    """The trained parameters before the update, of the sample that the program asks for."""
    return {name: t for name, t in updates(c.p, c.truth, "base").items() if name not in c.truth.frozen}


def _of_row(c: Case) -> list[oracle.Tensor]:
    """The parameters of the row of layers before the update."""
    return [
        t for n, t in c.truth.base.items() if c.key.name in (n, block_of(n, c.record.names)) or c.key.name.startswith("group_")
    ]


def _has_norm(tensor: oracle.Tensor) -> bool:
    return norm_of([tensor]).value > 0  # type: ignore[operator]


def is_true(reason: str, case: Case) -> bool | None:
    """Whether a reason holds; None where no such reason is known."""
    for pattern, fact in TRUE_REASONS:
        if (words := re.search(pattern, reason)) is not None:
            case.words = words
            return fact(case)
    return None


def is_true_of_layers(reason: str, case: Case, members: Sequence[str]) -> bool | None:
    """Whether each part of the reason of a block holds of one of its parameters."""
    parts = [is_true(reason, replace(case, key=case.key._replace(name=member))) for member in members]
    return None if all(truly is None for truly in parts) else any(parts)
