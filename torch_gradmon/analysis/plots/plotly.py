"""Charts as plotly figures: in notebooks, on dashboards and in the report. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..diagnosis.series import Series
from . import colours
from .elements import Chart, Heat, Line, Lines, Profile, Strip, guide, spans
from .framing import LEAST, ROW, escaped, framed, short, upside_down
from .heat_map import heat_map

#: Pixels of a strip, and of a small picture.
_STRIP, _SMALL = 170, 190
#: A logarithmic axis spans at least that factor, else a flat line has no ticks beside it.
_FLAT = 1.2
#: An axis of more powers of ten than these has no ticks between them.
_MANY_DECADES = 2.5
#: Stretches of steps with a spike that are told apart, and in a small picture.
_MARKS, _FEW_MARKS = 200, 60
#: The size of a point that no line passes.
_POINT = 4


def figure(chart: Chart) -> go.Figure:
    """The chart as a figure."""
    if isinstance(chart, Heat):
        return heat_map(chart)
    return _profile(chart) if isinstance(chart, Profile) else _lines(chart)


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
    drawn.update_layout(yaxis={"tickvals": rows, "ticktext": [short(name) for name in profile.rows], **upside_down(rows)})
    drawn.update_xaxes(type="log" if profile.is_log else "linear", exponentformat="e")
    return framed(drawn, profile.title, max(LEAST, ROW * len(rows) + 110))


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
    return framed(drawn, lines.title, max(LEAST, int(heights) + 90))


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
    elif strip.is_log:
        axis |= _decades(strip)
    drawn.update_yaxes(row=row, col=column, title_text=None if small else strip.title, **axis)


def _decades(strip: Strip) -> dict[str, Any]:
    """A logarithmic axis with a tick at each power of ten, and at twice and five times it where these are few."""
    series = [some for line in strip.lines for some in (line.series, line.low, line.high) if some is not None]
    known = [value for some in series for value in some.finite.values if value > 0] + list(strip.guides.values())
    low, high = math.log10(min(known, default=1.0)), math.log10(max(known, default=1.0))
    ticks = {"dtick": "D2" if high - low < _MANY_DECADES else 1}
    return {"range": [low - 0.5, low + 0.5], **ticks} if known and high - low < math.log10(_FLAT) else ticks


def _traces(line: Line, is_log: bool, named: bool) -> list[go.Scatter]:
    style = {
        "color": line.colour,
        "width": 1 if line.is_thin or not named else 1.6,
        "dash": "dash" if line.is_dashed else "solid",
    }
    if line.low is not None and line.high is not None:
        x, y = _around(line, line.low, line.high)
        fill = {"fill": "toself", "opacity": 0.4, "fillcolor": line.colour, "line": {"width": 0, "color": line.colour}}
        return [go.Scatter(x=x, y=y, mode="lines", hoverinfo="skip", name=escaped(line.name), showlegend=named, **fill)]
    pieces = line.pieces(line.series)
    alone = {step for piece in pieces if len(piece) == 1 for step in piece.steps}
    x, y = _chained([(list(piece.steps), _drawable(piece, is_log)) for piece in pieces])
    found = [
        go.Scatter(
            x=x,
            y=y,
            mode="lines+markers" if alone else "lines",
            line=style,
            marker={"size": [_POINT if step in alone else 0 for step in x], "opacity": 1} if alone else None,
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


def _chained(pieces: Sequence[tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
    """One line of several pieces, over the gaps between which nothing is drawn."""
    x: list[Any] = []
    y: list[Any] = []
    for steps, values in pieces:
        x += [None, *steps] if x else steps
        y += [None, *values] if y else values
    return x, y


def _around(line: Line, low: Series, high: Series) -> tuple[list[Any], list[Any]]:
    """The outline of a band, piece by piece."""
    return _chained(
        [
            ([*below.steps, *reversed(above.steps)], [*_drawable(below, True), *reversed(_drawable(above, True))])
            for below, above in zip(line.pieces(low), line.pieces(high), strict=True)
        ]
    )


def _drawable(series: Series, is_log: bool) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) and (value > 0 or not is_log) else None for value in series.values]
