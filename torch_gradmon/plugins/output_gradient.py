"""What the gradient at the output of a model shows about its loss: its kind, its scale, and the targets.

With logits z and p = softmax(z), the gradient of cross-entropy is c (p - y), y one-hot (Bridle 1990, "Probabilistic interpretation of
feedforward classification network outputs", section 3); with p = sigmoid(z) that of the binary one is c (p - y), and that of the mean
square is c (z - y). So from z and its gradient g alone the loss can be recognised, and the targets recovered. Nothing is assumed: what
fits no formula is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture.loss_graph import OUTPUT, Sources, is_made_by, is_move, nodes_of, notes_of, operation_of
from .tallies import Tallies

#: Rows and classes that are looked at; of more rows, some are, and outputs of more classes altogether.
ROWS, CLASSES = 512, 4096
#: Elements that are looked at, in 32 rows at least.
_ELEMENTS, _LEAST = 1 << 16, 32
#: Operations that change nothing but the scale, beside those that move.
_SCALES = frozenset(("Add", "Div", "Mean", "Mul", "Neg", "Sub", "Sum"))
#: Operations whose outputs are never negative, and often 0.
_RECTIFIES = frozenset(("Relu", "Threshold", "Hardtanh", "ClampMin", "Clamp"))
#: Operations with bounded outputs, and the bounds.
_BOUNDED = (
    (frozenset(("Sigmoid", "Hardsigmoid", "Softmax")), (0.0, 1.0)),
    (frozenset(("Tanh",)), (-1.0, 1.0)),
)
#: The most classes whose labels are counted.
COUNTED = 256
#: Relative deviation from a formula.
_FITS = 0.02
#: Relative deviation of gradients of two classes from each other. If they are all alike, as those of a mean are, they fit any such formula
#: where outputs are alike, and the value of the loss has to fit as well.
_VARIES = 0.1
#: The same where they are those of absolute errors, which fit a mean square if their mean is a quarter.
_ALIKE = 1e-3
#: The loss over that of an output from which on it has other terms.
_ALONE = 1.1
#: How well logarithms of gradients have to follow logits for a temperature to be read off them.
_LINEAR = 0.995
#: The fewest outputs that are drawn to one number, and the variance of these numbers over that of the targets, and over that of the
#: outputs: of gradients that are all alike, as those of a mean are, it is all of the latter.
_MANY, _ONE, _DRAWN = 8, 1e-6, 0.1
#: An answer that is this near to certain and right has, beside others, a gradient of rounding alone: float32 has no more of ``p - 1``.
_CERTAIN = 1e-5
_FACTS = 29
#: Multiples of it are spread evenly over the fractions.
_GOLDEN = 0.618


@dataclass(frozen=True)
class Head:
    """One output of a model and the gradient that came back to it."""

    kind: str  # "cross-entropy", "binary cross-entropy", "mean square" or empty for one that is not recognised
    rows: float  # examples, tokens or pixels with a gradient
    scale: float  # by what the loss, a mean over rows, is multiplied before the backward pass; `rows` for a sum over them
    temperature: float  # by which the loss divides the output; 1 if it does not
    zeros: float  # share of outputs that are exactly 0, if none is negative
    labels: tuple[float, ...]  # number of rows of each class; of the first COUNTED classes
    mean: float = math.nan  # of the targets of a mean square
    # their mean square. Where the loss compares each output with each target, the gradient shows their mean alone, and the rest of the
    # loss gives this
    square: float = math.nan
    negative: float = 0.0  # the share of their mean square that those below 0 have
    beyond: tuple[float, float] = (0.0, 0.0)  # the share of it that lies below -1, and the share that lies above 1
    error: float = 0.0  # the mean square of the differences between output and targets
    is_alone: bool = True  # the loss is not that of other outputs or a penalty, too, as far as its value shows

    def outside(self, low: float) -> float:
        """The share of the targets' mean square that lies outside of ``low``, 0 or -1, and 1."""
        return self.beyond[1] + (self.negative if low == 0 else self.beyond[0])

    @property
    def is_log(self) -> bool:
        return self.kind in ("cross-entropy", "binary cross-entropy")


