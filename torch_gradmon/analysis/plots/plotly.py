"""Charts as plotly figures: for notebooks, dashboards and the report. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ...core.formatting import cut_middle
from ..diagnosis.series import Series
from . import elements
from .elements import Chart, DepthProfile, Heatmap, Line, LineChart, Subplot, chain, drawable, merged_marks

# --- Common to all figures ---

#: Pixels of a row of a heat map or profile, and of the smallest figure.
ROW, LEAST = 17, 300
#: Characters of a name on an axis.
_NAME = 34


def short(name: str) -> str:
    return escaped(cut_middle(name, _NAME))


def escaped(text: str) -> str:
    """``text`` for plotly, which interprets some HTML tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def row_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis with a label for each row and the first row at the top, also if all rows are empty."""
    rows = len(names)
    return {
        "tickvals": list(range(rows)),
        "ticktext": [short(name) for name in names],
        "range": [rows - 0.5, -0.5],
        "automargin": True,
    }


def framed(figure: go.Figure, title: str, height: int) -> go.Figure:
    figure.update_layout(
        title={"text": escaped(title), "font": {"size": 15}},
        height=height,
        margin={"l": 60, "r": 20, "t": 48, "b": 44},
        template="plotly_white",
        hovermode="closest",
        modebar={"remove": ["sendChartToCloud"]},  # the data stays on this machine
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.0, "xanchor": "left"},
    )
    return figure


# --- Heat maps ---


def heatmap_figure(heat: Heatmap) -> go.Figure:
    rows = list(range(len(heat.rows)))  # numbers, because two layers may have the same short name
    steps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(heat.first, heat.last, strict=True)]
    texts = [
        [f"{escaped(name)}<br>{when}: {text}" for when, text in zip(steps, row, strict=True)]
        for name, row in zip(heat.rows, heat.texts(heat.medians), strict=True)
    ]
    digits = 4 if heat.is_log else 5
    shades = [[None if math.isnan(shade) else round(shade, digits) for shade in row] for row in heat.shades.tolist()]
    common = {
        "x": list(heat.grid.edges),
        "y": rows,
        "text": heat.on_grid(texts, "nothing was measured here"),
        "hovertemplate": "%{text}<extra></extra>",
    }
    figure = go.Figure()
    figure.add_heatmap(**common, z=heat.on_grid(shades, None), name="value", **_scale(heat))
    for name, colour, cells in heat.special_cells(None):
        figure.add_heatmap(**common, z=cells, colorscale=[[0, colour], [1, colour]], showscale=False, name=name)
        # a map has no entry in the legend
        square = {"symbol": "square", "size": 10, "color": colour}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=square, name=name, showlegend=True, hoverinfo="skip")
    if heat.marks and heat.first:
        triangle = {"symbol": "triangle-down", "size": 9, "color": elements.VERMILION}
        shown = {"hovertemplate": "spike in step %{x}<extra></extra>", "showlegend": False, "cliponaxis": False}
        above = {"x": list(heat.marks), "y": [1.0] * len(heat.marks), "yaxis": "y2"}
        figure.add_scatter(**above, mode="markers", marker=triangle, name="spike", **shown)
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1.0], "visible": False, "fixedrange": True})
    bare = {"showgrid": False, "zeroline": False}
    figure.update_layout(yaxis={**row_axis(heat.rows), **bare})
    figure.update_xaxes(title_text="step", **bare)
    return framed(figure, heat.title, max(LEAST, ROW * len(rows) + 110))


def _scale(heat: Heatmap) -> dict[str, Any]:
    bar: dict[str, Any] = {"title": {"text": "", "side": "right"}, "thickness": 14}
    if heat.medians is not None:
        most = elements.scale_limit(heat.shades, heat.is_log)
        labels = elements.scale_labels(most, heat.is_log)
        bar |= {"tickvals": list(labels), "ticktext": list(labels.values())}
        return {"colorscale": [list(stop) for stop in elements.DIVERGING], "zmin": -most, "zmax": most, "colorbar": bar}
    if heat.is_log:
        known = heat.shades[heat.shades.isfinite()].tolist()
        low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (0, -1)
        marks = list(range(low, high + 1, max((high - low) // 6, 1)))
        bar |= {"tickvals": marks, "ticktext": [f"1e{mark}" for mark in marks]} if marks else {}
    return {"colorscale": elements.SCALE, "colorbar": bar}


# --- Lines and profiles ---

#: Pixels of a subplot, and of a small one among several columns.
_SUBPLOT, _SMALL = 170, 190
#: A logarithmic axis spans at least this factor; otherwise a flat line has no ticks beside it.
_FLAT = 1.2
#: An axis of more powers of ten has no ticks between them.
_MANY_DECADES = 2.5
#: Ranges of spikes that are drawn, and in a small subplot.
_MARKS, _FEW_MARKS = 200, 60
#: The size of a point without a line.
_POINT = 4


def figure(chart: Chart) -> go.Figure:
    if isinstance(chart, Heatmap):
        return heatmap_figure(chart)
    return _profile(chart) if isinstance(chart, DepthProfile) else _lines(chart)


def _profile(profile: DepthProfile) -> go.Figure:
    rows = list(range(len(profile.rows)))
    low, high = (drawable(values, profile.is_log, None) for values in (profile.low, profile.high))
    x, y = chain([((a, b), (row, row)) for a, b, row in zip(low, high, rows, strict=True)], None)
    drawn = go.Figure()
    drawn.add_scatter(
        x=x, y=y, mode="lines", line={"color": elements.SKY, "width": 6}, opacity=0.45, name="all steps", hoverinfo="skip"
    )
    drawn.add_scatter(
        x=drawable(profile.values, profile.is_log, None),
        y=rows,
        mode="lines+markers",
        line={"color": elements.BLUE, "width": 1},
        marker={"size": 6},
        name="this step",
        text=[escaped(name) for name in profile.rows],
        hovertemplate="%{text}: %{x:.4g}<extra></extra>",
    )
    level, odd = profile.nonfinite
    if odd:
        marker = {"symbol": "x", "size": 9, "color": elements.NONFINITE}
        drawn.add_scatter(x=level, y=odd, mode="markers", marker=marker, name=elements.NOT_FINITE)
    drawn.update_layout(yaxis=row_axis(profile.rows))
    ticks = _log_ticks([value for value in (*profile.low, *profile.high) if value > 0]) if profile.is_log else {}
    drawn.update_xaxes(type="log" if profile.is_log else "linear", exponentformat="e", **ticks)
    return framed(drawn, profile.title, max(LEAST, ROW * len(rows) + 110))


def _lines(chart: LineChart) -> go.Figure:
    count, columns = chart.layout
    small = columns > 1
    drawn = make_subplots(
        rows=count,
        cols=columns,
        shared_xaxes=True,
        vertical_spacing=min(0.05 if not small else 0.35 / count, 1 / max(count, 2)),
        horizontal_spacing=0.06,
        row_heights=None if small else [subplot.height for subplot in chart.subplots],
        subplot_titles=[short(subplot.title) for subplot in chart.subplots] if small else None,
    )
    named: set[str] = set()
    for place, subplot in enumerate(chart.subplots):
        _add_subplot(drawn, subplot, place // columns + 1, place % columns + 1, small, named)
    if not small:
        drawn.update_xaxes(title_text="step", row=count, col=1)
    shapes = [
        _mark(first, last, axis)
        for axis in range(1, len(chart.subplots) + 1)
        for first, last in merged_marks(chart.marks, _FEW_MARKS if small else _MARKS)
    ]
    drawn.update_layout(shapes=[*drawn.layout.shapes, *shapes])  # all at once: one by one takes minutes for some hundred
    heights = count * _SMALL if small else sum(subplot.height for subplot in chart.subplots) * _SUBPLOT
    return framed(drawn, chart.title, max(LEAST, int(heights) + 90))


def _mark(first: float, last: float, axis: int) -> dict[str, Any]:
    """A line at a step with a spike, or a band over several steps, in one of the subplots."""
    number = "" if axis == 1 else str(axis)
    place = {"xref": f"x{number}", "yref": f"y{number} domain", "x0": first, "x1": last, "y0": 0, "y1": 1, "opacity": 0.7}
    line = {"color": elements.VERMILION, "width": 1, "dash": "dot"}
    if first == last:
        return {"type": "line", "line": line, **place}
    return {"type": "rect", "line": line, "fillcolor": elements.VERMILION, **place, "opacity": 0.25, "layer": "below"}


def _add_subplot(drawn: go.Figure, subplot: Subplot, row: int, column: int, small: bool, named: set[str]) -> None:
    """Draw ``subplot``. ``named`` holds the lines in the legend so far: the same line may be in each subplot."""
    for line in subplot.lines:
        for trace in _traces(line, subplot.is_log, not small):
            trace.legendgroup = line.name
            trace.showlegend = bool(trace.showlegend) and trace.name not in named
            if trace.showlegend:
                named.add(trace.name)
            drawn.add_trace(trace, row=row, col=column)
    for text, value in subplot.guides.items():
        drawn.add_hline(y=value, line={"color": elements.GREEN, "width": 1, "dash": "dash"}, row=row, col=column)
        _label(drawn, text, value, subplot.is_log, row, column)
    for text, (low, high) in subplot.bands.items():
        drawn.add_hrect(y0=low, y1=high, fillcolor=elements.GREEN, opacity=0.12, line_width=0, layer="below", row=row, col=column)
        _label(drawn, text, low, subplot.is_log, row, column)
    axis: dict[str, Any] = {"type": "log" if subplot.is_log else "linear", "exponentformat": "e", "automargin": True}
    if subplot.limits is not None:
        axis["range"] = list(subplot.limits)
    elif subplot.is_log:
        axis |= _decades(subplot)
    drawn.update_yaxes(row=row, col=column, title_text=None if small else subplot.title, **axis)


def _label(drawn: go.Figure, text: str, value: float, is_log: bool, row: int, column: int) -> None:
    at = math.log10(value) if is_log else value  # plotly places texts by the logarithm
    place = {"x": 1, "xref": "x domain", "xanchor": "right", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
    drawn.add_annotation(y=at, text=text, row=row, col=column, **place)


def _decades(subplot: Subplot) -> dict[str, Any]:
    """An axis with a tick at each power of ten, at 2 and 5 times each if these are few; for one value a power of ten wide."""
    series = [some for line in subplot.lines for some in (line.series, line.low, line.high) if some is not None]
    known = [value for some in series for value in some.finite.values if value > 0] + list(subplot.guides.values())
    known += [edge for band in subplot.bands.values() for edge in band]
    ticks = _log_ticks(known)
    if known and max(known) < _FLAT * min(known):
        low = math.log10(min(known))
        return {"range": [low - 0.5, low + 0.5], **ticks}
    return ticks


def _log_ticks(known: Sequence[float]) -> dict[str, Any]:
    few = bool(known) and max(known) < 10**_MANY_DECADES * min(known)
    # without a format plotly writes 2 and 5 for 0.02 and 0.05
    return {"dtick": "D2", "tickformat": "~g"} if few else {"dtick": 1}


def _traces(line: Line, is_log: bool, named: bool) -> list[go.Scatter]:
    if line.low is not None and line.high is not None:
        x, y = _outline(line, line.low, line.high)
        fill = {"fill": "toself", "opacity": 0.4, "fillcolor": line.colour, "line": {"width": 0, "color": line.colour}}
        return [go.Scatter(x=x, y=y, mode="lines", hoverinfo="skip", name=escaped(line.name), showlegend=named, **fill)]
    width, dash = 1 if line.is_thin or not named else 1.6, "dash" if line.is_dashed else "solid"
    alone = frozenset(line.lone_points.steps)
    x, y = line.chained(line.series, is_log, None)
    found = [
        go.Scatter(
            x=x,
            y=_rounded(y),
            mode="lines+markers" if alone else "lines",
            line={"color": line.colour, "width": width, "dash": dash},
            marker={"size": [_POINT if step in alone else 0 for step in x], "opacity": 1} if alone else None,
            name=escaped(line.name),
            showlegend=named,
            hovertemplate="step %{x}: %{y:.4g}<extra></extra>" if not named else None,
        )
    ]
    odd, level = line.nonfinite(is_log)
    if odd:
        marker = {"symbol": "x", "size": 8, "color": elements.NONFINITE}
        name, hover = f"{escaped(line.name)}: NaN or infinite", "step %{x}: NaN or infinite<extra></extra>"
        found += [go.Scatter(x=odd, y=level, mode="markers", marker=marker, name=name, showlegend=named, hovertemplate=hover)]
    return found


def _outline(line: Line, low: Series, high: Series) -> tuple[list[Any], list[Any]]:
    pieces = []
    for below, above in zip(line.pieces(low), line.pieces(high), strict=True):
        values = drawable((*below.values, *reversed(above.values)), True, None)
        pieces.append(((*below.steps, *reversed(above.steps)), _rounded(values)))
    return chain(pieces, None)


def _rounded(values: list[Any]) -> list[Any]:
    """``values`` with few digits, to keep pages small."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
