"""The result of a sweep: from measured terms to a verdict on every layer, in words, as a table and as a picture."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal

from torch import nn

from ...core.errors import display, nearest
from ...core.formatting import listed

# --- What was measured ---


@dataclass(frozen=True)
class LayerTerms:
    """The terms of one module on one batch; None for terms that do not apply.

    Attributes:
        update: root mean square over all elements of (W_t - W_0) x_t; None in a module without its own parameters.
        propagated: the same of W_0 (x_t - x_0).
        input: root mean square of x_t; None if it is no floating-point tensor.
        output: mean of ``|W_t x_t|``, as in the coordinate check of microsoft/mup.
    """

    update: float | None
    propagated: float | None
    input: float | None
    output: float


@dataclass(frozen=True)
class SweepRun:
    width: int
    seed: int
    losses: list[float]
    steps: list[dict[str, LayerTerms]]


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
            ``hidden`` (both), ``vector`` (all its parameters have one dimension), ``fixed`` (none grows).
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
    # the second dimension of a weight counts inputs, unless torch or transformers transposes it
    flipped = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.startswith(("ConvTranspose", "Conv1D"))
    return "output" if matrices[0].index(True) == (0 if flipped else 1) else "input"


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
    """What the first pattern in a module's name gives: an exponent, a pair, or None for terms that are not judged; else stable."""
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
    odd = [value for pairs in points.values() for _, value in pairs if not 0.0 < value < math.inf]
    if odd:
        raise ValueError(f"{odd[0]!r} has no logarithm; only positive, finite values lie on a power law")
    logs = {seed: [(math.log2(width), math.log2(value)) for width, value in pairs] for seed, pairs in points.items()}
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


def student_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution has ``probability``, of at least one half.

    With whole degrees of freedom the distribution is a finite sum in the angle arctan(t / sqrt(freedom)): Abramowitz & Stegun,
    Handbook of Mathematical Functions, 26.7.3 and 26.7.4. Bisection inverts the sum to the last bits of a float.
    """
    if not 0.5 <= probability < 1.0:
        raise ValueError(f"probability={probability!r} must lie between one half and 1")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 2.0 * probability - 1.0 else (low, middle)
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


# --- Verdicts ---

Term = Literal["update", "propagated"]
State = Literal["stable", "grows", "vanishes", "undecided", "zero", "not finite"]
TERMS: tuple[Term, Term] = ("update", "propagated")


@dataclass(frozen=True)
class LayerVerdict:
    """The verdict on one term of one module.

    Attributes:
        module: its name; empty for a model that is one layer.
        kind: of the layer, see :class:`~torch_gradmon.analysis.width_sweep.Layer`.
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


def within(slope: Slope, aim: float, tolerance: float) -> bool | None:
    """True if the interval is within ``tolerance`` about ``aim``, False if it is outside, None if it is both."""
    if aim - tolerance <= slope.low and slope.high <= aim + tolerance:
        return True
    return False if slope.high < aim - tolerance or slope.low > aim + tolerance else None


# --- The verdicts as sentences and as a table ---

_NAMES = {"update": "(W_t-W_0)x_t", "propagated": "W_0(x_t-x_0)"}
_MOST = 4


def table(verdicts: Sequence[LayerVerdict]) -> str:
    lines = [("module", "kind", "term", "exponent", "interval", "expected", "")]
    for verdict in verdicts:
        exponent, interval = "-", "-"
        if slope := verdict.slope:
            exponent, interval = f"{slope.exponent:+.2f}", f"{slope.low:+.2f} to {slope.high:+.2f}"
        expected = "any" if verdict.expected is None else f"{verdict.expected:+.2f}"
        about = verdict.module or "[model]", verdict.kind, _NAMES[verdict.term]
        lines.append((*about, exponent, interval, expected, _verdict_text(verdict)))
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, sizes)).rstrip() for line in lines)


def _verdict_text(verdict: LayerVerdict) -> str:
    state = f"{verdict.state}: {verdict.reason}" if verdict.reason else verdict.state
    if not verdict.judged or verdict.state in ("undecided", "zero"):
        return state
    if verdict.as_expected is None:
        return f"{state}, undecided whether as expected"
    if verdict.as_expected:
        return state if not verdict.expected else f"{state}, as expected"
    return f"{state}, FAILS"


