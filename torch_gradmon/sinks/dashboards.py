"""Dashboards of trackers: panels of one kind of value side by side, instead of one panel for each of a thousand keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from ..core import keys as n
from ..core.errors import display
from ..core.keys import Key, parse_key
from ..core.records import is_loss

#: Whole-model values that stand beside the loss.
_FIRST = ("grad_norm", "grad_norm_after_clip", "update_ratio", "lr_over_critical", "spike_score")
_TRAINING, _WHOLE = "training", "whole model"


class TrackerPanel(NamedTuple):
    """One chart."""

    section: str  # that it belongs to
    title: str
    pattern: str  # a regular expression that matches its keys and no others
    keys: tuple[str, ...]  # that it shows


def panels(keys: Iterable[str]) -> list[TrackerPanel]:
    """The charts for these keys: losses and the most important whole-model values first, then the others, then a chart for each metric of
    each source with a line for each tensor. Logged values that are no loss are left out.

    Raises:
        ValueError: there is no such value among them.
    """
    found: dict[tuple[str, str], list[str]] = {}
    known = [(text, parse_key(text)) for text in dict.fromkeys(keys)]
    for text, key in sorted(known, key=lambda pair: _place(pair[1])):
        if (place := _section(key)) is not None:
            found.setdefault(place, []).append(text)
    if not found:
        raise ValueError(f"there is no value of a monitor among {display([text for text, _ in known])}")
    return [TrackerPanel(section, title, _pattern(section, title, some), tuple(some)) for (section, title), some in found.items()]


def _place(key: Key) -> tuple[bool, int]:
    """Sort key: losses, then the whole model, then the rest in the order of its sources."""
    whole = (*_FIRST, key.metric).index(key.metric) if key.source == n.SUMMARY else -1
    order = n.TENSOR_SOURCES.index(key.source) if key.source in n.TENSOR_SOURCES else len(n.TENSOR_SOURCES)
    return key.source not in ("", n.SUMMARY), whole if key.source in ("", n.SUMMARY) else order


def _section(key: Key) -> tuple[str, str] | None:
    if is_loss(key):
        return _TRAINING, "loss"
    if key.source == n.SUMMARY:
        return _TRAINING if key.metric in _FIRST else _WHOLE, key.metric
    return (key.source.replace("_", " "), key.metric) if key.source and key.metric else None


def _pattern(section: str, title: str, keys: Iterable[str]) -> str:
    if section in (_TRAINING, _WHOLE):
        return "|".join(f"^{re.escape(key)}$" for key in keys)
    return f"^{re.escape(parse_key(next(iter(keys))).source)}/.*/{re.escape(title)}$"


def tensorboard_layout(keys: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """A layout for ``SummaryWriter.add_custom_scalars``, which may be called once for a writer: the tab *custom scalars* then has a
    chart for each metric.

    Args:
        keys: such as those of :meth:`ModuleMonitor.get_step_metrics`, or :meth:`Run.keys <torch_gradmon.analysis.run.Run.keys>`.

    Raises:
        ValueError: there is no value of a monitor among them.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for panel in panels(keys):
        found.setdefault(panel.section, {})[panel.title] = ["Multiline", [panel.pattern]]
    return found


def wandb_workspace(entity: str, project: str, keys: Iterable[str], name: str = "gradmon") -> Any:
    """A view of a W&B project with a section for each source and a panel for each metric; ``.save()`` sends it, and returns its address.

    Args:
        entity: of the project.
        project: its name.
        keys: as for :func:`tensorboard_layout`.
        name: of the view.

    Raises:
        ImportError: wandb-workspaces is not installed.
        ValueError: there is no value of a monitor among them.
    """
    try:
        workspaces, reports = import_module("wandb_workspaces.workspaces"), import_module("wandb_workspaces.reports.v2")
    except ImportError as error:
        raise ImportError("wandb_workspace needs wandb-workspaces: pip install wandb-workspaces") from error
    sections: dict[str, list[Any]] = {}
    for panel in panels(keys):
        by_key = panel.section in (_TRAINING, _WHOLE)
        lines, pattern = (list(panel.keys), None) if by_key else ([], panel.pattern)
        plot = reports.LinePlot(title=panel.title, x="gradmon/step", y=lines, metric_regex=pattern)
        sections.setdefault(panel.section, []).append(plot)
    made = [workspaces.Section(name=title, panels=plots, is_open=title == _TRAINING) for title, plots in sections.items()]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=made)
