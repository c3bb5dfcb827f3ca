"""Charts as matplotlib figures: for papers and READMEs. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

from ...core.formatting import cut_middle
from . import elements
from .elements import Chart, DepthProfile, Heatmap, Line, LineChart, Subplot, drawable, merged_marks, scale_labels, scale_limit

_WIDTH, _ROW, _SUBPLOT, _SMALL = 10.0, 0.19, 1.5, 1.7
_NAME = 40
#: Ranges of spikes that are drawn.
_MARKS = 200


def figure(chart: Chart) -> Figure:
    """The chart as a figure that belongs to no window: ``figure.savefig("picture.png")``."""
    if isinstance(chart, Heatmap):
        return _heatmap(chart)
    return _profile(chart) if isinstance(chart, DepthProfile) else _lines(chart)


def _label(name: str) -> str:
    """A name for an axis; an unescaped dollar sign would start a formula."""
    return cut_middle(name, _NAME).replace("$", r"\$")


def _row_figure(names: tuple[str, ...], width: float) -> tuple[Figure, Any]:
    """A figure and its axes, with a label for each row and the first row at the top."""
    drawn = Figure(figsize=(width, max(2.6, _ROW * len(names) + 1.1)), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_yticks(range(len(names)), [_label(name) for name in names], fontsize=7)
    return drawn, axes


def _heatmap(heat: Heatmap) -> Figure:
    drawn, axes = _row_figure(heat.rows, _WIDTH)
    edges, rows = heat.grid.edges, [row - 0.5 for row in range(len(heat.rows) + 1)]
    scale, labels = _scale(heat)
    cells = heat.on_grid(heat.shades.tolist(), math.nan)
    mesh = axes.pcolormesh(edges, rows, cells, shading="flat", rasterized=True, **scale)
    for name, colour, special in heat.special_cells(math.nan):
        axes.pcolormesh(edges, rows, special, cmap=ListedColormap([colour]), shading="flat", rasterized=True)
        axes.plot([], [], "s", color=colour, label=name)
    if heat.marks:
        top = [-0.75] * len(heat.marks)
        axes.plot(list(heat.marks), top, "v", color=elements.VERMILION, markersize=6, clip_on=False, label="spike")
    if axes.get_legend_handles_labels()[0]:
        above = 1.4 if heat.marks else 0.5  # the triangles
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), borderaxespad=above, ncols=3, frameon=False, fontsize=8)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xlabel("step")
    axes.set_title(heat.title, loc="left", fontsize=11, pad=14)  # above the triangles
    bar = drawn.colorbar(mesh, ax=axes, pad=0.01)
    if labels:
        bar.set_ticks(list(labels), labels=list(labels.values()))
    elif heat.is_log:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{10**value:.3g}")
    return drawn


def _scale(heat: Heatmap) -> tuple[dict[str, Any], dict[float, str]]:
    """The colour scale and its labels; no labels if colours are the values."""
    if heat.medians is None:
        return {"cmap": elements.SCALE.lower()}, {}
    most = scale_limit(heat.shades, heat.is_log)
    scale = {"cmap": LinearSegmentedColormap.from_list("diverging", elements.DIVERGING), "vmin": -most, "vmax": most}
    return scale, scale_labels(most, heat.is_log)


def _profile(profile: DepthProfile) -> Figure:
    drawn, axes = _row_figure(profile.rows, _WIDTH * 0.7)
    rows = list(range(len(profile.rows)))
    values = drawable(profile.values, profile.is_log)
    axes.hlines(rows, profile.low, profile.high, color=elements.SKY, linewidth=5, alpha=0.45, label="all steps")
    axes.plot(values, rows, "o-", color=elements.BLUE, linewidth=1, markersize=4, label="this step")
    level, odd = profile.nonfinite
    if odd:
        axes.plot(level, odd, "x", color=elements.NONFINITE, label=elements.NOT_FINITE)
    if profile.is_log:
        axes.set_xscale("log")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(profile.title, loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return drawn


def _lines(chart: LineChart) -> Figure:
    count, columns = chart.layout
    small = columns > 1
    height = count * _SMALL if small else sum(subplot.height for subplot in chart.subplots) * _SUBPLOT
    drawn = Figure(figsize=(_WIDTH, max(2.6, height + 0.6)), layout="constrained")
    ratios = None if small else [subplot.height for subplot in chart.subplots]
    places = drawn.subplots(count, columns, sharex=True, squeeze=False, height_ratios=ratios).flat
    for place, axes in enumerate(places):
        if place >= len(chart.subplots):
            axes.set_visible(False)
            continue
        _draw_subplot(axes, chart.subplots[place], small)
        for first, last in merged_marks(chart.marks, _MARKS):
            if first == last:
                axes.axvline(first, color=elements.VERMILION, linewidth=0.8, linestyle=":", alpha=0.7)
            else:
                axes.axvspan(first, last, color=elements.VERMILION, linewidth=0, alpha=0.2)
    drawn.suptitle(chart.title, x=0.01, ha="left", fontsize=11)
    drawn.supxlabel("step", fontsize=9)
    return drawn


def _draw_subplot(axes: Any, subplot: Subplot, small: bool) -> None:
    for line in subplot.lines:
        _draw_line(axes, line, subplot.is_log)
    for text, value in subplot.guides.items():
        axes.axhline(value, color=elements.GREEN, linewidth=0.9, linestyle="--", label=text)
    for text, (low, high) in subplot.bands.items():
        axes.axhspan(low, high, color=elements.GREEN, alpha=0.12, linewidth=0, label=text)
    if subplot.is_log:
        axes.set_yscale("log")
    if subplot.limits is not None:
        axes.set_ylim(*subplot.limits)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=7)
    if small:
        axes.set_title(_label(subplot.title), fontsize=8)
    else:
        axes.set_ylabel(subplot.title, fontsize=8)
        if len(subplot.lines) + len(subplot.guides) + len(subplot.bands) > 1:
            axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper right")


def _draw_line(axes: Any, line: Line, is_log: bool) -> None:
    if line.low is not None and line.high is not None:
        steps, low = line.chained(line.low, is_log)
        _, high = line.chained(line.high, is_log)
        axes.fill_between(steps, low, high, color=line.colour, alpha=0.35, linewidth=0, label=line.name)
        return
    width = 0.9 if line.is_thin else 1.3
    style = {"color": line.colour, "linewidth": width, "linestyle": "--" if line.is_dashed else "-", "label": line.name}
    axes.plot(*line.chained(line.series, is_log), **style)
    if len(alone := line.lone_points):
        axes.plot(alone.steps, drawable(alone.values, is_log), ".", color=line.colour, markersize=3)
    odd, level = line.nonfinite(is_log)
    if odd:
        axes.plot(odd, level, "x", color=elements.NONFINITE, markersize=5, label=elements.NOT_FINITE)
