"""Plots of a sweep: each layer is a line over the width, with logarithmic axes. Needs matplotlib, or plotly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .expected import Layer
from .training import SweepRun
from .verdicts import TERMS, LayerVerdict, series

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
    """One module in one panel.

    Attributes:
        label: its name, with the exponent if one was fitted.
        state: of its verdict; empty in the panel of outputs.
        colour: the same in all panels.
        points: by width, the measured values of all seeds that have a logarithm.
    """

    label: str
    state: str
    colour: str
    points: Mapping[int, Sequence[float]]

    @property
    def name(self) -> str:
        """The module, without its exponent."""
        return self.label.split(" ")[0]

    @property
    def means(self) -> list[float]:
        """The geometric mean at each width, ascending."""
        return [middle_of(self.points[width]) for width in sorted(self.points)]


@dataclass(frozen=True)
class TermPanel:
    """One quantity of all modules."""

    title: str
    lines: Sequence[TermLine]


def panels(runs: Sequence[SweepRun], layers: Mapping[str, Layer], verdicts: Sequence[LayerVerdict], step: int) -> list[TermPanel]:
    """The panels of the runs after ``step`` steps."""
    judged = {(verdict.module, verdict.term): verdict for verdict in verdicts}
    found = []
    for term in (*TERMS, "output"):
        lines = []
        for place, name in enumerate(layers):
            points: dict[int, list[float]] = {}
            for pairs in series(runs, name, term, step).values():
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


def draw(found: Sequence[TermPanel], path: str | Path) -> None:
    """Write the panels side by side to a file.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "torch_gradmon[plot]"') from error
    picture = Figure(figsize=(4.6 * len(found), 4.4), layout="constrained")
    for panel, axes in zip(found, picture.subplots(1, len(found), squeeze=False)[0], strict=True):
        draw_panel(axes, panel)
    picture.savefig(path, dpi=110)


def kinds() -> list[str]:
    """The possible endings of a file name, without the dot; needs matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def draw_panel(axes: Any, panel: TermPanel, legend: bool = True) -> None:
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
    if legend and panel.lines:
        axes.legend(fontsize=7, frameon=False, ncols=1 + len(panel.lines) // 10)


def interactive(found: Sequence[TermPanel]) -> Any:
    """The panels as one plotly figure; a click on a module hides it in all.

    Raises:
        ImportError: plotly is missing.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError('the figure needs plotly: pip install "torch_gradmon[report]"') from error
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


def _widths(found: Sequence[TermPanel]) -> list[int]:
    return sorted({width for panel in found for line in panel.lines for width in line.points})


def middle_of(values: Sequence[float]) -> float:
    """The geometric mean, which is the middle on a logarithmic axis."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
