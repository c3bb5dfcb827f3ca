"""What a picture shows, before anybody draws it: plotly and matplotlib draw the same charts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from ...core.errors import display, nearest
from ..diagnosis.series import Series, clip_bound
from . import colours
from .block_rows import ROWS, blocks, together
from .downsampling import squeezed
from .elements import POINTS, Chart, Heat, Line, Lines, Profile, Strip
from .gaps import begins
from .panels import LAYER_VIEWS, Panel, Reel
from .shading import is_worth_it, medians

#: Columns of a heat map.
COLUMNS = 1000
#: What works for most models, see torch_gradmon/analysis/diagnosis/rules/learning_rate.py.
GUIDE = 1e-3
#: A loss that spans so many times its smallest value is shown on a logarithmic scale.
_WIDE = 20.0
#: Small pictures side by side.
_MOST_LAYERS = 12


def heatmap(reel: Reel, view: str = "gradient", rows: int = ROWS, columns: int = COLUMNS, relative: bool | None = None) -> Heat:
    """A view of all layers over the steps, by blocks where there are more than ``rows`` layers. Colours are ``relative`` to the median
    of each row, or the values themselves; None for what suits the view, see :func:`torch_gradmon.analysis.plots.shading.is_worth_it`.
    """
    panel = _panel(reel, view)
    cells, groups = squeezed(panel, columns), blocks(panel.names, rows)
    is_relative = is_worth_it(panel.steps, panel.view.is_log) if relative is None else relative
    return Heat(
        f"{panel.view.title}, relative to the row's median" if is_relative else panel.view.title,
        tuple(groups),
        cells.first,
        cells.last,
        tuple(map(tuple, together(panel, cells, groups).T.tolist())),
        panel.view.is_log,
        _marks(reel),
        tuple(medians(together(panel, squeezed(panel, len(panel.steps)), groups)).tolist()) if is_relative else None,
        panel.gaps,
        panel.axis,
    )


def norm(reel: Reel) -> Lines:
    """The loss, the norm of all gradients before and after clipping with the bound, and the share of clipped steps."""
    before, after, loss = reel.line("grad_norm"), reel.line("grad_norm_clipped"), reel.loss()
    share, limit = reel.line("clipped_share"), reel.line("clip_limit")

    def line(name: str, series: Series, colour: str, **options: bool) -> Line:
        return Line.of(name, series, colour, reel.gaps(series.steps), **options)

    strips = []
    if len(loss):
        strips.append(Strip("loss", (line("loss", loss, colours.GREY),), is_wide(loss)))
    norms = [
        *([line("before clipping", before, colours.BLUE)] if len(before) else []),
        *([line("after clipping", after, colours.ORANGE)] if len(after) else []),
        *([line("limit of the adaptive clip", limit, colours.GREEN, is_thin=True)] if len(limit) else []),
    ]
    bound = None if len(limit) else clip_bound(before, after)
    if norms:
        strips.append(Strip("gradient norm", tuple(norms), guides={} if bound is None else {"bound": bound}, height=2.0))
    if len(share):
        shares = line("share of clipped steps", share, colours.PURPLE)
        strips.append(Strip("clipped share", (shares,), False, limits=(0.0, 1.05), height=0.7))
    if not len(before) and not len(loss):
        raise ValueError("neither a gradient norm nor a loss was recorded; use a preset, or log the loss")
    return Lines("loss and gradient norm", tuple(strips), _marks(reel))


def update(reel: Reel) -> Lines:
    """The update of all parameters over their norm, the spread of it over the matrices, and the guide of a thousandth."""
    whole, low, high = (reel.line(name) for name in ("update_ratio", "update_ratio_p10", "update_ratio_p90"))
    if not len(whole):
        raise ValueError("updates were not measured: attach the optimizer, and use the preset standard or full")
    lines = [Line.of("whole model", whole, colours.BLUE, reel.gaps(whole.steps))]
    if len(low) and low.steps == high.steps:
        behind = begins(reel.gaps(low.steps), low.steps, POINTS)
        few = _band(low, high, behind)
        lines.insert(0, Line("10th to 90th percentile of matrices", few[0], colours.SKY, few[0], few[1], begins=behind))
    return Lines(
        "update over parameter",
        (Strip("update / parameter", tuple(lines), guides={"what works for most models:": GUIDE}),),
        _marks(reel),
    )


def depth(reel: Reel, view: str = "gradient", step: int | None = None, rows: int = ROWS) -> Profile:
    """One step over the depth, by default the last one, beside the smallest and the largest value of all steps."""
    panel = _panel(reel, view)
    if step is None:
        step = panel.steps[-1]
    if step not in panel.steps:
        raise ValueError(f"step {step} has no {panel.view.title}; the nearest that has is {_nearest(panel.steps, step)}")
    groups = blocks(panel.names, rows)
    values = together(panel, squeezed(panel, len(panel.steps)), groups)
    known = values.where(values.isfinite(), math.nan)
    low = known.nan_to_num(nan=math.inf).amin(0)
    high = known.nan_to_num(nan=-math.inf).amax(0)
    now = values[panel.steps.index(step)]
    return Profile(
        f"{panel.view.title} in step {step}",
        tuple(groups),
        tuple(now.tolist()),
        tuple(low.where(low.isfinite(), math.nan).tolist()),
        tuple(high.where(high.isfinite(), math.nan).tolist()),
        panel.view.is_log,
    )


def layers(reel: Reel, view: str = "gradient", names: Sequence[str] = ()) -> Lines:
    """Single layers side by side: ``names``, or those that lie farthest above their own median in some step."""
    panel = _panel(reel, view)
    unknown = [name for name in names if name not in panel.names]
    if unknown:
        raise ValueError(f"there is no layer {unknown[0]!r} in it{nearest(unknown[0], panel.names)}")
    chosen = list(names) or striking(panel)
    series = {name: there(Series(panel.steps, tuple(panel.values[:, panel.names.index(name)].tolist()))) for name in chosen}
    strips = [
        Strip(name, (Line.of(name, line, colours.BLUE, reel.gaps(line.steps), POINTS // 4),), panel.view.is_log)
        for name, line in series.items()
    ]
    return Lines(panel.view.title, tuple(strips), _marks(reel), columns=3)


def striking(panel: Panel, most: int = _MOST_LAYERS) -> list[str]:
    """The layers whose largest value is farthest above their median, those with values that are not finite first."""
    finite = panel.values.where(panel.values.isfinite() & (panel.values > 0), math.nan)
    usual = finite.nanmedian(0).values
    above = (panel.values / usual).nan_to_num(nan=0.0, posinf=math.inf).amax(0).tolist()
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


def _panel(reel: Reel, view: str) -> Panel:
    if view not in LAYER_VIEWS:
        raise ValueError(f"view must be one of {', '.join(LAYER_VIEWS)}, got {display(view)}{nearest(str(view), LAYER_VIEWS)}")
    panel = reel.panel(view)
    if panel is None:
        raise ValueError(f"the {LAYER_VIEWS[view].title} of layers was not measured; preset='full' measures all views")
    return panel


def _band(low: Series, high: Series, behind: Sequence[int] = ()) -> tuple[Series, Series]:
    """Of equally many steps the lowest lower and the highest upper edge, of those that a logarithmic axis can show; none are taken
    together over a gap, of which there is one before each of the steps in ``behind``.
    """
    size = -(-len(low) // POINTS)
    edges = [
        (step, below, above)
        for step, below, above in zip(low.steps, low.values, high.values, strict=True)
        if below > 0 and math.isfinite(above)
    ]
    pieces = [list(some) for _, some in groupby(edges, key=lambda edge: bisect_right(behind, edge[0]))]
    bins = [piece[at : at + size] for piece in pieces for at in range(0, len(piece), size)]
    steps = tuple(some[0][0] for some in bins)
    lower, upper = (tuple(pick(edge[side] for edge in some) for some in bins) for pick, side in ((min, 1), (max, 2)))
    return Series(steps, lower), Series(steps, upper)


def is_wide(loss: Series) -> bool:
    """Whether a loss spans so much that it takes a logarithmic scale."""
    return 0 < _WIDE * min(loss.finite.values, default=0) < max(loss.finite.values, default=0)


def there(line: Series) -> Series:
    """Without the steps in which there is no value."""
    pairs = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if not math.isnan(value)]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def _marks(reel: Reel) -> tuple[int, ...]:
    return tuple(sorted({event.step for event in reel.events}))


def _nearest(steps: Sequence[int], step: int) -> int:
    return min(steps, key=lambda known: abs(known - step))
