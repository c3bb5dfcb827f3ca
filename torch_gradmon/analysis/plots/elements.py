"""What charts are made of, independent of the drawing library: colours, scales, gaps, downsampling, lines, heat maps and depth profiles."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import keys as n
from ..diagnosis.series import Matrix, Series, lower_median

# --- Colours that are distinct for the colour-blind, on light and on dark pages ---

#: Okabe and Ito (2008), "Color universal design": blue, orange, green, vermilion, purple, sky blue.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
#: NaN or infinite: a colour that no scale has.
NONFINITE = "#FF00C8"
#: Exactly 0, or no gradient at all: darker than any scale where that is warm.
ZERO = "#6B3F12"
#: The scale of heat maps, whose lightness rises monotonically.
SCALE = "Viridis"
#: The scale around a median. Its middle is grey, to differ from white, which means no value.
DIVERGING = ((0.0, BLUE), (0.5, "#C9CDD3"), (1.0, VERMILION))
GREY = "#8A8F98"


# --- The places of values on a colour scale, as they are or relative to the median of their layer ---

#: Measured steps that show what is usual just now; of a run with at least twice as many, maps can be relative to them.
RECENT = 100
#: Medians of fewer steps are not compared with.
_ENOUGH = 10
#: The scale ends at the first of these factors that covers nearly all cells, so that one spike does not hide the others.
_FACTORS = (2, 3, 5, 10)
#: The share of cells that counts as nearly all.
_NEARLY = 0.99
#: The smallest end of a linear scale.
_LEAST = 0.01
#: Instead of infinity, which JSON lacks: a logarithm beyond each scale.
_FAR = 30.0


def medians(values: Tensor) -> Tensor:
    """The lower median of the finite values of each layer in ``[steps, layers]``; NaN for a layer without any."""
    return values.where(values.isfinite(), math.nan).nanmedian(0).values


def is_relative_by_default(steps: Sequence[int], is_log: bool) -> bool:
    """Whether a view is shown relative to medians by default. Shares are not, because most layers may have none."""
    return is_log and len(steps) >= _ENOUGH


def recent_ratios(values: Tensor, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Values ``[steps, layers]`` relative to what was usual just before: to the median of the :data:`RECENT` measured steps before a
    column, and of the first ten for the first columns. ``begins`` and ``ends``: the places of the first and the last step of each column.

    Returns float64 ``[columns, layers]``: the ratio farthest from one in the column; infinity for values that are not finite, 0 for those
    that are exactly 0, NaN where there is no value, or none before it.
    """
    found = []
    for begin, end in zip(begins, ends, strict=True):
        part, usual = values[begin : end + 1], medians(values[max(0, begin - RECENT) : max(begin, _ENOUGH)])
        ratios = (part / usual).clamp(10**-_FAR, 10**_FAR)
        ratios = torch.where(part == 0, 0.0, torch.where(part.isinf(), math.inf, ratios))
        farthest = ratios.log10().abs().nan_to_num(nan=-1.0, posinf=math.inf).argmax(0, keepdim=True)
        found.append(ratios.gather(0, farthest))
    return torch.cat(found)


def deviations(values: Tensor, usual: Tensor, is_log: bool) -> Tensor:
    """The distance from the layer's median: a logarithm of the ratio, NaN for a 0, which has a colour of its own; or a difference."""
    if not is_log:
        return (values - usual).where(values.isfinite(), math.nan)
    far = (values / usual).log10().clamp(-_FAR, _FAR)  # all but zeros is far from a median of zero
    return far.where(values.isfinite() & (values != 0) & usual.isfinite(), math.nan)


def scale_limit(far: Tensor, is_log: bool) -> float:
    """The end of the scale of :func:`deviations` on both sides; values beyond it have the colour of the end."""
    known = far[far.isfinite()].abs().sort().values
    nearly = float(known[min(int(_NEARLY * len(known)), len(known) - 1)]) if len(known) else 0.0
    if not is_log:
        return max(nearly, _LEAST)
    return next((end for end in map(math.log10, _FACTORS) if end >= nearly), math.log10(_FACTORS[-1]))


def scale_labels(most: float, is_log: bool) -> dict[float, str]:
    low, high = (f"1/{10**most:.0f}", f"{10**most:.0f}x") if is_log else (f"-{most:.2g}", f"+{most:.2g}")
    return {-most: f"\N{LESS-THAN OR EQUAL TO} {low}", 0.0: "median", most: f"\N{GREATER-THAN OR EQUAL TO} {high}"}


# --- Ranges of steps in which nothing was measured, over which no cell and no line is drawn ---

