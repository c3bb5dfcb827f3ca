"""Why each fault does what it does, for the gallery. The cause in one sentence and the advice are those of the finding itself."""

from __future__ import annotations

WHY = {
    "initialisation-scale": (
        "A matrix keeps the scale of its input only where its standard deviation is about one over the root of its number "
        "of inputs. With a deviation of 1 every layer multiplies the scale of activations by that root, so outputs and "
        "gradients are thousands of times too large before the first update; far too small a deviation makes them vanish "
        "in the same way."
    ),
    "vanishing-gradients": (
        "On the way back each sigmoid multiplies the gradient by its slope, at most a quarter. After a few layers nothing "
        "is left, so the first layers stay as they were initialised while the last ones learn from what is noise to them."
    ),
    "exploding-gradients": (
        "Without a normalisation each residual branch adds its output to the stream at full scale, and the stream grows "
        "with the depth. The gradient takes the same path back and grows too, so a rate that suits one part is far too "
        "large for another."
    ),
    "dead-units": (
        "A ReLU passes a gradient only where its input is positive. A bias far below zero, or one large update, makes the "
        "input negative for every example. Then no gradient reaches the unit's weights, and nothing brings it back."
    ),
    "saturated-units": (
        "A tanh or a sigmoid is flat away from zero. Large inputs, or large weights, put the units on the flat part: "
        "their output is a constant, their slope nearly zero, and the layers below learn slowly or not at all."
    ),
    "no-gradient": (
        "A parameter learns only where the loss depends on it through operations that autograd records. `detach()`, a "
        "conversion to NumPy or `item()`, a branch that is never taken and `torch.no_grad()` all cut that path without an "
        "error."
    ),
    "attention-entropy-collapse": (
        "The dot product of two vectors of width d has a standard deviation of about the root of d. Undivided, such "
        "logits are so far apart that the softmax puts all weight on one key. Attention becomes a look-up whose choice "
        "gets almost no gradient."
    ),
    "attention-logit-growth": (
        "Nothing bounds the norms of queries and keys. Their product grows, the softmax sharpens, and the gradient that "
        "sharpened it grows too. Large trainings diverge this way; a normalisation of queries and keys bounds the logits."
    ),
    "non-finite-loss": (
        "The loss divides by zero or takes the logarithm of zero for some batches only: a mask without a true element, an "
        "empty class, a probability of zero. One such loss makes every gradient NaN, and the next update makes every "
        "parameter NaN."
    ),
    "non-finite-activation": (
        "An operation in the forward pass leaves its domain, such as a logarithm or a root of a negative number, or "
        "overflows in half precision. All later layers inherit the NaN, so the loss names no layer: the first one that "
        "has it does."
    ),
    "non-finite-gradient": (
        "The forward pass is finite and its derivative is not: the root at zero has an infinite slope, and zero times "
        "infinity is NaN. It happens for single examples, such as two equal points, so it comes without a warning."
    ),
    "non-finite-parameter": (
        "A gradient was finite and the update was not: the optimizer divided by the root of a second moment that is zero. "
        "From then on the parameter is NaN, whatever the gradients are."
    ),
    "learning-rate-high": (
        "Adam moves each weight by about the rate, whatever the gradient. A rate of the size of the weights replaces them "
        "in a step, and the loss jumps to where it never was. Within a few steps nothing of the initialisation is left."
    ),
    "learning-rate-low": (
        "An update that is a ten-millionth of the weights would need millions of steps to change anything. In half "
        "precision it may be rounded away altogether. The loss stays flat although every gradient is healthy."
    ),
    "update-ratio-high": (
        "One group of parameters has a rate of its own, far above the others, for example a head whose group kept an old "
        "setting. It moves by a tenth of itself in each step, and everything above it has to follow a moving target."
    ),
    "update-ratio-low": (
        "One group of parameters hardly moves, although its gradients are as large as those of the others: its rate is "
        "near zero, or it was decayed. In effect that part is frozen, and the rest learns around it."
    ),
    "always-clipped": (
        "A clip with a bound far below the usual norm acts in every step. Then it is no protection but a normalisation: "
        "every step has the same length, the gradient's own scale is lost, and the bound has become a second learning "
        "rate."
    ),
    "never-clipped": (
        "A bound above the largest outliers never acts. The clip looks like a protection in the code, and the spikes that "
        "it was meant for pass through."
    ),
    "loss-at-chance": (
        "The model gives all inputs the same answer, the best that is possible without a look at them. Here inputs are shuffled and "
        "targets are not, so nothing connects them; a mask, a reshape or a swapped axis that mixes examples has the same effect."
    ),
    "loss-divergence": (
        "The loss falls first and then rises above where it has been. A schedule that multiplies the rate by a factor "
        "above 1, a rate at the edge of stability, or a penalty that grows, takes the model away again from what it had "
        "learned."
    ),
    "weight-growth": (
        "A matrix grows without a bound because its update points where the weights point already: a penalty with the "
        "wrong sign rewards size. A loss that can always be lowered by larger logits does the same without weight decay."
    ),
    "gradient-dropped-to-zero": (
        "There was a gradient, and now it is exactly zero: a clamp of the loss, a target that is reached, a branch that "
        "is no longer taken. The optimizer's momentum moves the model on for a while, so the loss may look busy."
    ),
    "low-precision-underflow": (
        "Below 6e-8 float16 has nothing but zero, and gradients of a mean over many elements are often smaller. They "
        "become zero, layer by layer, from the input on. A GradScaler multiplies the loss first, which keeps them in "
        "range."
    ),
    "clipped-while-scaled": (
        "Under a GradScaler gradients are thousands of times too large until `unscale_`. A clip before it compares that "
        "norm with its bound, so it always acts, and it cuts the true gradients by the scale."
    ),
    "backward-after-unscale": (
        "`unscale_` divides the gradients that are there. A second backward pass after it adds gradients that are still "
        "multiplied by the scale, so the second loss counts thousands of times as much as the first."
    ),
    "missing-zero-grad": (
        "`backward()` adds to what is in `.grad`. Without `zero_grad()` a step uses the sum of all gradients since the "
        "beginning, in which the last batch is one of hundreds: the model follows where it went before, faster and "
        "faster."
    ),
    "step-without-gradients": (
        "`zero_grad()` sets gradients to None, and an optimizer skips parameters without one. Called between `backward()` "
        "and `step()` it makes every step an empty one. The loss is noise around its first value."
    ),
    "micro-batch-discarded": (
        "With accumulation the gradients of all micro-batches have to be there when the optimizer steps. A `zero_grad()` "
        "between them leaves the last one only: the batch is smaller than intended, and most of the work is thrown away."
    ),
    "stepped-twice": (
        "A second `step()` on the same gradient moves the model again in the same direction, with momentum that counts "
        "the batch twice. The effective rate is doubled, and the second step is not where its gradient was computed."
    ),
    "backward-twice": (
        "Each backward pass adds its gradient to `.grad`, so two of them through one graph double it. `retain_graph=True` silences torch's "
        "error, and the second call stays. SGD then steps twice as far; Adam divides most of it out, but a clip, a weight decay and an "
        "epsilon see twice the gradient."
    ),
    "never-stepped": (
        "Gradients are computed and cleared, and no optimizer applies them. The loss is that of the initial model on "
        "different batches."
    ),
    "unattached-optimizer": (
        "The monitor follows the optimizer that it was given. Where a loop makes a new one, for a new phase or after "
        "loading a checkpoint, the parameters change, and what the monitor could show of updates and clips would be "
        "stale."
    ),
    "clip-after-step": (
        "A clip after `step()` changes gradients that were used already and are dropped next. The clip never has an "
        "effect, although the norm that it returns looks right in the logs."
    ),
    "clip-per-micro-batch": (
        "A clip between two micro-batches scales the sum so far, and the next micro-batch is added at full size. The "
        "first ones count less than the last, and the total is not bounded by the clip."
    ),
    "not-in-optimizer": (
        "An optimizer keeps the parameters that it was made with. A head that is replaced afterwards has gradients, and "
        "nothing applies them: it stays random while the layers below adapt to it."
    ),
    "frozen-but-moving": (
        "`requires_grad=False` stops new gradients, and an optimizer still steps on those that are left: zeros, with "
        "which momentum and weight decay keep moving the parameter."
    ),
    "weights-untied": (
        "Two names that shared one parameter are two parameters now, for example after a head was replaced or a state was "
        "assigned. Each learns for itself, the model has more weights than intended, and a checkpoint of the tied model "
        "does not fit."
    ),
    "dead-hooks": (
        "`load_state_dict(assign=True)` and some conversions replace parameter objects. Hooks that the loop has put on the "
        "old ones, to clip or to log, are never called again, and an optimizer that holds these changes the model no more. "
        "Without such hooks nothing is found: the monitor's own move to the new ones."
    ),
    "optimizer-before-sharding": (
        "`fully_shard` replaces each parameter by its shard. An optimizer that was made before has the old, whole "
        "parameters, which take part in no forward pass: it steps, and the model stays as it was."
    ),
    "sync-every-micro-batch": (
        "DDP exchanges gradients at the end of each backward pass. With accumulation only the last exchange of a step is "
        "needed; each of the others costs the same time on the network for a result that is not used."
    ),
}
