"""The charts of a run, or of two, and where their values come from; independent of the drawing library."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import keys as n
from ...core import validation as check
from ...core.errors import display, nearest
from ...core.keys import Key, blocks_of
from ...core.moments import Column
from ...core.records import ModelOrder, StepRecord, loss_among, merged
from ...runs.reader import RunReader, StatsSeries, fitting
from ..diagnosis.series import Series, assembled, clip_bound, stacked
from . import elements
from .elements import (
    LAYER_VIEWS,
    POINTS,
    Chart,
    DepthProfile,
    Gap,
    Heatmap,
    Line,
    LineChart,
    Panel,
    PlotView,
    RecordedSteps,
    Subplot,
)

# --- Where drawn values come from: a run directory, or the records in a monitor's memory ---


class ValueSource:
    """Records in memory, read as a run on disk; ``is_whole`` is false if steps between them are forgotten."""

    def __init__(self, records: Iterable[StepRecord], order: ModelOrder | None = None, is_whole: bool = True) -> None:
        self._records = {record.step: record for record in records}
        self.steps, self.is_whole = list(self._records), is_whole
        self.events = [event for record in self._records.values() for event in record.events]
        self.scalars = {key for record in self._records.values() for key in record.values}
        self.in_model_order = (order or ModelOrder()).sorted

    def context(self, step: int) -> Mapping[str, Any]:
        return {**self._records[step].context, "applied": self._records[step].applied}

    def stored(self, key: Key) -> Mapping[int, float]:
        return {step: record.values[key] for step, record in self._records.items() if key in record.values}

    def tensors(self, source: str) -> list[str]:
        tables = (record.tables[source] for record in self._records.values() if source in record.tables)
        return list(dict.fromkeys(name for table in tables for name in table.names))

    def stacks(self, source: str) -> Iterator[StatsSeries]:
        found = [(step, record.tables[source]) for step, record in self._records.items() if source in record.tables]
        return stacked(found)


# --- The drawn values of one run, computed on first use ---

#: Steps, tensors, and by metric values ``[steps, tensors]``.
_Part = tuple[tuple[int, ...], tuple[str, ...], dict[str, torch.Tensor]]


class PanelSet:
    def __init__(self, source: RunReader | ValueSource, title: str = "") -> None:
        self._source, self.title = source, title
        contexts = {step: source.context(step) for step in source.steps}
        self.steps, self.events = list(contexts), source.events
        self.not_applied = [step for step, context in contexts.items() if not context["applied"]]
        #: The largest learning rate of each step.
        self.rates = Series.of((step, max(rates)) for step, context in contexts.items() if (rates := context.get("lr")))
        self._recorded = RecordedSteps(tuple(self.steps), not isinstance(source, ValueSource) or source.is_whole)
        self._panels: dict[str, Panel | None] = {}
        self._known: dict[str, list[_Part]] = {}

    def gaps(self, steps: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value that is known in ``steps``, ascending, is missing; empty for a value without steps."""
        return self._recorded.gaps(steps) if steps else ()

    def line(self, name: str) -> Series:
        """A whole-model value such as ``grad_norm``, or a logged value; empty if it is unknown."""
        return Series.of((self._source.stored(Key(n.SUMMARY, "", name)) or self._source.stored(Key("", name, ""))).items())

    def loss(self) -> Series:
        key = loss_among(key for key in self._source.scalars if not key.source)
        return Series() if key is None else Series.of(self._source.stored(key).items())

    def panel(self, name: str) -> Panel | None:
        """The panel of one of :data:`LAYER_VIEWS`; None if it was not measured."""
        if name not in self._panels:
            self._panels[name] = self._panel(LAYER_VIEWS[name])
        return self._panels[name]

    def panels(self) -> Iterator[tuple[str, Panel]]:
        """All measured panels by name, without those that repeat an earlier one because they fell back to its source."""
        seen = set()
        for name, view in LAYER_VIEWS.items():
            if (panel := self.panel(name)) is not None and (panel.source, view.metric, view.base) not in seen:
                seen.add((panel.source, view.metric, view.base))
                yield name, panel

    def _panel(self, view: PlotView) -> Panel | None:
        for source in view.sources:
            is_fallback = source != view.sources[0] and bool(view.fallback_title)
            panel = self._of(replace(view, title=view.fallback_title) if is_fallback else view, source)
            if panel is not None and view.base:
                if (base := self._of(view, view.base)) is None or not (found := panel.over(base)):
                    return None
                values = torch.where(base.of(found.steps, found.names).values.isinf(), math.inf, found.values)
                return replace(found, values=values)
            if panel is not None:
                return panel
        return None

    def _of(self, view: PlotView, source: str) -> Panel | None:
        parts = [(steps, names, values[view.metric]) for steps, names, values in self._parts(source) if view.metric in values]
        if not parts:
            return None
        # where the norm of all gradients is known, each gradient that there was is measured
        is_of_all = source == n.GRADIENT_BEFORE_CLIP and len(self.line("grad_norm")) > 0
        due = tuple(self._source.tensors(n.PARAMETER)) if is_of_all else ()
        names = self._source.in_model_order(source, {**{measured: None for _, measured, _ in parts}, due: None})
        found = assembled(parts, names)
        if len(found.names) < len(names):
            view = replace(view, title=f"{view.title}, of the {len(found.names):,} of {len(names):,} layers that have it most")
        span = self.steps[0], self.steps[-1]
        return Panel(**vars(found), view=view, source=source, gaps=self.gaps(found.steps), span=span, due=frozenset(due))

    def _parts(self, source: str) -> list[_Part]:
        """All that is drawn of a source, read once; all of its rows would be several times as large."""
        if source not in self._known:
            metrics = {view.metric for view in LAYER_VIEWS.values() if source in (*view.sources, view.base)}
            known = self._known[source] = []
            for stack in self._source.stacks(source):
                is_bad = stack.rows[..., Column.NONFINITE] > 0
                values = {metric: torch.where(is_bad, math.inf, stack.values(metric)) for metric in metrics if stack.has(metric)}
                known += [(stack.steps, stack.names, values)] if stack.names else []
        return self._known[source]


