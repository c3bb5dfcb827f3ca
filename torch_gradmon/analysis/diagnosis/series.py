"""Values over steps: of one quantity, and of many tensors."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.records import StatsTable, merged
from ...runs.reader import StatsSeries, fitting

if TYPE_CHECKING:
    from typing_extensions import Self


def lower_median(values: Iterable[float]) -> float:
    """The middle value, or the lower one of two; NaN without any."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


@dataclass(frozen=True)
class Series:
    """One value over the steps that have it, ascending; some values may not be finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Series:
        found = dict(pairs)
        return cls(tuple(found), tuple(found.values()))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, part: slice) -> Series:
        return Series(self.steps[part], self.values[part])

    def pairs(self) -> Iterable[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def beside(self, other: Series) -> list[tuple[int, float, float]]:
        """The steps that both have, with both values."""
        others = dict(other.pairs())
        return [(step, value, others[step]) for step, value in self.pairs() if step in others]

    @cached_property
    def finite(self) -> Series:
        if all(map(math.isfinite, self.values)):
            return self
        return Series.of((step, value) for step, value in self.pairs() if math.isfinite(value))

    def since(self, step: int) -> Series:
        return self[bisect_left(self.steps, step) :]

    def before(self, step: int) -> Series:
        return self[: bisect_left(self.steps, step)]

    def part(self, first: float, last: float) -> Series:
        """From one share of the series to another: ``part(0.75, 1)`` is its last quarter. At least one value, if it has any."""
        low = min(int(first * len(self)), max(len(self) - 1, 0))
        high = max(math.ceil(last * len(self)), low + 1)
        return self[low:high]

    def at(self, share: float) -> float:
        """The value at a share of the way from the first step to the last, or of the next step that has one."""
        step = self.steps[0] + share * (self.steps[-1] - self.steps[0])
        return self.values[min(bisect_left(self.steps, step), len(self) - 1)]

    @property
    def median(self) -> float:
        return lower_median(self.finite.values)


#: Norms or factors that differ by less than this part are the same, as far as rounding goes.
_SAME = 1e-3
#: The fewest steps, and the smallest share of them, that have a factor or a bound in common.
_FEW, _OFTEN = 3, 0.1


def clip_bound(before: Series, after: Series) -> float | None:
    """The norm to which gradients are clipped: most of the clipped steps have it in common, or many have it and none has more."""
    cut = [a for _, b, a in before.beside(after) if math.isfinite(b) and a < (1 - _SAME) * b]
    if not cut:
        return None
    usual, most = lower_median(cut), max(cut)
    if sum(abs(a - usual) <= _SAME * usual for a in cut) > len(cut) / 2:
        return usual
    return most if sum(a >= (1 - _SAME) * most for a in cut) >= max(_FEW, _OFTEN * len(cut)) else None


@dataclass(frozen=True)
class GradientEdit:
    """What the loop does to the norm of the whole gradient between backward and the optimizer's step: a clip, a scaling, or both."""

    bound: float | None = None  # the norm that a clip leaves at most; None without one
    # by step, the factor that is no clip, such as one over the number of tokens of a summed loss; 1 in steps that it lacks
    scales: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, before: Series, after: Series, kept: Matrix | None) -> GradientEdit:
        """From the norms of all gradients, and the norms of tensors after over before, if they are known.

        A factor that steps of different norms have in common is a scaling, and a norm that they have in common a bound. Where factors
        are all different, and no norms alike, the scaling is another one in each step.
        """
        pairs = [(step, b, a) for step, b, a in before.beside(after) if 0 < b < math.inf and 0 < a < math.inf]
        if not pairs or not scales_alike(kept):
            return cls()  # of single parameters or elements, and not of the norm of all gradients together
        factor = _common_factor([(a / b, b) for _, b, a in pairs])
        if factor is not None:
            scaled = Series.of((step, b * factor) for step, b, _ in pairs)
            return cls(clip_bound(scaled, after), dict.fromkeys(before.steps, factor) if abs(factor - 1) > _SAME else {})
        bound = clip_bound(before, after)
        free = {step: a / b for step, b, a in pairs if bound is None or a < (1 - _SAME) * bound}
        usual = lower_median(free.values()) if free else 1.0
        return cls(bound, {step: free.get(step, usual) for step in before.steps})

    def before_clip(self, norms: Series) -> Series:
        return Series.of((step, norm * self.scales.get(step, 1.0)) for step, norm in norms.pairs())


def _common_factor(factors: Sequence[tuple[float, float]]) -> float | None:
    """The factor, after over before, that most steps have in common, if their norms before differ; None if it is in too few of them."""
    best: list[tuple[float, float]] = []
    ordered = sorted(factors)
    first = 0
    for last, (factor, _) in enumerate(ordered):
        while ordered[first][0] < (1 - _SAME) * factor:
            first += 1
        best = max(best, ordered[first : last + 1], key=len) if last - first >= len(best) else best
    norms = [norm for _, norm in best]
    is_common = len(best) >= max(min(_FEW, len(ordered)), _OFTEN * len(ordered)) and max(norms) > (1 + 2 * _SAME) * min(norms)
    return lower_median(factor for factor, _ in best) if is_common else None


