"""Charts as plotly figures: in notebooks, on dashboards and in the report. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..diagnosis.series import Series
from . import colours
from .charts import Chart, Heat, Line, Lines, Profile, Strip, cut, guide, shade, spans

#: Pixels of a row of a heat map or profile, of the smallest figure, of a strip, and of a small picture.
_ROW, _LEAST, _STRIP, _SMALL = 17, 300, 170, 190
#: A logarithmic axis spans at least that factor, else a flat line has no ticks beside it.
_FLAT = 1.2
#: Stretches of steps with a spike that are told apart, and in a small picture.
_MARKS, _FEW_MARKS = 200, 60
#: Longer names lose their middle on an axis.
_NAME = 34


def figure(chart: Chart) -> go.Figure:
    """The chart as a figure."""
    if isinstance(chart, Heat):
        return _heat(chart)
    return _profile(chart) if isinstance(chart, Profile) else _lines(chart)


def short(name: str) -> str:
    """A name as it stands on an axis; what looks like HTML is no HTML there."""
    return escaped(cut(name, _NAME))


def escaped(text: str) -> str:
    """For plotly, which takes some tags in texts for formatting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shade(value: float, is_log: bool) -> float | None:
    """For JSON: with few digits, and None where there is none."""
    found = shade(value, is_log)
    return None if math.isnan(found) else round(found, 4 if is_log else 5)


def ticks(values: Sequence[float]) -> dict[str, Any]:
    """Powers of ten for a scale of logarithms."""
    if not values:
        return {}
    low, high = math.floor(min(values)), math.ceil(max(values))
    step = max((high - low) // 6, 1)
    marks = list(range(low, high + 1, step))
    return {"tickvals": marks, "ticktext": [f"1e{mark}" for mark in marks]}


def _heat(heat: Heat) -> go.Figure:
    shades = [[_shade(value, heat.is_log) for value in row] for row in heat.values]
    known = [value for row in shades for value in row if value is not None]
    told = [[_told(value) for value in row] for row in heat.values]
    names = [short(name) for name in heat.rows]
    steps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(heat.first, heat.last, strict=True)]
    rows = list(range(len(names)))  # two layers may have the same short name
    middles = [(a + b) / 2 for a, b in zip(heat.first, heat.last, strict=True)]  # of the cells, in which their steps lie
    hover = [
        [f"{escaped(name)}<br>{step}: {value}" for step, value in zip(steps, row, strict=True)]
        for name, row in zip(heat.rows, told, strict=True)
    ]
    drawn = go.Figure()
    drawn.add_heatmap(
        x=middles,
        y=rows,
        z=shades,
        text=hover,
        hovertemplate="%{text}<extra></extra>",
        colorscale=colours.SCALE,
        colorbar={"title": {"text": "", "side": "right"}, "thickness": 14, **(ticks(known) if heat.is_log else {})},
        name="value",
    )
    loud = [[1 if math.isinf(value) else None for value in row] for row in heat.values]
    if any(cell for row in loud for cell in row):
        drawn.add_heatmap(
            x=middles,
            y=rows,
            z=loud,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            colorscale=[[0, colours.LOUD], [1, colours.LOUD]],
            showscale=False,
            name="NaN or infinite",
        )
    _mark(drawn, heat.marks, heat.first)
    drawn.update_layout(yaxis={"tickvals": rows, "ticktext": names, **_upside_down(rows)})
    drawn.update_xaxes(title_text="step")
    return _framed(drawn, heat.title, max(_LEAST, _ROW * len(rows) + 110))


def _upside_down(rows: Sequence[int]) -> dict[str, Any]:
    """An axis with the first row at the top, also where there is nothing in it."""
    return {"range": [len(rows) - 0.5, -0.5], "automargin": True}


def _told(value: float) -> str:
    return "NaN or infinite" if math.isinf(value) else "not measured" if math.isnan(value) else f"{value:.4g}"


