"""Heat maps as plotly figures. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from . import colours
from .elements import Heatmap
from .framing import LEAST, ROW, escaped, framed, row_axis
from .shading import scale_labels, scale_limit


def heatmap_figure(heat: Heatmap) -> go.Figure:
    """The map as a figure; gaps are empty columns."""
    rows = list(range(len(heat.rows)))  # numbers, because two layers may have the same short name
    common = {
        "x": list(heat.grid.edges),
        "y": rows,
        "text": heat.on_grid(_hover_texts(heat), "nothing was measured here"),
        "hovertemplate": "%{text}<extra></extra>",
    }
    figure = go.Figure()
    figure.add_heatmap(**common, z=heat.on_grid(_shades(heat), None), name="value", **_scale(heat))
    for name, colour, cells in heat.special_cells(None):
        figure.add_heatmap(**common, z=cells, colorscale=[[0, colour], [1, colour]], showscale=False, name=name)
        # a map has no entry in the legend
        square = {"symbol": "square", "size": 10, "color": colour}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=square, name=name, showlegend=True, hoverinfo="skip")
    _add_marks(figure, heat.marks, heat.first)
    bare = {"showgrid": False, "zeroline": False}
    figure.update_layout(yaxis={**row_axis(heat.rows), **bare})
    figure.update_xaxes(title_text="step", **bare)
    return framed(figure, heat.title, max(LEAST, ROW * len(rows) + 110))


def _shades(heat: Heatmap) -> list[list[float | None]]:
    """The shades for JSON: few digits, None instead of NaN."""
    digits = 4 if heat.is_log else 5
    return [[None if math.isnan(shade) else round(shade, digits) for shade in row] for row in heat.shades.tolist()]


def _scale(heat: Heatmap) -> dict[str, Any]:
    """The colour scale and its labels."""
    bar: dict[str, Any] = {"title": {"text": "", "side": "right"}, "thickness": 14}
    if heat.medians is not None:
        most = scale_limit(heat.shades, heat.is_log)
        labels = scale_labels(most, heat.is_log)
        bar |= {"tickvals": list(labels), "ticktext": list(labels.values())}
        return {"colorscale": [list(stop) for stop in colours.DIVERGING], "zmin": -most, "zmax": most, "colorbar": bar}
    if heat.is_log:
        bar |= _ticks(heat.shades[heat.shades.isfinite()].tolist())
    return {"colorscale": colours.SCALE, "colorbar": bar}


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    """Powers of ten for a scale of logarithms."""
    if not values:
        return {}
    low, high = math.floor(min(values)), math.ceil(max(values))
    marks = list(range(low, high + 1, max((high - low) // 6, 1)))
    return {"tickvals": marks, "ticktext": [f"1e{mark}" for mark in marks]}


def _hover_texts(heat: Heatmap) -> list[list[str]]:
    """The row, steps and value of each cell."""
    steps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(heat.first, heat.last, strict=True)]
    return [
        [f"{escaped(name)}<br>{when}: {text}" for when, text in zip(steps, row, strict=True)]
        for name, row in zip(heat.rows, heat.texts, strict=True)
    ]


def _add_marks(figure: go.Figure, marks: Sequence[int], steps: Sequence[int], top: float = 1.0) -> None:
    """A triangle above each step with a spike."""
    if not marks or not steps:
        return
    figure.add_scatter(
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
    figure.update_layout(yaxis2={"overlaying": "y", "range": [0, top], "visible": False, "fixedrange": True})