def scales_alike(kept: Matrix | None) -> bool:
    """Whether most steps that an edit reduced scaled all tensors by one factor; True if that is unknown. Takes norms after over before."""
    if not kept:
        return True
    smallest = kept.values.nan_to_num(math.inf, math.inf, -math.inf).amin(1)
    largest = kept.values.nan_to_num(-math.inf, math.inf, -math.inf).amax(1)
    reduced = (smallest < 0.999) & (largest > 0)
    return 2 * int((reduced & (largest > smallest * 1.05)).sum()) <= int(reduced.sum())


def stacked(tables: Iterable[tuple[int, StatsTable]]) -> Iterator[StatsSeries]:
    """Successive tables of steps, ascending, as one where they have the same tensors and columns."""
    for (names, columns), some in groupby(tables, key=lambda pair: (pair[1].names, pair[1].columns)):
        steps, found = zip(*some, strict=True)
        yield StatsSeries(steps, names, torch.stack([table.rows for table in found]), columns)


def assembled(parts: Sequence[tuple[tuple[int, ...], tuple[str, ...], Tensor]], names: Iterable[str]) -> Matrix:
    """Values ``[steps, tensors]`` of successive steps below each other; each part has its steps and the names of its tensors.

    ``names`` are all of these, in the order of the result. Of more tensors than memory allows those with most steps are kept.
    """
    counts = Counter[tuple[str, ...]]()
    for some, own, _ in parts:
        counts[own] += len(some)
    known = dict.fromkeys(names, 0)
    for own, count in counts.items():
        for name in own:
            known[name] += count
    steps = tuple(chain.from_iterable(some for some, _, _ in parts))
    kept = fitting(known, len(steps))
    values = torch.full((len(steps), len(kept)), math.nan, dtype=torch.float64, device="cpu")
    places = {own: _shared(own, kept) for own in counts}
    first = 0
    for some, own, rows in parts:
        at, columns = places[own]
        values[first : first + len(some), columns] = rows if len(at) == len(own) else rows[:, at]
        first += len(some)
    return Matrix(steps, kept, values)


def _shared(some: Sequence[Any], others: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The places of what both have, in either."""
    place = {each: at for at, each in enumerate(others)}
    pairs = [(at, place[each]) for at, each in enumerate(some) if each in place]
    there = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2)
    return there[:, 0], there[:, 1]


@dataclass(frozen=True)
class Matrix:
    """A built-in metric over ascending steps; values are float64 ``[steps, tensors]``, NaN where a tensor has none or its value is NaN."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor

    def __bool__(self) -> bool:
        return bool(self.steps and self.names)

    @staticmethod
    def of_tables(tables: Iterable[tuple[int, StatsTable]], metric: str) -> Matrix:
        """A built-in metric from the tables that have it, ascending by step; empty without any."""
        series = [each for each in stacked(tables) if each.has(metric) and each.names]
        return assembled(
            [(each.steps, each.names, each.values(metric)) for each in series],
            merged(reversed({each.names: None for each in series})),
        )

    def over(self, base: Matrix) -> Self:
        """This matrix divided by ``base``, on the steps and tensors of both; NaN where ``base`` is not positive."""
        steps, names = set(base.steps), set(base.names)
        both = [step for step in self.steps if step in steps], [name for name in self.names if name in names]
        above, below = self.of(*both), base.of(*both).values
        return replace(above, values=torch.where(below > 0, above.values / below, math.nan))

    def by_name(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    def column(self, name: str) -> Series:
        """One tensor over the steps whose value is not NaN."""
        values = self.values[:, self.names.index(name)].tolist()
        return Series.of((step, value) for step, value in zip(self.steps, values, strict=True) if not math.isnan(value))

    def of(self, steps: Iterable[int], names: Iterable[str]) -> Self:
        """The part with these steps and tensors; NaN where it lacks one of them."""
        wanted = tuple(steps), tuple(names)
        values = torch.full(tuple(map(len, wanted)), math.nan, dtype=torch.float64, device="cpu")
        (rows, own_rows), (columns, own_columns) = map(_shared, wanted, (self.steps, self.names))
        values[rows[:, None], columns] = self.values[own_rows][:, own_columns]
        return replace(self, steps=wanted[0], names=wanted[1], values=values)

    def part(self, first: float, last: float) -> Matrix:
        rows = Series(self.steps, tuple(range(len(self.steps)))).part(first, last)
        return Matrix(rows.steps, self.names, self.values[list(rows.values)])

    def largest(self) -> dict[str, float]:
        """The largest value of each tensor that has one; NaN is no value."""
        found = self.values.nan_to_num(-math.inf, math.inf, -math.inf).amax(0).tolist() if len(self.steps) else []
        return {name: value for name, value in zip(self.names, found, strict=bool(found)) if value > -math.inf}

    def medians(self) -> dict[str, float]:
        found = torch.nanmedian(self.values, dim=0).values.tolist() if len(self.steps) else []
        return {name: value for name, value in zip(self.names, found, strict=bool(found)) if not math.isnan(value)}
