"""What a picture is made of: lines, strips of them, maps and profiles, before anybody draws them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..diagnosis.series import Series
from .downsampling import points
from .gaps import Gap, Grid, begins, grid
from .shading import departures, shades

#: Points of a line.
POINTS = 2000


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
        begins: steps that have a gap before them, over which nothing is drawn.
    """

    name: str
    series: Series
    colour: str
    low: Series | None = None
    high: Series | None = None
    is_thin: bool = False
    is_dashed: bool = False
    begins: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, series: Series, colour: str, gaps: Sequence[Gap], most: int = 0, **options: Any) -> Line:
        """A line of ``most`` points, by default :data:`POINTS`, with these gaps."""
        most = most or POINTS
        behind = begins(gaps, series.steps, most)
        return cls(name, points(series, most, frozenset(behind)), colour, begins=behind, **options)

    def pieces(self, series: Series) -> list[Series]:
        """The parts of ``series``, one of its own, between gaps."""
        parts = groupby(zip(series.steps, series.values, strict=True), key=lambda pair: bisect_right(self.begins, pair[0]))
        return [Series(*zip(*part, strict=True)) for _, part in parts]


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
        first: the first step of each column that was measured.
        last: the last one.
        values: by row, then by column; NaN for none, infinity for what is not finite.
        is_log: whether colours follow the logarithm.
        marks: steps with a spike.
        medians: of the rows over all steps, where colours are relative to them.
        gaps: where nothing was measured.
        span: the first and the last step of the axis; None for those of the columns.
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

    @cached_property
    def grid(self) -> Grid:
        """Where its columns lie, and gaps between them."""
        return grid(self.first, self.last, self.gaps, self.span or (self.first[0], self.last[-1]))

    @cached_property
    def shades(self) -> Tensor:
        """Where each value lies on the scale of colours, by row, then by column; NaN for none."""
        values = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        if self.medians is None:
            return shades(values, self.is_log)
        return departures(values, torch.tensor(self.medians, dtype=torch.float64, device="cpu").unsqueeze(1), self.is_log)


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


def words_of(value: float, median: float = math.nan) -> str:
    """A value in words, and the median of its row where that is known."""
    if not math.isfinite(value):
        return "NaN or infinite" if math.isinf(value) else "not measured"
    if math.isnan(median):
        return f"{value:.4g}"
    times = f"{value / median:.3g} times " if median > 0 else ""
    return f"{value:.4g}, {times or 'beside '}its median of {median:.3g}"


def guide(name: str, value: float) -> str:
    """What stands beside a horizontal line."""
    return f"{name} {value:.3g}"


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
