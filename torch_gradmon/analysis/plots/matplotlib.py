"""Charts as matplotlib figures: for papers, for READMEs, and where nothing interactive is shown. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

from ..diagnosis.series import Series
from . import colours
from .elements import Chart, Heat, Line, Lines, Profile, Strip, cut, guide, spans
from .shading import ends, limit

_WIDTH, _ROW, _STRIP, _SMALL = 10.0, 0.19, 1.5, 1.7
_NAME = 40
#: Stretches of steps with a spike that are told apart.
_MARKS = 200


def drawing(chart: Chart) -> Figure:
    """The chart as a figure, which belongs to no window: ``figure.savefig("picture.png")``."""
    if isinstance(chart, Heat):
        return _heat(chart)
    return _profile(chart) if isinstance(chart, Profile) else _lines(chart)


def _plain(name: str) -> str:
    """A name on an axis: a dollar sign would begin a formula."""
    return cut(name, _NAME).replace("$", r"\$")


def _heat(heat: Heat) -> Figure:
    drawn = Figure(figsize=(_WIDTH, max(2.6, _ROW * len(heat.rows) + 1.1)), layout="constrained")
    axes = drawn.add_subplot()
    edges = heat.grid.edges
    rows = [row - 0.5 for row in range(len(heat.rows) + 1)]
    scale, words = _scale(heat)
    mesh = axes.pcolormesh(edges, rows, _laid(heat, heat.shades.tolist()), shading="flat", rasterized=True, **scale)
    loud = _laid(heat, [[1.0 if math.isinf(value) else math.nan for value in row] for row in heat.values])
    if any(cell == 1.0 for row in loud for cell in row):
        axes.pcolormesh(edges, rows, loud, cmap=ListedColormap([colours.LOUD]), shading="flat", rasterized=True)
        axes.plot([], [], "s", color=colours.LOUD, label="NaN or infinite")
    if heat.marks:
        top = [-0.75] * len(heat.marks)
        axes.plot(list(heat.marks), top, "v", color=colours.VERMILION, markersize=6, clip_on=False, label="spike")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.01), ncols=2, frameon=False, fontsize=8)
    axes.set_yticks(range(len(heat.rows)), [_plain(name) for name in heat.rows], fontsize=7)
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xlabel("step")
    axes.set_title(heat.title, loc="left", fontsize=11, pad=14)  # above the triangles
    bar = drawn.colorbar(mesh, ax=axes, pad=0.01)
    if words:
        bar.set_ticks(list(words), labels=list(words.values()))
    elif heat.is_log:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{10**value:.3g}")
    return drawn


def _laid(heat: Heat, cells: list[list[float]]) -> list[list[float]]:
    """The columns of the picture: those of ``cells``, and NaN where nothing was measured."""
    return [[math.nan if place is None else row[place] for place in heat.grid.places] for row in cells]


def _scale(heat: Heat) -> tuple[dict[str, Any], dict[float, str]]:
    """The colours, and what stands beside them; nothing where that is the value."""
    if heat.medians is None:
        return {"cmap": colours.SCALE.lower()}, {}
    most = limit(heat.shades, heat.is_log)
    return {"cmap": LinearSegmentedColormap.from_list("around", colours.AROUND), "vmin": -most, "vmax": most}, ends(
        most, heat.is_log
    )


def _profile(profile: Profile) -> Figure:
    drawn = Figure(figsize=(_WIDTH * 0.7, max(2.6, _ROW * len(profile.rows) + 1.1)), layout="constrained")
    axes = drawn.add_subplot()
    rows = list(range(len(profile.rows)))
    axes.hlines(rows, profile.low, profile.high, color=colours.SKY, linewidth=5, alpha=0.45, label="all steps")
    axes.plot(
        _drawable(profile.values, profile.is_log), rows, "o-", color=colours.BLUE, linewidth=1, markersize=4, label="this step"
    )
    odd = [row for row, value in zip(rows, profile.values, strict=True) if math.isinf(value)]
    if odd:
        level = max((value for value in profile.high if math.isfinite(value)), default=1.0)
        axes.plot([level] * len(odd), odd, "x", color=colours.LOUD, label="NaN or infinite")
    if profile.is_log:
        axes.set_xscale("log")
    axes.set_yticks(rows, [_plain(name) for name in profile.rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(profile.title, loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return drawn


def _lines(lines: Lines) -> Figure:
    columns = min(lines.columns, len(lines.strips))
    count = -(-len(lines.strips) // columns)
    small = columns > 1
    height = count * _SMALL if small else sum(strip.height for strip in lines.strips) * _STRIP
    drawn = Figure(figsize=(_WIDTH, max(2.6, height + 0.6)), layout="constrained")
    ratios = None if small else [strip.height for strip in lines.strips]
    grid = drawn.subplots(count, columns, sharex=True, squeeze=False, height_ratios=ratios)
    places = [axes for row in grid for axes in row]
    for axes in places[len(lines.strips) :]:
        axes.set_visible(False)
    for strip, axes in zip(lines.strips, places, strict=False):
        _strip(axes, strip, small)
        for first, last in spans(lines.marks, _MARKS):
            if first == last:
                axes.axvline(first, color=colours.VERMILION, linewidth=0.8, linestyle=":", alpha=0.7)
            else:
                axes.axvspan(first, last, color=colours.VERMILION, linewidth=0, alpha=0.2)
    drawn.suptitle(lines.title, x=0.01, ha="left", fontsize=11)
    drawn.supxlabel("step", fontsize=9)
    return drawn


def _strip(axes: Any, strip: Strip, small: bool) -> None:
    for line in strip.lines:
        _line(axes, line, strip.is_log)
    for name, value in strip.guides.items():
        axes.axhline(value, color=colours.GREEN, linewidth=0.9, linestyle="--", label=guide(name, value))
    if strip.is_log:
        axes.set_yscale("log")
    if strip.limits is not None:
        axes.set_ylim(*strip.limits)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=7)
    if small:
        axes.set_title(_plain(strip.title), fontsize=8)
    else:
        axes.set_ylabel(strip.title, fontsize=8)
        if len(strip.lines) + len(strip.guides) > 1:
            axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper right")


def _line(axes: Any, line: Line, is_log: bool) -> None:
    if line.low is not None and line.high is not None:
        steps, low = _chained(line, line.low, is_log)
        _, high = _chained(line, line.high, is_log)
        axes.fill_between(steps, low, high, color=line.colour, alpha=0.35, linewidth=0, label=line.name)
        return
    width = 0.9 if line.is_thin else 1.3
    style = {"color": line.colour, "linewidth": width, "linestyle": "--" if line.is_dashed else "-", "label": line.name}
    axes.plot(*_chained(line, line.series, is_log), **style)
    alone = [piece for piece in line.pieces(line.series) if len(piece) == 1]
    if alone:  # no line passes these
        points = [piece.steps[0] for piece in alone], _drawable(tuple(piece.values[0] for piece in alone), is_log)
        axes.plot(*points, ".", color=line.colour, markersize=3)
    odd = Series(*_odd(line.series))
    if len(odd):
        level = max((value for value in line.series.finite.values if value > 0 or not is_log), default=1.0)
        axes.plot(list(odd.steps), [level] * len(odd), "x", color=colours.LOUD, markersize=5, label="NaN or infinite")


def _chained(line: Line, series: Series, is_log: bool) -> tuple[list[float], list[float]]:
    """Steps and values, and NaN in the gaps, over which nothing is drawn."""
    steps, values = list[float](), list[float]()
    for piece in line.pieces(series):
        steps += [*([math.nan] if steps else []), *piece.steps]
        values += [*([math.nan] if values else []), *_drawable(piece.values, is_log)]
    return steps, values


def _odd(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    pairs = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
    return tuple(step for step, _ in pairs), tuple(value for _, value in pairs)


def _drawable(values: tuple[float, ...], is_log: bool) -> list[float]:
    return [value if math.isfinite(value) and (value > 0 or not is_log) else math.nan for value in values]