# --- Layers grouped by block: a thousand rows are unreadable, a few dozen blocks are not ---

#: More rows than this are grouped by block.
ROWS = 48
#: Up to this many times as many blocks each have a row of their own.
_SCROLLED = 4


def blocks(names: Sequence[str], most: int = ROWS) -> dict[str, list[int]]:
    """The places of ``names`` by block, in order; too many blocks are merged with their neighbours (``blocks.0 to blocks.3``)."""
    if len(names) <= most:
        return {name: [place] for place, name in enumerate(names)}
    found: dict[str, list[int]] = {}
    block_of = blocks_of(names, of_modules=True)
    for place, name in enumerate(names):
        found.setdefault(block_of[name], []).append(place)
    if len(found) == 1:  # a single block: split it further
        prefix = next(iter(found))
        rests = [name[len(prefix) :].lstrip(".") for name in names]
        block_of = blocks_of(rests, of_modules=True)
        found = {}
        for place, rest in enumerate(rests):
            found.setdefault(f"{prefix}.{block_of[rest]}" if rest else names[place], []).append(place)
    if len(found) <= _SCROLLED * most:
        return found
    names, size = list(found), -(-len(found) // most)
    runs = [names[at : at + size] for at in range(0, len(names), size)]
    return {
        some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}": [place for name in some for place in found[name]]
        for some in runs
    }


def by_block(view: PlotView, cells: Tensor, groups: Mapping[str, Sequence[int]]) -> Tensor:
    """The root of the sum of squares of the layers of each block, or the largest value; infinite if one is not finite."""
    found = []
    for places in groups.values():
        values = cells[:, list(places)]
        absent = values.isnan().all(1)
        known = values.nan_to_num(nan=0.0, posinf=math.inf)
        one = known.square().sum(1).sqrt() if view.adds_up else known.amax(1)
        found.append(torch.where(absent, math.nan, one))
    return torch.stack(found, 1)


# --- The charts of one run, independent of the drawing library ---

#: Columns of a heat map.
COLUMNS = 1000
#: Updates over parameters that most healthy trainings have, as those of docs/gallery: a guide for the eye, judged by no rule.
USUAL_UPDATES = {"most healthy runs: 0.001 to 0.01": (1e-3, 1e-2)}
NO_NORM = "neither a gradient norm nor a loss was recorded; use a preset, or log the loss"
NO_UPDATE = "updates were not measured: attach the optimizer, and use the preset standard or full"
#: A loss whose largest value is more than this times its smallest is drawn on a logarithmic scale.
_WIDE = 20.0
#: Layers drawn side by side, and the share of the first steps that do not decide which.
_MOST_LAYERS, _BEGINNING = 12, 0.05


