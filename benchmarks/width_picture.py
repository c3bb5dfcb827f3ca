"""A picture of the sweeps: the own update of each kind of layer over the width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure

from torch_gradmon.analysis.width_sweep import WidthSweep
from torch_gradmon.analysis.width_sweep.result import series

#: Okabe & Ito's colours, which colour-blind people can distinguish.
_COLOURS = {"input": "#0072b2", "vector": "#8b949e", "hidden": "#e69f00", "output": "#d55e00"}
#: By column and row: the case and its title.
_PLACES = (
    (("mlp_standard", "Perceptron, standard, Adam"), ("mlp_mup", "Perceptron, muP, Adam")),
    (("transformer_standard", "Transformer, standard, Adam"), ("transformer_mup", "Transformer, muP, Adam")),
    (
        ("cross_entropy", "Perceptron, SGD, rate ~ width^-1/2,\ncross-entropy: only the logits diverge"),
        ("squared_error", "Perceptron, SGD, rate ~ width^-1/2,\nsquared error: hidden layers diverge too"),
    ),
)


def draw(found: Mapping[str, tuple[str, WidthSweep]], path: Path) -> None:
    """Write a panel for each of the cases that have a place; a line is a layer, its value relative to that at the smallest width."""
    picture = Figure(figsize=(11.5, 6.6), layout="constrained")
    axes = picture.subplots(2, len(_PLACES), sharex=True, sharey="col")
    for column, places in enumerate(_PLACES):
        for row, (name, title) in enumerate(places):
            if name in found:
                _panel(axes[row, column], found[name][1], title)
        axes[1, column].set_xlabel("width")
    axes[0, 0].set_ylabel("rms of (W_t - W_0) x_t,\nrelative to the smallest width")
    axes[1, 0].set_ylabel("rms of (W_t - W_0) x_t,\nrelative to the smallest width")
    picture.savefig(path, dpi=90, metadata={"Software": None})


def _panel(axes: Any, sweep: WidthSweep, title: str) -> None:
    slopes = {verdict.module: verdict.slope for verdict in sweep.verdicts if verdict.term == "update"}
    for kind, colour in _COLOURS.items():
        names = [name for name, layer in sweep.layers.items() if layer.kind == kind]
        exponents = [slope.exponent for name in names if (slope := slopes.get(name)) is not None]
        if not exponents:
            continue
        low, high = min(exponents), max(exponents)
        ends = sorted({f"{low:+.2f}", f"{high:+.2f}"}, key=float)
        label = f"{kind} {' to '.join(ends)}"
        for place, name in enumerate(names):
            by_width: dict[int, list[float]] = {}
            for pairs in series(sweep.runs, name, "update", sweep.steps).values():
                for width, value in pairs:
                    by_width.setdefault(width, []).append(value)
            middle = [geometric_mean(by_width[width]) for width in sweep.widths]
            relative = [value / middle[0] for value in middle]
            axes.plot(
                sweep.widths, relative, "o-", color=colour, markersize=3, linewidth=1.5, label=label if place == 0 else None
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sweep.widths, [str(width) for width in sweep.widths])
    axes.axhline(1.0, color="#757d87", linewidth=0.8, zorder=0)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False, title="exponent of the width", title_fontsize=8)