def words(verdicts: Sequence[LayerVerdict], smallest: int, largest: int, unmeasured: Sequence[str] = ()) -> str:
    """The verdict on all layers in a few sentences, with a remedy for each failure, and the unmeasured parameters."""
    judged = [verdict for verdict in verdicts if verdict.judged]
    bad = [verdict for verdict in judged if verdict.as_expected is False]
    still = [verdict for verdict in judged if verdict.state == "zero"]
    unclear = [verdict for verdict in judged if verdict.as_expected is None and verdict not in still]
    terms, widths = f"{len(judged)} terms", f"the expected exponent from width {smallest} to {largest}"
    lines = {
        "passes": [f"Passes: all {terms} have {widths}."],
        "fails": [f"Fails: {len(bad)} of {terms} do not have {widths}."],
        "undecided": [f"Undecided: {len(unclear) + len(still)} of {terms} could still be either way."],
    }[outcome(verdicts)]
    if len(still) == len(judged):
        lines = ["Undecided: no judged term has moved. Is the learning rate zero, or everything frozen?"]
    else:
        lines += _failures(bad)
        if unclear:
            lines.append(f"Undecided in {_listed(unclear)}: give more seeds, or larger widths.")
        if still:
            advice = "Give more steps, or check whether a gradient arrives there."
            lines.append(f"Not moved: {_listed(still)}; an update of zero cannot be judged. {advice}")
        hidden = {verdict.state for verdict in verdicts if verdict.term == "update" and verdict.kind == "hidden"}
        if hidden == {"stable"} and any(v.kind == "output" and v.state == "grows" for v in verdicts):
            lines.append(
                "Hidden layers move as much in wide models as in narrow ones while the outputs grow: with cross-entropy this can still "
                "train (controlled divergence, arXiv 2505.22491), with squared error it does not."
            )
    if unmeasured:
        names = listed(unmeasured, _MOST)
        lines.append(f"Not measured, and not judged: {names}; no module with these parameters is called and returns a tensor.")
    return "\n".join(lines)


#: By term, and by the side on which an exponent is.
_FAILURES = {
    "update high": "The own update is too large in wide models in {}: divide the learning rate there by that power of the width.",
    "update low": "The own update vanishes in wide models in {}: multiply the learning rate there by the missing power of the width.",
    "propagated high": "The layers below contribute too much in wide models in {}: check their updates first.",
    "propagated low": "The layers below contribute too little in wide models in {}: check their updates first.",
}
_ADDED_UP = (
    "The changes of the layers below add up in {}: if their updates are stable, start with smaller output weights (muP: of size "
    "1/width)."
)


def _failures(bad: Sequence[LayerVerdict]) -> Iterator[str]:
    groups: dict[tuple[str, str, bool], list[LayerVerdict]] = {}
    for verdict in bad:
        side = "not finite" if verdict.slope is None else "high" if verdict.slope.exponent > (verdict.expected or 0.0) else "low"
        adds = verdict.term == "propagated" and verdict.kind == "output"
        groups.setdefault((verdict.term, side, adds), []).append(verdict)
    for (term, side, adds), group in groups.items():
        text = _ADDED_UP if adds and side == "high" else _FAILURES.get(f"{term} {side}", "Training diverged in {}.")
        yield text.format(_listed(group))


def _listed(verdicts: Sequence[LayerVerdict]) -> str:
    return listed([f"{verdict.module or '[model]'}{_power(verdict)}" for verdict in verdicts], _MOST)


def _power(verdict: LayerVerdict) -> str:
    if verdict.slope is None:
        return f" ({verdict.reason})"
    instead = f" instead of {verdict.expected:+.2f}" if verdict.expected else ""
    if verdict.as_expected is None:
        return f" ({_NAMES[verdict.term]}: width^{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}{instead})"
    return f" (width^{verdict.slope.exponent:+.2f}{instead})"


# --- Plots ---

#: Medium greys and colours have enough contrast on white and on black pages; the colours are those of Okabe & Ito.
_TEXT = "#757d87"
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8b949e", "#b5a300")
_TITLES = {
    "update": "update: rms of (W_t - W_0) x_t",
    "propagated": "from below: rms of W_0 (x_t - x_0)",
    "output": "mean |output|",
}


@dataclass(frozen=True)
class TermLine:
    """One module in one panel; ``points`` are, by width, the measured values of all seeds that have a logarithm."""

    label: str
    state: str
    colour: str
    points: Mapping[int, Sequence[float]]

    @property
    def widths(self) -> list[int]:
        return sorted(self.points)

    @property
    def means(self) -> list[float]:
        """The middle on a logarithmic axis at each width, ascending."""
        return [geometric_mean(self.points[width]) for width in self.widths]


