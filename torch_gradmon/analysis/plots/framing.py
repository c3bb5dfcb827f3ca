"""What all plotly figures have in common. Needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from .elements import cut

#: Pixels of a row of a heat map or profile, and of the smallest figure.
ROW, LEAST = 17, 300
#: Longer names lose their middle on an axis.
_NAME = 34


def short(name: str) -> str:
    """A name as it stands on an axis; what looks like HTML is no HTML there."""
    return escaped(cut(name, _NAME))


def escaped(text: str) -> str:
    """For plotly, which takes some tags in texts for formatting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def upside_down(rows: Sequence[int]) -> dict[str, Any]:
    """An axis with the first row at the top, also where there is nothing in it."""
    return {"range": [len(rows) - 0.5, -0.5], "automargin": True}


def framed(drawn: go.Figure, title: str, height: int) -> go.Figure:
    """The figure with a title, a height in pixels, and what all have."""
    drawn.update_layout(
        title={"text": escaped(title), "font": {"size": 15}},
        height=height,
        margin={"l": 60, "r": 20, "t": 48, "b": 44},
        template="plotly_white",
        hovermode="closest",
        modebar={"remove": ["sendChartToCloud"]},  # what is looked at stays on this machine
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.0, "xanchor": "left"},
    )
    return drawn