def output_of(result: Any) -> Tensor | None:
    """The output that a loss is taken of: a tensor, the logits of a Transformers model, or the first tensor of a tuple or dict."""
    if isinstance(logits := getattr(result, "logits", None), Tensor):
        result = logits
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else (result,)
    found = next((value for value in values if isinstance(value, Tensor)), None)
    if type(found) is not Tensor or found.grad_fn is None or not torch.is_floating_point(found):  # a leaf would keep its hook
        return None
    return found if found.layout is torch.strided and not found.is_nested and found.numel() > 1 else None


def is_linear(losses: Sequence[Tensor]) -> bool:
    """Whether these losses are means of the output: their gradients are all alike, and may fit a formula by chance."""
    nodes = [node for node in nodes_of(losses, OUTPUT) if OUTPUT not in notes_of(node)]
    return bool(losses) and all(is_move(node) or operation_of(node) in _SCALES for node in nodes)


@dataclass(frozen=True)
class Origin:
    """What an output was made by."""

    is_rectified: bool = False  # a ReLU or the like; means of such numbers may be 0 as well
    bounds: tuple[float, float] | None = None  # of a sigmoid, a softmax or a tanh, if any are known


def origin_of(output: Tensor) -> Origin:
    node = output.grad_fn
    bounds = next((bounds for operations, bounds in _BOUNDED if is_made_by(node, operations, is_exact=True)), None)
    return Origin(is_made_by(node, _RECTIFIES), bounds)


def rows_of(tensor: Tensor) -> Tensor:
    """As ``[rows, classes]``: of images ``[N, C, H, W]`` pixels are rows, otherwise the last dimension has the classes."""
    if tensor.ndim == 4:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(-1, 1)


def sample_of(output: Tensor) -> Tensor | None:
    """A copy of the rows that are looked at, which a later layer of the loss may change in place; None where nothing is looked at."""
    rows = rows_of(output.detach())
    if rows.shape[1] > CLASSES or len(rows) < 2 or rows.device.type in ("meta", "mps"):  # the latter has no float64
        return None
    return looked_at(rows).clone()


