"""Charts of two runs on top of each other: the first as a solid line, the second as a dashed line above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..diagnosis.series import Series
from . import colours
from .charts import NO_NORM, NO_UPDATE, USUAL_UPDATES, column, is_wide
from .elements import POINTS, Line, LineChart, Subplot
from .pairing import RunPair
from .panel_set import PanelSet


def norm(pair: RunPair, marks: Sequence[int] = ()) -> LineChart:
    """The loss, the norm of all gradients before and after clipping, and the share of clipped steps.

    Raises:
        ValueError: neither run has any of these.
    """
    wide = any(is_wide(panels.loss()) for panels in pair.panel_sets)
    subplots = (
        *_subplot(pair, "loss", PanelSet.loss, is_log=wide),
        *_subplot(pair, "gradient norm", lambda panels: panels.line("grad_norm"), height=1.5),
        *_subplot(pair, "after clipping", lambda panels: panels.line("grad_norm_clipped")),
        *_subplot(
            pair, "clipped share", lambda panels: panels.line("clipped_share"), is_log=False, limits=(0.0, 1.05), height=0.7
        ),
    )
    if not subplots:
        raise ValueError(NO_NORM)
    return LineChart("loss and gradient norm", subplots, tuple(marks))


def update(pair: RunPair, marks: Sequence[int] = ()) -> LineChart:
    """The norm of all updates over that of all parameters.

    Raises:
        ValueError: neither run has it.
    """
    subplots = _subplot(pair, "update / parameter", lambda panels: panels.line("update_ratio"), bands=USUAL_UPDATES)
    if not subplots:
        raise ValueError(NO_UPDATE)
    return LineChart("update over parameter", subplots, tuple(marks))


def layers(pair: RunPair, names: Sequence[str], marks: Sequence[int] = (), view: str = "gradient") -> LineChart:
    """Layers side by side, by their names in the second run.

    Raises:
        ValueError: there are no names, or one of the runs lacks the view.
    """
    panels = pair.panels(view)
    if panels is None or not names:
        raise ValueError(f"there is no {view} of any layer that both runs have")
    both, view_of_both = (panels.first, panels.second), panels.first.view
    subplots = [
        Subplot(name, _lines(pair, [column(panel, name) for panel in both], POINTS // 4), view_of_both.is_log) for name in names
    ]
    return LineChart(view_of_both.title, tuple(subplots), tuple(marks), columns=3)


def _subplot(pair: RunPair, title: str, of: Callable[[PanelSet], Series], **options: Any) -> tuple[Subplot, ...]:
    """A subplot of one value of both runs; empty if neither run has it."""
    lines = _lines(pair, [of(panels) for panels in pair.panel_sets], POINTS)
    return (Subplot(title, lines, **options),) if lines else ()


def _lines(pair: RunPair, series: Sequence[Series], most: int) -> tuple[Line, ...]:
    colour = colours.BLUE, colours.ORANGE
    return tuple(
        Line.of(title, line, colour[place], panels.gaps(line.steps), most, is_dashed=place == 1)
        for place, (title, panels, line) in enumerate(zip(pair.titles, pair.panel_sets, series, strict=True))
        if len(line)
    )