def _mark(drawn: go.Figure, marks: Sequence[int], steps: Sequence[int], top: float = 1.0) -> None:
    """A triangle above each step with a spike, in the column that holds it."""
    if not marks or not steps:
        return
    drawn.add_scatter(
        x=list(marks),
        y=[top] * len(marks),
        yaxis="y2",
        mode="markers",
        marker={"symbol": "triangle-down", "size": 9, "color": colours.VERMILION},
        hovertemplate="spike in step %{x}<extra></extra>",
        name="spike",
        showlegend=False,
        cliponaxis=False,
    )
    drawn.update_layout(yaxis2={"overlaying": "y", "range": [0, top], "visible": False, "fixedrange": True})


def _profile(profile: Profile) -> go.Figure:
    rows = list(range(len(profile.rows)))
    drawn = go.Figure()
    spans = [(_at(a, profile.is_log), _at(b, profile.is_log)) for a, b in zip(profile.low, profile.high, strict=True)]
    edges = [edge for span, row in zip(spans, rows, strict=True) for edge in ((span[0], row), (span[1], row), (None, None))]
    drawn.add_scatter(
        x=[x for x, _ in edges],
        y=[y for _, y in edges],
        mode="lines",
        line={"color": colours.SKY, "width": 6},
        opacity=0.45,
        name="all steps",
        hoverinfo="skip",
    )
    drawn.add_scatter(
        x=[_at(value, profile.is_log) for value in profile.values],
        y=rows,
        mode="lines+markers",
        line={"color": colours.BLUE, "width": 1},
        marker={"size": 6},
        name="this step",
        text=[escaped(name) for name in profile.rows],
        hovertemplate="%{text}: %{x:.4g}<extra></extra>",
    )
    odd = [row for row, value in zip(rows, profile.values, strict=True) if math.isinf(value)]
    if odd:
        anywhere = next((high for _, high in spans if high is not None), 1.0)
        drawn.add_scatter(
            x=[anywhere] * len(odd),
            y=odd,
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": colours.LOUD},
            name="NaN or infinite",
        )
    drawn.update_layout(yaxis={"tickvals": rows, "ticktext": [short(name) for name in profile.rows], **_upside_down(rows)})
    drawn.update_xaxes(type="log" if profile.is_log else "linear", exponentformat="e")
    return _framed(drawn, profile.title, max(_LEAST, _ROW * len(rows) + 110))


def _at(value: float, is_log: bool) -> float | None:
    return value if math.isfinite(value) and (value > 0 or not is_log) else None