def looked_at(rows: Tensor, classes: int | None = None) -> Tensor:
    """Some of many rows, from all over them: the first pixels of an image are its border, and those in one distance may be a column.

    ``classes``: of the output that ``rows`` belong to, if they are not its own.
    """
    most, many = min(ROWS, max(_LEAST, _ELEMENTS // (classes or rows.shape[1]))), len(rows)
    if many <= most:
        return rows
    stride = next(step for step in range(int(_GOLDEN * many), many) if math.gcd(step, many) == 1)
    return rows[torch.arange(most, device=rows.device) * stride % many]


@torch.no_grad()
def facts_of(sample: Tensor, gradient: Tensor) -> Tensor | None:
    """Numbers about an output, see :func:`sample_of`, and its gradient: float64 ``[_FACTS + classes]`` on their device, without a wait."""
    z, every = sample.double(), rows_of(gradient)
    g = looked_at(every).double()
    if z.shape != g.shape:
        return None
    used = g.abs().sum(1) > 0
    sums = torch.stack([z.sum(), z.square().sum(), g.sum(), g.square().sum(), (z * g).sum()])
    targets = z - g * (every.numel() / 2)  # of a mean square
    outside = targets.clamp(max=0), (targets + 1).clamp(max=0), (targets - 1).clamp(min=0)
    shares = torch.stack([part.square().sum() for part in outside]) / targets.square().sum().clamp(min=1e-300)
    # of all rows
    whole = torch.linalg.vector_norm(every, dtype=torch.promote_types(every.dtype, torch.float32)).double().square().view(1)
    one = _single(z, g) if z.shape[1] == 1 else _classes(z, g, used)
    # filled on the device: a copy from the host would wait
    count, rows, classes = (sums.new_full((1,), float(number)) for number in (len(every), *z.shape))
    head = torch.cat([count, used.double().sum().view(1), rows, classes, sums, one[0]])
    return torch.cat([head, shares, whole, one[1]])


def _classes(z: Tensor, g: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    target = g.argmin(1)
    hot = torch.zeros_like(z).scatter_(1, target[:, None], 1.0)
    expected = (p := z.softmax(1)) - hot
    sizes = g.abs().amax(1)
    weight = (used & (sizes > _CERTAIN * sizes.amax())).double()
    certain = (p.amax(1) > 1 - _CERTAIN).double() * (1 - weight)
    factor = (g * expected).sum(1) / expected.square().sum(1).clamp(min=1e-300)
    mean, deviation = _spread(factor, weight)
    left = (g - factor[:, None] * expected).square().sum(1).sqrt() / g.square().sum(1).sqrt().clamp(min=1e-300)
    residual = (left * weight).amax()
    # logarithms of the other entries follow z / temperature
    others = (hot == 0) & (g > 0) & used[:, None]
    logs = torch.where(others, g.clamp(min=1e-300).log(), 0.0)
    number = others.double().sum(1, keepdim=True).clamp(min=1)
    dz = torch.where(others, z - (z * others).sum(1, keepdim=True) / number, 0.0)
    dl = torch.where(others, logs - logs.sum(1, keepdim=True) / number, 0.0)
    slope = (dz * dl).sum() / dz.square().sum().clamp(min=1e-300)
    fit = (dz * dl).sum().square() / (dz.square().sum() * dl.square().sum()).clamp(min=1e-300)
    warm = (z * slope).softmax(1) - hot
    scale, spread = _spread((g * warm).sum(1) / warm.square().sum(1).clamp(min=1e-300), weight)
    binary = _binary(z, g)
    extremes = z.amin(), (z == 0).double().mean()
    loss = -_spread(z.log_softmax(1).gather(1, target[:, None])[:, 0], weight)[0]
    counts = weight.sum(), certain.sum()
    one = torch.stack([deviation, residual, mean, slope, fit, scale, *extremes, *binary[:3], spread, loss, binary[3], *counts])
    labels = torch.zeros(min(z.shape[1], COUNTED), dtype=torch.float64, device=z.device)
    inside = target < len(labels)
    labels.scatter_add_(0, target.clamp(max=len(labels) - 1), weight * inside)
    return one, labels


def _single(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.full((6,), math.nan, dtype=torch.float64, device=z.device)
    extremes = torch.stack([z.amin(), (z == 0).double().mean()])
    used = g != 0
    ones = ((g < 0) & used).double().sum()
    labels = torch.stack([used.double().sum() - ones, ones])
    *binary, loss = _binary(z, g)
    return torch.cat([nothing, extremes, torch.stack(binary), nothing[:2], loss.view(1), nothing[:2]]), labels


def _binary(z: Tensor, g: Tensor) -> list[Tensor]:
    """Deviation and mean of the factor, if each output is the logit of one binary cross-entropy; how much gradients vary; that loss."""
    p = z.sigmoid()
    used = (g != 0).double()
    mean, deviation = _spread(g.abs() / torch.where(g < 0, 1 - p, p).clamp(min=1e-300), used)
    loss = torch.where(g < 0, nn.functional.softplus(-z), nn.functional.softplus(z))
    return [deviation, mean, _spread(g.abs(), used)[1], _spread(loss, used)[0]]


def _spread(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and the deviation from it over its size."""
    total = weight.sum().clamp(min=1)
    mean = (values * weight).sum() / total
    return mean, ((values - mean).square() * weight).sum().div(total).sqrt() / mean.abs().clamp(min=1e-300)


def _is_near(value: float, loss: float | None) -> bool:
    return loss is not None and abs(value - loss) <= _FITS * abs(loss)


def recognised(facts: list[float], loss: float | None) -> Head | None:
    """The head that these numbers, read back from the device, describe; ``loss``: the value that was logged in that step."""
    count, used, rows, classes, z1, z2, g1, g2, zg = facts[:9]
    deviation, residual, mean, slope, fit, scale, low, zeros, b_deviation, b_mean, varied, spread = facts[9:21]
    is_entropy, is_binary = (varied > _VARIES or _is_near(own, loss) for own in facts[21:23])
    is_alone, is_alone_binary = (loss is None or loss < _ALONE * own for own in facts[21:23])
    labels = tuple(facts[_FACTS:]) if classes <= COUNTED else ()
    if used < 2 or not all(map(math.isfinite, (z2, g2))) or g2 == 0:
        return None
    every = count * used / rows  # rows with a gradient, among all of them
    zeros = zeros if low == 0 else 0.0
    telling, certain = facts[23:25]
    if (classes > 2 or (classes == 2 and is_entropy)) and deviation < _FITS and residual < _FITS and telling > 1:
        # a row without a gradient is answered with certainty, or does not count
        least, most = (mean * count * number / rows for number in (telling, telling + certain))
        telling *= count / rows
        return Head("cross-entropy", telling, max(least, min(most, 1.0)), 1.0, zeros, labels, is_alone=is_alone)
    if is_binary and b_deviation < _FITS:
        answers = every * classes
        return Head("binary cross-entropy", answers, b_mean * answers, 1.0, zeros, labels, is_alone=is_alone_binary)
    if classes > 2 and fit > _LINEAR and slope > 0 and spread < _FITS:
        return Head("cross-entropy", every, scale * every / slope, 1 / slope, zeros, labels)
    elements = rows * classes
    factor = 2 / (count * classes)  # of a mean over all elements
    if loss is None:
        return None
    negative, below, above, whole = facts[_FACTS - 4 : _FACTS]
    average, own = (z1 - g1 / factor) / elements, whole / factor**2 / (count * classes)
    square = (z2 - 2 * zg / factor + g2 / factor**2) / elements
    if varied > _ALIKE and _is_near(own, loss):
        return Head("mean square", every, 1.0, 1.0, zeros, (), average, square, negative, (below, above), own)
    # all outputs are drawn to one number, from which the targets that the loss is taken of differ
    variance = square - average**2
    is_drawn = variance < _ONE * (loss - own) and variance < _DRAWN * (z2 / elements - (z1 / elements) ** 2)
    if rows == count and elements >= _MANY and is_drawn:
        return Head("mean square", every, 1.0, 1.0, zeros, (), average, average**2 + loss - own)
    return None


#: The label without a loss.
_IGNORED = -100
#: The fewest labels that show a shift.
_FEWEST = 8
#: What is added to scores of what is hidden, at most: some take -1e4 or -1e9 for minus infinity.
_HIDDEN = -5e3
#: The share of places that see the next one, if no mask is causal, but some hide padding.
_MOST_SEEN = 0.5
#: The losses that shift labels themselves; the default is the same.
_SHIFTS = ("ForCausalLM", None)
#: For each share its rule, the value that is a fault, and its name.
_RULES = (
    ("attention-mask", 0.0, "share of the text that is attended to"),
    ("labels-ignored", 0.0, "share of labels that count"),
    ("loss-on-padding", 1.0, "share of the padding with a label"),
    ("labels-shifted-twice", 1.0, "share of labels that are the next token"),
)
_OF_OUTPUT = (
    ("labels-not-shifted", 1.0, "share of targets that are the token itself"),
    ("causal-mask-missing", 1.0, "share of targets that are the next token, which attention sees"),
)


@torch.no_grad()
def shares_of(module: nn.Module, kwargs: Mapping[str, object]) -> Tensor | None:
    """Numbers on the device of the tokens, float64 ``[4]``, NaN where there is none: the share of tokens other than padding that are
    attended to, of labels that count, of masked tokens whose label counts, and of labels that are the next token instead of their own.

    None for other models: what they do with a mask and a label is not known.
    """
    model, ids = next(_from_transformers(module), None), kwargs.get("input_ids")
    if model is None or not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or ids.device.type in ("meta", "mps"):
        return None
    config = getattr(model, "config", None)
    found = [torch.full((), math.nan, dtype=torch.float64, device=ids.device)] * 4
    mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
    is_attended = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if is_attended is not None:
        pad = getattr(config, "pad_token_id", None)
        is_text = ids != pad if isinstance(pad, int) else torch.ones_like(ids, dtype=torch.bool)
        found[0] = _share(is_attended & is_text, is_text)
    if isinstance(labels, Tensor) and labels.numel() and not labels.is_floating_point():
        counts = labels != _IGNORED
        found[1] = counts.double().mean()
        if labels.shape == ids.shape and not _has_encoder(model):
            if is_attended is not None:
                found[2] = _share(counts & ~is_attended, ~is_attended)
            if _predicts_next(model) and kwargs.get("shift_labels") is None:
                found[3] = _share_of_next(ids, labels, counts)
    return torch.stack(found)


class Tokens(NamedTuple):
    ids: Tensor  # [N, T]
    is_shifted: bool  # the output of each is to be the next one
    is_seen: bool | Tensor  # attention sees the next one of most, which no causal mask allows


def runs_over_batch(found: Sources, output: Tensor) -> bool:
    """Whether a recurrent layer or attention before an output ``[N]`` or ``[N, classes]`` takes its N rows for places of a sequence."""
    rows = len(output)
    return output.ndim <= 2 and any(length == rows and batch > 1 and batch % rows for batch, length in found.spans)


def tokens_of(found: Sources, module: nn.Module, output: Tensor) -> tuple[Tokens | None, Tensor | None]:
    """The tokens that are embedded, those of a decoder if there is an encoder as well; and what attention may see of them, as
    :func:`share_of_text` says.
    """
    tokens = [each for each in found.tokens if each.device.type not in ("meta", "mps") and len(each) == len(output)]
    masks = [*found.masks.values()]
    share = next((of for mask in masks[:1] for ids in tokens if (of := share_of_text(mask, ids)) is not None), None)
    if not tokens:
        return None, share
    model = next(_from_transformers(module), None)
    is_shifted = model is not None and _predicts_next(model) and not _has_encoder(model)
    decodes = _has_encoder(model) or any(isinstance(each, nn.TransformerDecoderLayer) for each in module.modules())
    is_shifted |= decodes and any(each.data_ptr() != tokens[0].data_ptr() for each in tokens)
    length = tokens[0].shape[1]
    is_seen: bool | Tensor = not found.is_masked and length in found.lengths
    for mask in masks:
        if mask.shape[-1] == length and mask.shape[-2] in (1, length):  # no cross attention
            is_seen &= _seen(mask.expand(*mask.shape[:-2], length, -1).diagonal(1, -2, -1)).double().mean() > _MOST_SEEN
    return Tokens(tokens[0], is_shifted, is_seen), share


@torch.no_grad()
def share_of_text(mask: Tensor, ids: Tensor) -> Tensor | None:
    """0 where a mask lets attention see nothing but one token, the padding, and hides several others; else 1; float64 ``[1]``."""
    if mask.ndim != 4 or (len(mask), mask.shape[-1]) != ids.shape or mask.device != ids.device:
        return None
    sees, low, high = _seen(mask[:, 0]).any(1), ids.min(), ids.max()
    of_one = [ids.masked_fill(~chosen, high).amin() == ids.masked_fill(~chosen, low).amax() for chosen in (sees, ~sees)]
    return 1 - (of_one[0] & ~of_one[1] & (sees.sum(1) > 1).any()).double().view(1)  # one alone may be that of the class


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


@torch.no_grad()
def shares_of_next(tokens: Tokens, gradient: Tensor) -> Tensor | None:
    """The shares of targets that are the token in their own place, where it should be the next one, and that are a next one that the model
    sees: float64 ``[2]``; NaN where that is not known.

    The gradient of cross-entropy, ``[N, T, classes]``, is negative for the target alone.
    """
    ids = tokens.ids
    if gradient.ndim != 3 or gradient.shape[:2] != ids.shape or gradient.device != ids.device:
        return None
    g, classes = looked_at(rows_of(gradient)), gradient.shape[2]
    nothing = torch.full_like(ids[:, :1], -1)
    own, following = (looked_at(each.reshape(-1, 1), classes)[:, 0] for each in (ids, torch.cat([ids[:, 1:], nothing], 1)))
    tells, target, shares = (g < 0).sum(1) == 1, g.argmin(1), []
    for token, other, matters in ((own, following, tokens.is_shifted), (following, own, tokens.is_seen)):
        is_it, there = (target == token) & tells, tells & (token >= 0)
        is_known = (there.sum() >= _FEWEST) & (is_it & (token != other)).any() & matters
        shares.append(_share(is_it, there).where(is_known, math.nan))
    return torch.stack(shares)


def judge(shares: list[float], tallies: Tallies) -> None:
    rules = {1: _RULES[:1], 2: _OF_OUTPUT}.get(len(shares), _RULES)
    for (rule, fault, words), share in zip(rules, shares, strict=True):
        if not math.isnan(share):
            tallies.check(rule, share == fault, evidence={words: share})


def _from_transformers(module: nn.Module) -> Iterator[nn.Module]:
    """The models of Transformers itself in the watched one, the outermost first."""
    return (each for each in module.modules() if type(each).__module__.startswith("transformers.models."))


def _predicts_next(model: nn.Module) -> bool:
    return getattr(model, "loss_type", "") in _SHIFTS


def _has_encoder(model: nn.Module | None) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum().double() / whole.sum()


def _share_of_next(ids: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """NaN where too few labels count, or none of them differs from its own token."""
    counts = counts[:, :-1]
    own, following = (labels[:, :-1] == ids[:, :-1]) & counts, (labels[:, :-1] == ids[:, 1:]) & counts
    tells = (counts.sum() >= _FEWEST) & (own.sum() < counts.sum())
    return _share(following, counts).where(tells, math.nan)


#: Rows of a batch, and heads, before labels are judged.
_ROWS, _FEWEST_HEADS = 8, 5
#: Rows that may have a property by chance.
_FEW = 4
#: Share of heads whose batch has one label, if the data are sorted.
_MOSTLY = 0.8
#: Share of outputs that a ReLU has set to 0, and share of the targets' mean square that lies below 0,
#: or beyond what the output can be: more than noise around the bound.
_ZEROS, _BELOW = 0.02, 0.1
#: The root mean square of targets that are not normalised.
_LARGE = 30.0
#: A loss that is not divided by its micro-batches counts this share of them at least.
_NEARLY = 0.9
#: A loss that counts less than this share of its mean is divided by too much.
_HARDLY = 1 / 30.0
#: A temperature outside divides or multiplies logits far more than any that is learnt: CLIP stops at 100.
_COLD, _HOT = 1 / 150.0, 10.0
#: Targets are differences; where they are this small a part of the error, rounding is all that is left of them but their order.
_CANCELS = 1e-6
#: Labels counted for each class before their entropy is known.
_PER_CLASS = 4


class Targets:
    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._heads: list[Head] = []
        self._labels: list[float] = []
        self._of_one_label = 0
        # the loss of the best constant answer, and from how many "examples" it is known; of a mean square also that of the answer 0
        self.chance: dict[str, float] = {}

    def add(self, head: Head, forwards: int, micro_batches: int, is_scaled: bool, output: Origin) -> None:
        """One more head, from the first of the ``forwards`` of a step, those of turns of optimizers that rest in it included.

        ``micro_batches``: backward passes with one sum of gradients; ``is_scaled``: these are multiplied by a loss scale.
        """
        self._heads.append(head)
        self._tallies.check(
            "relu-before-loss", output.is_rectified and head.zeros > _ZEROS and (head.is_log or head.negative > _BELOW)
        )
        if head.kind == "mean square":
            outside = head.outside(output.bounds[0]) if output.bounds else 0.0
            self._tallies.check(
                "targets-out-of-range", outside > _BELOW, evidence={"share of their mean square outside": outside}
            )
            size = {"mean": head.mean, "root mean square": math.sqrt(max(head.square, 0.0))}
            self._tallies.check("targets-not-normalised", size["root mean square"] > _LARGE, evidence=size)
        if head.is_log:
            self._add_labels(head, forwards)
        self._learn_chance(head)
        if head.is_log and not is_scaled:
            self._judge_scale(head, micro_batches)

    def _add_labels(self, head: Head, forwards: int) -> None:
        if not head.labels or sum(head.labels) < 2:
            return
        if len(self._labels) != len(head.labels):
            self._labels, self._of_one_label = [0.0] * len(head.labels), 0
        self._labels = [a + b for a, b in zip(self._labels, head.labels, strict=True)]
        self._of_one_label += _has_one_label(head)
        seen = [each for each in self._heads if each.labels]
        if forwards > 1 or len(seen) < _FEWEST_HEADS or self._of_one_label < _MOSTLY * len(seen):
            return
        rule = "labels-not-mixed" if sum(count > 0 for count in self._labels) > 1 else "labels-constant"
        self._tallies.seen(rule, evidence={"batches of one class": float(self._of_one_label), "of": float(len(seen))})
        if rule == "labels-not-mixed":
            self._tallies.retract("labels-constant")

    def _learn_chance(self, head: Head) -> None:
        total = sum(self._labels)
        if head.kind == "mean square":
            known = [each for each in self._heads if each.kind == "mean square"]
            exact = [each for each in known if each.square > _CANCELS * each.error]
            rows = sum(each.rows for each in exact or known)
            mean = sum(each.mean * each.rows for each in exact or known) / rows
            square = sum(each.square * each.rows for each in exact or known) / rows
            chance = {"loss": max(square - mean**2, 0.0)} if exact else {}
            self.chance = {**chance, "examples": rows, "is square": 1.0, "of zero": square}
        elif total >= _PER_CLASS * len(self._labels) and head.labels and head.is_alone and abs(head.scale - 1) < 0.1:
            shares = [count / total for count in self._labels if count]
            self.chance = {"loss": -sum(share * math.log(share) for share in shares), "examples": total}

    def _judge_scale(self, head: Head, micro_batches: int) -> None:
        is_cold_or_hot = not _COLD < head.temperature < _HOT
        is_sum = head.rows >= _FEW and abs(head.scale / head.rows - 1) < 0.02
        is_tiny = 0 < head.scale * micro_batches < _HARDLY
        # batches of one label each, as the real and the made ones of a GAN, are terms of one loss
        is_undivided = micro_batches > 1 and abs(head.scale - 1) < 1 - _NEARLY and not _has_one_label(head)
        evidence = {}
        if is_cold_or_hot:
            evidence = {"temperature between output and loss": head.temperature}
        elif is_sum or is_tiny:
            evidence = {"times the gradient of the mean": head.scale}
        elif is_undivided:
            evidence = {"micro-batches that each count as a whole": float(micro_batches)}
        self._tallies.check("loss-scale", bool(evidence), evidence=evidence)


def _has_one_label(head: Head) -> bool:
    """Whether all rows of a batch that is large enough to show it are of one class."""
    return sum(head.labels) >= _ROWS and max(head.labels) == sum(head.labels)
