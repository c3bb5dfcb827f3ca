"""Gradients and signals over the depth of a model: vanishing, exploding, and weights of the wrong initial scale."""

from __future__ import annotations

import math

from ....core import keys as n
from ....core.formatting import also_in
from ..findings import Finding, NotMeasured
from ..history import History
from ..precautions import Precautions
from ..series import Matrix, lower_median

#: The fewest matrices that have a depth.
_FEWEST = 4
#: Gradients relative to weights: the last third of the matrices over the first third.
_VANISHED = 100.0
#: A smaller ratio is even: at the first step it means that the training caused the fading, and beside the largest gradient of the first
#: third that nothing faded on the way there.
_EVEN = 10.0
_MADE_BY_TRAINING = "; they did not fade at the first step, so the training caused it"
#: Module types.
_SQUASHING = frozenset({"Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh", "Softsign", "RNN"})
_OTHER_ACTIVATIONS = frozenset(
    {"ReLU", "GELU", "SiLU", "LeakyReLU", "ELU", "SELU", "Mish", "Softplus", "ReLU6", "PReLU", "Hardswish"}
)
#: The relative change of the loss per relative change of a matrix: the gradient's norm times the weights' over the loss. Healthy
#: models have 1 to 30.
_EXPLODES = 300.0
#: The fewest steps that show it, unless the run has died before.
_FEW_STEPS = 3
#: What explodes before the first update ranks before a learning rate that is too high for it, which ranks before what explodes later.
_FROM_START = 85.2
#: Modules that multiply by one matrix in each time step, and those of them with gates.
RECURRENT, _GATED = frozenset({"RNN", "LSTM", "GRU"}), frozenset({"LSTM", "GRU"})
#: Growth of outputs from the first modules to the last ones, and their least size; logits begin at about 1.
_OUTPUTS, _SIZE = 100.0, 50.0
#: A loss that begins this many times above where it ends was drowned by large weights, unless it begins below this many times the loss of
#: the best constant answer.
_DROWNED, _PLAIN = 30.0, 3.0
#: For mean squares as many times the loss of the answer 0, whatever the mean of the targets is.
_PLAIN_SQUARE = 100.0
#: Outputs of the whole model with this root mean square are loud if the loss then fell by this factor; logits begin at about 1.
_LOUD, _CAME_DOWN = 8.0, 5.0
#: A loss that is down at the best constant answer within this number of steps has lost nothing that matters.
_AT_ONCE = 20
#: Standard deviation times sqrt(fan in): 1 in Glorot and Bengio (2010), 1.41 in He et al. (2015), 0.55 and more in GPT-2.
_GAIN_HIGH, _GAIN_LOW = 3.0, 0.03
#: The smallest fan in whose weights show their scale.
_LEAST_FAN_IN = 8


def check_depth(history: History) -> list[Finding]:
    """Initialisation first: gradients that explode or vanish because of it are not reported again."""
    if not history.matrices:
        raise NotMeasured("it is unknown which parameters are matrices")
    return _initialisation(history) or [*(_exploding(history) or _loud(history)), *_vanishing(history)]


def _initialisation(history: History) -> list[Finding]:
    gains = _gains(history)
    if not gains:
        return []
    high = {name: gain for name, gain in gains.items() if gain > _GAIN_HIGH}
    low = {name: gain for name, gain in gains.items() if gain < _GAIN_LOW}
    odd = high if len(high) >= len(low) else low
    if len(odd) <= len(gains) / 2:
        return []
    worst = sorted(odd, key=lambda name: -abs(math.log(odd[name])))
    loss = history.loss.finite
    is_drowned = odd is high and len(loss) >= _FEWEST and history.first_loss > _DROWNED * history.learning.last > 0
    is_drowned &= not history.first_loss < _PLAIN * history.chance.get(
        "loss", 0.0
    )  # a model may scale its weights in its forward
    is_drowned |= odd is high and _begins_high(history)
    fate = "large: signals grow from layer to layer." if odd is high else "small: signals fade from layer to layer."
    return history.finding(
        "initialisation-scale",
        worst[0],
        {"std * sqrt(fan in)": odd[worst[0]], "matrices like this": float(len(odd)), "of": float(len(gains))},
        f"Most matrices begin with weights that are too {fate}{also_in(worst)}",
        "Draw them with a standard deviation of gain / sqrt(fan in), as kaiming_normal_ and xavier_normal_ do, "
        "with a gain of 1 to 1.41.",
        85.5,
        severity="warning" if is_drowned else None,
        steps=(history.steps[0], history.steps[0]),
    )


