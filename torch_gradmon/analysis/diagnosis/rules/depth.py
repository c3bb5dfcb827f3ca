"""Rules about layers and steps: scale over the depth, spikes, clipping and attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_high

from ....core import keys as n
from ....core.formatting import times
from ....core.keys import SUMMARY, TENSOR_SOURCES, parse_key
from ....core.moments import VIEWS
from ....core.records import Severity
from ....spikes.attribution import ParameterAttribution, SpikeCause, spike_cause
from ....spikes.signals import Episode, largest, size
from ..findings import UNDONE, Finding, NotMeasured
from ..history import History, Precautions, rank_shift, trend
from ..series import Matrix, Series, lower_median

# --- Scale over the depth ---

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
    first = history.at_beginning(history.matrix(n.PARAMETER, "rms"))
    fan_ins = {name: fan_in for name, fan_in in history.matrices.items() if fan_in >= _LEAST_FAN_IN and first.get(name, 0.0) > 0}
    gains = {name: first[name] * math.sqrt(fan_in) for name, fan_in in fan_ins.items()}
    high = {name: gain for name, gain in gains.items() if gain > _GAIN_HIGH}
    low = {name: gain for name, gain in gains.items() if gain < _GAIN_LOW}
    odd = high if len(high) >= len(low) else low
    if len(odd) <= len(gains) / 2:
        return []
    worst = sorted(odd, key=lambda name: -abs(math.log(odd[name])))
    is_drowned = _comes_down(history, _DROWNED)
    # a model may scale its weights in its forward
    is_drowned &= not history.first_loss < _PLAIN * history.chance.get("loss", 0.0)
    is_drowned = odd is high and (is_drowned or _begins_high(history))
    fate = "large: signals grow from layer to layer." if odd is high else "small: signals fade from layer to layer."
    evidence = {"std * sqrt(fan in)": odd[worst[0]], "matrices like this": float(len(odd)), "of": float(len(gains))}
    cause = f"Most matrices begin with weights that are too {fate}"
    advice = (
        "Draw them with a standard deviation of gain / sqrt(fan in), as kaiming_normal_ and xavier_normal_ do, with a gain of 1 to "
        "1.41."
    )
    severity: Severity | None = "warning" if is_drowned else None
    return history.finding("initialisation-scale", worst, evidence, cause, advice, 85.5, severity, history.steps[:1])


def _loud(history: History) -> list[Finding]:
    """Initial outputs that are so large that the loss first has to fall because of them."""
    outputs, loss = history.matrix(n.ACTIVATION, "rms"), history.loss.finite
    returned = [name for name in outputs.names if name.startswith(n.ROOT)]
    names = [name for name in returned if name not in history.returned_numbers]  # a loss that the model computes itself
    at = history.beginning(outputs.steps)
    if at is None or not names or not (_comes_down(history, _CAME_DOWN) or _begins_high(history)):  # it may end in NaN at once
        return []
    largest = max(outputs.of([outputs.steps[at]], names).values[0].nan_to_num(0.0).tolist())
    if not largest > _LOUD:
        return []
    is_down_at_once = min(loss.values[:_AT_ONCE], default=math.inf) < history.chance.get("loss", 0.0)
    severity: Severity | None = "warning" if _begins_high(history) and not is_down_at_once else None
    where = next((name for name in reversed(outputs.names) if not name.startswith(n.ROOT)), "")
    losses = {"first loss": history.first_loss, "loss now": history.learning.last}
    evidence = {"root mean square of the first outputs": largest, **losses}
    cause = "The first outputs of the model are far too large, and the loss has to fall from there first."
    advice = "Draw the last layer, or the embedding that it is tied to, with a standard deviation of 0.02 or 1 / sqrt(its width)."
    return history.finding("initialisation-scale", where, evidence, cause, advice, 85.5, severity, history.steps[:1])


def _comes_down(history: History, factor: float) -> bool:
    return len(history.loss.finite) >= _FEWEST and history.first_loss > factor * history.learning.last > 0


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
    losses, measured = dict(loss.pairs()), set(parameters.steps)
    first = [step for step in gradients.steps if step in measured and losses.get(step, 0) > 0][:20]
    names = [name for name in gradients.names if name in history.matrices and name in parameters.names]
    ends = [series.values[-1] for series in (loss, history.series("grad_norm")) if series]
    has_died = history.is_cut or not all(map(math.isfinite, ends))
    if len(first) < (1 if has_died else _FEW_STEPS) or not names:
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
    from_start = explodes and began is not None and float(values[began, names.index(worst)]) > _EXPLODES
    # beside a loss near zero, as it may be later, any gradient looks large, and outputs alone may be large on purpose
    severity: Severity = "info" if began is None else "warning" if explodes else history.concern
    norm, weight = history.unclipped_norm.part(0, 0.1).median, _FROM_START if from_start else 78.0 if explodes else 76.5
    evidence = {"gradient * weight / loss": usual[worst], "outputs at the end / at the beginning": grows, "gradient norm": norm}
    words = _words_on_explosion(history, worst, from_start)
    return history.finding("exploding-gradients", worst, evidence, *words, weight, severity, first)


def _words_on_explosion(history: History, worst: str, from_start: bool) -> tuple[str, str]:
    since = ", from the first step on, before any update" if from_start else ""
    clips = Precautions(history).clips
    kind = history.kinds.get(worst.rpartition(".")[0], "")
    if kind.removesuffix("Cell") not in RECURRENT:
        advice = "Normalise inside the model (a norm at the start of each residual branch, an orthogonal recurrence)"
        what = f"Gradients are out of proportion{since}: each layer multiplies the signal, forward or backward."
        return what, f"{advice}{'; the clip only bounds the result' if clips else ', and clip the gradient norm'}."
    gates = "" if kind.removesuffix("Cell") in _GATED else ", or take a gated recurrence (LSTM, GRU)"
    start = f"begin with an orthogonal recurrent matrix (torch.nn.init.orthogonal_ of each weight_hh){gates}."
    bound = (
        "The clip only bounds the result:" if clips else "Clip the gradient norm, which a lower learning rate does not replace;"
    )
    what = f"Gradients are out of proportion{since}: this {kind} multiplies the signal by the same matrix in each time step."
    return what, f"{bound} {start}"


def _growth_of_outputs(history: History) -> float:
    """The largest root mean square of an initial output over that of the first module; 1 if no output is large."""
    sizes = history.at_beginning(history.matrix(n.ACTIVATION, "rms"))
    # infinity is a mask, or the subject of another rule
    found = [value for name, value in sizes.items() if math.isfinite(value) and name not in history.returned_numbers]
    largest, first = max(found, default=0.0), next(iter(found), 0.0)
    return largest / first if first > 0 and largest > _SIZE else 1.0


def _vanishing(history: History) -> list[Finding]:
    ratios = history.ratio(n.GRADIENT_BEFORE_CLIP, n.PARAMETER) or history.ratio(n.GRADIENT, n.PARAMETER)
    # where optimizers alternate, as in a GAN, the first matrices and the last ones are of different models
    is_stuck = history.learning.is_stuck and not history.need_not_fall
    if not ratios or (history.learning.state != "unknown" and not is_stuck):
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
    evidence = {"gradient / weight here": usual[names[0]], f"in {names[-1]}": usual[names[-1]], "last third / first third": drop}
    cause = f"Gradients fade on their way back to the first layers, which do not learn, and the loss does not fall{made}."
    advice = _advice_for_faded(history, came)
    return history.finding("vanishing-gradients", names[0], evidence, cause, advice, 63.0, steps=ratios.steps)


def _advice_for_faded(history: History, came: bool) -> str:
    if came:
        return f"Lower the learning rate by ten to begin with{Precautions(history).warm_up_advice}."
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


# --- The largest spike: its step, its origin, and what the training does about such steps ---

#: A spike is grave from this many times the usual, if it is as far above all but this share of the other steps, and above the
#: median of this many later steps. A value that returns often is usual, and one that stays is a new level.
_GRAVE, _RARE, _AFTER = 10.0, 0.2, 20
#: A share of the largest spike's size that others reach where spikes are a habit; never of one this many times the usual.
_NEARLY, _HUGE = 0.25, 100.0
#: It is also this many times that of the first steps: norms jump where the loss is near zero.
_ABOVE = 2.0
#: What is usual is nothing below this share of the first values; any batch with a loss is far above it.
_NOTHING = 1e-9
#: A layer with a larger share of the squared norm is alone in it.
_ALONE = 0.9
#: The first losses, and by how many standard deviations of their ranks those after a spike lie above those before.
_FIRST, _RANKS = 5, 3.0
#: The loss of a bad batch is this many times that of the next one.
_BAD_BATCH = 2.0
#: Norms before and after a clip that does not act differ by no more than this part.
_ROUNDING = 1e-3
#: A learning rate jumped if it was this many times the usual one, at most this many steps before a spike.
_LEAP, _BEFORE = 2.0, 5


def check_spikes(history: History) -> list[Finding]:
    found = history.spikes
    if not found:
        return []
    (spike,) = largest(found, 1)
    event = spike.worst
    suspects, losses = history.suspects(event.step), dict(history.loss.pairs())
    made = spike_cause(suspects, event.step, losses.get(event.step), bool(losses))
    far = f", {times(event.value / event.usual)} what was usual" if event.usual is not None and event.usual > 0 else ""
    when = f" in step {event.step}" if spike.first != spike.last else ""
    others = len(found) - 1
    more = "" if not others else f" There {'was 1 other spike' if others == 1 else f'were {others} other spikes'}, none larger."
    undone, loss_after = _undone(history, spike) or ("", {})
    usual = {} if event.usual is None else {"usual": event.usual}
    evidence = {event.signal: event.value, **usual, "score": event.score, **loss_after}
    cause = f"{event.signal} was {event.value:.4g}{when}{far}{f'; {made.words}' if made.words else ''}.{undone}{more}"
    advice, severity = _advice(history, spike, made, suspects), "warning" if undone else _severity(history, spike, made)
    weight = 128.0 if undone else 15.0
    return history.finding("spike", made.layer, evidence, cause, advice, weight, severity, (spike.first, spike.last))


def _undone(history: History, spike: Episode) -> tuple[str, dict[str, float]] | None:
    """A sentence and the loss after it, if the steps after the only grave spike have lost half of the progress before it."""
    loss = history.loss.finite
    earlier = loss.before(spike.first)
    until, before, after = len(earlier), earlier.values[-_AFTER:], loss.since(spike.last + 1).values[:_AFTER]
    if min(len(before), len(after)) < _AFTER or not _applied(history, spike.worst.step):
        return None
    if sum(size(other.worst) >= _GRAVE for other in history.spikes) != 1 or size(spike.worst) < _GRAVE:
        return None
    first, was, now = (lower_median(values) for values in (loss.values[:_FIRST], before, after))
    if not (trend(earlier)[0] == "falls" and now > was + (first - was) / 2 and rank_shift(before, after) > _RANKS):
        return None
    if not loss.values[until] > _BAD_BATCH * loss.values[until + 1]:  # other data from here on, as in a curriculum
        return None
    told = f" It undid what was learnt: the loss, {first:.3g} at first, was {was:.3g} before it and {now:.3g} after it."
    return told, {UNDONE: now}


def _rate_jump(history: History, step: int) -> str:
    rates = [*history.largest_rates.before(step + 1).pairs()]
    at, highest = max(rates[-_BEFORE:], key=lambda rate: rate[1], default=(step, 0.0))
    usual = lower_median(rate for _, rate in rates[:-_BEFORE][-_AFTER:])
    is_jump = highest > _LEAP * usual > 0
    return f"; the learning rate was {highest:.3g} in step {at}, {times(highest / usual)} the usual" if is_jump else ""


def _severity(history: History, spike: Episode, made: SpikeCause) -> Severity:
    event = spike.worst
    if size(event) < _GRAVE or not _applied(history, event.step) or _recurs(history, spike):
        return "info"
    values = _values(history, event.signal)
    if event.usual is not None and event.usual < _NOTHING * values.part(0, 0.1).median:  # the loss is at zero
        return "info"
    others = sorted(value for step, value in values.pairs() if step not in spike.steps)
    if others:
        after = values.since(spike.last + 1).values[:_AFTER]
        level = max(others[int((1 - _RARE) * (len(others) - 1))], lower_median(after) if after else 0.0)
        if event.value < max(_GRAVE * level, _ABOVE * values.part(0, 0.1).median):
            return "info"
    # a clip scales a loud batch to the usual norm; if one layer alone is loud, it leaves nothing of the others
    return "info" if made.is_common and _bounded(history, spike) is not None else "warning"


def _recurs(history: History, spike: Episode) -> bool:
    """Whether spikes of this size are a habit of the loss, and none is huge: two more are nearly as large, or the data change with what is
    trained, so that a loss which was low comes back, as that of a discriminator does when the generator has moved.
    """
    like_it = [other for other in history.spikes if other != spike and size(other.worst) > _NEARLY * size(spike.worst)]
    return size(spike.worst) < _HUGE and (history.need_not_fall or len(like_it) > 1)


def _values(history: History, signal: str) -> Series:
    key = parse_key(signal)
    if key.source not in TENSOR_SOURCES:
        return history.applied(signal.removeprefix(f"{SUMMARY}/")).finite
    matrix = history.matrix(key.source, key.metric) if key.metric in VIEWS else None
    return Series() if matrix is None or key.name not in matrix.names else matrix.column(key.name).finite


def _applied(history: History, step: int) -> bool:
    return all(record.applied for record in history.records if record.step == step)


def _bounded(history: History, spike: Episode) -> float | None:
    """The norm to which the worst step was clipped; None if it was not."""
    norms = history.unclipped_norm.beside(history.series("grad_norm_after_clip"))
    return next((after for step, before, after in norms if step == spike.worst.step and after < (1 - _ROUNDING) * before), None)


def _advice(history: History, spike: Episode, made: SpikeCause, suspects: Sequence[ParameterAttribution]) -> str:
    step, run, bound = spike.worst.step, Precautions(history), _bounded(history, spike)
    report = f"'gradmon why {history.place} --step {step}'" if history.place else f"monitor.why({step})"
    what = "the batch and the loss" if made.is_common else "the batch"
    when = "this step" if spike.first == spike.last else f"step {step}"
    look = f"Look at {what} of {when}, and at {report}{_rate_jump(history, spike.first)}"
    skip = "on_spike='skip' leaves such steps out"
    if not _applied(history, step):
        return f"{look}. The step was not applied, so it changed nothing."
    if run.skips:
        return f"{look}. Other spikes were skipped, and this step was applied."
    if bound is not None:
        alone = any(suspect.name == made.layer and (suspect.share or 0.0) > _ALONE for suspect in suspects)
        left = f", which left almost nothing of the layers other than {made.layer}" if alone else ""
        return f"{look}. The clip reduced the norm of this step to {bound:.3g}{left}; {skip}."
    if run.clips:
        limit = f", which acts from {run.bound:.3g} on," if run.bound is not None else ""
        return f"{look}. The clip{limit} let it pass; a lower bound reduces such steps, and {skip}."
    if any(kind.removesuffix("Cell") in RECURRENT for kind in history.kinds.values()):
        recurs = "The gradient of a recurrence is a product over its time steps, so such steps come again"
        return f"{look}. {recurs}: clip_grad_norm_ bounds them, and an orthogonal or a gated recurrence has fewer; {skip}."
    return f"{look}; {skip}, and clip_grad_norm_ bounds them."


# --- Gradient clipping that always acts, or never does ---

#: The share of the last steps that are clipped if nearly all are.
_ALWAYS = 0.95
#: The median norm over the bound if the bound is too low, and if it is far too low.
_LOW, _FAR_TOO_LOW = 10.0, 100.0
#: And if it is for plain SGD, whose loss still falls: Adam divides by the size of the gradient anyway.
_SHORT = 30.0
#: Norms before and after a clip that does not act differ by rounding only, of float16 gradients at most by this part.
_SAME = 1e-3
#: An outlier has this many times the median norm of this many steps before and after it,
_OUTLIER, _AROUND = 10.0, 20
#: and this many times that of the first steps: norms jump where the loss is near zero.
_ABOVE_BEGINNING = 2.0


def check_clipping(history: History) -> list[Finding]:
    """Judged by the applied steps: by the norms that the clip gets, and those that it leaves."""
    norms = history.edit.before_clip(history.applied("grad_norm").finite)
    if not norms:
        raise NotMeasured("no gradient norm before clipping was measured")
    shares = history.applied("clip_fraction")
    if not shares or shares.steps[-1] < norms.part(0.9, 1).steps[0]:  # a scaling that was first taken for a clip
        return []
    if shares.values[-1] >= _ALWAYS:
        return _always(history, norms, shares)
    return _never(history, norms) if max(shares.values) == 0 else []


def _always(history: History, norms: Series, shares: Series) -> list[Finding]:
    clipped = history.applied("grad_norm_after_clip").finite
    run = Precautions(history)
    is_clip = run.bound is not None or run.adaptive
    norms = norms if is_clip else history.applied("grad_norm").finite  # with what may be a scaling
    ratios = [before / after for _, before, after in norms.beside(clipped) if after]
    if not ratios or not (usual := median_high(ratios)) > _LOW:
        return []
    severity: Severity = "info"
    evidence, weight = {"median norm": norms.median, "times less": usual}, 4.0
    cause = (
        f"In nearly every step the gradient is made {usual:.3g} times smaller between backward and the optimizer's step, and not to "
        "one norm, as by a clip with one bound."
    )
    advice = (
        "If it is a clip of single parameters or elements, or one whose bound changes, raise that bound. A division or another edit "
        "needs nothing."
    )
    if is_clip:  # else by parameters or elements, or by a bound that changes; or divided, masked and so on
        bound = {"norm after it" if run.adaptive else "bound": clipped.median}
        evidence = {"share of clipped steps": shares.values[-1], "median norm": norms.median, **bound}
        cause = (
            f"Nearly every step is clipped, to {usual:.3g} times less than its norm: the bound sets the length of the step, not the "
            "gradient."
        )
        advice = (
            f"Raise {'the limit of the adaptive clip' if run.adaptive else 'max_norm'} until a gradient of the median norm, "
            f"{norms.median:.2g}, passes it and only outliers are clipped."
        )
        is_plain = bool(history.groups) and all(group["optimizer"] == "SGD" for group in history.groups)
        costs = history.learning.is_stuck or (usual > _FAR_TOO_LOW and history.learning.state != "falls")
        costs |= is_plain and usual > _SHORT and trend(history.loss.finite.part(0.5, 1))[0] == "falls"
        severity, weight = "warning" if costs else "info", 68.0
    return history.finding("always-clipped", "", evidence, cause, advice, weight, severity, norms.steps)


def _never(history: History, norms: Series) -> list[Finding]:
    pairs = history.applied("grad_norm").finite.beside(history.applied("grad_norm_after_clip").finite)
    if any(abs(before - after) > _SAME * before for _, before, after in pairs):
        return []  # what changes norms, and reduces none, is no clip
    far, limit = _outliers(norms), history.clip_bound
    spiky = 2 <= len(far) < len(norms) / 10
    if limit is not None and not spiky and not (limit and far):
        return []  # a bound that nothing has to reach, or a norm that the trainer only measures
    made = "The loop writes to gradients between backward and the optimizer's step, as a clip does, and never makes them smaller"
    if limit is not None:
        made = f"No gradient reaches the bound of the clip, {limit:g}" if limit else "Gradients are not clipped"
    cause = made + (f", though {len(far)} steps had more than ten times the norm of those around them." if spiky else ".")
    bound = f"two or three times the median norm, {norms.median:.2g}"
    advice = f"Nothing has to be done: a bound above all norms only measures them. One that is to stop outliers is {bound}."
    if spiky:
        there = "; a clip that is there has a bound above all norms, or an infinite one." if limit is None else "."
        advice = f"Clip the norm of all gradients to {bound}{there}"
    elif not far:
        advice = "Nothing has to be done: no step has an outlier for a bound to stop, and one above all norms only measures them."
    evidence = {"median norm": norms.median, "largest": max(norms.values), "outliers": float(len(far))}
    severity: Severity = "warning" if spiky and not history.learning.has_fallen else "info"
    weight = 77.5 if spiky else 0.5  # below all that it might be taken for a cause of
    return history.finding("never-clipped", "", evidence, cause, advice, weight, severity, far if spiky else norms.steps)


def _outliers(norms: Series) -> list[int]:
    """Steps whose norm is far above those around them. Skips the first tenth, which is above the rest in most runs."""
    found = []
    beginning = norms.part(0, 0.1).median
    for place in range(len(norms) // 10, len(norms)):
        around = sorted(norms.values[max(place - _AROUND, 0) : place + _AROUND + 1])
        if norms.values[place] > max(_OUTLIER * around[len(around) // 2], _ABOVE_BEGINNING * beginning):
            found.append(norms.steps[place])
    return found


# --- Attention that looks at one key only, and attention logits that grow until it does ---

#: Entropy over the largest possible one, the log of the number of visible keys; mean over a layer's heads.
_COLLAPSED = 0.25
#: An entropy below this at the first step is no result of training.
_BROKEN = 0.15
#: The largest logit of a layer has grown by this factor, and beyond the size at which a softmax saturates.
_GREW, _LARGE, _FAR_TOO_LARGE = 5.0, 30.0, 100.0
#: The fewest steps that are judged.
_FEWEST_VALUES = 4


def check_attention(history: History) -> list[Finding]:
    entropies = history.heads(n.ATTENTION_ENTROPY_NORMALIZED, "mean")
    logits = history.heads(n.ATTENTION_MAX_LOGIT, "max")
    if not entropies and not logits and n.has_attention(history.kinds):
        reasons = (record.context.get(n.NO_ATTENTION) for record in reversed(history.records))
        why = next(filter(None, reasons), "preset='full', or add_attention_metric")
        raise NotMeasured(f"attention was not measured: {why}")
    return [*_collapse(history, entropies), *_growth(history, logits)]


def _collapse(history: History, entropies: Mapping[str, Series]) -> list[Finding]:
    levels = {name: series.median for name, series in entropies.items() if len(series) >= _FEWEST_VALUES}
    worst = sorted((name for name in levels if levels[name] < _COLLAPSED), key=levels.__getitem__)
    if not worst:
        return []
    series = entropies[worst[0]]
    at = history.beginning(series.steps)
    first = math.nan if at is None else series.values[at]
    evidence = {"entropy / largest possible": levels[worst[0]], **({} if at is None else {"at the beginning": first})}
    cause = f"The heads of this layer look at one or two keys only{', from the start on' if first < _COLLAPSED else ''}."
    advice = "Check that logits are divided by sqrt(width of a head); normalise queries and keys, or lower the learning rate."
    severity: Severity | None = "warning" if first < _BROKEN else None
    return history.finding("attention-entropy-collapse", worst, evidence, cause, advice, 64.5, severity, series.steps)


def _growth(history: History, logits: Mapping[str, Series]) -> list[Finding]:
    last = {name: series.part(0.75, 1).median for name, series in logits.items() if len(series) >= _FEWEST_VALUES}
    grown = {name: level for name, level in last.items() if level > max(_GREW * abs(logits[name].values[0]), _LARGE)}
    if not grown:
        return []
    worst = sorted(grown, key=lambda name: -grown[name])
    series, level = logits[worst[0]], grown[worst[0]]
    evidence = {"largest logit at the beginning": series.values[0], "at the end": level}
    cause = "The attention logits of this layer grow; a softmax of such logits passes no gradient on."
    advice = "Normalise queries and keys (qk-norm), cap the logits, or lower the learning rate of the query and key projections."
    severity: Severity = "warning" if level > _FAR_TOO_LARGE or history.learning.is_stuck else "info"
    return history.finding("attention-logit-growth", worst, evidence, cause, advice, 65.0, severity, series.steps)
