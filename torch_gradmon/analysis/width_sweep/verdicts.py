"""From measured terms to a verdict on every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .expected import Expected, Kind, Layer
from .power_law import Slope, fit_slope
from .training import Run

Term = Literal["update", "propagated"]
State = Literal["stable", "grows", "vanishes", "undecided", "zero", "not finite"]
TERMS: tuple[Term, Term] = ("update", "propagated")


@dataclass(frozen=True)
class Verdict:
    """What was found of one term of one module.

    Attributes:
        module: its name; empty for a model that is one layer.
        kind: of the layer, see :class:`~torch_gradmon.analysis.width_sweep.expected.Layer`.
        term: ``update``, (W_t - W_0) x_t, or ``propagated``, W_0 (x_t - x_0).
        state: what it does with the width. ``stable``, ``grows`` and ``vanishes`` are said only where the whole confidence interval of
            the exponent says so: within the tolerance about 0, above, or below; ``undecided`` is the rest.
        slope: the exponent with its interval; None where there is no power law.
        expected: the exponent that it should have; None where it is not judged.
        as_expected: whether the whole interval is within the tolerance about ``expected`` (True) or outside (False); None where it is
            neither, or not judged.
        reason: why there is no slope, in words; empty where there is one.
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
        """Whether it counts: something is expected, and there is something that could have an exponent, or should be."""
        return self.expected is not None and (self.state != "zero" or self.term == "update")


def judge(
    runs: Sequence[Run],
    layers: Mapping[str, Layer],
    expected: Mapping[str, Expected],
    step: int,
    tolerance: float,
    confidence: float,
) -> list[Verdict]:
    """Verdicts on both terms of every layer, in the order in which layers run, after ``step`` steps.

    The tolerance stands for what bends lines at small widths, where an exponent is not yet that of the limit; exponents of theory
    are multiples of one half, so that a quarter tells neighbours apart. Within it a layer has to be *shown* to be: an interval that
    is too wide passes nobody (a test of equivalence: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680, with an interval
    of ``confidence`` on both sides).
    """
    found = []
    for name, layer in layers.items():
        for term in TERMS:
            points = series(runs, name, term, step)
            if points:
                aim = getattr(expected[name], term)
                verdict = _verdict(name, layer.kind, term, points, aim, tolerance, confidence)
                is_idle = verdict.state == "zero" and layer.lr_exponent is None  # nobody wants it to move
                found.append(replace(verdict, expected=None) if is_idle else verdict)
    return found


def series(runs: Sequence[Run], module: str, term: str, step: int) -> dict[int, list[tuple[int, float]]]:
    """By seed, the widths and what was measured there after ``step`` steps: an attribute of :class:`Terms`."""
    points: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        measured = run.steps[step - 1].get(module)
        value = None if measured is None else getattr(measured, term)
        if value is not None:
            points.setdefault(run.seed, []).append((run.width, value))
    return points


def outcome(verdicts: Sequence[Verdict]) -> Literal["passes", "fails", "undecided"]:
    """Of all that is judged: fails with the first that is not as expected, passes only if all are."""
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
) -> Verdict:
    wild = [(width, seed) for seed, pairs in points.items() for width, value in pairs if not math.isfinite(value)]
    if wild:
        reason = f"not finite at width {wild[0][0]} with seed {wild[0][1]}"
        return Verdict(name, kind, term, "not finite", None, aim, None if aim is None else False, reason)
    zeros = [(width, seed) for seed, pairs in points.items() for width, value in pairs if value == 0.0]
    if len(zeros) == sum(map(len, points.values())):
        reason = "its parameters do not move" if term == "update" else "its input does not change"
        return Verdict(name, kind, term, "zero", None, aim, None, reason)
    if zeros:
        return Verdict(name, kind, term, "undecided", None, aim, None, f"zero at width {zeros[0][0]} with seed {zeros[0][1]}")
    try:
        slope = fit_slope(points, confidence)
    except ValueError:  # such as an expert that is given other tokens than at first, and then is not measured
        reason = f"measured in {sum(map(len, points.values()))} runs only, where it ran as at first"
        return Verdict(name, kind, term, "undecided", None, aim, None, reason)
    about = {True: "stable", False: "grows" if slope.exponent > 0 else "vanishes", None: "undecided"}
    state: State = about[within(slope, 0.0, tolerance)]  # type: ignore[assignment]
    return Verdict(name, kind, term, state, slope, aim, None if aim is None else within(slope, aim, tolerance))


def within(slope: Slope, aim: float, tolerance: float) -> bool | None:
    """Whether the interval is within ``tolerance`` about ``aim`` (True), outside (False), or both (None)."""
    if aim - tolerance <= slope.low and slope.high <= aim + tolerance:
        return True
    return False if slope.high < aim - tolerance or slope.low > aim + tolerance else None