def _gains(history: History) -> dict[str, float]:
    """At the beginning, the root mean square of each matrix that multiplies inputs, times the root of its fan in."""
    norms = history.matrix(n.PARAMETER, "rms")
    at = None if norms is None else history.beginning(norms.steps)
    if norms is None or at is None:
        return {}
    first = dict(zip(norms.names, norms.values[at].tolist(), strict=True))
    fan_ins = ((name, fan_in) for name, fan_in in history.matrices.items() if fan_in >= _LEAST_FAN_IN)
    return {name: first[name] * math.sqrt(fan_in) for name, fan_in in fan_ins if first.get(name, 0.0) > 0}


def _loud(history: History) -> list[Finding]:
    """Initial outputs that are so large that the loss first has to fall because of them."""
    outputs, loss = history.matrix(n.ACTIVATION, "rms"), history.loss.finite
    returned = [] if outputs is None else [name for name in outputs.names if name.startswith(n.ROOT)]
    names = [name for name in returned if name not in history.returned_numbers]  # a loss that the model computes itself
    at = None if outputs is None else history.beginning(outputs.steps)
    if outputs is None or at is None or not names:
        return []
    came_down = len(loss) >= _FEWEST and history.first_loss > _CAME_DOWN * history.learning.last > 0
    if not (came_down or _begins_high(history)):  # such a run may end in NaN at once
        return []
    largest = max(outputs.of([outputs.steps[at]], names).values[0].nan_to_num(0.0).tolist())
    if not largest > _LOUD:
        return []
    return history.finding(
        "initialisation-scale",
        next((name for name in reversed(outputs.names) if not name.startswith(n.ROOT)), ""),
        {"root mean square of the first outputs": largest, "first loss": history.first_loss, "loss now": history.learning.last},
        "The first outputs of the model are far too large, and the loss has to fall from there first.",
        "Draw the last layer, or the embedding that it is tied to, with a standard deviation of 0.02 or 1 / sqrt(its width).",
        85.5,
        severity="warning" if _begins_high(history) and not _is_down_at_once(history) else None,
        steps=(history.steps[0], history.steps[0]),
    )


def _is_down_at_once(history: History) -> bool:
    loss, chance = history.loss.finite, history.chance.get("loss", 0.0)
    return any(value < chance for value in loss.values[:_AT_ONCE])


def _begins_high(history: History) -> bool:
    """Whether the first loss is far above that of an untrained answer: logarithms show that the model is sure where it knows nothing."""
    chance, is_square = history.chance.get("loss", 0.0), bool(history.chance.get("is square"))
    if is_square and history.learning.has_fallen:  # outputs that feed themselves may begin so
        return False
    plain = _PLAIN_SQUARE * history.chance.get("of zero", 0.0) if is_square else _PLAIN * chance
    return history.first_loss > plain > 0


def _exploding(history: History) -> list[Finding]:
    """By the gradients before a clip, since it hides them, and after a division, since they are then those of the logged loss."""
    gradients, parameters, loss = history.unclipped_norms(), history.matrix(n.PARAMETER, "norm"), history.loss
    if gradients is None or parameters is None:
        return []
    losses = dict(zip(loss.steps, loss.values, strict=True))
    measured = set(parameters.steps)
    first = [step for step in gradients.steps if step in measured and losses.get(step, 0) > 0][:20]
    names = [name for name in gradients.names if name in history.matrices and name in parameters.names]
    if len(first) < (1 if history.died else _FEW_STEPS) or not names:
        return []
    larger = 1.0 if history.edit.scales else history.backward_over_logged
    product = gradients.of(first, names).values * parameters.of(first, names).values
    # the largest loss so far, because beside a loss that is solved within these steps any gradient looks large
    largest = product.new_tensor([losses[step] * larger for step in first]).cummax(0).values
    values = (product / largest[:, None]).nan_to_num(0.0)
    usual = dict(zip(names, values.median(0).values.tolist(), strict=True))
    worst = max(usual, key=lambda each: usual[each])
    grows, explodes = _growth_of_outputs(history), usual[worst] > _EXPLODES
    if not explodes and grows <= _OUTPUTS:
        return []
    began = history.beginning(first)
    # before the first update no learning rate can be the cause
    from_start = began is not None and float(values[began, names.index(worst)]) > _EXPLODES
    # beside a loss near zero, as it may be later, any gradient looks large, and outputs alone may be large on purpose
    severity = "info" if began is None else "warning" if explodes else history.concern
    return history.finding(
        "exploding-gradients",
        worst,
        {
            "gradient * weight / loss": usual[worst],
            "outputs at the end / at the beginning": grows,
            "gradient norm": history.unclipped_norm.part(0, 0.1).median,
        },
        *_words_on_explosion(history, worst, explodes and from_start),
        _FROM_START if explodes and from_start else 78.0 if explodes else 76.5,
        severity=severity,
        steps=(first[0], first[-1]),
    )