def _lines(lines: Lines) -> go.Figure:
    columns = min(lines.columns, len(lines.strips))
    count = -(-len(lines.strips) // columns)
    small = columns > 1
    drawn = make_subplots(
        rows=count,
        cols=columns,
        shared_xaxes=True,
        vertical_spacing=min(0.05 if not small else 0.35 / count, 1 / max(count, 2)),
        horizontal_spacing=0.06,
        row_heights=None if small else [strip.height for strip in lines.strips],
        subplot_titles=[short(strip.title) for strip in lines.strips] if small else None,
    )
    named: set[str] = set()
    for place, strip in enumerate(lines.strips):
        row, column = place // columns + 1, place % columns + 1
        _strip(drawn, strip, row, column, small, named)
    if not small:
        drawn.update_xaxes(title_text="step", row=count, col=1)
    shapes = [
        _marked(first, last, axis)
        for axis in range(1, len(lines.strips) + 1)
        for first, last in spans(lines.marks, _FEW_MARKS if small else _MARKS)
    ]
    drawn.update_layout(shapes=[*drawn.layout.shapes, *shapes])  # all at once: one by one takes minutes for some hundred
    heights = count * _SMALL if small else sum(strip.height for strip in lines.strips) * _STRIP
    return _framed(drawn, lines.title, max(_LEAST, int(heights) + 90))


def _marked(first: int, last: int, axis: int) -> dict[str, Any]:
    """A line at a step with a spike, or a band over several, in one of the subplots."""
    number = "" if axis == 1 else str(axis)
    place = {"xref": f"x{number}", "yref": f"y{number} domain", "x0": first, "x1": last, "y0": 0, "y1": 1, "opacity": 0.7}
    line = {"color": colours.VERMILION, "width": 1, "dash": "dot"}
    if first == last:
        return {"type": "line", "line": line, **place}
    return {"type": "rect", "line": line, "fillcolor": colours.VERMILION, **place, "opacity": 0.25, "layer": "below"}


def _strip(drawn: go.Figure, strip: Strip, row: int, column: int, small: bool, named: set[str]) -> None:
    """Draw it; ``named`` has the lines that the legend has by now, for one of several strips may come in each of them."""
    for line in strip.lines:
        for trace in _traces(line, strip.is_log, not small):
            trace.legendgroup = line.name
            trace.showlegend = bool(trace.showlegend) and trace.name not in named
            if trace.showlegend:
                named.add(trace.name)
            drawn.add_trace(trace, row=row, col=column)
    for name, value in strip.guides.items():
        drawn.add_hline(y=value, line={"color": colours.GREEN, "width": 1, "dash": "dash"}, row=row, col=column)
        at = math.log10(value) if strip.is_log else value  # a text's place is a logarithm there
        place = {"x": 1, "xref": "x domain", "xanchor": "right", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
        drawn.add_annotation(y=at, text=guide(name, value), row=row, col=column, **place)
    axis: dict[str, Any] = {"type": "log" if strip.is_log else "linear", "exponentformat": "e", "automargin": True}
    if strip.limits is not None:
        axis["range"] = list(strip.limits)
    elif strip.is_log and (level := _level(strip)) is not None:
        axis["range"] = [level - 0.5, level + 0.5]
    drawn.update_yaxes(row=row, col=column, title_text=None if small else strip.title, **axis)


def _level(strip: Strip) -> float | None:
    """The power of ten at which everything lies, where there is nothing to span an axis; None elsewhere."""
    known = [value for line in strip.lines for value in line.series.finite.values if value > 0] + list(strip.guides.values())
    return math.log10(known[0]) if known and max(known) < _FLAT * min(known) else None


def _traces(line: Line, is_log: bool, named: bool) -> list[go.Scatter]:
    if line.low is not None and line.high is not None:
        edge = {"mode": "lines", "line": {"width": 0, "color": line.colour}, "hoverinfo": "skip"}
        return [
            go.Scatter(x=list(line.low.steps), y=_drawable(line.low, is_log), showlegend=False, name=escaped(line.name), **edge),
            go.Scatter(
                x=list(line.high.steps),
                y=_drawable(line.high, is_log),
                fill="tonexty",
                opacity=0.4,
                name=escaped(line.name),
                showlegend=named,
                **edge,
            ),
        ]
    found = [
        go.Scatter(
            x=list(line.series.steps),
            y=_drawable(line.series, is_log),
            mode="lines" if len(line.series) > 1 else "markers",
            line={
                "color": line.colour,
                "width": 1 if line.is_thin or not named else 1.6,
                "dash": "dash" if line.is_dashed else "solid",
            },
            name=escaped(line.name),
            showlegend=named,
            hovertemplate="step %{x}: %{y:.4g}<extra></extra>" if not named else None,
        )
    ]
    odd = [step for step, value in zip(line.series.steps, line.series.values, strict=True) if not math.isfinite(value)]
    level = max((value for value in line.series.finite.values if value > 0 or not is_log), default=1.0)
    if odd:
        found.append(
            go.Scatter(
                x=odd,
                y=[level] * len(odd),
                mode="markers",
                marker={"symbol": "x", "size": 8, "color": colours.LOUD},
                name=f"{escaped(line.name)}: NaN or infinite",
                showlegend=named,
                hovertemplate="step %{x}: NaN or infinite<extra></extra>",
            )
        )
    return found


def _drawable(series: Series, is_log: bool) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) and (value > 0 or not is_log) else None for value in series.values]


def _framed(drawn: go.Figure, title: str, height: int) -> go.Figure:
    drawn.update_layout(
        title={"text": escaped(title), "font": {"size": 15}},
        height=height,
        margin={"l": 60, "r": 20, "t": 48, "b": 44},
        template="plotly_white",
        hovermode="closest",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.0, "xanchor": "left"},
    )
    return drawn
