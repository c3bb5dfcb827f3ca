"""Mistakes in how a model, its optimizers, its data and its loss are put together: severity, cause, and what to change."""

from __future__ import annotations

from .loop_mistakes import Mistake

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
        "What monitor.expect() declared does not hold",
        "Mend the training, or what is declared",
        repeats=1,
        weight=140.0,
        warns_for_each=True,
    ),
}
