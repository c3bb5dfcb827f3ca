"""A run layer by layer: one row for each parameter, or for each block of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...analysis.plots.block_rows import blocks
from ...analysis.run import Run
from ...core import keys as n
from ...core.moments import Column
from ...runs.stats_series import StatsSeries, paired

#: More parameters than these are shown by blocks.
MOST = 40


@dataclass(frozen=True)
class Row:
    """What a parameter, or a block of them, did over the steps. What is not known is NaN or None.

    Attributes:
        name: of the parameter or block.
        parameters: how many it stands for.
        norm: the median norm of the gradient before clipping (after it where only that is known); of the finite ones, as the next.
        largest: the largest norm.
        at: the first step that has it.
        share: of the squared norm of the whole gradient, the mean over the steps.
        clipped: the median norm of the gradient after clipping.
        update: the median norm of the update over that of the weights before it.
        zeros: the median share of the gradient's elements that are near zero.
        nonfinite: steps whose gradient holds NaN or infinite elements.
        since: the first one of them.
    """

    name: str
    parameters: int
    norm: float
    largest: float
    at: int | None
    share: float
    clipped: float
    update: float
    zeros: float
    nonfinite: int
    since: int | None


#: By the name of a column what rows are sorted by, largest first.
SORTS: Mapping[str, Callable[[Row], float]] = {
    "norm": lambda row: row.norm,
    "largest": lambda row: row.largest,
    "at": lambda row: math.nan if row.at is None else row.at,
    "share": lambda row: row.share,
    "clipped": lambda row: row.clipped,
    "update": lambda row: row.update,
    "zeros": lambda row: row.zeros,
    "nonfinite": lambda row: row.nonfinite,
}


def arranged(rows: Sequence[Row], column: str) -> list[Row]:
    """Sorted by a column, or by ``"name"``; what has no such value comes last."""
    if column == "name":
        return sorted(rows, key=lambda row: row.name)
    value = SORTS[column]
    return sorted(rows, key=lambda row: -math.inf if math.isnan(value(row)) else value(row), reverse=True)


class Groups(NamedTuple):
    """Which parameters a row stands for.

    Attributes:
        titles: of the rows.
        place: of each parameter, the number of its row.
    """

    titles: tuple[str, ...]
    place: Mapping[str, int]


def groups(names: Sequence[str], depth: int | None = None, all_of_them: bool = False) -> Groups:
    """Each of ``names`` by itself, or by blocks if they are many; with ``depth`` by that many parts of their paths.

    >>> groups(["h.0.a.weight", "h.0.b.weight", "head.weight"], depth=2).titles
    ('h.0', 'head.weight')
    """
    if depth is None:
        by_block = blocks(names, len(names) if all_of_them else MOST)
        title_of = {place: title for title, places in by_block.items() for place in places}
        titles = [title_of[place] for place in range(len(names))]
    else:
        titles = [".".join(name.split(".")[:depth]) for name in names]
    members = Counter(titles)
    titles = [name if members[title] == 1 else title for name, title in zip(names, titles, strict=True)]
    order = {title: number for number, title in enumerate(dict.fromkeys(titles))}
    return Groups(tuple(order), {name: order[title] for name, title in zip(names, titles, strict=True)})


@dataclass
class _Collected:
    """Values of all rows over steps, float64 ``[steps, rows]``; NaN where there is none."""

    steps: list[int] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)

    def add(self, steps: Sequence[int], values: Tensor) -> None:
        self.steps += steps
        self.parts.append(values)

    @property
    def values(self) -> Tensor:
        return torch.cat(self.parts)


class _Merger:
    """Makes rows of groups from those of parameters."""

    def __init__(self, grouped: Groups) -> None:
        self._grouped = grouped
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], list[int]]] = {}  # nearly all stacks have the same names

    def __call__(self, stack: StatsSeries) -> StatsSeries:
        if stack.names not in self._known:
            kept = tuple(name for name in stack.names if name in self._grouped.place)
            self._known[stack.names] = kept, [self._grouped.place[name] for name in kept]
        names, places = self._known[stack.names]
        return stack.of(names).merged(self._grouped.titles, places)


def rows(run: Run, grouped: Groups, since: int | None = None) -> list[Row]:
    """One row for each group, by the statistics of the steps from ``since`` on; none where no gradient was measured."""
    source = gradient_source(run)
    merged = _Merger(grouped)
    norms, zeros, spoiled, shares = _Collected(), _Collected(), _Collected(), _Collected()
    for whole in () if source is None else run.stacks(source, since):
        stack = merged(whole)
        norm = _values(stack, "norm")
        norms.add(stack.steps, norm)
        zeros.add(stack.steps, _values(stack, "sparsity"))
        spoiled.add(stack.steps, stack.values("nonfinite"))
        total = whole.values("norm").square().nansum(1, keepdim=True)
        total = torch.where((total > 0) & total.isfinite() & ~whole.values("nonfinite").any(1, keepdim=True), total, torch.nan)
        shares.add(stack.steps, torch.where(total.isnan(), torch.nan, (norm.square() / total).nan_to_num(nan=0.0)))
    if not norms.steps or not grouped.titles:
        return []
    after, ratios = _Collected(), _Collected()
    for stack in run.stacks(n.GRADIENT, since) if source == n.GRADIENT_BEFORE_CLIP else ():
        after.add(stack.steps, _values(merged(stack), "norm"))
    for update, weights in paired(run.stacks(n.UPDATE, since), run.stacks(n.PARAMETER, since)):
        before = _values(merged(weights), "norm")
        ratios.add(update.steps, torch.where(before > 0, _values(merged(update), "norm") / before, torch.nan))
    if after.steps and _same(norms, after):  # nothing clips
        after = _Collected()
    members = Counter(grouped.place.values())
    columns = zip(
        grouped.titles,
        [members[place] for place in range(len(grouped.titles))],
        _medians(norms, grouped),
        *_largest(norms),
        shares.values.nanmean(0).tolist(),
        _medians(after, grouped),
        _medians(ratios, grouped),
        _medians(zeros, grouped),
        *_spoiled(spoiled),
        strict=True,
    )
    return [Row(*each) for each in columns]


def gradient_source(run: Run) -> str | None:
    """The gradients that are looked at: those before clipping where there are any; None without any."""
    return next((source for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if source in run.sources), None)


def _values(stack: StatsSeries, metric: str) -> Tensor:
    """A metric of merged rows; NaN for groups that have nothing in these steps."""
    return torch.where(stack.rows[..., Column.COUNT] > 0, stack.values(metric), torch.nan)


def _medians(collected: _Collected, grouped: Groups) -> list[float]:
    if not collected.steps:
        return [math.nan] * len(grouped.titles)
    values = collected.values
    found: list[float] = torch.where(values.isinf(), torch.nan, values).nanmedian(dim=0).values.tolist()
    return found


def _largest(norms: _Collected) -> tuple[list[float], list[int | None]]:
    """The largest finite value of each row, and the first step that has it."""
    values = norms.values
    finite = torch.where(values.isfinite(), values, -math.inf)
    places = finite.argmax(0)
    found = finite.gather(0, places.unsqueeze(0)).squeeze(0).tolist()
    steps = [norms.steps[place] if value > -math.inf else None for place, value in zip(places.tolist(), found, strict=True)]
    return [value if value > -math.inf else math.nan for value in found], steps


def _spoiled(counts: _Collected) -> tuple[list[int], list[int | None]]:
    """In how many steps each row is not finite, and the first one of them."""
    bad = (counts.values > 0).int()
    found, places = bad.sum(0).tolist(), bad.argmax(0).tolist()
    return found, [counts.steps[place] if count else None for count, place in zip(found, places, strict=True)]


def _same(before: _Collected, after: _Collected) -> bool:
    """Whether the norms are the same in all steps that have both."""
    place = {step: number for number, step in enumerate(before.steps)}
    there = [number for number, step in enumerate(after.steps) if step in place]
    rows = before.values[[place[after.steps[number]] for number in there]]
    return torch.allclose(rows, after.values[there], rtol=1e-6, atol=0.0, equal_nan=True)
