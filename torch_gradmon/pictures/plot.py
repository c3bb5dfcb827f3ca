"""From a run, or from what a monitor remembers, to a figure."""

from __future__ import annotations

from typing import Any

from .. import check
from ..errors import display, nearest
from .charts import CHARTS
from .reel import Reel

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
            from .interactive import figure
        except ModuleNotFoundError as error:
            raise ImportError('the figure needs plotly: pip install "torch_gradmon[report]"') from error
        return figure(chart)
    try:
        from .still import drawing
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
    names = options.get("names", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be a list of names of layers, such as ['head.weight'], got {display(names)}")
