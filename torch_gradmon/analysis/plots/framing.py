"""What all plotly figures have in common. Needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ...core.formatting import cut_middle

#: Pixels of a row of a heat map or profile, and of the smallest figure.
ROW, LEAST = 17, 300
#: Characters of a name on an axis.
_NAME = 34


def short(name: str) -> str:
    """A name for an axis, escaped and shortened."""
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
    """The figure with its title, its height in pixels, and the common layout."""
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
