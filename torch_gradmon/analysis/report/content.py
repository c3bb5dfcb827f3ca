"""What a report says, as plain data."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...analysis.run import Run
from ...spikes.episodes import counted, episodes, largest
from ..diagnosis.causes import CONSEQUENCES
from ..diagnosis.diagnose import diagnosed
from ..diagnosis.findings import Diagnosis, Finding
from ..diagnosis.history import History
from ..diagnosis.series import Series
from ..plots import charts
from ..plots.block_rows import blocks, together
from ..plots.downsampling import Squeezed, squeezed
from ..plots.elements import Chart
from ..plots.gaps import grid
from ..plots.panels import LAYER_VIEWS, OfRun, Panel, Reel
from ..plots.plotly import figure
from ..plots.shading import departures, is_worth_it, limit, medians
from .packing import LOG_SCALE, LOUD, NONE, SCALE, ZERO, packed

#: Cells of one view, of layers and blocks together, and columns.
_CELLS, _FEWEST_COLUMNS, _COLUMNS = 150_000, 100, 1000
#: Parts that take time: the diagnosis, and each view.
PARTS = 1 + len(LAYER_VIEWS)
#: Spikes that are listed, the largest ones.
MOST_SPIKES = 200
#: How the page reads what :func:`torch_gradmon.analysis.report.packing.packed` writes.
CODES = {"none": NONE, "loud": LOUD, "zero": ZERO, "log": LOG_SCALE, "linear": SCALE}


def content(run: Run, title: str, advance: Callable[[], None]) -> dict[str, Any]:
    """Everything that the page shows; ``advance`` is called after each of :data:`PARTS`."""
    reel = Reel(OfRun(run), title)
    diagnosis = diagnosed(History.of_run(run))
    advance()
    for name in LAYER_VIEWS:
        reel.panel(name)
        advance()
    panels = dict(reel.panels())
    return {
        "title": title,
        "facts": facts(run, reel),
        "against": None,
        "findings": findings(diagnosis),
        "unseen": [f"{rule}: {why}" for rule, why in diagnosis.unseen.items()],
        "marks": sorted({event.step for event in reel.events}),
        "mark": "spike",
        "events": spikes(reel),
        "spikes": counted(episodes(reel.events, reel.steps)),
        "codes": CODES,
        "sides": {"run": ""},
        "views": {name: view({"run": panel}) for name, panel in panels.items()},
        "figures": _figures(reel, diagnosis),
        "layers": _layers(reel),
    }


def findings(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The findings in the order in which they are told, each with what may come of it."""
    told: list[dict[str, Any]] = []
    left = list(diagnosis.findings)
    while left:
        finding = left.pop(0)
        signs = CONSEQUENCES.get(finding.rule, frozenset())
        followers = [other for other in left if other.rule in signs and other.severity != "error"]
        left = [other for other in left if other not in followers]
        told.append({**_told(finding), "signs": [_told(other) for other in followers]})
    return told


def spikes(reel: Reel) -> list[str]:
    """The largest spikes in order, each in a line."""
    return [str(spike) for spike in largest(episodes(reel.events, reel.steps), MOST_SPIKES)]


def _told(finding: Finding) -> dict[str, Any]:
    first, last = finding.steps
    return {
        "severity": finding.severity,
        "rule": finding.rule,
        "where": finding.where,
        "first": first,
        "last": last,
        "cause": finding.cause,
        "advice": finding.advice,
        "evidence": [[name, f"{value:.4g}"] for name, value in finding.evidence.items()],
    }


def facts(run: Run, reel: Reel) -> list[list[str]]:
    """What stands beside the title."""
    steps = reel.steps
    told = [["steps", f"{steps[0]:,} to {steps[-1]:,}, {len(steps):,} of them recorded" if steps else "none"]]
    if steps:
        begin, end = (run.context(step)["time"] for step in (steps[0], steps[-1]))
        when = datetime.datetime.fromtimestamp(begin).strftime("%Y-%m-%d %H:%M")
        told.append(["begun", f"{when}, {_long(end - begin)} long"])
    if len(loss := reel.loss()):
        told.append(["loss", _of_loss(loss)])
    rates = reel.rates()
    if len(rates):
        told.append(["learning rate", f"{min(rates.values):.3g} to {max(rates.values):.3g}"])
    refused = len(reel.refused)
    told.append(["spikes", counted(episodes(reel.events, steps))])
    if refused:
        told.append(["not applied", f"{refused:,} steps"])
    told.append(["torch", str(run.meta.get("torch", "unknown"))])
    return told


def _of_loss(loss: Series) -> str:
    """Where it began and where it is, of the last part the median, for one batch says little."""
    known = loss.finite
    begin = f"{known.values[0]:.4g}" if len(known) else "never finite"
    if math.isfinite(loss.values[-1]):
        return f"{begin} to {known.part(0.95, 1).median:.4g} (median of the end)"
    since = loss.steps[0] if not len(known) else loss.steps[loss.steps.index(known.steps[-1]) + 1]
    return f"{begin}, not finite since step {since}" if len(known) else begin


