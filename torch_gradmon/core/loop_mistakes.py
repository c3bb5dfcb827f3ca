"""Findings that need no statistics, of the loop, the setup, the data and the ranks: severity, cause, and the line to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from .records import NON_FINITE_INPUT, Severity


class Mistake(NamedTuple):
    severity: Severity  # of the finding
    cause: str  # a sentence without its full stop
    advice: str  # what to change, likewise
    repeats: int  # number of occurrences from which it counts
    weight: float  # of the finding. All are high, since a mistake in the loop causes what the statistics show.
    warns: bool  # warn during training. Others are reported only on request, since they are uncertain or may be intended.
    # a warning where the model does not learn, and otherwise information, whatever ``severity`` is
    matters_if_stuck: bool
    warns_for_each: bool  # warn for each key that it is counted for, with the evidence, and not once for all


def _read(table: str) -> dict[str, Mistake]:
    """Mistakes by rule: severity, weight, repeats and what is not the default; the cause; and the advice."""
    found = {}
    for entry in re.split(r"\n(?=\S)", table.strip()):
        head, _, texts = entry.partition("\n")
        rule, _, settings = head.partition(": ")
        severity, weight, repeats, *flags = settings.split(", ")
        cause, advice = " ".join(texts.split()).split(" -> ")
        counts = int(repeats.removeprefix("from ")), float(weight.removeprefix("weight "))
        if unknown := {*flags} - {"silent", "if stuck", "for each"}:
            raise ValueError(f"{rule}: unknown {unknown}")
        told = "silent" not in flags, "if stuck" in flags, "for each" in flags
        found[rule] = Mistake(severity, cause, advice, *counts, *told)  # type: ignore[arg-type]
    return found


MISTAKES = _read("""
missing-zero-grad: error, weight 120, from 3
    Gradients are not cleared between two steps, so each step uses the sum of all gradients so far
    -> Call optimizer.zero_grad() once in each step, before the first backward pass
step-without-gradients: error, weight 120, from 3
    The optimizer steps when all gradients are None, and changes nothing
    -> Call backward() on the loss of this forward pass, not on a copy or a new tensor, and optimizer.zero_grad() before it, not
    between it and optimizer.step()
micro-batch-discarded: warning, weight 120, from 3, silent
    Gradients are cleared between the backward passes of one step, so only the last micro-batch counts
    -> Call optimizer.zero_grad() once for each optimizer.step(), not for each micro-batch
stepped-twice: error, weight 120, from 3
    The optimizer steps twice on the same gradient, with no forward or backward pass between the two
    -> Remove one of the two calls of optimizer.step(), such as one inside a helper
backward-twice: warning, weight 120, from 3
    A forward pass goes backward more than once: again in the same step, where its gradient counts several times, or in later ones,
    where it is out of date
    -> Compute the loss anew in each step, and call backward() on it once; retain_graph=True is for another loss of the same forward
    pass
never-stepped: error, weight 120, from 1, silent
    Gradients are computed again and again, and no optimizer has stepped so far
    -> Call optimizer.step() after loss.backward(); where a wrapper accumulates, as Accelerate's does, for each micro-batch
unattached-optimizer: error, weight 120, from 1
    The parameters change, but the attached optimizer does not step: another one does, or the loop itself, and nothing is recorded
    -> Call monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls. If the loop itself updates the
    parameters, call monitor.begin_step() and monitor.end_step() around the updates
clip-after-step: warning, weight 100, from 3
    Gradients are changed after the optimizer's step and then dropped: a clip there has no effect
    -> Move the clip between loss.backward() and optimizer.step()
clip-per-micro-batch: warning, weight 100, from 3, silent
    Gradients are changed between the backward passes of one step: sums of micro-batches are clipped again and again
    -> Clip once, after the last backward pass of the step
clipped-while-scaled: error, weight 120, from 3
    Gradients are clipped while they are still multiplied by the scale of the GradScaler, thousands of times too hard
    -> Call scaler.unscale_(optimizer) before the clip
backward-after-unscale: error, weight 120, from 3
    A scaled loss goes backward after scaler.unscale_(): its gradient counts thousands of times as much as the others
    -> Call scaler.unscale_(optimizer) after the last backward pass of the step
not-in-optimizer: warning, weight 100, from 2, silent
    Parameters get gradients but are in no optimizer, so they never change
    -> Add them to the optimizer, or set requires_grad=False if they are meant to stay fixed
optimizer-never-steps: warning, weight 100, from 1
    An attached optimizer has never stepped in more than 100 steps of the others, though its parameters get gradients
    -> Call its step() after the backward pass of its loss, or watch without it until it begins
optimizer-before-sharding: error, weight 120, from 2
    The optimizer was created before fully_shard replaced the parameters: it steps the old ones, which nothing uses any more
    -> Create the optimizer after fully_shard, and watch the model after both
