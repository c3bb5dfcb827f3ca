"""Mistakes of a training loop: severity, cause, and the line to change."""

from __future__ import annotations

from typing import NamedTuple

from .records import Severity


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        severity: of the finding.
        cause: a sentence without its full stop.
        advice: what to change, likewise.
        repeats: number of occurrences from which it counts.
        warns: warn during training. Others are reported only on request, since they are uncertain or may be intended.
        weight: of the finding. All are high, since a mistake in the loop causes what the statistics show.
        matters_if_stuck: a warning where the model does not learn, and otherwise information, whatever ``severity`` is.
        warns_for_each: warn for each key that it is counted for, with the evidence, and not once for all.
    """

    severity: Severity
    cause: str
    advice: str
    repeats: int = 3
    warns: bool = True
    weight: float = 120.0
    matters_if_stuck: bool = False
    warns_for_each: bool = False


MISTAKES: dict[str, Mistake] = {
    "missing-zero-grad": Mistake(
        "error",
        "Gradients are not cleared between two steps, so each step uses the sum of all gradients so far",
        "Call optimizer.zero_grad() once in each step, before the first backward pass",
    ),
    "step-without-gradients": Mistake(
        "error",
        "The optimizer steps when all gradients are None, and changes nothing",
        "Call backward() on the loss of this forward pass, not on a copy or a new tensor, and optimizer.zero_grad() before it, not "
        "between it and optimizer.step()",
    ),
    "micro-batch-discarded": Mistake(
        "warning",
        "Gradients are cleared between the backward passes of one step, so only the last micro-batch counts",
        "Call optimizer.zero_grad() once for each optimizer.step(), not for each micro-batch",
        warns=False,
    ),
    "stepped-twice": Mistake(
        "error",
        "The optimizer steps twice on the same gradient, with no forward or backward pass between the two",
        "Remove one of the two calls of optimizer.step(), such as one inside a helper",
    ),
    "backward-twice": Mistake(
        "warning",
        "A forward pass goes backward more than once: again in the same step, where its gradient counts several times, or in later ones, "
        "where it is out of date",
        "Compute the loss anew in each step, and call backward() on it once; retain_graph=True is for another loss of the same "
        "forward pass",
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
        "The parameters change, but the attached optimizer does not step: another one does, or the loop itself, and nothing is recorded",
        "Call monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls. If the loop itself updates "
        "the parameters, call monitor.begin_step() and monitor.end_step() around the updates",
        repeats=1,
    ),
    "clip-after-step": Mistake(
        "warning",
        "Gradients are changed after the optimizer's step and then dropped: a clip there has no effect",
        "Move the clip between loss.backward() and optimizer.step()",
        weight=100.0,
    ),
    "clip-per-micro-batch": Mistake(
        "warning",
        "Gradients are changed between the backward passes of one step: sums of micro-batches are clipped again and again",
        "Clip once, after the last backward pass of the step",
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
        "Parameters get gradients but are in no optimizer, so they never change",
        "Add them to the optimizer, or set requires_grad=False if they are meant to stay fixed",
        repeats=2,
        warns=False,
        weight=100.0,
    ),
    "optimizer-never-steps": Mistake(
        "warning",
        "An attached optimizer has never stepped in more than 100 steps of the others, though its parameters get gradients",
        "Call its step() after the backward pass of its loss, or watch without it until it begins",
        repeats=1,
        weight=100.0,
    ),
    "optimizer-before-sharding": Mistake(
        "error",
        "The optimizer was created before fully_shard replaced the parameters: it steps the old ones, which nothing uses any more",
        "Create the optimizer after fully_shard, and watch the model after both",
        repeats=2,
    ),
    "frozen-but-moving": Mistake(
        "warning",
        "Parameters with requires_grad=False still move, by momentum or weight decay, because their gradients are not None",
        "Set parameter.grad = None when freezing, or remove them from the optimizer",
        weight=100.0,
    ),
    "weights-untied": Mistake(
        "warning",
        "Weights that were one parameter are now two, and diverge",
        "Tie them again, as in head.weight = embedding.weight, after whatever replaced one of them (load_state_dict(assign=True))",
        repeats=2,
        warns=False,
        weight=100.0,
    ),
    "sync-every-micro-batch": Mistake(
        "info",
        "Ranks exchange gradients in each backward pass of a step, not only in the last one, which takes time and changes nothing",
        "Run forward and backward of all micro-batches except the last under model.no_sync(), or set_requires_gradient_sync(False)",
        warns=False,
        weight=90.0,
    ),
    "dead-hooks": Mistake(
        "warning",
        "The parameters were replaced during training, and hooks of the loop on the old ones never fire again",
        "Load checkpoints without assign=True and convert before the training; otherwise create hooks and monitors again afterwards",
        repeats=2,
        warns=False,
        weight=95.0,
    ),
}