def _long(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def view(panels: Mapping[str, Panel]) -> dict[str, Any]:
    """Panels of the same layers and steps, by the side that each is of: one run has one, and two runs have three."""
    panel = next(iter(panels.values()))
    groups = blocks(panel.names)
    grouped = len(groups) < len(panel.names)
    many = len(panels) * (len(panel.names) + (len(groups) if grouped else 0))
    columns = min(max(_CELLS // many, _FEWEST_COLUMNS), _COLUMNS)
    cells = {side: squeezed(each, columns) for side, each in panels.items()}
    one = next(iter(cells.values()))
    laid = grid(one.first, one.last, panel.gaps, panel.axis)
    return {
        "names": list(panel.names),
        "blocks": [[block, places] for block, places in groups.items()] if grouped else None,
        "first": list(one.first),
        "last": list(one.last),
        "edges": list(laid.edges),
        "places": list(laid.places),
        "sides": {side: _side(each, cells[side], groups if grouped else None) for side, each in panels.items()},
    }


def _side(panel: Panel, cells: Squeezed, groups: Mapping[str, Sequence[int]] | None) -> dict[str, Any]:
    """The values of one panel, of its layers and of blocks of them, and the medians of both over all steps."""
    is_log = panel.view.is_log
    own, usual = cells.values, medians(panel.values)
    grouped = None if groups is None else together(panel, cells, groups)
    usual_grouped = None if groups is None else medians(together(panel, squeezed(panel, len(panel.steps)), groups))
    return {
        "title": panel.view.title,
        "log": is_log,
        "cells": packed(own.T, is_log),
        "ofBlocks": None if grouped is None else packed(grouped.T, is_log),
        "medians": _numbers(usual),
        "mediansOfBlocks": None if usual_grouped is None else _numbers(usual_grouped),
        "limit": limit(departures(own, usual, is_log), is_log),
        "relative": None if panel.view.is_apart else is_worth_it(panel.steps, is_log),
    }


def _numbers(values: torch.Tensor) -> list[float | None]:
    """For JSON, with few digits."""
    return [cell(value) for value in values.tolist()]


def _figures(reel: Reel, diagnosis: Diagnosis) -> dict[str, Any]:
    """Figures that stay as they are, by name."""
    flagged = _flagged(reel, diagnosis)
    return drawn(
        {
            "norm": lambda: charts.norm(reel),
            "update": lambda: charts.update(reel),
            "layers": lambda: charts.layers(reel, names=flagged),
        }
    )


def drawn(wanted: Mapping[str, Callable[[], Chart]]) -> dict[str, Any]:
    """Charts as figures; one that lacks what it shows is left out."""
    found = {}
    for name, chart in wanted.items():
        try:
            found[name] = figure(chart()).to_plotly_json()
        except ValueError:
            continue
    return found


def _flagged(reel: Reel, diagnosis: Diagnosis) -> list[str]:
    """Layers that findings name, and those that stand out most."""
    panel = reel.panel("gradient")
    if panel is None:
        return []
    named = [finding.where for finding in diagnosis.findings]
    flagged = [name for name in panel.names if any(name == where or name.startswith(f"{where}.") for where in named if where)]
    striking = [name for name in charts.striking(panel, 6) if name not in flagged]
    return (flagged[:6] + striking)[:9]


def _layers(reel: Reel) -> dict[str, Any]:
    """A table of all layers: a row for each parameter."""
    panels = dict(reel.panels())
    gradient, clipped, update, sparsity = (panels.get(name) for name in ("gradient", "clipped", "update", "sparsity"))
    columns: list[tuple[str, dict[str, float]]] = []
    names: Sequence[str] = () if gradient is None else gradient.names
    if gradient is not None:
        finite = gradient.values.where(gradient.values.isfinite(), math.nan)
        largest, at = finite.nan_to_num(nan=-1.0).max(0)
        squares = finite.square()
        share = (squares / squares.nansum(1, keepdim=True)).nanmean(0)
        columns += [
            ("gradient, median", by_name(gradient, finite.nanmedian(0).values)),
            ("gradient, largest", by_name(gradient, largest.where(largest >= 0, math.nan))),
            ("in step", by_name(gradient, torch.tensor([float(gradient.steps[row]) for row in at.tolist()]))),
            ("share of square", by_name(gradient, share)),
        ]
        odd = gradient.values.isinf().double().sum(0)
        if bool(odd.any()):
            columns.append(("steps with NaN", by_name(gradient, odd)))
    for title, panel in (("after clip, median", clipped), ("update / parameter", update), ("near zero", sparsity)):
        if panel is not None:
            known = panel.values.where(panel.values.isfinite(), math.nan)
            columns.append((title, by_name(panel, known.nanmedian(0).values)))
    rows = [[name, *(cell(column.get(name)) for _, column in columns)] for name in names]
    return {"columns": ["layer", *(title for title, _ in columns)], "rows": rows}


def by_name(panel: Panel, values: torch.Tensor) -> dict[str, float]:
    """One value of each layer."""
    return dict(zip(panel.names, values.tolist(), strict=True))


def cell(value: float | None) -> float | None:
    """A number in the table; None for none."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.4g}")  # numbers of steps are whole
