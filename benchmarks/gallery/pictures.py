"""Pictures of the gallery: small enough for a page, drawn by matplotlib in the colours of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch_gradmon as gradmon
from torch_gradmon.analysis.plots.elements import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Title and key.
_SIGNALS = {"loss": "loss", "gradient norm": "gradmon/grad_norm", "update ratio": "gradmon/update_ratio"}
_COLOURS = {"faulty": VERMILION, "cured": BLUE, "healthy": BLUE}
#: Ticks at 1, 2 and 5 are labelled over this many times the smallest value at most; powers of ten alone above it.
_LABELLED = 200.0
#: From this many times the smallest value on, an axis is logarithmic: below, it may have no round number on it.
_LOGARITHMIC = 5.0
#: Rules that compare layers with each other: their maps show the norms, those of the others how each layer changes.
OVER_DEPTH = {"initialisation-scale", "vanishing-gradients", "exploding-gradients"}


def series(run: gradmon.Run, key: str) -> dict[int, float]:
    """The values of a key by step; none where the run does not have it."""
    return run.series(key) if key in run.keys() else {}  # noqa: SIM118 (a method of the run)


def drawn(runs: Mapping[str, gradmon.Run]) -> Figure:
    """Loss, gradient norm and update ratio of some runs over each other; NaN and infinity are marked at the top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), dpi=90, layout="constrained")
    for axis, (title, key) in zip(figure.subplots(1, len(_SIGNALS)), _SIGNALS.items(), strict=True):
        shown: list[float] = []
        for number, (name, run) in enumerate(runs.items()):
            colour = _COLOURS[name]
            values = series(run, key)
            finite = {step: value for step, value in values.items() if math.isfinite(value)}
            shown += finite.values()
            axis.plot(
                list(finite),
                list(finite.values()),
                color=colour,
                label=name,
                linestyle=("-", "--")[number],  # where both are the same, both are seen
                linewidth=1.2,
                marker="." if len(finite) < 30 else "",
            )
            if bad := [step for step in values if step not in finite]:
                axis.plot(
                    bad, [1.0] * len(bad), "x", color=colour, transform=axis.get_xaxis_transform(), clip_on=False, markersize=4
                )
        _scale(axis, [value for value in shown if value > 0])
        if not shown:
            axis.text(0.5, 0.5, "no value", transform=axis.transAxes, ha="center", va="center", fontsize=8, color="grey")
            axis.set(xticks=(), yticks=())
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    return figure


def _scale(axis: Axes, positive: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not positive or max(positive) < _LOGARITHMIC * min(positive):
        return
    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    if max(positive) <= _LABELLED * min(positive):
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def signals(path: Path, runs: Mapping[str, gradmon.Run]) -> None:
    """Draw them into ``path``."""
    drawn(runs).savefig(path)


def layers(path: Path, run: gradmon.Run, relative: bool) -> None:
    """Draw the heat map of a run's layers over its steps into ``path``: relative to the row's median, or the norms themselves."""
    figure = run.plot("heatmap", engine="matplotlib", rows=16, relative=relative)
    figure.set_dpi(80)
    figure.savefig(path, dpi=80)
