"""The report of a run, or of two: its content as plain data, and one HTML file that contains its script, style and data."""

from __future__ import annotations

import base64
import datetime
import functools
import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder
from torch import Tensor

from ...core.files import replacing
from ...core.formatting import ProgressBar
from ...core.keys import TENSOR_SOURCES, parse_key
from ...runs.reader import RunReader
from ...spikes.signals import counted, episodes, largest
from .. import diff
from ..comparison import renamer
from ..diagnosis.diagnose import diagnose_history
from ..diagnosis.findings import Diagnosis, Finding
from ..diagnosis.history import History
from ..diagnosis.series import Series
from ..diff import RunDiff
from ..plots import charts, elements
from ..plots.charts import PanelPair, PanelSet, RunPair, blocks, by_block
from ..plots.elements import LAYER_VIEWS, RECENT, Chart, Downsampled, Panel, medians, recent_ratios
from ..plots.plotly import figure
from ..run import read_run

# --- Values of layers in two bytes per cell, as text that the page decodes ---

#: Codes for a missing value, a gradient that there was not, a value that is not finite, and zero on a logarithmic scale.
NONE, NO_GRADIENT, NONFINITE, ZERO = -32768, -32766, 32767, -32767
#: A code is this factor times the logarithm to base ten, or times the value: steps of 0.33 % from 1e-45 to 1e45, or of 1/30000.
LOG_SCALE, SCALE = 700.0, 30000.0
_LARGEST = 32000.0


def packed(values: Tensor, is_log: bool, due: Sequence[bool] = ()) -> str:
    """``values`` as base64 of 16-bit little-endian codes, row by row; in ``due`` rows, NaN is a gradient that there was not."""
    scaled = values.abs().clamp_min(1e-300).log10() * LOG_SCALE if is_log else values * SCALE
    codes = scaled.nan_to_num(0.0, 0.0, 0.0).round().clamp(-_LARGEST, _LARGEST)
    if is_log:
        codes = torch.where(values == 0, float(ZERO), codes)
    codes = torch.where(values.isinf(), float(NONFINITE), codes)
    missing = torch.tensor([[float(NO_GRADIENT if each else NONE)] for each in due or [False]], device="cpu")
    codes = torch.where(values.isnan(), missing, codes)
    return base64.b64encode(codes.numpy().astype("<i2").tobytes()).decode("ascii")


# --- The content of a report, as plain data ---

#: Cells of one view, of layers and blocks together, and its columns.
_CELLS, _FEWEST_COLUMNS, _COLUMNS = 150_000, 100, 1000
#: Parts that take time: the diagnosis, and each view.
PARTS = 1 + len(LAYER_VIEWS)
#: The largest spikes, which are listed.
MOST_SPIKES = 200
#: How the page decodes the output of :func:`torch_gradmon.analysis.report.page.packed`.
CODES = {"none": NONE, "bare": NO_GRADIENT, "loud": NONFINITE, "zero": ZERO, "log": LOG_SCALE, "linear": SCALE, "recent": RECENT}


def content(run: RunReader, title: str, advance: Callable[[], None]) -> dict[str, Any]:
    """The data of the page; ``advance`` is called after each of :data:`PARTS`."""
    panels = PanelSet(run, title)
    diagnosis = diagnose_history(History.of_run(run))
    advance()
    for name in LAYER_VIEWS:
        panels.panel(name)
        advance()
    return {
        "title": title,
        "facts": facts(run, panels),
        "last": panels.steps[-1],
        "against": None,
        "findings": findings(diagnosis),
        "unseen": [f"{rule}: {why}" for rule, why in diagnosis.unseen.items()],
        "marks": sorted({event.step for event in panels.events}),
        "mark": "spike",
        "events": spikes(panels),
        "spikes": counted(episodes(panels.events, panels.steps)),
        "codes": CODES,
        "sides": {"run": ""},
        "views": {name: view({"run": panel}) for name, panel in panels.panels()},
        "figures": figures(
            norm=lambda: charts.norm(panels),
            update=lambda: charts.update(panels),
            layers=lambda: charts.layers(panels, names=_notable_layers(panels, diagnosis)),
        ),
        "layers": _layers(panels),
    }