def heatmap(
    panels: PanelSet, view: str = "gradient", rows: int = ROWS, columns: int = COLUMNS, relative: bool | None = None
) -> Heatmap:
    """A view over the steps, by blocks if there are more than ``rows`` layers; ``relative`` to the median of the row."""
    panel = _panel(panels, view)
    cells, groups = elements.downsampled(panel, columns), blocks(panel.names, rows)
    is_relative = elements.is_relative_by_default(panel.steps, panel.view.is_log) if relative is None else relative
    title = f"{panel.view.title}, relative to the row's median" if is_relative else panel.view.title
    values = tuple(map(tuple, by_block(panel.view, cells.values, groups).T.tolist()))
    usual = tuple(elements.medians(by_block(panel.view, panel.values, groups)).tolist()) if is_relative else None
    due = tuple(all(panel.names[place] in panel.due for place in places) for places in groups.values())
    first, last, marks, is_log = cells.first, cells.last, _marks(panels), panel.view.is_log
    return Heatmap(title, tuple(groups), first, last, values, is_log, marks, usual, panel.gaps, panel.axis, due)


def norm(panels: PanelSet) -> LineChart:
    """The loss, the norm of all gradients before and after clipping with the bound, the share of clipped steps, and the head-room."""
    before, after, loss = panels.line("grad_norm"), panels.line("grad_norm_after_clip"), panels.loss()
    share, limit = panels.line("clip_fraction"), panels.line("clip_limit")
    if not len(before) and not len(loss):
        raise ValueError(NO_NORM)

    def lines(*wanted: tuple[str, Series, str], **options: bool) -> tuple[Line, ...]:
        return tuple(Line.of(name, own, colour, panels.gaps(own.steps), **options) for name, own, colour in wanted if len(own))

    norms = lines(("before clipping", before, elements.BLUE), ("after clipping", after, elements.ORANGE))
    norms += lines(("limit of the adaptive clip", limit, elements.GREEN), is_thin=True)
    bound = None if len(limit) else clip_bound(before, after)
    shares = lines(("share of clipped steps", share, elements.PURPLE))
    headroom = lines(("learning rate over the critical one", panels.line("lr_over_critical"), elements.BLUE))
    subplots = (
        Subplot("loss", lines(("loss", loss, elements.GREY)), is_wide(loss)),
        Subplot("gradient norm", norms, guides={} if bound is None else {f"bound {bound:.3g}": bound}, height=2.0),
        Subplot("clipped share", shares, False, limits=(0.0, 1.05), height=0.7),
        Subplot("learning rate / critical", headroom, guides={"the step would raise the loss of its batch: 1": 1.0}),
    )
    return LineChart("loss and gradient norm", tuple(subplot for subplot in subplots if subplot.lines), _marks(panels))


def update(panels: PanelSet) -> LineChart:
    """The norm of all updates over that of all parameters, its spread over the matrices, and where those of most runs are."""
    whole, low, high = (panels.line(name) for name in ("update_ratio", "update_ratio_p10", "update_ratio_p90"))
    if not len(whole):
        raise ValueError(NO_UPDATE)
    lines = [Line.of("whole model", whole, elements.BLUE, panels.gaps(whole.steps))]
    if len(low) and low.steps == high.steps:
        after = elements.steps_after(panels.gaps(low.steps), low.steps, POINTS)
        below, above = _band(low, high, after)
        lines.insert(0, Line("10th to 90th percentile of matrices", below, elements.SKY, below, above, after_gaps=after))
    return LineChart("update over parameter", (Subplot("update / parameter", tuple(lines), bands=USUAL_UPDATES),), _marks(panels))


def depth(panels: PanelSet, view: str = "gradient", step: int | None = None, rows: int = ROWS) -> DepthProfile:
    """One step over the depth, by default the last one, with the smallest and the largest value of all steps."""
    panel = _panel(panels, view)
    if step is None:
        step = panel.steps[-1]
    if step not in panel.steps:
        close = min(panel.steps, key=lambda known: abs(known - step))
        raise ValueError(f"step {step} has no {panel.view.title}; the nearest that has is {close}")
    groups = blocks(panel.names, rows)
    values = by_block(panel.view, panel.values, groups)
    ends = values.where(values.isfinite(), math.inf).amin(0), values.where(values.isfinite(), -math.inf).amax(0)
    low, high = (tuple(end.where(end.isfinite(), math.nan).tolist()) for end in ends)
    title, now = f"{panel.view.title} in step {step}", tuple(values[panel.steps.index(step)].tolist())
    return DepthProfile(title, tuple(groups), now, low, high, panel.view.is_log)


