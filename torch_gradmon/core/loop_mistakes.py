"""Mistakes of a training loop: how grave each is, what it is, and the line to change."""

from __future__ import annotations

from typing import NamedTuple

from .records import Severity


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        severity: of the finding.
        cause: what it is, a sentence without its full stop.
        advice: what to change, likewise.
        repeats: from so many times on it is no accident.
        warns: whether it is certain, and certain not to be meant; the others are told only where somebody asks.
        weight: of the finding. All are high, since the loop's mistake is the cause of whatever the statistics show.
    """

    severity: Severity
    cause: str
    advice: str
    repeats: int = 3
    warns: bool = True
    weight: float = 120.0


MISTAKES: dict[str, Mistake] = {
    "missing-zero-grad": Mistake(
        "error",
        "Gradients are not cleared between two steps, so that each step takes the sum of all gradients so far",
        "Call optimizer.zero_grad() once in each step, before the first backward pass",
    ),
    "step-without-gradients": Mistake(
        "error",
        "The optimizer steps when all gradients are None, and changes nothing",
        "Move optimizer.zero_grad() before loss.backward(), so that nothing stands between that and optimizer.step()",
    ),
    "micro-batch-discarded": Mistake(
        "warning",
        "Gradients are cleared between the backward passes of one step, so that only the last micro-batch counts",
        "Call optimizer.zero_grad() once for each optimizer.step(), and not for each micro-batch",
        warns=False,
    ),
    "stepped-twice": Mistake(
        "error",
        "The optimizer steps twice on the same gradient, with no forward or backward pass between the two",
        "Take one of the two calls of optimizer.step() out, such as one inside of a helper",
    ),
    "never-stepped": Mistake(
        "error",
        "Gradients are computed and cleared again and again, and no optimizer has stepped so far",
        "Call optimizer.step() after loss.backward()",
        repeats=1,
        warns=False,
    ),
    "unattached-optimizer": Mistake(
        "error",
        "The parameters change, and the attached optimizer does not step: another one does, or the loop itself, and nothing is recorded",
        "Call monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls. Around updates that the loop makes "
        "by itself, call monitor.begin_step() and monitor.end_step()",
        repeats=1,
    ),
    "clip-after-step": Mistake(
        "warning",
        "Gradients are changed after the optimizer's step and then dropped: a clip there has no effect",
        "Move the clip between loss.backward() and optimizer.step()",
        weight=100.0,
    ),
    "clip-per-micro-batch": Mistake(
        "info",
        "Gradients are changed between the backward passes of one step: sums of micro-batches are clipped again and again",
        "Clip once, after the last backward pass of the step, unless this is meant",
        warns=False,
        weight=100.0,
    ),
    "clipped-while-scaled": Mistake(
        "error",
        "Gradients are clipped while they are still multiplied by the scale of the GradScaler, thousands of times too hard",
        "Call scaler.unscale_(optimizer) before the clip",
    ),
    "backward-after-unscale": Mistake(
        "error",
        "A scaled loss goes backward after scaler.unscale_(): its gradient counts thousands of times as much as the others",
        "Call scaler.unscale_(optimizer) after the last backward pass of the step",
    ),
    "not-in-optimizer": Mistake(
        "warning",
        "Parameters get gradients and no optimizer has them, so that they stay as they are",
        "Give them to the optimizer, or set requires_grad=False where they are meant to stay",
        repeats=2,
        warns=False,
        weight=100.0,
    ),
    "optimizer-before-sharding": Mistake(
        "error",
        "The optimizer was made before fully_shard replaced the parameters: it steps the old ones, which nothing uses any more",
        "Make the optimizer after fully_shard, and watch the model after both",
        repeats=2,
    ),
    "frozen-but-moving": Mistake(
        "warning",
        "Parameters with requires_grad=False still move, by momentum or weight decay, for they have gradients that are not None",
        "Set parameter.grad = None when freezing, or take them out of the optimizer",
        weight=100.0,
    ),
    "weights-untied": Mistake(
        "warning",
        "Weights that were one parameter are two now, and go different ways",
        "Tie them again, as in head.weight = embedding.weight, after whatever replaced one of them (load_state_dict(assign=True))",
        repeats=2,
        warns=False,
        weight=100.0,
    ),
    "sync-every-micro-batch": Mistake(
        "info",
        "Ranks exchange gradients in each backward pass of a step and not only in the last one, which takes time and changes nothing",
        "Put forward and backward of all micro-batches but the last under model.no_sync(), or set_requires_gradient_sync(False)",
        warns=False,
        weight=90.0,
    ),
    "dead-hooks": Mistake(
        "warning",
        "The parameters were replaced while the training went on: hooks on the old ones never fire again",
        "Load checkpoints without assign=True and convert before the training; otherwise hang hooks, and make monitors, again afterwards",
        repeats=2,
        warns=False,
        weight=95.0,
    ),
}
