"""The result of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ...core.formatting import listed
from .recipe import SweepRun
from .verdicts import TERMS, Expected, Layer, LayerVerdict, judge, outcome, series

# --- The verdicts as sentences and as a table ---

HEADINGS = ("module", "kind", "term", "exponent", "interval", "expected", "")
_NAMES = {"update": "(W_t-W_0)x_t", "propagated": "W_0(x_t-x_0)"}
_MOST = 4


def rows(verdicts: Sequence[LayerVerdict]) -> list[tuple[str, ...]]:
    return [
        (
            verdict.module or "[model]",
            verdict.kind,
            _NAMES[verdict.term],
            f"{verdict.slope.exponent:+.2f}" if verdict.slope else "-",
            f"{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}" if verdict.slope else "-",
            "any" if verdict.expected is None else f"{verdict.expected:+.2f}",
            _verdict_text(verdict),
        )
        for verdict in verdicts
    ]


def table(verdicts: Sequence[LayerVerdict]) -> str:
    lines = [HEADINGS, *rows(verdicts)]
    sizes = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)).rstrip() for line in lines)


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
    if len(still) == len(judged):
        return "\n".join(
            [
                "Undecided: no judged term has moved. Is the learning rate zero, or everything frozen?",
                *_unmeasured_note(unmeasured),
            ]
        )
    head = {
        "passes": f"Passes: all {len(judged)} terms have the expected exponent from width {smallest} to {largest}.",
        "fails": f"Fails: {len(bad)} of {len(judged)} terms do not have the expected exponent from width {smallest} to {largest}.",
        "undecided": f"Undecided: {len(unclear) + len(still)} of {len(judged)} terms could still be either way.",
    }[outcome(verdicts)]
    lines = [head, *_failures(bad)]
    if unclear:
        lines.append(f"Undecided in {_listed(unclear)}: give more seeds, or larger widths.")
    if still:
        lines.append(
            f"Not moved: {_listed(still)}; an update of zero cannot be judged. Give more steps, or check whether a gradient arrives "
            "there."
        )
    if _only_logits_grow(verdicts):
        lines.append(
            "Hidden layers move as much in wide models as in narrow ones while the outputs grow: with cross-entropy this can still train "
            "(controlled divergence, arXiv 2505.22491), with squared error it does not."
        )
    return "\n".join([*lines, *_unmeasured_note(unmeasured)])


def _unmeasured_note(unmeasured: Sequence[str]) -> list[str]:
    if not unmeasured:
        return []
    return [
        f"Not measured, and not judged: {listed(unmeasured, _MOST)}; no module with these parameters is called and returns a tensor."
    ]


def _failures(bad: Sequence[LayerVerdict]) -> list[str]:
    groups: dict[tuple[str, str, bool], list[LayerVerdict]] = {}
    for verdict in bad:
        side = "not finite" if verdict.slope is None else "high" if verdict.slope.exponent > (verdict.expected or 0.0) else "low"
        adding = verdict.term == "propagated" and verdict.kind == "output"
        groups.setdefault((verdict.term, side, adding), []).append(verdict)
    return [_failure(term, side, adding, group) for (term, side, adding), group in groups.items()]


def _failure(term: str, side: str, adding: bool, group: Sequence[LayerVerdict]) -> str:
    where = _listed(group)
    if side == "not finite":
        return f"Training diverged in {where}."
    if term == "update":
        if side == "high":
            return f"The own update is too large in wide models in {where}: divide the learning rate there by that power of the width."
        return f"The own update vanishes in wide models in {where}: multiply the learning rate there by the missing power of the width."
    if side == "high" and adding:
        return (
            f"The changes of the layers below add up in {where}: if their updates are stable, start with smaller output weights (muP: of "
            "size 1/width)."
        )
    more = "too much" if side == "high" else "too little"
    return f"The layers below contribute {more} in wide models in {where}: check their updates first."


def _listed(verdicts: Sequence[LayerVerdict]) -> str:
    return listed([f"{verdict.module or '[model]'}{_power(verdict)}" for verdict in verdicts], _MOST)


def _power(verdict: LayerVerdict) -> str:
    if verdict.slope is None:
        return f" ({verdict.reason})"
    instead = f" instead of {verdict.expected:+.2f}" if verdict.expected else ""
    if verdict.as_expected is None:
        return f" ({_NAMES[verdict.term]}: width^{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}{instead})"
    return f" (width^{verdict.slope.exponent:+.2f}{instead})"


def _only_logits_grow(verdicts: Sequence[LayerVerdict]) -> bool:
    updates = [verdict for verdict in verdicts if verdict.term == "update"]
    hidden = [verdict.state for verdict in updates if verdict.kind == "hidden"]
    return bool(hidden) and set(hidden) == {"stable"} and any(v.state == "grows" for v in verdicts if v.kind == "output")


# --- Plots ---

#: Medium greys and colours have enough contrast on white and on black pages; the colours are those of Okabe & Ito.
_TEXT = "#757d87"
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8b949e", "#b5a300")
_TITLES = {
    "update": "update: rms of (W_t - W_0) x_t",
    "propagated": "from below: rms of W_0 (x_t - x_0)",
    "output": "mean |output|",
}
_DASHES = {"stable": "solid", "grows": "dashed", "vanishes": "dotted"}


@dataclass(frozen=True)
class TermLine:
    """One module in one panel; ``points`` are, by width, the measured values of all seeds that have a logarithm."""

    label: str
    state: str
    colour: str
    points: Mapping[int, Sequence[float]]

    @property
    def name(self) -> str:
        return self.label.split(" ")[0]

    @property
    def means(self) -> list[float]:
        """The middle on a logarithmic axis at each width, ascending."""
        return [geometric_mean(self.points[width]) for width in sorted(self.points)]


@dataclass(frozen=True)
class TermPanel:
    title: str
    lines: Sequence[TermLine]


def kinds() -> list[str]:
    """The possible endings of a file name, without the dot; needs matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def _draw_panel(axes: Any, panel: TermPanel) -> None:
    """Draw one panel on matplotlib axes: geometric means over seeds, and a point for each seed.

    Lines that grow are dashed, those that vanish dotted.
    """
    for line in panel.lines:
        widths = sorted(line.points)
        axes.plot(
            widths, line.means, color=line.colour, linestyle=_DASHES.get(line.state, "solid"), linewidth=1.6, label=line.label
        )
        for width in widths:
            axes.plot([width] * len(line.points[width]), line.points[width], ".", color=line.colour, markersize=3, alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = _widths([panel])
    axes.set_xticks(ticks, [str(width) for width in ticks])
    axes.xaxis.minorticks_off()
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("width")
    axes.grid(color=_TEXT, alpha=0.2)
    if panel.lines:
        axes.legend(fontsize=7, frameon=False, ncols=1 + len(panel.lines) // 10)


def _widths(found: Sequence[TermPanel]) -> list[int]:
    return sorted({width for panel in found for line in panel.lines for width in line.points})


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

    @cached_property
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
        return judge(self.runs, self.layers, self.expected, step, self.tolerance, self.confidence)

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
        found = self.panels()
        picture = Figure(figsize=(4.6 * len(found), 4.4), layout="constrained")
        for panel, axes in zip(found, picture.subplots(1, len(found), squeeze=False)[0], strict=True):
            _draw_panel(axes, panel)
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
        figure = make_subplots(rows=1, cols=len(found), subplot_titles=[panel.title for panel in found])
        dashes = {"grows": "dash", "vanishes": "dot"}
        for column, panel in enumerate(found, start=1):
            for line in panel.lines:
                trace = {
                    "x": sorted(line.points),
                    "y": line.means,
                    "mode": "lines+markers",
                    "name": line.name,  # without the exponent, because it stands for the module in all panels
                    "legendgroup": line.name,
                    "showlegend": column == 1 or line.name not in {first.name for first in found[0].lines},
                    "line": {"color": line.colour, "dash": dashes.get(line.state, "solid")},
                    "hovertemplate": f"{line.label} {line.state}<br>width %{{x}}: %{{y:.3g}}<extra></extra>",
                }
                figure.add_scatter(**trace, row=1, col=column)
        ticks = _widths(found)
        figure.update_xaxes(type="log", title_text="width", tickvals=ticks, ticktext=[str(width) for width in ticks])
        round_numbers = [float(f"{digit}e{power}") for power in range(-12, 13) for digit in (1, 2, 5)]
        figure.update_yaxes(type="log", tickvals=round_numbers, ticktext=[f"{number:g}" for number in round_numbers])
        return figure

    def panels(self) -> list[TermPanel]:
        """The plotted panels: both terms and the mean of |output| over the width, after the last step."""
        judged = {(verdict.module, verdict.term): verdict for verdict in self.verdicts}
        found = []
        for term in (*TERMS, "output"):
            lines = []
            for place, name in enumerate(self.layers):
                points: dict[int, list[float]] = {}
                for pairs in series(self.runs, name, term, self.steps).values():
                    for width, value in pairs:
                        if 0.0 < value < math.inf:
                            points.setdefault(width, []).append(value)
                verdict = judged.get((name, term))  # type: ignore[arg-type]
                if points:
                    exponent = f" {verdict.slope.exponent:+.2f}" if verdict and verdict.slope else ""
                    state = verdict.state if verdict else ""
                    lines.append(TermLine(f"{name or '[model]'}{exponent}", state, _COLOURS[place % len(_COLOURS)], points))
            found.append(TermPanel(_TITLES[term], lines))
        return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
