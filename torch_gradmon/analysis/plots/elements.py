"""The parts of a chart, independent of the drawing library: lines, subplots, heat maps and depth profiles."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..diagnosis.series import Series
from . import colours
from .downsampling import points
from .gaps import Gap, Grid, grid, steps_after
from .shading import deviations, shades

#: Points of a line.
POINTS = 2000
#: What a cell without a place on the scale is called.
NOT_FINITE, EXACTLY_0, NO_GRADIENT = "NaN or infinite", "exactly 0", "no gradient"


@dataclass(frozen=True)
class Line:
    """Values over steps.

    Attributes:
        name: in the legend.
        series: the points; some may not be finite.
        colour: of the line.
        low, high: the edges, if it is a band.
        is_thin: whether other lines are more important.
        is_dashed: whether it is dashed, so that a line below it stays visible.
        after_gaps: the steps that follow a gap; nothing is drawn over a gap.
    """

    name: str
    series: Series
    colour: str
    low: Series | None = None
    high: Series | None = None
    is_thin: bool = False
    is_dashed: bool = False
    after_gaps: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, series: Series, colour: str, gaps: Sequence[Gap], most: int = 0, **options: Any) -> Line:
        """A line of ``most`` points, by default :data:`POINTS`, with these gaps."""
        most = most or POINTS
        after = steps_after(gaps, series.steps, most)
        return cls(name, points(series, most, frozenset(after)), colour, after_gaps=after, **options)

    def pieces(self, series: Series) -> list[Series]:
        """The parts of ``series``, one of its own, between gaps."""
        parts = groupby(zip(series.steps, series.values, strict=True), key=lambda pair: bisect_right(self.after_gaps, pair[0]))
        return [Series(*zip(*part, strict=True)) for _, part in parts]

    def chained(self, series: Series, is_log: bool, gap: Any = math.nan) -> tuple[list[Any], list[Any]]:
        """Steps and values of all pieces, with ``gap`` between them and for values that cannot be drawn."""
        pieces = self.pieces(series)
        return chain([(piece.steps, drawable(piece.values, is_log, gap)) for piece in pieces], gap)

    @property
    def lone_points(self) -> Series:
        """The pieces of one point each, which a line would not show."""
        alone = [piece for piece in self.pieces(self.series) if len(piece) == 1]
        return Series(tuple(piece.steps[0] for piece in alone), tuple(piece.values[0] for piece in alone))

    @property
    def nonfinite_steps(self) -> list[int]:
        """The steps whose value is NaN or infinite."""
        return [step for step, value in zip(self.series.steps, self.series.values, strict=True) if not math.isfinite(value)]

    def nonfinite_level(self, is_log: bool) -> float:
        """Where the marks of :attr:`nonfinite_steps` are drawn: at the largest finite value."""
        return max((value for value in self.series.finite.values if value > 0 or not is_log), default=1.0)


def chain(pieces: Sequence[tuple[Sequence[Any], Sequence[Any]]], gap: Any) -> tuple[list[Any], list[Any]]:
    """One line of several pieces, with ``gap`` between them."""
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
    """Lines with a common axis.

    Attributes:
        title: of the axis.
        lines: in drawing order.
        is_log: whether the axis is logarithmic.
        guides: horizontal lines by name.
        bands: horizontal bands by name, each from its lower to its upper edge.
        limits: of the axis, if they are fixed.
        height: relative to other subplots.
    """

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
        """The number of rows and columns."""
        columns = min(self.columns, len(self.subplots))
        return -(-len(self.subplots) // columns), columns


@dataclass(frozen=True)
class Heatmap:
    """Layers over steps.

    Attributes:
        title: for people.
        rows: names of layers or blocks, in model order.
        first, last: the first and the last measured step of each column.
        values: by row, then by column; NaN for no value, infinity for NaN or infinite elements.
        is_log: whether colours follow the logarithm.
        marks: steps with a spike.
        medians: of the rows over all steps, if colours are relative to them.
        gaps: where nothing was measured.
        span: first and last step of the axis; None for those of the columns.
        due: whether a missing value of a row means that it had no gradient; none of them by default.
    """

    title: str
    rows: tuple[str, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    is_log: bool
    marks: tuple[int, ...] = ()
    medians: tuple[float, ...] | None = None
    gaps: tuple[Gap, ...] = ()
    span: tuple[int, int] | None = None
    due: tuple[bool, ...] = ()

    @cached_property
    def grid(self) -> Grid:
        """The edges of columns and gaps."""
        return grid(self.first, self.last, self.gaps, self.span or (self.first[0], self.last[-1]))

    @cached_property
    def shades(self) -> Tensor:
        """Where each value lies on the colour scale, by row, then by column; NaN for none."""
        values = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        if self.medians is None:
            return shades(values, self.is_log)
        return deviations(values, torch.tensor(self.medians, dtype=torch.float64, device="cpu").unsqueeze(1), self.is_log)

    def on_grid(self, cells: Sequence[Sequence[Any]], gap: Any) -> list[list[Any]]:
        """``cells`` as columns of the grid, with ``gap`` where nothing was measured."""
        return [[gap if place is None else row[place] for place in self.grid.places] for row in cells]

    def special_cells(self, absent: Any) -> Iterator[tuple[str, str, list[list[Any]]]]:
        """What the scale has no colour for: its name, its colour, and the grid with 1 in its cells and ``absent`` elsewhere."""
        texts = [[cell_text(value, due=due) for value in row] for row, due in zip(self.values, self._due, strict=True)]
        for colour, names in ((colours.NONFINITE, (NOT_FINITE,)), (colours.ZERO, (NO_GRADIENT, *[EXACTLY_0] * self.is_log))):
            if there := [name for name in names if any(name in row for row in texts)]:
                cells = [[1.0 if text in there else absent for text in row] for row in texts]
                yield " or ".join(there), colour, self.on_grid(cells, absent)

    @property
    def texts(self) -> list[list[str]]:
        """What there is to say of each value, by row, then by column."""
        usual = self.medians or [math.nan] * len(self.rows)
        return [
            [cell_text(value, median, due) for value in row]
            for row, median, due in zip(self.values, usual, self._due, strict=True)
        ]

    @property
    def _due(self) -> Sequence[bool]:
        return self.due or [False] * len(self.rows)


@dataclass(frozen=True)
class DepthProfile:
    """One step over the depth of the model.

    Attributes:
        title: for people.
        rows: names of layers or blocks, in model order.
        values: of the step.
        low, high: the smallest and the largest value of all steps.
        is_log: whether the axis is logarithmic.
    """

    title: str
    rows: tuple[str, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    is_log: bool

    @property
    def nonfinite_rows(self) -> list[int]:
        """The rows whose value is not finite."""
        return [row for row, value in enumerate(self.values) if math.isinf(value)]

    @property
    def nonfinite_level(self) -> float:
        """Where the marks of :attr:`nonfinite_rows` are drawn: at the largest finite value."""
        return max((value for value in self.high if math.isfinite(value)), default=1.0)


Chart = Heatmap | LineChart | DepthProfile


def cell_text(value: float, median: float = math.nan, due: bool = False) -> str:
    """A value, and how it compares with the median of its row if that is known; ``due``: whether there would be one of any gradient."""
    if not math.isfinite(value):
        return NOT_FINITE if math.isinf(value) else NO_GRADIENT if due else "not measured"
    if not value and not median > 0:
        return EXACTLY_0
    if math.isnan(median):
        return f"{value:.4g}"
    return (
        f"{value:.4g}, {value / median:.3g} times its median of {median:.3g}"
        if median > 0
        else f"{value:.4g}, with a median of {median:.3g}"
    )


def guide_text(name: str, value: float) -> str:
    """The label of a horizontal line."""
    return f"{name} {value:.3g}"


def band_text(name: str, low: float, high: float) -> str:
    """The label of a horizontal band."""
    return f"{name}: {low:.3g} to {high:.3g}"


def merged_marks(marks: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Steps as ranges from first to last. Steps are merged if they are so close that ``most`` ranges would fill the chart."""
    found: list[tuple[int, int]] = []
    near = (marks[-1] - marks[0]) / most if marks else 0
    for step in marks:
        if found and step - found[-1][1] <= max(near, 1):
            found[-1] = found[-1][0], step
        else:
            found.append((step, step))
    return found
