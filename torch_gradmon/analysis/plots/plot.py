"""Figures of a run, or of the records in a monitor's memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...core import validation as check
from ...core.errors import display, nearest
from .charts import CHARTS
from .panel_set import PanelSet
from .sources import ValueSource

#: The extra that installs each engine.
_ENGINES = {"plotly": "report", "matplotlib": "plot"}


def plot(source: ValueSource, kind: str, engine: str, options: dict[str, Any]) -> Any:
    """A figure of the engine.

    Args:
        source: of the values.
        kind: one of :data:`CHARTS`.
        engine: ``plotly`` or ``matplotlib``.
        options: of the chart.

    Raises:
        ValueError: the kind or engine is unknown, or the value was not measured.
        TypeError: the chart has no such option, or an option has the wrong type.
        ImportError: the engine is not installed.
    """
    if kind not in CHARTS:
        raise ValueError(f"kind must be one of {', '.join(CHARTS)}, got {display(kind)}{nearest(str(kind), CHARTS)}")
    if engine not in _ENGINES:
        raise ValueError(f"engine must be plotly or matplotlib, got {display(engine)}")
    if not source.steps:
        raise ValueError("no step is known yet: nothing was monitored so far")
    _check(options)
    chart = CHARTS[kind](PanelSet(source), **options)
    try:
        drawing = import_module(f".{engine}", __package__)
    except ModuleNotFoundError as error:
        raise ImportError(f'the figure needs {engine}: pip install "torch_gradmon[{_ENGINES[engine]}]"') from error
    return drawing.figure(chart)


def _check(options: dict[str, Any]) -> None:
    """Check the options that several charts have; each chart refuses unknown ones."""
    for name in ("rows", "columns"):
        if name in options:
            check.positive_int(name, options[name])
    if options.get("step") is not None:
        check.step_number("step", options["step"])
    relative = options.get("relative")
    if relative is not None and not isinstance(relative, bool):
        raise TypeError(f"relative must be True, False, or None for the default of the view, got {display(relative)}")
    names = options.get("names", ())
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be a list of names of layers, such as ['head.weight'], got {display(names)}")
