"""NaN and infinity: which came first, a parameter, an output, the loss or a gradient."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ....core import keys as n
from ....core.loop_mistakes import OF_THE_BATCH
from ....core.records import StepRecord, is_loss_of_network, nonfinite_names
from ....spikes.attribution import innermost
from ..findings import Finding
from ..history import History
from ..precautions import Precautions

#: This many overflowed steps in a row at the end are no search for a loss scale: GradScaler starts at 2**16 and halves it, so
#: that the scale is 1 after 16 of them.
_STUCK = 16
#: A loss that has grown this many times before the first NaN, in this number of steps at least, has run away.
_GREW, _FEWEST = 5.0, 3


#: Modules whose outputs are finite if their parameters and inputs are, up to an overflow: sums of products, and functions without a pole.
_FINITE = re.compile(
    r"Linear|Bilinear|Conv(Transpose)?[123]d|Identity|Flatten|Dropout[123]?d?|(Adaptive)?(Avg|Max)Pool[123]d|ReLU6?|(Leaky|P|R)ReLU|C?ELU|"
    r"SELU|GELU|SiLU|Mish|Hard(tanh|sigmoid|swish)|(Log)?Sigmoid|Tanh|Softsign|Softplus"
)


class _Stage(NamedTuple):
    """One stage of a step: its rule, the source of its statistics, the cause and the advice."""

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
    found = _stuck(history)
    losses = dict(zip(history.loss.steps, history.loss.values, strict=True))
    bad = [
        (record, nonfinite)
        for record in history.records
        if (nonfinite := _first_nonfinite(record, losses.get(record.step), history))
    ]
    applied = [(record, nonfinite) for record, nonfinite in bad if record.applied]
    if not applied:
        return found
    record, (stage, places) = applied[0]
    if any(fact.rule in OF_THE_BATCH and fact.first <= record.step <= fact.last for fact in history.facts):
        return found  # the rest follows from the batch
    last = applied[-1][0].step
    evidence = {"steps": float(len(applied))}
    if stage.source:
        evidence = {"tensors": float(len(places)), **evidence}
    where, (cause, advice) = (
        _origin(stage, places, record, history),
        _words_of_networks(stage, record, history) or _words(stage, places, record, history, losses.get(record.step)),
    )
    known = [loss for step, loss in losses.items() if step < record.step and math.isfinite(loss)]
    if len(known) >= _FEWEST and known[-1] > _GREW * known[0] > 0:
        cause += f"; the loss had grown from {known[0]:.3g} to {known[-1]:.3g} before"
        advice = "lower the learning rate first, since the training had left its range; if that changes nothing, " + advice
    if stage.rule != "non-finite-parameter" and not Precautions.of(history).skips:
        advice += ", or skip such steps: on_spike='skip'"
    return [
        *found,
        Finding(stage.rule, "error", where, (record.step, last), evidence, _sentence(cause), _sentence(advice), 100.0),
    ]


class _Networks:
    """What a step of several networks, each with an optimizer and perhaps a loss of its own, shows besides.

    Attributes:
        finite, bad: the losses of networks that are finite, and those that are not, by name.
        take_turns: the step has the steps of several of their optimizers.
        spread: gradients of several of these have NaN or Inf: the others' went through what the first one wrote.
    """

    def __init__(self, record: StepRecord, history: History) -> None:
        losses = {key.name: value for key, value in record.values.items() if is_loss_of_network(key)}
        self.finite = [name for name, value in losses.items() if math.isfinite(value)]
        self.bad = [name for name in losses if name not in self.finite]
        self.take_turns = "by_turns" in record.context
        names = nonfinite_names(record.tables.get(n.GRADIENT_BEFORE_CLIP, record.tables.get(n.GRADIENT)))
        self.spread = len(history.first_to_step(names, record)) < len(names)

    def has_finite_loss(self, loss: float | None) -> bool | None:
        """Whether the loss was finite of the network that had NaN or Inf first; None if that is unknown."""
        if self.finite and self.bad and self.take_turns:
            return self.spread
        return None if loss is None else math.isfinite(loss)


def _words_of_networks(stage: _Stage, record: StepRecord, history: History) -> tuple[str, str] | None:
    """Cause and advice where several networks are trained, each by its loss."""
    networks = _Networks(record, history)
    finite, bad, turns = _joined(networks.finite), _joined(networks.bad), record.context.get("by_turns", 0)
    if stage.rule == "non-finite-loss" and networks.spread and turns > 1:
        return (
            f"the loss and the gradients of several optimizers are NaN or infinite; one of these stepped {turns:.0f} times in this step, "
            "of which the last one alone is known, so that the gradients of an earlier one may have been the first",
            f"watch each network by a monitor of its own, so that each of its steps has a record; {stage.advice}; and {_DERIVATIVES}",
        )
    if stage.rule == "non-finite-loss" and finite and bad and networks.take_turns:
        return f"{bad} came first with NaN or Inf; parameters and {finite} are finite", stage.advice
    if stage.source == n.GRADIENT_BEFORE_CLIP and networks.spread:
        return (
            f"{finite or 'the loss'} had no NaN or Inf, and the backward pass produces them; the optimizer of this parameter steps before "
            "the others, whose gradients then went through what it wrote",
            stage.advice,
        )
    if stage.source == n.GRADIENT_BEFORE_CLIP and finite and bad:
        return (
            f"gradients are NaN or infinite while parameters and {finite} are finite, unlike {bad}: if this network is trained by "
            f"{finite}, its backward pass produces them, and if by {bad}, they came with this loss",
            f"{stage.advice}; or at what went into {bad}",
        )
    return None


def _joined(names: Sequence[str]) -> str:
    return " and ".join(names)


def _words(stage: _Stage, places: list[str], record: StepRecord, history: History, loss: float | None) -> tuple[str, str]:
    """Cause and advice, by what was recorded of the step: what comes before may be finite, or only unknown."""
    if stage.source == n.PARAMETER:
        return _after_unseen_steps(stage.cause, record, history), stage.advice
    if stage.source == n.GRADIENT:
        unseen = "the gradients that the optimizer used are NaN or infinite; those of the backward pass are not known"
        return stage.cause if n.GRADIENT_BEFORE_CLIP in record.tables else unseen, stage.advice
    if stage.source == n.ACTIVATION:
        return _made_before(places[0], record, history) or (stage.cause, stage.advice)
    if n.ACTIVATION in record.tables:
        return stage.cause, stage.advice
    look = (
        "look for NaN and Inf in the batch with torch.isfinite, then watch with preset='full', which measures outputs, to see whether a "
        "module makes it; if none does, "
    )
    if stage.rule == "non-finite-loss":
        return (
            "the loss is NaN or infinite while parameters are finite; outputs of modules were not measured",
            look + stage.advice,
        )
    if stage.rule == "non-finite-gradient" and loss is None:
        cause = "gradients are NaN or infinite while parameters are finite; neither the loss nor outputs of modules were recorded"
        remedy = "" if history.loss else f"{history.advice.loss}, and "
        return cause, f"{remedy}{look}{stage.advice}"
    return stage.cause, stage.advice


def _made_before(name: str, record: StepRecord, history: History) -> tuple[str, str] | None:
    """Cause and advice for a module that cannot have made NaN or Inf itself; None if it can, or its parameters are not known."""
    kind, inputs = history.kinds.get(name, ""), record.tables.get(n.INPUT)
    if n.PARAMETER not in record.tables or not _FINITE.fullmatch(kind):
        return None
    if inputs is not None and name in inputs.names and name not in nonfinite_names(inputs):
        return None  # its sums overflow
    outputs = record.tables[n.ACTIVATION]
    spoiled = {*nonfinite_names(outputs)}
    before = [each for each in outputs.names[: outputs.names.index(name)] if each not in spoiled]
    article = "an" if kind[0] in "AEIU" else "a"
    if not before:  # the first module that is called
        return (
            f"the first output that is measured has NaN or Inf, and {name} is {article} {kind} whose parameters are finite: what it got "
            "was not finite, the batch or what forward() makes of it before, or so large that its sums overflow",
            "look for NaN and Inf in the inputs with torch.isfinite, in the file and after each transform, and drop or fill these "
            f"examples; then at what forward() computes before {name}",
        )
    where = f"between {before[-1]}, whose output is the last finite one, and {name}"
    return (
        f"the forward pass has its first NaN or Inf in the output of this module, but {name} is {article} {kind} whose parameters are "
        "finite: what it got was not finite, or so large that its sums overflow",
        f"look at what forward() computes {where}: clamp before log, exp and sqrt, add an eps in divisions, and use float32 where float16 "
        "overflows",
    )


def _after_unseen_steps(cause: str, record: StepRecord, history: History) -> str:
    """The cause, without a word about steps whose gradients are not in the records."""
    last = max((step for step in history.steps if step < record.step), default=None)
    if last is None:
        return "parameters were NaN or infinite before the forward pass of the first step that is known"
    if record.step - last == 1:
        return cause
    return f"parameters were NaN or infinite before the forward pass; gradients were finite in step {last}, and later ones are not known"


def _origin(stage: _Stage, places: list[str], record: StepRecord, history: History) -> str:
    """The first name in the order of the pass; a backward pass reaches the last parameters first. A clip spreads NaN to all."""
    table = record.tables.get(n.GRADIENT)
    if not places or (stage.source == n.GRADIENT and table is not None and len(places) == len(table.names)):
        return ""
    if stage.source not in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT):
        return places[0]
    first = history.first_to_step(places, record)
    if stage.source == n.GRADIENT:
        return first[0]
    return next((name for name in reversed(first) if name in history.matrices), first[-1])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _first_nonfinite(record: StepRecord, loss: float | None, history: History) -> tuple[_Stage, list[str]] | None:
    networks: _Networks | None = None
    for stage in _STAGES:
        if not stage.source:
            if (networks or _Networks(record, history)).has_finite_loss(loss) is False:
                return stage, []
        elif places := nonfinite_names(record.tables.get(stage.source)):
            if stage.source == n.ACTIVATION:
                networks = _Networks(record, history)
                comes_after = networks.spread and networks.has_finite_loss(loss)
                places = [] if comes_after or _is_harmless(record, loss) else innermost(places)
            if places:
                return stage, places
    return None


def _is_harmless(record: StepRecord, loss: float | None) -> bool:
    """Whether all that follows an output is finite, as for logits that a mask sets to minus infinity."""
    tables = [table for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if (table := record.tables.get(source)) is not None]
    return bool(tables) and not any(map(nonfinite_names, tables)) and (loss is None or math.isfinite(loss))


def _stuck(history: History) -> list[Finding]:
    overflowed = 0
    for record in reversed(history.records):
        if record.applied or record.skipped or record.interrupted:
            break
        overflowed += 1
    if overflowed < _STUCK:
        return []
    first, last = history.records[-overflowed].step, history.records[-1].step
    return history.finding(
        "non-finite-gradient",
        "",
        {"overflowed steps in a row": float(overflowed)},
        "The GradScaler skips every step: the gradients overflow at any scale.",
        "The forward or backward pass itself overflows: use bfloat16, or keep the layers that overflow in float32.",
        100.0,
        severity="error",
        steps=(first, last),
    )
