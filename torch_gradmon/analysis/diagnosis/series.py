"""Values over steps: of one quantity, and of many tensors."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...core.moments import ALWAYS, VIEWS
from ...core.records import StatsTable


def lower_median(values: Iterable[float]) -> float:
    """The middle value, or the lower one of two; NaN without any."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else math.nan


@dataclass(frozen=True)
class Series:
    """One value over the steps that have it.

    Attributes:
        steps: ascending.
        values: of these steps; some may not be finite.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> Series:
        """A series of pairs of a step and its value, ascending by step."""
        pairs = list(pairs)
        return cls(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def finite(self) -> Series:
        """Without the values that are NaN or infinite."""
        return Series.of((step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value))

    def since(self, step: int) -> Series:
        """From ``step`` on."""
        first = bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])

    def before(self, step: int) -> Series:
        """Up to ``step``, without it."""
        last = bisect_left(self.steps, step)
        return Series(self.steps[:last], self.values[:last])

    def part(self, first: float, last: float) -> Series:
        """From one share of the series to another: ``part(0.75, 1)`` is its last quarter. At least one value, if it has any."""
        low = min(int(first * len(self)), max(len(self) - 1, 0))
        high = max(math.ceil(last * len(self)), low + 1)
        return Series(self.steps[low:high], self.values[low:high])

    def at(self, share: float) -> float:
        """The value at a share of the way from the first step to the last, or of the next step that has one."""
        step = self.steps[0] + share * (self.steps[-1] - self.steps[0])
        return self.values[min(bisect_left(self.steps, step), len(self) - 1)]

    @property
    def median(self) -> float:
        """The lower median of the finite values; NaN without any."""
        return lower_median(self.finite.values)


def clip_bound(before: Series, after: Series) -> float | None:
    """The norm to which gradients are clipped, if most clipped steps have it in common."""
    clipped = dict(zip(after.steps, after.values, strict=True))
    pairs = [(b, clipped[s]) for s, b in zip(before.steps, before.values, strict=True) if s in clipped]
    cut = [a for b, a in pairs if math.isfinite(b) and a < 0.999 * b]
    usual = lower_median(cut)
    same = sum(abs(a - usual) <= 1e-3 * usual for a in cut)
    return usual if cut and same > len(cut) / 2 else None


def scales_alike(kept: Matrix | None) -> bool:
    """Whether most steps that an edit reduced scaled all tensors by one factor; True if that is unknown. Takes norms after over before."""
    if kept is None:
        return True
    smallest = kept.values.nan_to_num(math.inf, math.inf, -math.inf).amin(1)
    largest = kept.values.nan_to_num(-math.inf, math.inf, -math.inf).amax(1)
    reduced = (smallest < 0.999) & (largest > 0)
    return 2 * int((reduced & (largest > smallest * 1.05)).sum()) <= int(reduced.sum())


def _merge(names: list[str], new: Sequence[str]) -> None:
    """Put each name that ``names`` lacks behind the one that it follows in ``new``: both are in model order."""
    known, at = set(names), 0
    if known.issuperset(new):
        return
    for name in new:
        if name in known:
            at = names.index(name) + 1
        else:
            names.insert(at, name)
            at += 1


@dataclass(frozen=True)
class Matrix:
    """A built-in metric of many tensors over steps.

    Attributes:
        steps: ascending.
        names: of the tensors, in model order.
        values: float64 ``[steps, tensors]``; NaN where a tensor has no value or its value is NaN.
    """

    steps: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor

    @classmethod
    def of_tables(cls, tables: Iterable[tuple[int, StatsTable]], metric: str) -> Matrix | None:
        """A built-in metric from the tables that have it, ascending by step; None without any."""
        view = VIEWS[metric]
        kept = [(step, table) for step, table in tables if view.columns <= table.columns | ALWAYS and table.names]
        if not kept:
            return None
        names: list[str] = []
        for new in dict.fromkeys(table.names for _, table in kept):  # nearly all tables have the same names
            _merge(names, new)
        place = {name: column for column, name in enumerate(names)}
        values = torch.full((len(kept), len(names)), math.nan, dtype=torch.float64, device="cpu")
        columns: dict[tuple[str, ...], Tensor] = {}
        for row, (_, table) in enumerate(kept):
            if table.names not in columns:
                columns[table.names] = torch.tensor([place[name] for name in table.names], device="cpu")
            values[row, columns[table.names]] = torch.where(view.defined(table.rows), view.compute(table.rows), math.nan)
        return cls(tuple(step for step, _ in kept), tuple(names), values)

    def over(self, base: Matrix) -> Matrix | None:
        """This matrix divided by ``base``, on the steps and tensors of both; NaN where ``base`` is not positive, None without any."""
        steps, names = set(base.steps), set(base.names)
        both = [step for step in self.steps if step in steps], [name for name in self.names if name in names]
        if not all(both):
            return None
        above, below = self.of(*both), base.of(*both).values
        return Matrix(above.steps, above.names, torch.where(below > 0, above.values / below, math.nan))

    def column(self, name: str) -> Series:
        """One tensor over the steps whose value is not NaN."""
        values = self.values[:, self.names.index(name)].tolist()
        return Series.of((step, value) for step, value in zip(self.steps, values, strict=True) if not math.isnan(value))

    def of(self, steps: Iterable[int], names: Iterable[str]) -> Matrix:
        """The part with these steps and tensors; it must have them all."""
        row = {step: number for number, step in enumerate(self.steps)}
        column = {name: number for number, name in enumerate(self.names)}
        steps, names = tuple(steps), tuple(names)
        values = self.values[[row[step] for step in steps]][:, [column[name] for name in names]]
        return Matrix(steps, names, values)

    def part(self, first: float, last: float) -> Matrix:
        """Its steps from one share to another."""
        rows = Series(self.steps, tuple(range(len(self.steps)))).part(first, last)
        return Matrix(rows.steps, self.names, self.values[list(rows.values)])

    def largest(self) -> dict[str, float]:
        """The largest value of each tensor that has one; NaN is no value."""
        found = self.values.nan_to_num(-math.inf, math.inf, -math.inf).amax(0).tolist() if len(self.steps) else []
        return {name: value for name, value in zip(self.names, found, strict=bool(found)) if value > -math.inf}

    def medians(self) -> dict[str, float]:
        """The median value of each tensor that has one."""
        found = torch.nanmedian(self.values, dim=0).values.tolist() if len(self.steps) else []
        return {name: value for name, value in zip(self.names, found, strict=bool(found)) if not math.isnan(value)}