frozen-but-moving: warning, weight 100, from 3
    Parameters with requires_grad=False still move, by momentum or weight decay, because their gradients are not None
    -> Set parameter.grad = None when freezing, or remove them from the optimizer
weights-untied: warning, weight 100, from 2, silent
    Weights that were one parameter are now two, and diverge
    -> Tie them again, as in head.weight = embedding.weight, after whatever replaced one of them (load_state_dict(assign=True))
sync-every-micro-batch: info, weight 90, from 3, silent
    Ranks exchange gradients in each backward pass of a step, not only in the last one, which takes time and changes nothing
    -> Run forward and backward of all micro-batches except the last under model.no_sync(), or set_requires_gradient_sync(False)
dead-hooks: warning, weight 95, from 2, silent
    The parameters were replaced during training, and hooks of the loop on the old ones never fire again
    -> Load checkpoints without assign=True and convert before the training; otherwise create hooks and monitors again afterwards
""")

#: Mistakes of a batch from which NaN follows.
OF_THE_BATCH = (NON_FINITE_INPUT, "labels-ignored")

#: Of setup and data.
SETUP_MISTAKES = _read("""
eval-mode: warning, weight 110, from 20
    The model trains in evaluation mode, so dropout is off and batch norm uses its running statistics
    -> Call model.train() before the loop, and again after each evaluation
unregistered-parameters: warning, weight 118, from 1
    Layers in a plain list, dict or attribute, or made in forward, get gradients but are no part of the model: no optimizer has them,
    nor are they saved
    -> Make them in __init__, and put them into nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter
parameter-in-two-optimizers: warning, weight 105, from 1, silent
    Several optimizers have the same parameters, so each moves what another one trains
    -> Give each optimizer the parameters of its own part
another-model-trained: error, weight 130, from 1
    The optimizer steps, but the watched model is not called, and none of its parameters has ever had a gradient, as where the loop
    trains another copy of it
    -> Watch the model that the loop calls, with an optimizer that was made of its parameters
players-agree: warning, weight 119, from 1
    Two networks take turns, one answers to what the other makes, and both losses push these answers the same way: they do not play
    against each other
    -> Look at the sign and the labels of both losses for what is generated: the discriminator has to lower its answer where the
    generator raises it
betas-swapped: warning, weight 112, from 1
    The first beta is larger than the second: the mean of the gradient is longer than that of its square, so steps overshoot
    -> Pass betas=(0.9, 0.999), the longer mean second
dropout-high: warning, weight 104, from 1, silent
    A dropout drops nine of ten values or more
    -> The argument is the share that is dropped, not the share that is kept: 0.1 to 0.5 is usual
batch-norm-frozen: warning, weight 103, from 1, silent
    A batch norm trains with the statistics of its batches, while its running statistics do not move, and evaluation uses these
    -> Set momentum to 0.1, the share of the new batch, or to None for a plain mean
softmax-before-loss: error, weight 125, from 2
    The loss takes logits and applies softmax or sigmoid itself, and gets what has gone through one already: gradients are small and
    the loss cannot reach zero
    -> Return the output of the last linear layer, without softmax or sigmoid, and apply these for predictions only
log-softmax-missing: error, weight 125, from 2
    nll_loss and kl_div take logarithms of probabilities, and get other numbers: the loss is below 0
    -> Use log_softmax of the last linear layer, or cross_entropy in place of nll_loss
rows-paired: error, weight 122, from 2
    The loss compares each row of the output with the target of every row, as [N, 1] and [N] make [N, N] of each other, so the best
    answer is the same for all
    -> Bring both to one shape, output.squeeze(1) beside targets [N], or targets.unsqueeze(1) beside an output of [N, 1]
classes-mixed: error, weight 123, from 2
    The loss views an output [N, classes, ...] as [rows, classes], so each row has scores of other classes and other places
    -> Give cross_entropy the output as it is, with targets [N, ...], or move the classes last, output.movedim(1, -1), before
    reshape(-1, classes)
batch-as-sequence: error, weight 124, from 2
    A recurrent layer or attention takes the examples of the batch for the places of a sequence, so each answer depends on the others
    -> Pass batch_first=True to a layer of torch that gets [N, T, features], or transpose(0, 1) what it gets
relu-before-loss: warning, weight 106, from 2
    The output has gone through a ReLU, but the loss takes logits, and cannot rule a class out, or has targets below 0: many outputs
    are exactly 0 and get no gradient
    -> Remove the activation behind the last linear layer
targets-out-of-range: info, weight 106, from 2, silent
    The output comes out of a sigmoid or a tanh, and part of the targets lies beyond what these can give
    -> Remove the function behind the last linear layer, or bring the targets into its range
labels-not-mixed: warning, weight 116, from 1
    Each batch has examples of one class only: the data are sorted, and the model forgets one class while it learns the next
    -> Shuffle the data, DataLoader(..., shuffle=True), or mix shards
