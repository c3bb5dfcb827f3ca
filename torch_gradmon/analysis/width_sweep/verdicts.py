"""From measured terms to a verdict on every layer."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from torch import nn

from ...core.errors import display, nearest
from .recipe import SweepRun

# --- Expected exponents ---

Kind = Literal["input", "hidden", "output", "vector", "fixed"]
Family = Literal["sgd", "adam"]
#: The expectations that have a name.
KEYWORDS = ("stable", "standard")

#: By optimizer and kind of layer: the exponent of the update term with a learning rate independent of the width.
_STANDARD: dict[Family, dict[Kind, float]] = {
    "sgd": {"input": -0.5, "vector": -0.5, "hidden": 0.5, "output": 1.0},
    "adam": {"input": 0.0, "vector": 0.0, "hidden": 1.0, "output": 1.0},
}


@dataclass(frozen=True)
class Expected:
    """The exponents of a module's two terms; None for a term that is not judged."""

    update: float | None = 0.0
    propagated: float | None = 0.0


@dataclass(frozen=True)
class Layer:
    """A module with its own parameters, before training.

    Attributes:
        kind: which dimensions of its weight grow with the width: ``input`` (only the outputs), ``output`` (only the inputs),
            ``hidden``
            (both), ``vector`` (all its parameters have one dimension), ``fixed`` (none grows).
        lr_exponent: exponent of its learning rate over the width; None if no optimizer has it.
    """

    kind: Kind
    lr_exponent: float | None


def kind_of(module: nn.Module, narrow: Mapping[str, tuple[int, ...]], wide: Mapping[str, tuple[int, ...]]) -> Kind:
    grown = {name: tuple(a != b for a, b in zip(narrow[name], wide[name], strict=True)) for name in narrow}
    if not any(any(dimensions) for dimensions in grown.values()):
        return "fixed"
    matrices = [dimensions for dimensions in grown.values() if len(dimensions) > 1 and any(dimensions)]
    if not matrices:
        return "vector"
    if any(sum(dimensions) > 1 for dimensions in matrices):
        return "hidden"
    return "output" if matrices[0].index(True) == _place_of_inputs(module) else "input"


def _place_of_inputs(module: nn.Module) -> int:
    """The dimension of the weight that counts inputs: the second, unless torch or transformers transposes it."""
    flipped = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.startswith(("ConvTranspose", "Conv1D"))
    return 0 if flipped else 1


def standard(layers: Mapping[str, Layer], family: Family) -> dict[str, Expected]:
    """The theoretical exponents of the standard parametrisation, for layers in execution order.

    The propagated term is predicted only for plain chains of linear layers, where each layer's output is the next one's input.
    Normalisation, attention and residual branches bound or mix it; there it is not judged.
    """
    chain = all(layer.kind in ("input", "hidden", "output") for layer in layers.values())
    reached: float | None = None
    found = {}
    for name, layer in layers.items():
        if layer.kind == "fixed" or layer.lr_exponent is None:
            found[name] = Expected(None, None)
            continue
        update = _STANDARD[family][layer.kind] + layer.lr_exponent
        propagated = reached if chain else None
        if propagated is not None and layer.kind == "output":
            propagated += 0.5
        found[name] = Expected(update, propagated)
        reached = max(update, reached if reached is not None else update)
    return found


def user_expectations(asked: Mapping[str, Any], names: Mapping[str, Layer]) -> dict[str, Expected]:
    """The first pattern that matches a module's name decides; modules without a match should be stable.

    ``asked`` has, by regex, one exponent for both terms, or a pair of them; None for a term that is not judged.
    """
    values = {pattern: _pair(pattern, value) for pattern, value in asked.items()}
    try:
        patterns = {pattern: re.compile(pattern) for pattern in asked}
    except re.error as error:
        raise ValueError(f"expected={asked!r} has a pattern that is no regex: {error}") from error
    for pattern, compiled in patterns.items():
        if not any(compiled.search(name) for name in names):
            raise ValueError(f"expected={pattern!r} matches none of the modules that have parameters{nearest(pattern, names)}")
    return {name: next((values[p] for p, compiled in patterns.items() if compiled.search(name)), Expected()) for name in names}


def _pair(pattern: str, value: Any) -> Expected:
    if not isinstance(pattern, str):
        raise TypeError(
            f"expected={{{pattern!r}: ...}} must have patterns of module names, such as 'head', got {display(pattern)}"
        )
    terms = value if isinstance(value, tuple) else (value, value)
    if len(terms) != 2 or not all(
        term is None or (isinstance(term, (int, float)) and not isinstance(term, bool) and math.isfinite(term)) for term in terms
    ):
        raise TypeError(
            f"expected[{pattern!r}] must be an exponent, such as 0.5, a pair (update, propagated) of them, or None for a term that is not "
            f"judged, got {display(value)}"
        )
    return Expected(*terms)


