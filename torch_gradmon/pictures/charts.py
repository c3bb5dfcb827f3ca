"""What a picture shows, before anybody draws it: plotly and matplotlib draw the same charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..diagnosis.series import Series, lower_median
from ..errors import display, nearest
from . import colours
from .blocks import ROWS, blocks, together
from .reel import LAYER_VIEWS, Panel, Reel
from .squeezing import points, squeezed

#: Columns of a heat map, and points of a line.
COLUMNS, POINTS = 1000, 2000
#: What works for most models, see torch_gradmon/diagnosis/rates.py.
GUIDE = 1e-3
#: A loss that spans so many times its smallest value is shown on a logarithmic scale.
_WIDE = 20.0
#: Small pictures side by side.
_MOST_LAYERS = 12


@dataclass(frozen=True)
class Line:
    """Values over steps.

    Attributes:
        name: of what it shows.
        series: its points; some may not be finite.
        colour: of the line.
        low: its lower and
        high: its upper edge, where it is a band.
        is_thin: whether it stands back behind others.
        is_dashed: whether it lets one below it be seen.
    """

    name: str
    series: Series
    colour: str
    low: Series | None = None
    high: Series | None = None
    is_thin: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Strip:
    """Lines that share an axis.

    Attributes:
        title: of the axis.
        lines: in the order in which they are drawn.
        is_log: whether the axis is logarithmic.
        guides: horizontal lines, by what they are called.
        limits: of the axis, where they are fixed.
        height: beside other strips.
    """

    title: str
    lines: tuple[Line, ...]
    is_log: bool = True
    guides: Mapping[str, float] = field(default_factory=dict)
    limits: tuple[float, float] | None = None
    height: float = 1.0


@dataclass(frozen=True)
class Lines:
    """Strips below each other over the same steps, or side by side in ``columns``; ``marks`` are steps with a spike."""

    title: str
    strips: tuple[Strip, ...]
    marks: tuple[int, ...] = ()
    columns: int = 1


@dataclass(frozen=True)
class Heat:
    """Layers over steps.

    Attributes:
        title: in words.
        rows: names of layers or blocks, in the order of the model.
        first: the first step of each column.
        last: the last one.
        values: by row, then by column; NaN for none, infinity for what is not finite.
        is_log: whether colours follow the logarithm.
        marks: steps with a spike.
    """

    title: str
    rows: tuple[str, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    is_log: bool
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Profile:
    """One step over the depth of the model.

    Attributes:
        title: in words.
        rows: names of layers or blocks, in the order of the model.
        values: of the step.
        low: the smallest value of all steps, and
        high: the largest.
        is_log: whether the axis is logarithmic.
    """

    title: str
    rows: tuple[str, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    is_log: bool


Chart = Heat | Lines | Profile


def cut(name: str, most: int) -> str:
    """A name on an axis: one that is longer than ``most`` loses its middle."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{name[-most // 2 :]}"


def shade(value: float, is_log: bool) -> float:
    """Where a value lies on the scale of colours; NaN for one that is not there, is not finite, or has no logarithm."""
    if not math.isfinite(value) or (is_log and value <= 0):
        return math.nan
    return math.log10(value) if is_log else value


def guide(name: str, value: float) -> str:
    """What stands beside a horizontal line."""
    return f"{name} {value:.3g}"


def heatmap(reel: Reel, view: str = "gradient", rows: int = ROWS, columns: int = COLUMNS) -> Heat:
    """A view of all layers over the steps, by blocks where there are more than ``rows`` layers."""
    panel = _panel(reel, view)
    cells, groups = squeezed(panel, columns), blocks(panel.names, rows)
    values = together(panel, cells, groups).T.tolist()
    return Heat(
        panel.view.title, tuple(groups), cells.first, cells.last, tuple(map(tuple, values)), panel.view.is_log, _marks(reel)
    )


