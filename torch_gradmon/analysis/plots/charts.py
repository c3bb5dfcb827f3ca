"""The charts of one run, independent of the drawing library."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch

from ...core.errors import display, nearest
from ..diagnosis.series import Series, clip_bound
from . import colours
from .block_rows import ROWS, blocks, by_block
from .downsampling import downsampled
from .elements import POINTS, Chart, DepthProfile, Heatmap, Line, LineChart, Subplot
from .gaps import steps_after
from .panel_set import PanelSet
from .shading import is_relative_by_default, medians
from .views import LAYER_VIEWS, Panel

#: Columns of a heat map.
COLUMNS = 1000
#: Updates over parameters that most healthy trainings have, as those of docs/gallery: a guide for the eye, judged by no rule.
USUAL_UPDATES = {"most healthy runs": (1e-3, 1e-2)}
NO_NORM = "neither a gradient norm nor a loss was recorded; use a preset, or log the loss"
NO_UPDATE = "updates were not measured: attach the optimizer, and use the preset standard or full"
#: A loss whose largest value is more than this times its smallest is drawn on a logarithmic scale.
_WIDE = 20.0
#: Layers drawn side by side, and the share of the first steps that do not decide which.
_MOST_LAYERS, _BEGINNING = 12, 0.05


def heatmap(
    panels: PanelSet, view: str = "gradient", rows: int = ROWS, columns: int = COLUMNS, relative: bool | None = None
) -> Heatmap:
    """A view of all layers over the steps, by blocks if there are more than ``rows`` layers.

    ``relative`` colours show each value relative to the median of its row; None for the default of the view, see
    :func:`torch_gradmon.analysis.plots.shading.is_relative_by_default`.
    """
    panel = _panel(panels, view)
    cells, groups = downsampled(panel, columns), blocks(panel.names, rows)
    is_relative = is_relative_by_default(panel.steps, panel.view.is_log) if relative is None else relative
    return Heatmap(
        f"{panel.view.title}, relative to the row's median" if is_relative else panel.view.title,
        tuple(groups),
        cells.first,
        cells.last,
        tuple(map(tuple, by_block(panel, cells, groups).T.tolist())),
        panel.view.is_log,
        _marks(panels),
        tuple(medians(by_block(panel, downsampled(panel, len(panel.steps)), groups)).tolist()) if is_relative else None,
        panel.gaps,
        panel.axis,
        tuple(all(panel.names[place] in panel.due for place in places) for places in groups.values()),
    )


def norm(panels: PanelSet) -> LineChart:
    """The loss, the norm of all gradients before and after clipping with the bound, the share of clipped steps, and the head-room."""
    before, after, loss = panels.line("grad_norm"), panels.line("grad_norm_clipped"), panels.loss()
    share, limit = panels.line("clipped_share"), panels.line("clip_limit")
    if not len(before) and not len(loss):
        raise ValueError(NO_NORM)

    def lines(*wanted: tuple[str, Series, str], **options: bool) -> tuple[Line, ...]:
        return tuple(Line.of(name, own, colour, panels.gaps(own.steps), **options) for name, own, colour in wanted if len(own))

    norms = lines(("before clipping", before, colours.BLUE), ("after clipping", after, colours.ORANGE))
    norms += lines(("limit of the adaptive clip", limit, colours.GREEN), is_thin=True)
    bound = None if len(limit) else clip_bound(before, after)
    shares = lines(("share of clipped steps", share, colours.PURPLE))
    headroom = lines(("learning rate over the critical one", panels.line("lr_over_critical"), colours.BLUE))
    subplots = (
        Subplot("loss", lines(("loss", loss, colours.GREY)), is_wide(loss)),
        Subplot("gradient norm", norms, guides={} if bound is None else {"bound": bound}, height=2.0),
        Subplot("clipped share", shares, False, limits=(0.0, 1.05), height=0.7),
        Subplot("learning rate / critical", headroom, guides={"the step would raise the loss of its batch:": 1.0}),
    )
    return LineChart("loss and gradient norm", tuple(subplot for subplot in subplots if subplot.lines), _marks(panels))


def update(panels: PanelSet) -> LineChart:
    """The norm of all updates over that of all parameters, its spread over the matrices, and where those of most runs are."""
    whole, low, high = (panels.line(name) for name in ("update_ratio", "update_ratio_p10", "update_ratio_p90"))
    if not len(whole):
        raise ValueError(NO_UPDATE)
    lines = [Line.of("whole model", whole, colours.BLUE, panels.gaps(whole.steps))]
    if len(low) and low.steps == high.steps:
        after = steps_after(panels.gaps(low.steps), low.steps, POINTS)
        below, above = _band(low, high, after)
        lines.insert(0, Line("10th to 90th percentile of matrices", below, colours.SKY, below, above, after_gaps=after))
    return LineChart(
        "update over parameter",
        (Subplot("update / parameter", tuple(lines), bands=USUAL_UPDATES),),
        _marks(panels),
    )


def depth(panels: PanelSet, view: str = "gradient", step: int | None = None, rows: int = ROWS) -> DepthProfile:
    """One step over the depth, by default the last one, with the smallest and the largest value of all steps."""
    panel = _panel(panels, view)
    if step is None:
        step = panel.steps[-1]
    if step not in panel.steps:
        close = min(panel.steps, key=lambda known: abs(known - step))
        raise ValueError(f"step {step} has no {panel.view.title}; the nearest that has is {close}")
    groups = blocks(panel.names, rows)
    values = by_block(panel, downsampled(panel, len(panel.steps)), groups)
    known = values.where(values.isfinite(), math.nan)
    low, high = known.nan_to_num(nan=math.inf).amin(0), known.nan_to_num(nan=-math.inf).amax(0)
    return DepthProfile(
        f"{panel.view.title} in step {step}",
        tuple(groups),
        tuple(values[panel.steps.index(step)].tolist()),
        tuple(low.where(low.isfinite(), math.nan).tolist()),
        tuple(high.where(high.isfinite(), math.nan).tolist()),
        panel.view.is_log,
    )


def layers(panels: PanelSet, view: str = "gradient", names: Sequence[str] = ()) -> LineChart:
    """Layers side by side: ``names``, or those farthest above their own median in some step."""
    panel = _panel(panels, view)
    unknown = [name for name in names if name not in panel.names]
    if unknown:
        raise ValueError(f"there is no layer {unknown[0]!r} in it{nearest(unknown[0], panel.names)}")
    series = {name: column(panel, name) for name in names or most_deviating(panel)}
    subplots = [
        Subplot(name, (Line.of(name, line, colours.BLUE, panels.gaps(line.steps), POINTS // 4),), panel.view.is_log)
        for name, line in series.items()
    ]
    return LineChart(panel.view.title, tuple(subplots), _marks(panels), columns=3)


def most_deviating(panel: Panel, most: int = _MOST_LAYERS) -> list[str]:
    """The layers whose largest value is farthest above their median; layers with values that are not finite come first.

    The first steps of a training are no part of it, since the gradients of many layers are largest in the first of all.
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
    """The lowest lower and the highest upper edge of equally many steps each, without values that a logarithmic axis cannot show.

    Steps on both sides of a gap are never combined; ``after_gaps`` are the steps that follow one.
    """
    size = -(-len(low) // POINTS)
    edges = [
        (step, below, above)
        for step, below, above in zip(low.steps, low.values, high.values, strict=True)
        if below > 0 and math.isfinite(above)
    ]
    pieces = [list(some) for _, some in groupby(edges, key=lambda edge: bisect_right(after_gaps, edge[0]))]
    bins = [piece[at : at + size] for piece in pieces for at in range(0, len(piece), size)]
    steps = tuple(some[0][0] for some in bins)
    lower, upper = (tuple(pick(edge[side] for edge in some) for some in bins) for pick, side in ((min, 1), (max, 2)))
    return Series(steps, lower), Series(steps, upper)


def is_wide(loss: Series) -> bool:
    """Whether the values of a loss need a logarithmic scale."""
    return 0 < _WIDE * min(loss.finite.values, default=0) < max(loss.finite.values, default=0)


def column(panel: Panel, name: str) -> Series:
    """The values of one layer, without the steps in which it has none."""
    values = panel.values[:, panel.names.index(name)].tolist()
    return Series.of((step, value) for step, value in zip(panel.steps, values, strict=True) if not math.isnan(value))


def _marks(panels: PanelSet) -> tuple[int, ...]:
    return tuple(sorted({event.step for event in panels.events}))
