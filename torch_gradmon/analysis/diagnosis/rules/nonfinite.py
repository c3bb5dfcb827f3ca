"""NaN and infinity: which came first, a parameter, an output, the loss or a gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

from ....core import keys as n
from ....core.moments import Column
from ....core.records import StatsTable, StepRecord
from ....spikes.nonfinite_origin import innermost
from ..findings import Finding
from ..history import History
from ..precautions import Precautions

#: This many overflowed steps in a row at the end are no search for a loss scale: GradScaler starts at 2**16 and halves it, so
#: that the scale is 1 after 16 of them.
_STUCK = 16
#: A loss that has grown this many times before the first NaN, in this number of steps at least, has run away.
_GREW, _FEWEST = 5.0, 3


class _Stage(NamedTuple):
    """One stage of a step: its rule, the source of its statistics, the cause and the advice."""

    rule: str
    source: str
    cause: str
    advice: str


#: In the order of the step: the first stage with NaN is the cause, and the rest follows from it.
_STAGES = (
    _Stage(
        "non-finite-parameter",
        n.PARAMETER,
        "parameters were NaN or infinite before the forward pass, and no earlier gradient was",
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
        "look for functions that are finite but have an infinite derivative (sqrt, norm and pow at 0, torch.where around a division)",
    ),
)


def check_nonfinite(history: History) -> list[Finding]:
    """The first applied step with NaN or Inf, by the stage that had it first; and a GradScaler that never applies a step."""
    found = _stuck(history)
    losses = dict(zip(history.loss.steps, history.loss.values, strict=True))
    bad = [(record, nonfinite) for record in history.records if (nonfinite := _first_nonfinite(record, losses.get(record.step)))]
    applied = [(record, nonfinite) for record, nonfinite in bad if record.applied]
    if not applied:
        return found
    record, (stage, places) = applied[0]
    last = applied[-1][0].step
    evidence = {"steps": float(len(applied))}
    if stage.source:
        evidence = {"tensors": float(len(places)), **evidence}
    where, (cause, advice) = _origin(stage, places, history), _words(stage, record, losses.get(record.step), history)
    known = [loss for step, loss in losses.items() if step < record.step and math.isfinite(loss)]
    if len(known) >= _FEWEST and known[-1] > _GREW * known[0] > 0:
        cause += f"; the loss had grown from {known[0]:.3g} to {known[-1]:.3g} before"
        advice = "lower the learning rate first, since the training had left its range; if that changes nothing, " + advice
    if stage.source == n.GRADIENT_BEFORE_CLIP and not Precautions.of(history).skips:
        advice += ", or skip such steps: on_spike='skip'"
    return [
        *found,
        Finding(stage.rule, "error", where, (record.step, last), evidence, _sentence(cause), _sentence(advice), 100.0),
    ]


def _words(stage: _Stage, record: StepRecord, loss: float | None, history: History) -> tuple[str, str]:
    """Cause and advice, by what was recorded of the step: what comes before may be finite, or only unknown."""
    if n.ACTIVATION in record.tables:
        return stage.cause, stage.advice
    look = "watch with preset='full', which measures outputs, to see whether a module makes it; if none does, "
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


def _origin(stage: _Stage, places: list[str], history: History) -> str:
    """The first name in the order of the pass; a backward pass reaches the last parameters first."""
    if not places:
        return ""
    if stage.source != n.GRADIENT_BEFORE_CLIP:
        return places[0]
    return next((name for name in reversed(places) if name in history.matrices), places[-1])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _first_nonfinite(record: StepRecord, loss: float | None) -> tuple[_Stage, list[str]] | None:
    for stage in _STAGES:
        if stage.source:
            places = _nonfinite_names(record.tables.get(stage.source))
            if stage.source == n.ACTIVATION:
                places = [] if _is_harmless(record, loss) else innermost(places)
            if places:
                return stage, places
        elif loss is not None and not math.isfinite(loss):
            return stage, []
    return None


def _is_harmless(record: StepRecord, loss: float | None) -> bool:
    """Whether all that follows an output is finite, as for logits that a mask sets to minus infinity."""
    tables = [table for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if (table := record.tables.get(source)) is not None]
    return bool(tables) and not any(map(_nonfinite_names, tables)) and (loss is None or math.isfinite(loss))


def _nonfinite_names(table: StatsTable | None) -> list[str]:
    if table is None:
        return []
    bad = table.rows[:, Column.NONFINITE] > 0
    if Column.SQUARE_SUM in table.columns:
        bad |= ~table.rows[:, Column.SQUARE_SUM].isfinite()
    return [name for name, is_bad in zip(table.names, bad.tolist(), strict=True) if is_bad]


def _stuck(history: History) -> list[Finding]:
    overflowed = 0
    for record in reversed(history.records):
        if record.applied or record.skipped:
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