def findings(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    return [{**_finding(leader), "signs": [_finding(other) for other in others]} for leader, others in diagnosis.grouped()]


def spikes(panels: PanelSet) -> list[str]:
    return [str(spike) for spike in largest(episodes(panels.events, panels.steps), MOST_SPIKES)]


def _finding(finding: Finding) -> dict[str, Any]:
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


def facts(run: RunReader, panels: PanelSet) -> list[list[str]]:
    steps = panels.steps
    found = [["steps", f"{steps[0]:,} to {steps[-1]:,}, {len(steps):,} of them recorded" if steps else "none"]]
    if steps:
        start, end = (run.context(step)["time"] for step in (steps[0], steps[-1]))
        when = datetime.datetime.fromtimestamp(start).strftime("%Y-%m-%d %H:%M")
        found.append(["started", f"{when}, lasted {_duration(end - start)}"])
    if len(loss := panels.loss()):
        found.append(["loss", _loss_text(loss)])
    if len(rates := panels.rates):
        low, high = f"{min(rates.values):.3g}", f"{max(rates.values):.3g}"
        found.append(["learning rate", low if low == high else f"{low} to {high}"])
    found.append(["model", run.model_text])
    if parts := run.trained_parts:
        found.append(["trains", "\n".join(map(str, parts))])
    found.append(["spikes", counted(episodes(panels.events, steps))])
    if count := len(panels.not_applied):
        found.append(["not applied", f"{count:,} steps"])
    found.append(["torch", str(run.meta.get("torch", "unknown"))])
    if damage := run.damage:
        found.append(["damage", "\n".join(damage)])
    return found


def _loss_text(loss: Series) -> str:
    """The first loss and the median of the last ones; a single batch would not be representative."""
    known = loss.finite
    first = f"{known.values[0]:.4g}" if len(known) else "never finite"
    if math.isfinite(loss.values[-1]):
        return f"{first} to {known.part(0.95, 1).median:.4g} (median of the end)"
    since = loss.steps[0] if not len(known) else loss.steps[loss.steps.index(known.steps[-1]) + 1]
    return f"{first}, not finite since step {since}" if len(known) else first


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def view(panels: Mapping[str, Panel]) -> dict[str, Any]:
    """Panels of the same layers and steps by side: one for one run, three for two runs."""
    panel = next(iter(panels.values()))
    groups = blocks(panel.names)
    is_grouped = len(groups) < len(panel.names)
    many = len(panels) * (len(panel.names) + (len(groups) if is_grouped else 0))
    columns = min(max(_CELLS // many, _FEWEST_COLUMNS), _COLUMNS)
    cells = {side: elements.downsampled(each, columns) for side, each in panels.items()}
    one = next(iter(cells.values()))
    laid = elements.grid(one.first, one.last, panel.gaps, panel.axis)
    return {
        "names": list(panel.names),
        "blocks": [[block, places] for block, places in groups.items()] if is_grouped else None,
        "first": list(one.first),
        "last": list(one.last),
        "edges": list(laid.edges),
        "places": list(laid.places),
        "sides": {side: _side(each, cells[side], groups if is_grouped else None) for side, each in panels.items()},
    }


def _side(panel: Panel, cells: Downsampled, groups: Mapping[str, Sequence[int]] | None) -> dict[str, Any]:
    """The values of a panel's layers and blocks, the medians of both over all steps, and the values relative to the steps before each
    column; None for these in a short run, whose medians are those of these steps.
    """
    is_log, usual = panel.view.is_log, medians(panel.values)
    due = [name in panel.due for name in panel.names]
    of_blocks = None if groups is None else by_block(panel.view, panel.values, groups)
    due_blocks = [all(due[place] for place in places) for places in (groups or {}).values()]

    def shown(own: Tensor, own_blocks: Tensor | None, middle: Tensor) -> dict[str, Any]:
        return {
            "cells": packed(own.T, is_log, due),
            "ofBlocks": None if own_blocks is None else packed(own_blocks.T, is_log, due_blocks),
            "limit": elements.scale_limit(elements.deviations(own, middle, is_log), is_log),
        }

    recent = None
    if len(panel.steps) >= 2 * RECENT and is_log:
        place = {step: at for at, step in enumerate(panel.steps)}
        columns = [place[step] for step in cells.first], [place[step] for step in cells.last]
        of_both = recent_ratios(panel.values, *columns), None if of_blocks is None else recent_ratios(of_blocks, *columns)
        recent = shown(*of_both, torch.ones(1, dtype=torch.float64, device="cpu"))
    return {
        "title": panel.view.title,
        "log": is_log,
        **shown(cells.values, None if groups is None else by_block(panel.view, cells.values, groups), usual),
        "medians": list(map(cell, usual.tolist())),
        "mediansOfBlocks": None if of_blocks is None else list(map(cell, medians(of_blocks).tolist())),
        "relative": None if panel.view.is_difference else elements.is_relative_by_default(panel.steps, is_log),
        "recent": recent,
    }


def figures(**wanted: Callable[[], Chart]) -> dict[str, Any]:
    """Charts as static figures by name, without those whose values are missing."""
    found = {}
    for name, chart in wanted.items():
        with suppress(ValueError):
            found[name] = figure(chart()).to_plotly_json()
    return found


def _notable_layers(panels: PanelSet, diagnosis: Diagnosis) -> list[str]:
    panel = panels.panel("gradient")
    if panel is None:
        return []
    places = [finding.where for finding in diagnosis.findings if finding.where]
    named = [name for name in panel.names if any(name == where or name.startswith(f"{where}.") for where in places)]
    others = [name for name in charts.most_deviating(panel, 6) if name not in named]
    return (named[:6] + others)[:9]


def _layers(panels: PanelSet) -> dict[str, Any]:
    measured = dict(panels.panels())
    gradient, clipped, update, sparsity = (measured.get(name) for name in ("gradient", "clipped", "update", "sparsity"))
    columns: list[tuple[str, dict[str, float]]] = []
    if gradient is not None:
        finite = gradient.values.where(gradient.values.isfinite(), math.nan)
        largest, at = finite.nan_to_num(nan=-1.0).max(0)
        squares = finite.square()
        share = (squares / squares.nansum(1, keepdim=True)).nanmean(0)
        columns += [
            ("gradient, median", gradient.by_name(finite.nanmedian(0).values)),
            ("gradient, largest", gradient.by_name(largest.where(largest >= 0, math.nan))),
            ("in step", gradient.by_name(torch.tensor([float(gradient.steps[row]) for row in at.tolist()]))),
            ("share of square", gradient.by_name(share)),
        ]
        odd = gradient.values.isinf().double().sum(0)
        if bool(odd.any()):
            columns.append(("steps with NaN", gradient.by_name(odd)))
    others = (("after clip, median", clipped), ("update / parameter", update), ("near zero", sparsity))
    columns += [(title, panel.by_name(medians(panel.values))) for title, panel in others if panel is not None]
    return layer_table(() if gradient is None else gradient.names, columns)


def layer_table(names: Sequence[str], columns: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Any]:
    rows = [[name, *(cell(column.get(name)) for _, column in columns)] for name in names]
    return {"columns": ["layer", *(title for title, _ in columns)], "rows": rows}


def cell(value: float | None) -> float | None:
    """A number for JSON, with few digits; None for a missing value."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.4g}")  # numbers of steps are integers


# --- The content of a page about two runs, as plain data ---

#: Divergences that are listed, and layers drawn side by side.
_DIVERGENCES, _MOST_LAYERS = 5, 9


def comparison_content(
    runs: tuple[RunReader, RunReader],
    names: tuple[str, str],
    difference: RunDiff,
    renamed: Callable[[str], str],
    title: str,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """The data of the page on two runs, whose ``names`` differ; ``renamed`` gives the name of a layer in the second run."""
    pair = RunPair(PanelSet(runs[0], names[0]), PanelSet(runs[1], names[1]), renamed)
    diagnoses = [diagnose_history(History.of_run(run)) for run in runs]
    advance()
    for name in LAYER_VIEWS:
        pair.panels(name)
        advance()
    shown = {name for panels in pair.panel_sets for name, _ in panels.panels()}
    pairs = {name: found for name in LAYER_VIEWS if name in shown and (found := pair.panels(name)) is not None}
    marks = [difference.first.step] if difference.first is not None else []
    return {
        "title": title,
        "facts": _facts(runs, pair),
        "against": comparison(difference),
        "findings": [
            {**found, "run": name} for name, diagnosis in zip(names, diagnoses, strict=True) for found in findings(diagnosis)
        ],
        "unseen": [],
        "marks": marks,
        "mark": "the runs diverge",
        "events": [f"{name}: {spike}" for name, panels in zip(names, pair.panel_sets, strict=True) for spike in spikes(panels)],
        "spikes": "",
        "codes": CODES,
        "sides": {"apart": "difference", "first": names[0], "second": names[1]},
        "views": {
            name: view({"apart": each.difference, "first": each.first, "second": each.second}) for name, each in pairs.items()
        },
        "figures": figures(
            norm=lambda: charts.pair_norm(pair, marks),
            update=lambda: charts.pair_update(pair, marks),
            layers=lambda: charts.pair_layers(pair, _differing_layers(difference, pairs.get("gradient")), marks),
        ),
        "layers": _paired_layers(pairs.get("gradient"), names),
    }


def comparison(difference: RunDiff) -> dict[str, Any]:
    shown = difference.divergences[:_DIVERGENCES]
    return {
        "parts": difference.diverges,
        "words": [line.strip() for line in diff.opening(difference) if line.strip()],
        "step": difference.steps[-1],
        "partings": [[each.key, *diff.both(each), diff.number(each.relative)] for each in shown],
        "more": len(difference.divergences) - len(shown),
        "stages": diff.stage_rows(difference),
        "lone": list(diff.unmatched(difference)),
    }


def _facts(runs: tuple[RunReader, RunReader], pair: RunPair) -> list[list[str]]:
    first, second = (dict(facts(run, panels)) for run, panels in zip(runs, pair.panel_sets, strict=True))
    found = [["runs", " | ".join(pair.titles)]]
    for name in dict.fromkeys((*first, *second)):
        values = dict.fromkeys((first.get(name, "none"), second.get(name, "none")))
        found.append([name, "\n| ".join(values) if any("\n" in value for value in values) else " | ".join(values)])
    return found


def _differing_layers(difference: RunDiff, gradient: PanelPair | None) -> list[str]:
    """The layers that diverge in the first divergent step, then those with the largest differences in any step."""
    if gradient is None:
        return []
    keys = [parse_key(divergence.other) for divergence in difference.divergences]
    divergent = [key.name for key in keys if key.source in TENSOR_SOURCES]
    largest = torch.nan_to_num(gradient.difference.values, nan=-1.0).amax(0)
    known = gradient.first.names
    ranked = (known[place] for place in largest.argsort(descending=True, stable=True).tolist())
    found = dict.fromkeys((*(name for name in divergent if name in known), *ranked))
    return list(found)[:_MOST_LAYERS]


def _paired_layers(gradient: PanelPair | None, names: Sequence[str]) -> dict[str, Any]:
    """A row for each layer: the size of its gradient in both runs, and the differences."""
    if gradient is None:
        return layer_table((), [])
    both = zip(names, (gradient.first, gradient.second), strict=True)
    columns = [(f"gradient in {name}, median", panel.by_name(medians(panel.values))) for name, panel in both]
    apart = gradient.difference
    far = apart.values.nan_to_num(nan=-1.0)
    largest, at = far.max(0)
    steps = torch.tensor([float(step) for step in apart.steps], dtype=torch.float64, device="cpu")
    columns += [
        ("largest difference", apart.by_name(largest.where(largest >= 0, torch.nan))),
        ("in step", apart.by_name(steps[at].where(largest > 0, torch.nan))),
        ("differs since step", apart.by_name(steps[(far > 0).int().argmax(0)].where(largest > 0, torch.nan))),
    ]
    return layer_table(gradient.first.names, columns)


# --- The page ---

#: The name of the report in a run directory.
NAME = "report.html"


def write(
    path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None, title: str | None = None, progress: bool | None = None
) -> Path:
    """Write the report of the run in the directory ``path``, by default into ``report.html`` there, and return its file. Raises as
    :func:`load_run`, ValueError also if the run has no step yet or ``to`` is a directory, and OSError if the file cannot be written.
    """
    target = _checked(Path(path) / NAME if to is None else Path(to))
    with closing(read_run(path)) as run:
        if not run.steps:
            raise ValueError(f"the run in {str(path)!r} has no recorded step yet")
        with ProgressBar(PARTS, "report", "part", progress) as bar:
            found = content(run, title or _name(path), bar.advance)
    return _written(found, target)


def write_both(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    difference: RunDiff,
    to: str | os.PathLike[str],
    title: str | None = None,
    rename: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> Path:
    """Write one report of two runs on top of each other; ``difference`` and ``rename`` are those of :func:`torch_gradmon.diff_runs`.
    Returns and raises as :func:`write`.
    """
    target = _checked(Path(to))
    names = _name(first), _name(second)
    if names[0] == names[1]:
        names = str(first), str(second)
    if names[0] == names[1]:
        names = f"{names[0]} (first)", f"{names[1]} (second)"
    with (
        closing(read_run(first)) as left,
        closing(read_run(second)) as right,
        ProgressBar(PARTS, "report", "part", progress) as bar,
    ):
        both = f"{names[0]} and {names[1]}"
        found = comparison_content((left, right), names, difference, renamer(rename), title or both, bar.advance)
    return _written(found, target)


def _name(path: str | os.PathLike[str]) -> str:
    return Path(path).resolve().name


def _checked(target: Path) -> Path:
    """Refuse a directory as the target before the work begins."""
    if target.is_dir():
        raise ValueError(f"{str(target)!r} is a directory; name a file in it")
    return target


def _written(data: dict[str, Any], target: Path) -> Path:
    text = html(data)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:  # a browser may show the old one
        file.write(text.encode())
    return target


def html(data: dict[str, Any], **live: str) -> str:
    """The page; ``live`` is for that of a server: ``run``, its name there or empty if the page follows none, ``script`` and ``version``."""
    here = files(__package__)
    return template("analysis/report", "page.html.j2").render(
        data,
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=_plotly()[0],
        plotly_source=_plotly()[1],
        # JSON that cannot end its script element, whatever names it contains
        data=as_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        live=live,
    )


def template(folder: str, name: str) -> Template:
    loader = PackageLoader("torch_gradmon", folder)
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, **options)
    environment.filters["hashed"] = _hashed
    return environment.get_template(name)


def _hashed(script: str) -> str:
    """The source of a Content-Security-Policy that allows this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _plotly() -> tuple[str, str]:
    """Plotly's script, gzipped to four tenths of its size, as base64; and its source as :func:`_hashed` gives it."""
    script = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _hashed(script)


def as_json(data: Any) -> str:
    return json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"), allow_nan=False)