#: A value is due every n steps if this share of those steps has it, and at least this many steps do.
_NEARLY_ALL, _FEWEST = 0.9, 3
#: How many likely distances are tried.
_TRIED = 3
#: Recording was interrupted where two steps are more than this many usual distances apart.
_LONGER = 1.5
#: The smallest width of a cell, as a part of the axis, so that a single step stays visible.
_VISIBLE = 1 / 300
#: First and last place of a gap on the axis of steps; infinite at the ends.
Gap = tuple[float, float]


@dataclass(frozen=True)
class RecordedSteps:
    """The ascending steps of a run; ``is_whole``: all recorded ones, as a monitor keeps only some of many."""

    steps: tuple[int, ...]
    is_whole: bool = True

    @cached_property
    def stride(self) -> int:
        """The distance of more than half of the neighbours, or else their lower median."""
        distances = Counter(after - before for before, after in pairwise(self.steps))
        if not distances or not self.is_whole:
            return 1
        distance, count = max(distances.items(), key=lambda pair: (pair[1], -pair[0]))
        return distance if 2 * count > distances.total() else int(lower_median(distances.elements()))

    def gaps(self, measured: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value that ``measured`` steps, one at least, have was due and is missing, or nothing was recorded, ascending."""
        cadence = 1 if len(measured) == len(self.steps) else self._cadence(measured)
        there, half = set(measured), max(cadence, self.stride) / 2
        due = sorted(self._due(measured, cadence) | there)
        found: list[Gap] = [(-math.inf, due[0] - half)]
        for before, step, after in zip([-math.inf, *due], due, [*due[1:], math.inf], strict=False):
            if bisect_right(self._breaks, step) > bisect_right(self._breaks, before) and before + half < step - half:
                found.append((before + half, step - half))
            if step not in there:
                found.append(((before + step) / 2, (step + after) / 2))
        return _joined([*found, (due[-1] + half, math.inf)])

    def _cadence(self, measured: Sequence[int]) -> int:
        """N for a value that is measured in every n-th step and in few others; otherwise 1."""
        distances = Counter(after - before for before, after in pairwise(measured))
        likely = [distance for distance, _ in distances.most_common(_TRIED)]
        for distance in dict.fromkeys((math.gcd(*distances), *likely)) if distances else ():
            due = self._due(measured, distance)
            there = len(due.intersection(measured))
            elsewhere = len(measured) - there
            is_rule = elsewhere < there and 2 * elsewhere <= len(self.steps) - len(due)
            if len(due) >= _FEWEST and there >= _NEARLY_ALL * len(due) and is_rule:
                return distance
        return 1

    def _due(self, measured: Sequence[int], cadence: int) -> set[int]:
        """The steps with the same remainder modulo ``cadence`` as most measured steps."""
        ((remainder, _),) = Counter(step % cadence for step in measured).most_common(1)
        return {step for step in self.steps if step % cadence == remainder}

    @cached_property
    def _breaks(self) -> tuple[int, ...]:
        """The first steps after an interruption of the recording."""
        longest = _LONGER * self.stride if self.is_whole else math.inf
        return tuple(after for before, after in pairwise(self.steps) if after - before > longest)


def _joined(gaps: Iterable[Gap], near: float = 0.0) -> tuple[Gap, ...]:
    """Ascending gaps, each with those after it that begin no farther than ``near`` behind its end."""
    found: list[Gap] = []
    for low, high in gaps:
        if found and low - found[-1][1] <= near:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def intersection(some: Sequence[Gap], others: Sequence[Gap]) -> tuple[Gap, ...]:
    edges = sorted((edge, change) for low, high in (*some, *others) for edge, change in ((low, 1), (high, -1)))
    depths = accumulate(change for _, change in edges)
    return tuple(
        (low, high) for ((low, _), (high, _)), depth in zip(pairwise(edges), depths, strict=False) if depth == 2 and low < high
    )


def between(gaps: Sequence[Gap], before: float, after: float) -> Gap | None:
    """The gap between two successive measured steps; None without one."""
    place = bisect_left(gaps, (before, -math.inf))
    return gaps[place] if place < len(gaps) and gaps[place][1] <= after else None


def steps_after(gaps: Sequence[Gap], steps: Sequence[int], most: int) -> tuple[int, ...]:
    """The steps that follow a gap. If there are more than ``most`` steps, gaps too narrow for that many points are left out."""
    narrow = (steps[-1] - steps[0]) / most if len(steps) > most else 0.0
    found = ((after, between(gaps, before, after)) for before, after in pairwise(steps))
    return tuple(after for after, gap in found if gap is not None and gap[1] - gap[0] > narrow)


class Grid(NamedTuple):
    """The ascending edges of the columns of a heat map, and the number of the cells in each column; None for a gap."""

    edges: tuple[float, ...]
    places: tuple[int | None, ...]


def grid(first: Sequence[int], last: Sequence[int], gaps: Sequence[Gap], span: tuple[int, int]) -> Grid:
    """Lay out cells, from their first to their last measured step, over a span: each reaches half-way to the next, or to a gap."""
    begin, end = span[0] - 0.5, span[1] + 0.5
    least = _VISIBLE * (end - begin) / 2
    edges: list[float] = [begin]
    places: list[int | None] = []

    def cover(until: float, place: int | None) -> None:
        if until > edges[-1]:
            edges.append(until)
            places.append(place)

    gap = between(gaps, -math.inf, first[0])
    for place, (left, right) in enumerate(zip(first, last, strict=True)):
        if gap is not None:
            cover(min(gap[1], left - least), None)
        is_last = place + 1 == len(first)
        following = math.inf if is_last else first[place + 1]
        gap = between(gaps, right, following)
        middle = end if is_last else (right + following) / 2
        cover(middle if gap is None else min(max(gap[0], right + least), middle), place)
    cover(end, None)
    return Grid(tuple(edges), tuple(places))


# --- The values of layers that can be drawn, and one of them over the steps of a run ---


@dataclass(frozen=True)
class PlotView:
    title: str
    sources: tuple[str, ...]  # of the value; the first one that was measured is drawn
    metric: str
    base: str = ""  # the source by which the value is divided; empty for none
    is_log: bool = True
    adds_up: bool = False  # a block has the root of the sum of the squares of its layers; otherwise the largest value
    fallback_title: str = ""  # if the value is not from the first source; empty for the title
    is_difference: bool = False  # between two runs; only the largest matters


#: By name, in the order in which they are offered.
LAYER_VIEWS: Mapping[str, PlotView] = {
    "gradient": PlotView(
        "gradient norm before clipping",
        (n.GRADIENT_BEFORE_CLIP, n.GRADIENT),
        "norm",
        adds_up=True,
        fallback_title="gradient norm at the step",
    ),
    "clipped": PlotView("gradient norm after clipping", (n.GRADIENT,), "norm", adds_up=True),
    "update": PlotView("update norm / parameter norm", (n.UPDATE,), "norm", base=n.PARAMETER),
    "sparsity": PlotView("share of gradients near zero", (n.GRADIENT_BEFORE_CLIP, n.GRADIENT), "sparsity", is_log=False),
    "activation": PlotView("output root mean square", (n.ACTIVATION,), "rms"),
    "parameter": PlotView("parameter norm", (n.PARAMETER,), "norm", adds_up=True),
}


@dataclass(frozen=True)
class Panel(Matrix):
    """A view of all layers over the steps: NaN where a layer has no value, infinity where it has NaN or infinite elements."""

    view: PlotView
    source: str = ""
    gaps: tuple[Gap, ...] = ()  # where the value was not measured
    span: tuple[int, int] | None = None  # first and last step of the run, if the run has more steps than the panel
    # the layers of which a missing value means that they had no gradient, not that nobody looked
    due: frozenset[str] = frozenset()

    @property
    def axis(self) -> tuple[int, int]:
        return self.span or (self.steps[0], self.steps[-1])


# --- Fewer columns and points than steps, with every spike and dip kept ---


class Downsampled(NamedTuple):
    """A panel with fewer columns: the first and the last measured step of each, and values float64 ``[columns, layers]``."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    values: Tensor


def downsampled(panel: Panel, columns: int) -> Downsampled:
    """At most ``columns`` columns of equally many steps, those without a measured step left out. Each cell has the value farthest from the
    layer's median, on a logarithmic scale if the view has one, or the largest difference of two runs; NaN and infinities come first.
    """
    steps, values = panel.steps, panel.values
    if len(steps) <= columns:
        return Downsampled(steps, steps, values)
    far = values.nan_to_num(nan=-1.0, posinf=math.inf) if panel.view.is_difference else _distance(values, panel.view.is_log)
    width = -(-(steps[-1] - steps[0] + 1) // columns)
    parts = [[*part] for _, part in groupby(range(len(steps)), key=lambda place: (steps[place] - steps[0]) // width)]
    found = [values[part].gather(0, far[part].argmax(0, keepdim=True)) for part in parts]
    return Downsampled(tuple(steps[part[0]] for part in parts), tuple(steps[part[-1]] for part in parts), torch.cat(found))


def _distance(values: Tensor, is_log: bool) -> Tensor:
    """The distance from the median of each column; -1 for no value, infinity for values that are not finite."""
    scale = values
    if is_log:
        positive = torch.where(values > 0, values, math.inf)
        floor = positive.amin(0, keepdim=True).nan_to_num(posinf=1.0)
        scale = torch.where(values > 0, values.log(), floor.log() - 1)  # zero is farther away than the smallest positive value
    finite = torch.where(values.isfinite(), scale, math.nan)
    distance = (finite - finite.nanmedian(0, keepdim=True).values).abs()
    return torch.where(values.isinf(), math.inf, distance.nan_to_num(nan=-1.0, posinf=0.0))


def points(series: Series, most: int, after_gaps: Collection[int] = ()) -> Series:
    """At most ``most`` points of a line: the smallest and the largest value of equally many steps each. Up to ``most`` values that are not
    finite stay too, and the points on both sides of each gap; ``after_gaps`` are the steps that follow one.
    """
    if len(series) <= most:
        return series
    bins = max(most // 2, 1)
    size = -(-len(series) // bins)
    chosen: set[int] = {0, len(series) - 1}
    for begin in range(0, len(series), size):
        if places := [p for p in range(begin, min(begin + size, len(series))) if math.isfinite(series.values[p])]:
            chosen.update((min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)))
    chosen.update(*((place - 1, place) for place, step in enumerate(series.steps) if step in after_gaps))
    odd = [place for place, value in enumerate(series.values) if not math.isfinite(value)]
    chosen.update(odd[:: -(-len(odd) // most) or 1])
    return Series.of((series.steps[place], series.values[place]) for place in sorted(chosen))


# --- Lines, subplots, heat maps, depth profiles ---

#: Points of a line.
POINTS = 2000
#: What a cell without a place on the scale is called.
NOT_FINITE, EXACTLY_0, NO_GRADIENT = "NaN or infinite", "exactly 0", "no gradient"


@dataclass(frozen=True)
class Line:
    name: str
    series: Series
    colour: str
    low: Series | None = None  # the edges, if it is a band
    high: Series | None = None
    is_thin: bool = False  # other lines are more important
    is_dashed: bool = False  # so that a line below it stays visible
    after_gaps: tuple[int, ...] = ()  # the steps that follow a gap; nothing is drawn over a gap

    @classmethod
    def of(cls, name: str, series: Series, colour: str, gaps: Sequence[Gap], most: int = POINTS, **options: Any) -> Line:
        after = steps_after(gaps, series.steps, most)
        return cls(name, points(series, most, frozenset(after)), colour, after_gaps=after, **options)

    def pieces(self, series: Series) -> list[Series]:
        """The parts of ``series``, one of its own, between gaps."""
        parts = groupby(series.pairs(), key=lambda pair: bisect_right(self.after_gaps, pair[0]))
        return [Series(*zip(*part, strict=True)) for _, part in parts]

    def chained(self, series: Series, is_log: bool, gap: Any = math.nan) -> tuple[list[Any], list[Any]]:
        """Steps and values of all pieces, with ``gap`` between them and for values that cannot be drawn."""
        pieces = self.pieces(series)
        return chain([(piece.steps, drawable(piece.values, is_log, gap)) for piece in pieces], gap)

    @property
    def lone_points(self) -> Series:
        """The pieces of one point each, which a line would not show."""
        return Series.of(pair for piece in self.pieces(self.series) if len(piece) == 1 for pair in piece.pairs())

    def nonfinite(self, is_log: bool) -> tuple[list[int], list[float]]:
        """The steps whose value is not finite, and where they are marked: at the largest finite value."""
        odd = [step for step, value in self.series.pairs() if not math.isfinite(value)]
        return odd, [max((value for value in self.series.finite.values if value > 0 or not is_log), default=1.0)] * len(odd)


def chain(pieces: Sequence[tuple[Sequence[Any], Sequence[Any]]], gap: Any) -> tuple[list[Any], list[Any]]:
    x, y = list[Any](), list[Any]()
    for steps, values in pieces:
        x += [gap, *steps] if x else steps
        y += [gap, *values] if y else values
    return x, y


def drawable(values: Sequence[float], is_log: bool, absent: Any = math.nan) -> list[Any]:
    """``values``, with ``absent`` for those that the axis cannot show."""
    return [value if math.isfinite(value) and (value > 0 or not is_log) else absent for value in values]


@dataclass(frozen=True)
class Subplot:
    """Lines with a common axis; ``guides`` and ``bands`` are horizontal, by their text, and ``height`` is relative to other subplots."""

    title: str
    lines: tuple[Line, ...]
    is_log: bool = True
    guides: Mapping[str, float] = field(default_factory=dict)
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    limits: tuple[float, float] | None = None
    height: float = 1.0


@dataclass(frozen=True)
class LineChart:
    """Subplots over the same steps, below each other or in ``columns``; ``marks`` are steps with a spike."""

    title: str
    subplots: tuple[Subplot, ...]
    marks: tuple[int, ...] = ()
    columns: int = 1

    @property
    def layout(self) -> tuple[int, int]:
        columns = min(self.columns, len(self.subplots))
        return -(-len(self.subplots) // columns), columns


@dataclass(frozen=True)
class Heatmap:
    title: str
    rows: tuple[str, ...]
    first: tuple[int, ...]  # the first and the last measured step of each column
    last: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]  # by row, then by column; NaN for no value, infinity for NaN or infinite elements
    is_log: bool
    marks: tuple[int, ...] = ()  # steps with a spike
    medians: tuple[float, ...] | None = None  # of the rows over all steps, if colours are relative to them
    gaps: tuple[Gap, ...] = ()
    span: tuple[int, int] | None = None  # first and last step of the axis; None for those of the columns
    due: tuple[bool, ...] = ()  # whether a missing value of a row means that it had no gradient; none of them by default

    @cached_property
    def grid(self) -> Grid:
        return grid(self.first, self.last, self.gaps, self.span or (self.first[0], self.last[-1]))

    @cached_property
    def shades(self) -> Tensor:
        """Where each value lies on the colour scale, by row, then by column; NaN for none."""
        values = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        if self.medians is None:
            found = values.log10() if self.is_log else values
            return found.where(found.isfinite(), math.nan)
        return deviations(values, torch.tensor(self.medians, dtype=torch.float64, device="cpu").unsqueeze(1), self.is_log)

    def on_grid(self, cells: Sequence[Sequence[Any]], gap: Any) -> list[list[Any]]:
        """``cells`` as columns of the grid, with ``gap`` where nothing was measured."""
        return [[gap if place is None else row[place] for place in self.grid.places] for row in cells]

    def special_cells(self, absent: Any) -> Iterator[tuple[str, str, list[list[Any]]]]:
        """What the scale has no colour for: its name, its colour, and the grid with 1 in its cells and ``absent`` elsewhere."""
        texts = self.texts()
        for colour, names in ((NONFINITE, (NOT_FINITE,)), (ZERO, (NO_GRADIENT, *[EXACTLY_0] * self.is_log))):
            if there := [name for name in names if any(name in row for row in texts)]:
                cells = [[1.0 if text in there else absent for text in row] for row in texts]
                yield " or ".join(there), colour, self.on_grid(cells, absent)

    def texts(self, medians: Sequence[float] | None = None) -> list[list[str]]:
        """What there is to say of each value, and of it beside ``medians``, by row, then by column."""
        rows = zip(self.values, medians or [math.nan] * len(self.rows), self.due or [False] * len(self.rows), strict=True)
        return [[cell_text(value, median, due) for value in row] for row, median, due in rows]


@dataclass(frozen=True)
class DepthProfile:
    """One step over the depth of the model; ``low`` and ``high`` are the smallest and the largest value of all steps."""

    title: str
    rows: tuple[str, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    is_log: bool

    @property
    def nonfinite(self) -> tuple[list[float], list[int]]:
        """The rows whose value is not finite, behind where they are marked: at the largest finite value."""
        odd = [row for row, value in enumerate(self.values) if math.isinf(value)]
        return [max((value for value in self.high if math.isfinite(value)), default=1.0)] * len(odd), odd


Chart = Heatmap | LineChart | DepthProfile


def cell_text(value: float, median: float = math.nan, due: bool = False) -> str:
    """A value, and how it compares with the median of its row if that is known; ``due``: whether there would be one of any gradient."""
    if not math.isfinite(value):
        return NOT_FINITE if math.isinf(value) else NO_GRADIENT if due else "not measured"
    if not value and not median > 0:
        return EXACTLY_0
    if math.isnan(median):
        return f"{value:.4g}"
    return f"{value:.4g}, {f'{value / median:.3g} times its' if median > 0 else 'with a'} median of {median:.3g}"


def merged_marks(marks: Sequence[int], most: int) -> tuple[Gap, ...]:
    """Steps as ranges from first to last. Steps are merged if they are so close that ``most`` ranges would fill the chart."""
    return _joined(((step, step) for step in marks), max((marks[-1] - marks[0]) / most, 1)) if marks else ()