# --- Power laws ---


@dataclass(frozen=True)
class Slope:
    """``value`` is about ``2**offset * width**exponent``.

    Attributes:
        exponent: the slope of log2(value) over log2(width).
        low: lower end of the confidence interval of the exponent.
        high: its upper end.
        offset: log2 of the value at width 1, averaged over seeds.
        scatter: standard deviation of log2(value) about the lines; 0.1 is about 7 percent of the value.
        freedom: degrees of freedom of the interval.
    """

    exponent: float
    low: float
    high: float
    offset: float
    scatter: float
    freedom: int

    def at(self, width: float) -> float:
        """The value of the fitted line at ``width``."""
        return math.pow(2.0, self.offset + self.exponent * math.log2(width))


def fit_slope(points: Mapping[int, Sequence[tuple[int, float]]], confidence: float = 0.95) -> Slope:
    """Fit one exponent to the runs of all seeds, with an offset for each seed.

    Runs of one seed share their data, so their values are high or low together; the offset removes that. The interval is that of ordinary
    least squares: exponent -+ t * s / sqrt(Sxx), with s^2 the sum of squared residuals over the degrees of freedom (points - seeds - 1),
    Sxx the sum of squares of log2(width) about the mean of its seed, and t the quantile of Student's distribution (Draper & Smith, Applied
    Regression Analysis, section 1.4). It covers the scatter of initialisations. The bend of the line at small widths is not scatter; a
    tolerance has to cover that.

    Args:
        points: by seed, pairs of a width and a positive, finite value.
        confidence: probability that the interval covers the exponent.

    Raises:
        ValueError: too few points for one degree of freedom, no two widths in one seed, or a value without a logarithm.
    """
    total = sum(len(pairs) for pairs in points.values())
    freedom = total - len(points) - 1
    if freedom < 1:
        raise ValueError(
            f"{total} points of {len(points)} seeds are too few for an exponent with an interval; give three widths or more"
        )
    logs = {seed: [(math.log2(width), _logarithm(value)) for width, value in pairs] for seed, pairs in points.items()}
    means = {seed: (fmean([x for x, _ in pairs]), fmean([y for _, y in pairs])) for seed, pairs in logs.items()}
    centred = [(x - means[seed][0], y - means[seed][1]) for seed, pairs in logs.items() for x, y in pairs]
    spread = math.fsum(x * x for x, _ in centred)
    if spread == 0.0:
        raise ValueError("all runs of a seed have the same width; give different widths")
    exponent = math.fsum(x * y for x, y in centred) / spread
    scatter = math.sqrt(math.fsum((y - exponent * x) ** 2 for x, y in centred) / freedom)
    half = student_quantile(0.5 + confidence / 2, freedom) * scatter / math.sqrt(spread)
    offset = fmean([y - exponent * x for x, y in means.values()])
    return Slope(exponent, exponent - half, exponent + half, offset, scatter, freedom)


