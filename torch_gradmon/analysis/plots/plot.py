"""From a run, or from what a monitor remembers, to a figure."""

from __future__ import annotations

from typing import Any

from ...core import validation as check
from ...core.errors import display, nearest
from .charts import CHARTS
from .panels import Reel

_ENGINES = ("plotly", "matplotlib")


def plot(reel: Reel, kind: str, engine: str, options: dict[str, Any]) -> Any:
    """A figure of the engine.

    Args:
        reel: the values.
        kind: one of :data:`CHARTS`.
        engine: ``plotly`` or ``matplotlib``.
        options: of the chart.

    Raises:
        ValueError: there is no such kind or engine, or what is to be shown was not measured.
        TypeError: the chart has no such option, or it is of the wrong type.
        ImportError: the engine is not installed.
    """
    if kind not in CHARTS:
        raise ValueError(f"kind must be one of {', '.join(CHARTS)}, got {display(kind)}{nearest(str(kind), CHARTS)}")
    if engine not in _ENGINES:
        raise ValueError(f"engine must be plotly or matplotlib, got {display(engine)}")
    if not reel.steps:
        raise ValueError("no step is known yet: nothing was monitored so far")
    _check(options)
    chart = CHARTS[kind](reel, **options)
    if engine == "plotly":
        try:
            from .plotly import figure
        except ModuleNotFoundError as error:
            raise ImportError('the figure needs plotly: pip install "torch_gradmon[report]"') from error
        return figure(chart)
    try:
        from .matplotlib import drawing
    except ModuleNotFoundError as error:
        raise ImportError('the picture needs matplotlib: pip install "torch_gradmon[plot]"') from error
    return drawing(chart)


def _check(options: dict[str, Any]) -> None:
    """Those that several charts have; a chart itself refuses what it does not know."""
    for name in ("rows", "columns"):
        if name in options:
            check.positive_int(name, options[name])
    if options.get("step") is not None:
        check.step_number("step", options["step"])
    relative = options.get("relative")
    if relative is not None and not isinstance(relative, bool):
        raise TypeError(f"relative must be True, False or None, for what suits the view, got {display(relative)}")
    names = options.get("names", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be a list of names of layers, such as ['head.weight'], got {display(names)}")
