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

#: So many refused steps in a row, at the end of what was seen, are no search for a loss scale any more: GradScaler begins at 2**16
#: and halves, so that after 16 of them the scale is 1.
_STUCK = 16


class _Stage(NamedTuple):
    """One stage of a step: its rule, the source whose statistics tell, what it means, and what to do."""

    rule: str
    source: str
    cause: str
    advice: str


#: In the order in which a step comes to them: what is spoiled first is the cause, and the rest follows from it.
_STAGES = (
    _Stage(
        "non-finite-parameter",
        n.PARAMETER,
        "parameters were NaN or infinite before the forward pass, and no gradient was before that",
        "look at what writes to parameters besides finite gradients: the learning rate and eps of the optimizer, weight decay, an average "
        "of models, a checkpoint",
    ),
    _Stage(
        "non-finite-activation",
        n.ACTIVATION,
        "the forward pass has its first NaN or Inf in the output of this module, while parameters are finite",
        "make what it computes safe (clamp before log, exp and sqrt, eps in divisions, float32 where it computes in float16), or look at "
        "the batch of this step",
    ),
    _Stage(
        "non-finite-loss",
        "",
        "the loss is the first that is NaN or infinite; parameters are finite, and no output that was measured is not",
        "look at the loss function on this batch: log(0), 0/0, a mask that leaves nothing, a target out of range",
    ),
    _Stage(
        "non-finite-gradient",
        n.GRADIENT_BEFORE_CLIP,
        "loss and forward pass are finite, and the backward pass brings NaN or Inf",
        "look for functions whose derivative is infinite where they are finite (sqrt, norm and pow at 0, torch.where around a division)",
    ),
)


def nonfinite(history: History) -> list[Finding]:
    """The first step that is spoiled and applied, by the stage that was spoiled first; and a GradScaler that never lets one through."""
    found = _stuck(history)
    losses = dict(zip(history.loss.steps, history.loss.values, strict=True))
    bad = [(record, spoiled) for record in history.records if (spoiled := _first_spoiled(record, losses.get(record.step)))]
    applied = [(record, spoiled) for record, spoiled in bad if record.applied]
    if not applied:
        return found
    record, (stage, places) = applied[0]
    last = applied[-1][0].step
    evidence = {"steps": float(len(applied))}
    if stage.source:
        evidence = {"tensors": float(len(places)), **evidence}
    where, advice = _origin(stage, places, history), stage.advice
    if stage.source == n.GRADIENT_BEFORE_CLIP and not Precautions.of(history).skips:
        advice += ", or skip such steps: on_spike='skip'"
    return [
        *found,
        Finding(stage.rule, "error", where, (record.step, last), evidence, _sentence(stage.cause), _sentence(advice), 100.0),
    ]


def _origin(stage: _Stage, places: list[str], history: History) -> str:
    """The first in the order of the pass: a backward pass comes to the last parameters first."""
    if not places:
        return ""
    if stage.source != n.GRADIENT_BEFORE_CLIP:
        return places[0]
    return next((name for name in reversed(places) if name in history.matrices), places[-1])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _first_spoiled(record: StepRecord, loss: float | None) -> tuple[_Stage, list[str]] | None:
    for stage in _STAGES:
        if stage.source:
            places = _spoiled(record.tables.get(stage.source))
            if stage.source == n.ACTIVATION:
                places = [] if _is_harmless(record, loss) else innermost(places)
            if places:
                return stage, places
        elif loss is not None and not math.isfinite(loss):
            return stage, []
    return None


def _is_harmless(record: StepRecord, loss: float | None) -> bool:
    """Whether what follows an output is finite all the same, as where logits that are masked are minus infinity on purpose."""
    tables = [table for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if (table := record.tables.get(source)) is not None]
    return bool(tables) and not any(map(_spoiled, tables)) and (loss is None or math.isfinite(loss))


def _spoiled(table: StatsTable | None) -> list[str]:
    if table is None:
        return []
    bad = table.rows[:, Column.NONFINITE] > 0
    if Column.SQUARE_SUM in table.columns:
        bad |= ~table.rows[:, Column.SQUARE_SUM].isfinite()
    return [name for name, is_bad in zip(table.names, bad.tolist(), strict=True) if is_bad]


def _stuck(history: History) -> list[Finding]:
    refused = 0
    for record in reversed(history.records):
        if record.applied or record.skipped:
            break
        refused += 1
    if refused < _STUCK:
        return []
    first, last = history.records[-refused].step, history.records[-1].step
    return [
        Finding(
            "non-finite-gradient",
            "error",
            "",
            (first, last),
            {"refused steps in a row": float(refused)},
            "The GradScaler refuses every step: the gradients are infinite at any scale.",
            "The forward or backward pass overflows by itself: use bfloat16, or keep the layers that overflow in float32.",
            100.0,
        )
    ]
