"""A picture of the ratios, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .report import by_place, figure

#: Mid-greys and a mid-blue have enough contrast with white and with black.
_TEXT, _OTHERS, _OURS = "#757d87", "#8b949e", "#3b82d6"


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one panel for each set, device and number of threads: bars of the median ratio, lines between the quartiles."""
    panels = [
        (f"{section['title']} ({where})", section)
        for result in results
        for where, sections in by_place(result)
        for section in sections
    ]
    heights = [len(section["contenders"]) + 1.5 for _, section in panels]
    with matplotlib.rc_context({"svg.hashsalt": "benchmark", "svg.fonttype": "none", "text.color": _TEXT, "font.size": 9}):
        drawing = Figure(figsize=(9, 0.24 * sum(heights)), layout="constrained")
        axes = drawing.subplots(len(panels), 1, height_ratios=heights, squeeze=False, sharex=True)
        for (title, section), axis in zip(panels, axes[:, 0], strict=True):
            _panel(axis, title, section)
        axes[-1, 0].set_xlabel("time over the floor (logarithmic)", color=_TEXT)
        drawing.savefig(path, transparent=True, metadata={"Date": None})


def _panel(axis: Any, title: str, section: Mapping[str, Any]) -> None:
    contenders = sorted(section["contenders"].values(), key=lambda contender: -contender["ratio"]["median"])
    ratios = [contender["ratio"] for contender in contenders]
    medians = [ratio["median"] for ratio in ratios]
    whiskers = [
        [ratio["median"] - ratio["quartile_1"] for ratio in ratios],
        [ratio["quartile_3"] - ratio["median"] for ratio in ratios],
    ]
    colours = [_OURS if contender["ours"] else _OTHERS for contender in contenders]
    axis.barh([contender["label"] for contender in contenders], medians, color=colours, xerr=whiskers, ecolor=_TEXT, height=0.7)
    for place, ratio in enumerate(ratios):
        axis.annotate(
            figure(ratio["median"]), (ratio["quartile_3"], place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axis.set_xscale("log")
    axis.tick_params(which="both", colors=_TEXT, labelbottom=True)
    axis.axvline(1, color=_TEXT, linewidth=0.8)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.margins(x=0.12, y=0.02)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axis.spines[side].set_color(_TEXT)
