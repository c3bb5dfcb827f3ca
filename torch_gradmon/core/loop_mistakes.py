"""Findings that need no statistics, of the loop, the setup, the data and the ranks: severity, cause, and the line to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from .records import Severity


class Mistake(NamedTuple):
    """One mistake."""

    severity: Severity  # of the finding
    cause: str  # a sentence without its full stop
    advice: str  # what to change, likewise
    repeats: int = 3  # number of occurrences from which it counts
    warns: bool = True  # warn during training. Others are reported only on request, since they are uncertain or may be intended.
    weight: float = 120.0  # of the finding. All are high, since a mistake in the loop causes what the statistics show.
    # a warning where the model does not learn, and otherwise information, whatever ``severity`` is
    matters_if_stuck: bool = False
    warns_for_each: bool = False  # warn for each key that it is counted for, with the evidence, and not once for all


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


# --- mistakes of setup and data ---


#: What the user has declared does not hold.
EXPECTATION = "expectation-broken"
#: NaN or Inf that comes with the batch.
NON_FINITE_INPUT = "non-finite-input"
#: Mistakes of a batch from which NaN follows.
OF_THE_BATCH = (NON_FINITE_INPUT, "labels-ignored")

SETUP_MISTAKES: dict[str, Mistake] = {
    "eval-mode": Mistake(
        "warning",
        "The model trains in evaluation mode, so dropout is off and batch norm uses its running statistics",
        "Call model.train() before the loop, and again after each evaluation",
        repeats=20,
        weight=110.0,
    ),
    "unregistered-parameters": Mistake(
        "warning",
        "Layers in a plain list, dict or attribute, or made in forward, get gradients but are no part of the model: no optimizer has them, "
        "nor are they saved",
        "Make them in __init__, and put them into nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter",
        repeats=1,
        weight=118.0,
    ),
    "parameter-in-two-optimizers": Mistake(
        "warning",
        "Several optimizers have the same parameters, so each moves what another one trains",
        "Give each optimizer the parameters of its own part",
        repeats=1,
        warns=False,
        weight=105.0,
    ),
    "another-model-trained": Mistake(
        "error",
        "The optimizer steps, but the watched model is not called, and none of its parameters has ever had a gradient, as where the loop "
        "trains another copy of it",
        "Watch the model that the loop calls, with an optimizer that was made of its parameters",
        repeats=1,
        weight=130.0,
    ),
    "players-agree": Mistake(
        "warning",
        "Two networks take turns, one answers to what the other makes, and both losses push these answers the same way: they do not play "
        "against each other",
        "Look at the sign and the labels of both losses for what is generated: the discriminator has to lower its answer where the "
        "generator raises it",
        repeats=1,
        weight=119.0,
    ),
    "betas-swapped": Mistake(
        "warning",
        "The first beta is larger than the second: the mean of the gradient is longer than that of its square, so steps overshoot",
        "Pass betas=(0.9, 0.999), the longer mean second",
        repeats=1,
        weight=112.0,
    ),
    "dropout-high": Mistake(
        "warning",
        "A dropout drops nine of ten values or more",
        "The argument is the share that is dropped, not the share that is kept: 0.1 to 0.5 is usual",
        repeats=1,
        warns=False,
        weight=104.0,
    ),
    "batch-norm-frozen": Mistake(
        "warning",
        "A batch norm trains with the statistics of its batches, while its running statistics do not move, and evaluation uses these",
        "Set momentum to 0.1, the share of the new batch, or to None for a plain mean",
        repeats=1,
        warns=False,
        weight=103.0,
    ),
    "softmax-before-loss": Mistake(
        "error",
        "The loss takes logits and applies softmax or sigmoid itself, and gets what has gone through one already: gradients are small and "
        "the loss cannot reach zero",
        "Return the output of the last linear layer, without softmax or sigmoid, and apply these for predictions only",
        repeats=2,
        weight=125.0,
    ),
    "log-softmax-missing": Mistake(
        "error",
        "nll_loss takes logarithms of probabilities, and gets other numbers: the loss is below 0, and falls without bound",
        "Use cross_entropy, or return log_softmax of the last linear layer",
        repeats=2,
        weight=125.0,
    ),
    "relu-before-loss": Mistake(
        "warning",
        "The output has gone through a ReLU, but the loss takes logits, and cannot rule a class out, or has targets below 0: many outputs "
        "are exactly 0 and get no gradient",
        "Remove the activation behind the last linear layer",
        repeats=2,
        weight=106.0,
    ),
    "targets-out-of-range": Mistake(
        "info",
        "The output comes out of a sigmoid or a tanh, and part of the targets lies beyond what these can give",
        "Remove the function behind the last linear layer, or bring the targets into its range",
        repeats=2,
        warns=False,
        weight=106.0,
    ),
    "labels-not-mixed": Mistake(
        "warning",
        "Each batch has examples of one class only: the data are sorted, and the model forgets one class while it learns the next",
        "Shuffle the data, DataLoader(..., shuffle=True), or mix shards",
        repeats=1,
        weight=116.0,
    ),
    "labels-constant": Mistake(
        "warning",
        "All examples so far have the same label, so there is nothing to distinguish",
        "Look at the labels, and shuffle the data",
        repeats=1,
        warns=False,
        weight=116.0,
    ),
    "loss-scale": Mistake(
        "info",
        "The gradient of the loss is not that of a mean over the examples of the step",
        "Divide the loss by the number of micro-batches, and use reduction='mean'",
        repeats=2,
        warns=False,
        weight=101.0,
        matters_if_stuck=True,
    ),
    NON_FINITE_INPUT: Mistake(
        "error",
        "The batch has NaN or Inf in an input of the model, and the gradients have it from there",
        "Look for it in the data with torch.isfinite, in the file and after each transform, and drop or fill these examples; "
        "on_spike='skip' leaves out the steps that get one",
        repeats=1,
        warns=False,  # the spike warns, and its text is about this step
        weight=120.0,
    ),
    "attention-mask": Mistake(
        "warning",
        "The attention_mask hides all of the text: it is 0 everywhere, or 1 for the padding alone",
        "Pass 1 for what is to be attended to and 0 for padding, as the tokenizer returns it",
        repeats=2,
        warns=False,
        weight=121.0,
    ),
    "labels-ignored": Mistake(
        "error",
        "All labels are -100, which the loss leaves out, so it is NaN or 0 and nothing is learnt",
        "Look at what makes the labels: a text that is cut before its answer, a template that is not found, a mask that is inverted",
        repeats=2,
        warns=False,
        weight=121.0,
    ),
    "loss-on-padding": Mistake(
        "warning",
        "The loss counts the padding: what the attention_mask hides has labels",
        "Set the labels to -100 where attention_mask is 0, as DataCollatorForLanguageModeling and DataCollatorForTokenClassification do; "
        "else the loss is mostly that of the padding",
        repeats=2,
        warns=False,
        weight=113.0,
    ),
    "labels-shifted-twice": Mistake(
        "warning",
        "Each label is the next token, and the model shifts the labels once more, so it learns to skip a token",
        "Pass labels that are input_ids, with -100 where there is no loss: the model compares each output with the token that follows",
        repeats=2,
        warns=False,
        weight=121.0,
    ),
    "labels-not-shifted": Mistake(
        "warning",
        "The loss compares the output of each token with that token, which the model sees, and not with the next one, so it learns to copy",
        "Compare logits[:, :-1] with labels[:, 1:], as the model does itself if it gets labels=",
        repeats=2,
        warns=False,
        weight=121.0,
    ),
    "repeated-batch": Mistake(
        "info",
        "The model gets the same batch again and again",
        "Take the next batch in each step, for x, y in loader; next(iter(loader)) begins anew each time, as does a seed that "
        "is set in the loop",
        repeats=1,
        warns=False,
        weight=99.0,
    ),
    "constant-input": Mistake(
        "info",
        "All rows of the input are the same, so the model cannot distinguish examples",
        "Look at the batch: a failed read, a mask that hides everything, a normalisation by zero",
        repeats=2,
        warns=False,
        weight=108.0,
        matters_if_stuck=True,
    ),
    "inputs-not-normalised": Mistake(
        "info",
        "The input is far from mean 0 and standard deviation 1",
        "Normalise it, pixels by 1/255 and then by mean and standard deviation, features one by one",
        repeats=2,
        warns=False,
        weight=86.0,
        matters_if_stuck=True,
    ),
    "targets-not-normalised": Mistake(
        "info",
        "The targets of a mean square are large numbers, and a model begins with outputs of about 1",
        "Subtract their mean and divide by their standard deviation, and undo this for predictions",
        repeats=2,
        warns=False,
        weight=85.0,
        matters_if_stuck=True,
    ),
    EXPECTATION: Mistake(
        "error",
        "What checks=Checks(...) declares does not hold",
        "Mend the training, or what is declared",
        repeats=1,
        weight=140.0,
        warns_for_each=True,
    ),
}


#: Between ranks that should be equal.
RANK_FAULTS: dict[str, Mistake] = {
    "ranks-not-synchronised": Mistake(
        "error",
        "Ranks use different gradients where they should have the same: each trains a model of its own",
        "Call the wrapper, not its .module, and leave no_sync() before the last backward pass of a step; put every trained parameter "
        "below the wrapper, and change gradients after the backward pass in the same way on all ranks. If ranks are meant to differ, "
        "declare it by distributed=Distributed(distinct=..., process_group=...), or switch this off by checks=Checks(replicas_every=0)",
        repeats=1,
        weight=150.0,
    ),
    "ranks-diverged": Mistake(
        "error",
        "What ranks should have in common differs: parameters, the state of the optimizer, or its settings",
        "Start all ranks from one initialisation or checkpoint, with the optimizer's state and the same settings; if one tensor of one "
        "rank differs from then on, suspect its memory or device, and restart from a checkpoint before that step",
        repeats=1,
        weight=150.0,
    ),
    "same-batches-on-all-ranks": Mistake(
        "warning",
        "All ranks train on the same batches, so more ranks add nothing",
        "Give each rank its own part of the data, by a DistributedSampler or a seed that depends on the rank",
        repeats=1,
        weight=130.0,
    ),
    "one-rank-apart": Mistake(
        "warning",
        "One rank is far from all others, or of two one from the other, check after check: it has other data, or computes otherwise",
        "Compare what that rank reads with the others, such as its shard, its tokenisation and its normalisation; if the data are alike, "
        "suspect its device, and call torch_gradmon.check_determinism() there. If each rank is meant to have data of another "
        "kind, this is no fault",
        repeats=1,
        weight=110.0,
    ),
    "ranks-not-compared": Mistake(
        "info",
        "Ranks are not compared with each other, because some give no answer: they have no monitor, another model, or other options",
        "Create the monitor on every rank with the same options, or name those of a model by distributed=Distributed(process_group=...)",
        repeats=1,
        warns=False,
        weight=20.0,
    ),
}


#: The rule of signs of a divergence that the loss does not show yet, and what to do.
ABOUT_TO_DIVERGE = "about-to-diverge"
DIVERGENCE_ADVICE = "Lower the learning rate by half, clip gradients to their usual norm, or look at what has changed in the data"


@dataclass(frozen=True)
class LoopFinding:
    """One mistake of the loop."""

    rule: str  # the slug of the finding, such as ``missing-zero-grad``
    first: int  # the first step in which it occurred
    last: int  # the last one
    count: int  # number of such steps
    where: tuple[str, ...] = ()  # affected parameters or modules, if any; messages name the first
    evidence: Mapping[str, float] = field(default_factory=dict)  # numbers by description

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "where": list(self.where)}

    @classmethod
    def of_dict(cls, fact: Mapping[str, Any]) -> LoopFinding:
        known = {each.name: fact[each.name] for each in fields(cls) if each.name in fact}  # a later version may know more
        return cls(**{**known, "where": tuple(fact.get("where", ()))})
