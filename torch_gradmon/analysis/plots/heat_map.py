"""Layers over steps as a plotly figure. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from . import colours
from .elements import Heat, words_of
from .framing import LEAST, ROW, escaped, framed, short, upside_down
from .shading import ends, limit


def heat_map(heat: Heat) -> go.Figure:
    """The map as a figure; gaps are columns of their own, in which there is nothing."""
    rows = list(range(len(heat.rows)))  # two layers may have the same short name
    loud = [[1 if math.isinf(value) else None for value in row] for row in heat.values]
    common = {
        "x": list(heat.grid.edges),
        "y": rows,
        "text": _laid(heat, _hover(heat), "nothing was measured here"),
        "hovertemplate": "%{text}<extra></extra>",
    }
    drawn = go.Figure()
    drawn.add_heatmap(**common, z=_laid(heat, _shades(heat)), name="value", **_scale(heat))
    if any(cell for row in loud for cell in row):
        scale = [[0, colours.LOUD], [1, colours.LOUD]]
        drawn.add_heatmap(**common, z=_laid(heat, loud), colorscale=scale, showscale=False, name="NaN or infinite")
    _mark(drawn, heat.marks, heat.first)
    bare = {"showgrid": False, "zeroline": False}
    drawn.update_layout(yaxis={"tickvals": rows, "ticktext": [short(name) for name in heat.rows], **bare, **upside_down(rows)})
    drawn.update_xaxes(title_text="step", **bare)
    return framed(drawn, heat.title, max(LEAST, ROW * len(rows) + 110))


def _laid(heat: Heat, cells: list[list[Any]], gap: Any = None) -> list[list[Any]]:
    """The columns of the picture: those of ``cells``, and ``gap`` where nothing was measured."""
    return [[gap if place is None else row[place] for place in heat.grid.places] for row in cells]


def _shades(heat: Heat) -> list[list[float | None]]:
    """For JSON: with few digits, and None where there is none."""
    digits = 4 if heat.is_log else 5
    return [[None if math.isnan(shade) else round(shade, digits) for shade in row] for row in heat.shades.tolist()]


def _scale(heat: Heat) -> dict[str, Any]:
    """The colours, and what stands beside them."""
    bar: dict[str, Any] = {"title": {"text": "", "side": "right"}, "thickness": 14}
    if heat.medians is not None:
        most = limit(heat.shades, heat.is_log)
        words = ends(most, heat.is_log)
        bar |= {"tickvals": list(words), "ticktext": list(words.values())}
        return {"colorscale": [list(stop) for stop in colours.AROUND], "zmin": -most, "zmax": most, "colorbar": bar}
    if heat.is_log:
        known = heat.shades
        bar |= _ticks(known[known.isfinite()].tolist())
    return {"colorscale": colours.SCALE, "colorbar": bar}


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    """Powers of ten for a scale of logarithms."""
    if not values:
        return {}
    low, high = math.floor(min(values)), math.ceil(max(values))
    step = max((high - low) // 6, 1)
    marks = list(range(low, high + 1, step))
    return {"tickvals": marks, "ticktext": [f"1e{mark}" for mark in marks]}


def _hover(heat: Heat) -> list[list[str]]:
    """What each cell is: its row, its steps and its value."""
    steps = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(heat.first, heat.last, strict=True)]
    return [
        [f"{escaped(name)}<br>{when}: {words_of(value, median)}" for when, value in zip(steps, row, strict=True)]
        for name, row, median in zip(heat.rows, heat.values, heat.medians or [math.nan] * len(heat.rows), strict=True)
    ]


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