def _words_on_explosion(history: History, worst: str, from_start: bool) -> tuple[str, str]:
    """Cause and advice."""
    since = ", from the first step on, before any update" if from_start else ""
    clips = Precautions.of(history).clips
    kind = history.kinds.get(worst.rpartition(".")[0], "")
    if kind.removesuffix("Cell") not in RECURRENT:
        advice = "Normalise inside the model (a norm at the start of each residual branch, an orthogonal recurrence)"
        what = f"Gradients are out of proportion{since}: each layer multiplies the signal, forward or backward."
        return what, f"{advice}{'; the clip only bounds the result' if clips else ', and clip the gradient norm'}."
    gates = "" if kind.removesuffix("Cell") in _GATED else ", or take a gated recurrence (LSTM, GRU)"
    start = f"egin with an orthogonal recurrent matrix (torch.nn.init.orthogonal_ of each weight_hh){gates}."
    bound = (
        "The clip only bounds the result: b"
        if clips
        else "Clip the gradient norm, which a lower learning rate does not replace; b"
    )
    return (
        f"Gradients are out of proportion{since}: this {kind} multiplies the signal by the same matrix in each time step.",
        f"{bound}{start}",
    )


def _growth_of_outputs(history: History) -> float:
    """The largest root mean square of an initial output over that of the first module; 1 if no output is large."""
    outputs = history.matrix(n.ACTIVATION, "rms")
    at = None if outputs is None else history.beginning(outputs.steps)
    if outputs is None or at is None:
        return 1.0
    # infinity is a mask, or the subject of another rule
    sizes = zip(outputs.names, outputs.values[at].tolist(), strict=True)
    found = [value for name, value in sizes if math.isfinite(value) and name not in history.returned_numbers]
    largest, first = max(found, default=0.0), next(iter(found), 0.0)
    return largest / first if first > 0 and largest > _SIZE else 1.0


def _vanishing(history: History) -> list[Finding]:
    ratios = history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER) or history.ratio(n.GRADIENT, n.PARAMETER)
    # where optimizers alternate, as in a GAN, the first matrices and the last ones are of different models
    is_stuck = history.learning.is_stuck and not history.need_not_fall
    if ratios is None or (history.learning.state != "unknown" and not is_stuck):
        return []
    # one without any gradient is the subject of another rule
    reached = [name for name, largest in ratios.largest().items() if largest > 0]
    ratios = history.settled(ratios.of(ratios.steps, reached), behind=True)
    # a loss that is stuck for lack of gradients leaves all of them small in the end
    usual, drop = max((_drop(history, part) for part in (ratios.part(0, 0.1), ratios)), key=lambda found: found[1])
    if not drop > _VANISHED:
        return []
    names = [name for name in usual if history.matrices[name]] or list(usual)
    at = history.beginning(ratios.steps)
    came = at is not None and 0 < _drop(history, ratios.of([ratios.steps[at]], ratios.names))[1] < _EVEN
    made = _MADE_BY_TRAINING if came else ""
    return history.finding(
        "vanishing-gradients",
        names[0],
        {"gradient / weight here": usual[names[0]], f"in {names[-1]}": usual[names[-1]], "last third / first third": drop},
        f"Gradients fade on their way back to the first layers, which do not learn, and the loss does not fall{made}.",
        _advice_for_faded(history, came),
        63.0,
        steps=(ratios.steps[0], ratios.steps[-1]),
    )


def _advice_for_faded(history: History, came: bool) -> str:
    if came:
        return f"Lower the learning rate by ten to begin with{Precautions.of(history).warm_up_advice}."
    kinds = set(history.kinds.values())
    activations = "" if kinds & _OTHER_ACTIVATIONS and not kinds & _SQUASHING else "ReLU or GELU in place of sigmoid or tanh, "
    norm = "" if any("Norm" in kind for kind in kinds) else "a norm in each layer, "
    return f"Use {activations}residual connections, {norm}or an initialisation that keeps the scale."


def _drop(history: History, ratios: Matrix) -> tuple[dict[str, float], float]:
    """The usual gradients relative to weights, and those of the last third of the matrices over those of the first third, or over
    the largest of these if that is not much smaller; 0 if these are unknown.
    """
    known = {name: value for name, value in ratios.medians().items() if name in history.matrices}
    # a step reaches few rows of an embedding, and its weights are large
    usual = {name: value for name, value in known.items() if "Embedding" not in history.kinds.get(name.rpartition(".")[0], "")}
    values, third = list(usual.values()), max(len(usual) // 3, 1)
    if len(known) < _FEWEST or not usual or not (last := lower_median(values[-third:])) > 0:
        return usual or known, 0.0
    # where one is as large, the gradient has arrived: those of queries and keys are small at any depth as long as attention is even
    largest = max(values[:third])
    first = largest if last < _EVEN * largest else lower_median(values[:third])
    # what fades over the depth has faded in part in the middle; small gradients of all but the last layers are not made by the depth
    if lower_median(values[third:-third]) < first:
        return usual, 0.0
    return usual, last / first if first > 0 else math.inf
