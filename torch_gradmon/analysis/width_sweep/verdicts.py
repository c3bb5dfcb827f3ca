"""From measured terms to a verdict on every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .expected import Expected, Kind, Layer
from .power_law import Slope, fit_slope
from .training import SweepRun

Term = Literal["update", "propagated"]
State = Literal["stable", "grows", "vanishes", "undecided", "zero", "not finite"]
TERMS: tuple[Term, Term] = ("update", "propagated")


@dataclass(frozen=True)
class LayerVerdict:
    """The verdict on one term of one module.

    Attributes:
        module: its name; empty for a model that is one layer.
        kind: of the layer, see :class:`~torch_gradmon.analysis.width_sweep.expected.Layer`.
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
    nonfinite = [(width, seed) for seed, pairs in points.items() for width, value in pairs if not math.isfinite(value)]
    if nonfinite:
        reason = f"not finite at width {nonfinite[0][0]} with seed {nonfinite[0][1]}"
        return LayerVerdict(name, kind, term, "not finite", None, aim, None if aim is None else False, reason)
    zeros = [(width, seed) for seed, pairs in points.items() for width, value in pairs if value == 0.0]
    if len(zeros) == sum(map(len, points.values())):
        reason = "its parameters do not move" if term == "update" else "its input does not change"
        return LayerVerdict(name, kind, term, "zero", None, aim, None, reason)
    if zeros:
        return LayerVerdict(
            name, kind, term, "undecided", None, aim, None, f"zero at width {zeros[0][0]} with seed {zeros[0][1]}"
        )
    try:
        slope = fit_slope(points, confidence)
    except ValueError:  # such as an expert that gets other tokens than at first, and is not measured then
        reason = f"measured in only {sum(map(len, points.values()))} runs, in which it ran as at first"
        return LayerVerdict(name, kind, term, "undecided", None, aim, None, reason)
    about = {True: "stable", False: "grows" if slope.exponent > 0 else "vanishes", None: "undecided"}
    state: State = about[within(slope, 0.0, tolerance)]  # type: ignore[assignment]
    return LayerVerdict(name, kind, term, state, slope, aim, None if aim is None else within(slope, aim, tolerance))


def within(slope: Slope, aim: float, tolerance: float) -> bool | None:
    """True if the interval is within ``tolerance`` about ``aim``, False if it is outside, None if it is both."""
    if aim - tolerance <= slope.low and slope.high <= aim + tolerance:
        return True
    return False if slope.high < aim - tolerance or slope.low > aim + tolerance else None