@functools.lru_cache(maxsize=64)
def student_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution has ``probability``.

    With whole degrees of freedom the distribution is a finite sum in the angle arctan(t / sqrt(freedom)): Abramowitz & Stegun,
    Handbook of
    Mathematical Functions, 26.7.3 and 26.7.4. Bisection inverts the sum to the last bits of a float.

    Raises:
        ValueError: a probability outside ]0, 1[, or degrees of freedom that are not a whole number of at least 1.
    """
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability={probability!r} must lie between 0 and 1")
    if freedom < 1 or freedom != int(freedom):
        raise ValueError(f"freedom={freedom!r} must be a whole number of at least 1")
    if probability < 0.5:
        return -student_quantile(1.0 - probability, freedom)
    inside = 2.0 * probability - 1.0
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < inside else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    """The probability that ``|t| <= sqrt(freedom) * tan(angle)``."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = math.cos(angle) if freedom % 2 else 1.0
    total = 0.0
    for power in range(2 if freedom % 2 else 1, freedom, 2):
        total += term
        term *= square * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if freedom % 2 else sine * total


def _logarithm(value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{value!r} has no logarithm; only positive, finite values lie on a power law")
    return math.log2(value)


# --- Verdicts ---

Term = Literal["update", "propagated"]
State = Literal["stable", "grows", "vanishes", "undecided", "zero", "not finite"]
TERMS: tuple[Term, Term] = ("update", "propagated")


@dataclass(frozen=True)
class LayerVerdict:
    """The verdict on one term of one module.

    Attributes:
        module: its name; empty for a model that is one layer.
        kind: of the layer, see :class:`~torch_gradmon.analysis.width_sweep.verdicts.Layer`.
        term: ``update``, (W_t - W_0) x_t, or ``propagated``, W_0 (x_t - x_0).
        state: how the term depends on the width: ``stable``, ``grows`` or ``vanishes`` if the whole confidence interval of the exponent
            lies within the tolerance about 0, above, or below; otherwise ``undecided``.
        slope: the exponent with its interval; None without a power law.
        expected: expected exponent; None if the term is not judged.
        as_expected: True if the whole interval is within the tolerance about ``expected``, False if it is outside, None if it is neither,
            or not judged.
        reason: why there is no slope; empty if there is one.
    """

    module: str
    kind: Kind
    term: Term
    state: State
    slope: Slope | None
    expected: float | None
    as_expected: bool | None
    reason: str = ""

    @property
    def judged(self) -> bool:
        """Whether it counts: an exponent is expected, and the term could have one, or should."""
        return self.expected is not None and (self.state != "zero" or self.term == "update")


def judge(
    runs: Sequence[SweepRun],
    layers: Mapping[str, Layer],
    expected: Mapping[str, Expected],
    step: int,
    tolerance: float,
    confidence: float,
) -> list[LayerVerdict]:
    """Verdicts on both terms of every layer, in execution order, after ``step`` steps.

    The tolerance covers the bend of lines at small widths, where an exponent differs from that of the limit. Theoretical exponents are
    multiples of one half, which a tolerance of a quarter distinguishes. A layer has to be *shown* to be within it: an interval that is too
    wide passes nothing (a test of equivalence: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680, with an interval of ``confidence``
    on both sides).
    """
    found = []
    for name, layer in layers.items():
        for term in TERMS:
            points = series(runs, name, term, step)
            if points:
                aim = getattr(expected[name], term)
                verdict = _verdict(name, layer.kind, term, points, aim, tolerance, confidence)
                is_idle = verdict.state == "zero" and layer.lr_exponent is None  # it is not meant to move
                found.append(replace(verdict, expected=None) if is_idle else verdict)
    return found


def series(runs: Sequence[SweepRun], module: str, term: str, step: int) -> dict[int, list[tuple[int, float]]]:
    """By seed, the widths and the values there after ``step`` steps; ``term`` is an attribute of :class:`LayerTerms`."""
    points: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        measured = run.steps[step - 1].get(module)
        value = None if measured is None else getattr(measured, term)
        if value is not None:
            points.setdefault(run.seed, []).append((run.width, value))
    return points


def outcome(verdicts: Sequence[LayerVerdict]) -> Literal["passes", "fails", "undecided"]:
    """``fails`` if one judged term is not as expected, ``passes`` only if all are."""
    judged = [verdict.as_expected for verdict in verdicts if verdict.judged]
    if False in judged:
        return "fails"
    return "passes" if judged and all(judged) else "undecided"


def _verdict(
    name: str,
    kind: Kind,
    term: Term,
    points: dict[int, list[tuple[int, float]]],
    aim: float | None,
    tolerance: float,
    confidence: float,
) -> LayerVerdict:
    verdict = functools.partial(LayerVerdict, name, kind, term)
    nonfinite = [(width, seed) for seed, pairs in points.items() for width, value in pairs if not math.isfinite(value)]
    if nonfinite:
        reason = f"not finite at width {nonfinite[0][0]} with seed {nonfinite[0][1]}"
        return verdict("not finite", None, aim, None if aim is None else False, reason)
    zeros = [(width, seed) for seed, pairs in points.items() for width, value in pairs if value == 0.0]
    if len(zeros) == sum(map(len, points.values())):
        reason = "its parameters do not move" if term == "update" else "its input does not change"
        return verdict("zero", None, aim, None, reason)
    if zeros:
        return verdict("undecided", None, aim, None, f"zero at width {zeros[0][0]} with seed {zeros[0][1]}")
    try:
        slope = fit_slope(points, confidence)
    except ValueError:  # such as an expert that gets other tokens than at first, and is not measured then
        reason = f"measured in only {sum(map(len, points.values()))} runs, in which it ran as at first"
        return verdict("undecided", None, aim, None, reason)
    about = {True: "stable", False: "grows" if slope.exponent > 0 else "vanishes", None: "undecided"}
    state: State = about[within(slope, 0.0, tolerance)]  # type: ignore[assignment]
    return verdict(state, slope, aim, None if aim is None else within(slope, aim, tolerance))


def within(slope: Slope, aim: float, tolerance: float) -> bool | None:
    """True if the interval is within ``tolerance`` about ``aim``, False if it is outside, None if it is both."""
    if aim - tolerance <= slope.low and slope.high <= aim + tolerance:
        return True
    return False if slope.high < aim - tolerance or slope.low > aim + tolerance else None