def norm(reel: Reel) -> Lines:
    """The loss, the norm of all gradients before and after clipping with the bound, and the share of clipped steps."""
    before, after, loss = reel.line("grad_norm"), reel.line("grad_norm_clipped"), reel.loss()
    share, limit = reel.line("clipped_share"), reel.line("clip_limit")
    strips = []
    if len(loss):
        strips.append(Strip("loss", (Line("loss", points(loss, POINTS), colours.GREY),), is_wide(loss)))
    lines = [Line("before clipping", points(before, POINTS), colours.BLUE)]
    lines += [Line("after clipping", points(after, POINTS), colours.ORANGE)] if len(after) else []
    lines += [Line("limit of the adaptive clip", points(limit, POINTS), colours.GREEN, is_thin=True)] if len(limit) else []
    bound = None if len(limit) else _bound(before, after)
    strips.append(Strip("gradient norm", tuple(lines), guides={} if bound is None else {"bound": bound}, height=2.0))
    if len(share):
        line = Line("share of clipped steps", points(share, POINTS), colours.PURPLE)
        strips.append(Strip("clipped share", (line,), False, limits=(0.0, 1.05), height=0.7))
    if not len(before) and not len(loss):
        raise ValueError("neither a gradient norm nor a loss was recorded; use a preset, or log the loss")
    return Lines("loss and gradient norm", tuple(strips), _marks(reel))


def update(reel: Reel) -> Lines:
    """The update of all parameters over their norm, the spread of it over the matrices, and the guide of a thousandth."""
    whole, low, high = (reel.line(name) for name in ("update_ratio", "update_ratio_p10", "update_ratio_p90"))
    if not len(whole):
        raise ValueError("updates were not measured: attach the optimizer, and use the preset standard or full")
    lines = [Line("whole model", points(whole, POINTS), colours.BLUE)]
    if len(low) and low.steps == high.steps:
        few = _band(low, high)
        lines.insert(0, Line("10th to 90th percentile of matrices", few[0], colours.SKY, few[0], few[1]))
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
    """Single layers side by side: ``names``, or those that lie farthest above their own normal in some step."""
    panel = _panel(reel, view)
    unknown = [name for name in names if name not in panel.names]
    if unknown:
        raise ValueError(f"there is no layer {unknown[0]!r} in it{nearest(unknown[0], panel.names)}")
    chosen = list(names) or striking(panel)
    series = {name: Series(panel.steps, tuple(panel.values[:, panel.names.index(name)].tolist())) for name in chosen}
    strips = [
        Strip(name, (Line(name, points(there(line), POINTS // 4), colours.BLUE),), panel.view.is_log)
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


def _band(low: Series, high: Series) -> tuple[Series, Series]:
    """Of equally many steps the lowest lower and the highest upper edge, of those that a logarithmic axis can show."""
    size = -(-len(low) // POINTS)
    edges = [
        (step, below, above)
        for step, below, above in zip(low.steps, low.values, high.values, strict=True)
        if below > 0 and math.isfinite(above)
    ]
    bins = [edges[at : at + size] for at in range(0, len(edges), size)]
    steps = tuple(some[0][0] for some in bins)
    lower, upper = (tuple(pick(edge[side] for edge in some) for some in bins) for pick, side in ((min, 1), (max, 2)))
    return Series(steps, lower), Series(steps, upper)


def spans(marks: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Steps as stretches, from the first to the last of those that lie so close that ``most`` of them would fill the picture."""
    found: list[tuple[int, int]] = []
    near = (marks[-1] - marks[0]) / most if marks else 0
    for step in marks:
        if found and step - found[-1][1] <= max(near, 1):
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found


def is_wide(loss: Series) -> bool:
    """Whether a loss spans so much that it takes a logarithmic scale."""
    return 0 < _WIDE * min(loss.finite.values, default=0) < max(loss.finite.values, default=0)


def _bound(before: Series, after: Series) -> float | None:
    """To what gradients are clipped: what the clipped steps have in common, if they have."""
    clipped = dict(zip(after.steps, after.values, strict=True))
    pairs = [(b, clipped[s]) for s, b in zip(before.steps, before.values, strict=True) if s in clipped]
    cut = [a for b, a in pairs if math.isfinite(b) and a < 0.999 * b]
    usual = lower_median(cut)
    same = sum(abs(a - usual) <= 1e-3 * usual for a in cut)
    return usual if cut and same > len(cut) / 2 else None


def there(line: Series) -> Series:
    """Without the steps in which there is no value."""
    pairs = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if not math.isnan(value)]
    return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def _marks(reel: Reel) -> tuple[int, ...]:
    return tuple(sorted({event.step for event in reel.events}))


def _nearest(steps: Sequence[int], step: int) -> int:
    return min(steps, key=lambda known: abs(known - step))