def layers(panels: PanelSet, view: str = "gradient", names: Sequence[str] = ()) -> LineChart:
    """Layers side by side: ``names``, or those farthest above their own median in some step."""
    panel = _panel(panels, view)
    unknown = [name for name in names if name not in panel.names]
    if unknown:
        raise ValueError(f"there is no layer {unknown[0]!r} in it{nearest(unknown[0], panel.names)}")
    series = {name: panel.column(name) for name in names or most_deviating(panel)}
    subplots = [
        Subplot(name, (Line.of(name, line, elements.BLUE, panels.gaps(line.steps), POINTS // 4),), panel.view.is_log)
        for name, line in series.items()
    ]
    return LineChart(panel.view.title, tuple(subplots), _marks(panels), columns=3)


def most_deviating(panel: Panel, most: int = _MOST_LAYERS) -> list[str]:
    """The layers whose largest value is farthest above their median; layers with values that are not finite come first. The first steps of
    a training are no part of it, since the gradients of many layers are largest in the first of all.
    """
    begun = panel.values[int(_BEGINNING * len(panel.steps)) :]
    finite = begun.where(begun.isfinite() & (begun > 0), math.nan)
    usual = finite.nanmedian(0).values
    above = torch.where(begun.isinf(), math.inf, begun / usual).nan_to_num(nan=0.0, posinf=math.inf).amax(0).tolist()
    ranked = sorted(range(len(above)), key=lambda place: -above[place])
    return [panel.names[place] for place in sorted(ranked[:most])]


#: By name.
CHARTS: Mapping[str, Callable[..., Chart]] = {
    "heatmap": heatmap,
    "norm": norm,
    "update": update,
    "depth": depth,
    "layers": layers,
}


def _panel(panels: PanelSet, view: str) -> Panel:
    if view not in LAYER_VIEWS:
        raise ValueError(f"view must be one of {', '.join(LAYER_VIEWS)}, got {display(view)}{nearest(str(view), LAYER_VIEWS)}")
    panel = panels.panel(view)
    if panel is None:
        raise ValueError(f"the {LAYER_VIEWS[view].title} of layers was not measured; preset='full' measures all views")
    return panel


def _band(low: Series, high: Series, after_gaps: Sequence[int] = ()) -> tuple[Series, Series]:
    """The lowest lower and the highest upper edge of equally many steps each, never combined over a gap."""
    size = -(-len(low) // POINTS)
    edges = [edge for edge in low.beside(high) if edge[1] > 0 and math.isfinite(edge[2])]
    pieces = [list(some) for _, some in groupby(edges, key=lambda edge: bisect_right(after_gaps, edge[0]))]
    bins = [piece[at : at + size] for piece in pieces for at in range(0, len(piece), size)]
    steps = tuple(some[0][0] for some in bins)
    lower, upper = (tuple(pick(edge[side] for edge in some) for some in bins) for pick, side in ((min, 1), (max, 2)))
    return Series(steps, lower), Series(steps, upper)


def is_wide(loss: Series) -> bool:
    return 0 < _WIDE * min(loss.finite.values, default=0) < max(loss.finite.values, default=0)


def _marks(panels: PanelSet) -> tuple[int, ...]:
    return tuple(sorted({event.step for event in panels.events}))


# --- Two runs on the same steps and layers, and their differences ---


class PanelPair(NamedTuple):
    """One view of both runs, on the steps and layers of either, and their :func:`relative` difference."""

    first: Panel
    second: Panel
    difference: Panel


class RunPair:
    """The values of two runs; ``renamed`` maps the name of a layer in the first run to its name in the second."""

    def __init__(self, first: PanelSet, second: PanelSet, renamed: Callable[[str], str] = str) -> None:
        self.panel_sets = first, second
        self.titles = first.title, second.title
        self._renamed = renamed
        self._pairs: dict[str, PanelPair | None] = {}

    def panels(self, name: str) -> PanelPair | None:
        """Both panels of one of :data:`.elements.LAYER_VIEWS`; None unless both runs have it of one source."""
        if name not in self._pairs:
            first, second = (panels.panel(name) for panels in self.panel_sets)
            if first is None or second is None or first.source != second.source:
                self._pairs[name] = None
            else:
                self._pairs[name] = self._paired(first, second)
        return self._pairs[name]

    def _paired(self, first: Panel, second: Panel) -> PanelPair:
        own = replace(first, names=tuple(map(self._renamed, first.names)))
        steps = tuple(sorted({*own.steps, *second.steps}))
        known = [dict(zip(each.names, (~each.values.isnan()).sum(0).tolist(), strict=True)) for each in (own, second)]
        both = merged([own.names, second.names])
        names = fitting({name: sum(each.get(name, 0) for each in known) for name in both}, len(steps))
        span = min(own.axis[0], second.axis[0]), max(own.axis[1], second.axis[1])
        gaps = elements.intersection(own.gaps, second.gaps)
        a, b = (replace(each.of(steps, names), gaps=gaps, span=span, due=frozenset()) for each in (own, second))
        view = PlotView(f"{first.view.title}, relative difference", first.view.sources, first.view.metric, is_difference=True)
        return PanelPair(a, b, replace(a, view=view, values=relative(a.values, b.values)))


def relative(a: Tensor, b: Tensor) -> Tensor:
    """The difference relative to the larger value: 0 if neither is finite, infinity if one is not, NaN if one is missing."""
    larger = torch.maximum(a.abs(), b.abs())
    found = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
    found = torch.where(a.isinf() != b.isinf(), math.inf, found)
    found = torch.where(a.isinf() & b.isinf(), 0.0, found)
    return torch.where(a.isnan() | b.isnan(), math.nan, found)


# --- Charts of two runs ---


def pair_norm(pair: RunPair, marks: Sequence[int] = ()) -> LineChart:
    losses = [panels.loss() for panels in pair.panel_sets]
    loss = _lines(pair, losses, POINTS)
    subplots = (
        *([Subplot("loss", loss, any(map(is_wide, losses)))] if loss else ()),
        *_subplot(pair, "gradient norm", "grad_norm", height=1.5),
        *_subplot(pair, "after clipping", "grad_norm_after_clip"),
        *_subplot(pair, "clipped share", "clip_fraction", is_log=False, limits=(0.0, 1.05), height=0.7),
    )
    if not subplots:
        raise ValueError(NO_NORM)
    return LineChart("loss and gradient norm", subplots, tuple(marks))


def pair_update(pair: RunPair, marks: Sequence[int] = ()) -> LineChart:
    subplots = _subplot(pair, "update / parameter", "update_ratio", bands=USUAL_UPDATES)
    if not subplots:
        raise ValueError(NO_UPDATE)
    return LineChart("update over parameter", subplots, tuple(marks))


def pair_layers(pair: RunPair, names: Sequence[str], marks: Sequence[int] = ()) -> LineChart:
    """The gradients of layers side by side, by their names in the second run."""
    panels = pair.panels("gradient")
    if panels is None or not names:
        raise ValueError("there is no gradient of any layer that both runs have")
    series = ([panel.column(name) for panel in panels[:2]] for name in names)
    subplots = (Subplot(name, _lines(pair, both, POINTS // 4)) for name, both in zip(names, series, strict=True))
    return LineChart(panels.first.view.title, tuple(subplots), tuple(marks), columns=3)


def _subplot(pair: RunPair, title: str, name: str, **options: Any) -> tuple[Subplot, ...]:
    lines = _lines(pair, [panels.line(name) for panels in pair.panel_sets], POINTS)
    return (Subplot(title, lines, **options),) if lines else ()


def _lines(pair: RunPair, series: Sequence[Series], most: int) -> tuple[Line, ...]:
    colour = elements.BLUE, elements.ORANGE
    return tuple(
        Line.of(title, line, colour[place], panels.gaps(line.steps), most, is_dashed=place == 1)
        for place, (title, panels, line) in enumerate(zip(pair.titles, pair.panel_sets, series, strict=True))
        if len(line)
    )


# --- Figures of a run, or of the records in a monitor's memory ---

#: The extra that installs each engine.
_ENGINES = {"plotly": "report", "matplotlib": "plot"}


def plot(source: RunReader | ValueSource, kind: str, engine: str, options: dict[str, Any]) -> Any:
    """A figure of the engine. Raises ValueError for an unknown kind or engine and a value that was not measured, TypeError for an option
    that the chart lacks or of the wrong type, ImportError if the engine is not installed.
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