labels-constant: warning, weight 116, from 1, silent
    All examples so far have the same label, so there is nothing to distinguish
    -> Look at the labels, and shuffle the data
loss-scale: info, weight 101, from 2, silent, if stuck
    The gradient of the loss is not that of a mean over the examples of the step
    -> Divide the loss by the number of micro-batches, and use reduction='mean'
non-finite-input: error, weight 120, from 1, silent
    The batch has NaN or Inf in an input of the model, and the gradients have it from there
    -> Look for it in the data with torch.isfinite, in the file and after each transform, and drop or fill these examples;
    on_spike='skip' leaves out the steps that get one
attention-mask: warning, weight 121, from 2, silent
    The mask of attention hides all of the text: it is 0 everywhere, or lets only the padding through
    -> Pass 1 for what is to be attended to and 0 for padding, as the tokenizer returns it; key_padding_mask of torch's layers is True
    for what is left out, so ids == padding
causal-mask-missing: error, weight 121, from 2
    Each target is the next token of the input, and attention sees it: the model learns to copy, and cannot generate
    -> Mask what comes later, is_causal=True in scaled_dot_product_attention, or an attn_mask that hides what lies above the diagonal
labels-ignored: error, weight 121, from 2, silent
    All labels are -100, which the loss leaves out, so it is NaN or 0 and nothing is learnt
    -> Look at what makes the labels: a text that is cut before its answer, a template that is not found, a mask that is inverted
loss-on-padding: warning, weight 113, from 2, silent
    The loss counts the padding: what the attention_mask hides has labels
    -> Set the labels to -100 where attention_mask is 0, as DataCollatorForLanguageModeling and DataCollatorForTokenClassification do;
    else the loss is mostly that of the padding
labels-shifted-twice: warning, weight 121, from 2, silent
    Each label is the next token, and the model shifts the labels once more, so it learns to skip a token
    -> Pass labels that are input_ids, with -100 where there is no loss: the model compares each output with the token that follows
labels-not-shifted: warning, weight 121, from 2, silent
    The loss compares the output of each token with that token, which the model sees, and not with the next one, so it learns to copy
    -> Compare logits[:, :-1] with labels[:, 1:], as the model does itself if it gets labels=; a decoder gets labels moved by one
repeated-batch: info, weight 99, from 1, silent
    The model gets the same batch again and again
    -> Take the next batch in each step, for x, y in loader; next(iter(loader)) begins anew each time, as does a seed that is set in
    the loop
constant-input: info, weight 108, from 2, silent, if stuck
    All rows of the input are the same, so the model cannot distinguish examples
    -> Look at the batch: a failed read, a mask that hides everything, a normalisation by zero
inputs-not-normalised: info, weight 86, from 2, silent, if stuck
    The input is far from mean 0 and standard deviation 1
    -> Normalise it, pixels by 1/255 and then by mean and standard deviation, features one by one
targets-not-normalised: info, weight 85, from 2, silent, if stuck
    The targets of a mean square are large numbers, and a model begins with outputs of about 1
    -> Subtract their mean and divide by their standard deviation, and undo this for predictions
expectation-broken: error, weight 140, from 1, for each
    What checks=Checks(...) declares does not hold
    -> Mend the training, or what is declared
""")

#: Between ranks that should be equal.
RANK_FAULTS = _read("""
ranks-not-synchronised: error, weight 150, from 1
    Ranks use different gradients where they should have the same: each trains a model of its own
    -> Call the wrapper, not its .module, and leave no_sync() before the last backward pass of a step; put every trained parameter
    below the wrapper, and change gradients after the backward pass in the same way on all ranks. If ranks are meant to differ,
    declare it by distributed=Distributed(distinct=..., process_group=...), or switch this off by checks=Checks(replicas_every=0)
ranks-diverged: error, weight 150, from 1
    What ranks should have in common differs: parameters, the state of the optimizer, or its settings
    -> Start all ranks from one initialisation or checkpoint, with the optimizer's state and the same settings; if one tensor of one
    rank differs from then on, suspect its memory or device, and restart from a checkpoint before that step
same-batches-on-all-ranks: warning, weight 130, from 1
    All ranks train on the same batches, so more ranks add nothing
    -> Give each rank its own part of the data, by a DistributedSampler or a seed that depends on the rank
one-rank-apart: warning, weight 110, from 1
    One rank is far from all others, or of two one from the other, check after check: it has other data, or computes otherwise
    -> Compare what that rank reads with the others, such as its shard, its tokenisation and its normalisation; if the data are alike,
    suspect its device, and call torch_gradmon.check_determinism() there. If each rank is meant to have data of another kind, this is
    no fault
ranks-not-compared: info, weight 20, from 1, silent
    Ranks are not compared with each other, because some give no answer: they have no monitor, another model, or other options
    -> Create the monitor on every rank with the same options, or name those of a model by distributed=Distributed(process_group=...)
""")


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