def kinds() -> list[str]:
    """The possible endings of a file name, without the dot; needs matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


@dataclass(frozen=True)
class WidthSweep:
    """The runs of a sweep and their verdicts.

    Attributes:
        runs: one for each width and seed.
        layers: the modules with their own parameters, in execution order.
        expected: their expected exponents.
        tolerance: of exponents.
        confidence: of the intervals.
        settings: arguments of the sweep, for the records.
        unmeasured: names of trained parameters in no module that is measured; the verdict does not cover them.
    """

    runs: Sequence[SweepRun]
    layers: Mapping[str, Layer]
    expected: Mapping[str, Expected]
    tolerance: float
    confidence: float
    settings: Mapping[str, Any]
    unmeasured: Sequence[str] = ()

    @property
    def widths(self) -> list[int]:
        """The widths, from the smallest."""
        return sorted({run.width for run in self.runs})

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @property
    def steps(self) -> int:
        return len(self.runs[0].steps)

    @functools.cached_property
    def verdicts(self) -> list[LayerVerdict]:
        """The verdicts after the last step."""
        return self.verdicts_at(self.steps)

    def verdicts_at(self, step: int) -> list[LayerVerdict]:
        """The verdicts after ``step`` steps.

        Raises:
            ValueError: there is no such step.
        """
        if not 1 <= step <= self.steps:
            raise ValueError(f"step={step!r} is not one of 1 to {self.steps}")
        measured = ((name, term, series(self.runs, name, term, step)) for name in self.layers for term in TERMS)
        return [self._verdict(name, term, points) for name, term, points in measured if points]

    def _verdict(self, name: str, term: Term, points: dict[int, list[tuple[int, float]]]) -> LayerVerdict:
        # The tolerance covers the bend of lines at small widths, where an exponent differs from that of the limit. Theoretical exponents
        # are multiples of one half, which a tolerance of a quarter distinguishes. A layer has to be shown to be within it: an interval that
        # is too wide passes nothing (a test of equivalence: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680).
        layer, aim = self.layers[name], getattr(self.expected[name], term)
        verdict = functools.partial(LayerVerdict, name, layer.kind, term)
        values = [(f"width {width} with seed {seed}", value) for seed, pairs in points.items() for width, value in pairs]
        nonfinite = [run for run, value in values if not math.isfinite(value)]
        zeros = [run for run, value in values if value == 0.0]
        if nonfinite:
            return verdict("not finite", None, aim, None if aim is None else False, f"not finite at {nonfinite[0]}")
        if len(zeros) == len(values):
            reason = "its parameters do not move" if term == "update" else "its input does not change"
            # what no optimizer has is not meant to move
            return verdict("zero", None, None if layer.lr_exponent is None else aim, None, reason)
        if zeros:
            return verdict("undecided", None, aim, None, f"zero at {zeros[0]}")
        try:
            slope = fit_slope(points, self.confidence)
        except ValueError:  # such as an expert that gets other tokens than at first, and is not measured then
            return verdict("undecided", None, aim, None, f"measured in only {len(values)} runs, in which it ran as at first")
        about = {True: "stable", False: "grows" if slope.exponent > 0 else "vanishes", None: "undecided"}
        state: State = about[within(slope, 0.0, self.tolerance)]  # type: ignore[assignment]
        return verdict(state, slope, aim, None if aim is None else within(slope, aim, self.tolerance))

    @property
    def outcome(self) -> str:
        """``passes``, ``fails`` or ``undecided``."""
        return outcome(self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether every judged term was shown to be as expected."""
        return self.outcome == "passes"

    def of_seeds(self, *seeds: int) -> WidthSweep:
        """The sweep with these seeds only.

        Raises:
            ValueError: no seed is given, or one is not in the sweep.
        """
        strange = [seed for seed in seeds if seed not in self.seeds]
        if strange or not seeds:
            raise ValueError(f"seeds={strange or []!r} are not among {self.seeds}; name one of these or more")
        return replace(self, runs=[run for run in self.runs if run.seed in seeds])

    def words(self) -> str:
        """The verdict in a few sentences, with the remedies."""
        return words(self.verdicts, self.widths[0], self.widths[-1], self.unmeasured)

    def table(self) -> str:
        """A line for each term of each layer, as plain text."""
        return table(self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; numbers that are not finite are None."""
        return {
            "outcome": self.outcome,
            "words": self.words(),
            "settings": dict(self.settings),
            "tolerance": self.tolerance,
            "confidence": self.confidence,
            "unmeasured": list(self.unmeasured),
            "layers": {name: asdict(layer) for name, layer in self.layers.items()},
            "verdicts": [_finite(asdict(verdict)) for verdict in self.verdicts],
            "runs": [_finite(asdict(run)) for run in self.runs],
        }

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the terms over the width into a PNG, or another format by the file name; needs matplotlib.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('a picture needs matplotlib: pip install "torch_gradmon[plot]"') from error
        found, dashes = self.panels(), {"grows": "dashed", "vanishes": "dotted"}
        picture = Figure(figsize=(4.6 * len(found), 4.4), layout="constrained")
        for (title, lines), axes in zip(found.items(), picture.subplots(1, len(found), squeeze=False)[0], strict=True):
            for line in lines:  # geometric means over seeds, and a point for each seed
                style = {"color": line.colour, "linestyle": dashes.get(line.state, "solid"), "label": line.label}
                axes.plot(line.widths, line.means, linewidth=1.6, **style)
                for width in line.widths:
                    axes.plot(
                        [width] * len(line.points[width]), line.points[width], ".", color=line.colour, markersize=3, alpha=0.5
                    )
            ticks = sorted({width for line in lines for width in line.points})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(width) for width in ticks])
            axes.xaxis.minorticks_off()
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("width")
            axes.grid(color=_TEXT, alpha=0.2)
            if lines:
                axes.legend(fontsize=7, frameon=False, ncols=1 + len(lines) // 10)
        picture.savefig(path, dpi=110)

    def figure(self) -> Any:
        """The same as a plotly figure; needs plotly. A click on a module hides it in all panels.

        Raises:
            ImportError: plotly is missing.
        """
        try:
            from plotly.subplots import make_subplots
        except ImportError as error:
            raise ImportError('the figure needs plotly: pip install "torch_gradmon[report]"') from error
        found = self.panels()
        figure = make_subplots(rows=1, cols=len(found), subplot_titles=list(found))
        dashes, named = {"grows": "dash", "vanishes": "dot"}, set[str]()
        for column, lines in enumerate(found.values(), start=1):
            for line in lines:
                name = line.label.split(" ")[0]  # without the exponent, because it stands for the module in all panels
                trace = {
                    "x": line.widths,
                    "y": line.means,
                    "mode": "lines+markers",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": name not in named,
                    "line": {"color": line.colour, "dash": dashes.get(line.state, "solid")},
                    "hovertemplate": f"{line.label} {line.state}<br>width %{{x}}: %{{y:.3g}}<extra></extra>",
                }
                figure.add_scatter(**trace, row=1, col=column)
            named = named or {line.label.split(" ")[0] for line in lines}
        ticks = sorted({width for lines in found.values() for line in lines for width in line.points})
        figure.update_xaxes(type="log", title_text="width", tickvals=ticks, ticktext=list(map(str, ticks)))
        round_numbers = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 2, 5)]
        figure.update_yaxes(type="log", tickvals=round_numbers, ticktext=[f"{number:g}" for number in round_numbers])
        return figure

    def panels(self) -> Mapping[str, Sequence[TermLine]]:
        """The lines of each plotted panel by its title: both terms and the mean of |output| over the width, after the last step."""
        judged: dict[tuple[str, str], LayerVerdict] = {(verdict.module, verdict.term): verdict for verdict in self.verdicts}
        found: dict[str, list[TermLine]] = {}
        for term, title in _TITLES.items():
            lines = found[title] = []
            for name, colour in zip(self.layers, cycle(_COLOURS), strict=False):
                points: dict[int, list[float]] = {}
                for width, value in chain.from_iterable(series(self.runs, name, term, self.steps).values()):
                    if 0.0 < value < math.inf:
                        points.setdefault(width, []).append(value)
                verdict = judged.get((name, term))
                exponent = f" {verdict.slope.exponent:+.2f}" if verdict and verdict.slope else ""
                if points:
                    state = verdict.state if verdict else ""
                    lines.append(TermLine(f"{name or '[model]'}{exponent}", state, colour, points))
        return found


def _finite(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
