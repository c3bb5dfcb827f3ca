"""A run layer by layer: a row for each parameter, or for each block of them."""

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
from ...runs.reader import StatsSeries, most_cells, paired

#: More parameters than this are grouped by block; so many rows are never too many for the steps.
MOST, _FEW = 40, 160


@dataclass(frozen=True)
class LayerRow:
    """A parameter, or a block of them, over the steps. Unknown values are NaN or None.

    Attributes:
        name: of the parameter or block.
        parameters: number of parameters.
        norm: median of the finite gradient norms, before clipping if they are known.
        largest: largest finite norm.
        at: the first step with it.
        share: of the squared norm of the whole gradient, mean over the steps.
        clipped: median norm of the gradient after clipping.
        update: median norm of the update over that of the weights before it.
        zeros: median share of near-zero gradient elements.
        nonfinite: number of steps whose gradient has NaN or infinite elements.
        since: the first of these.
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


#: Sort keys by the name of a column; the largest comes first.
SORTS: Mapping[str, Callable[[LayerRow], float]] = {
    "norm": lambda row: row.norm,
    "largest": lambda row: row.largest,
    "at": lambda row: math.nan if row.at is None else row.at,
    "share": lambda row: row.share,
    "clipped": lambda row: row.clipped,
    "update": lambda row: row.update,
    "zeros": lambda row: row.zeros,
    "nonfinite": lambda row: row.nonfinite,
}


def sort_rows(rows: Sequence[LayerRow], column: str) -> list[LayerRow]:
    """Sorted by a column, or by ``"name"``; rows without a value come last."""
    if column == "name":
        return sorted(rows, key=lambda row: row.name)
    value = SORTS[column]
    return sorted(rows, key=lambda row: -math.inf if math.isnan(value(row)) else value(row), reverse=True)


class Groups(NamedTuple):
    """The parameters of each row.

    Attributes:
        titles: of the rows.
        place: number of each parameter's row.
    """

    titles: tuple[str, ...]
    place: Mapping[str, int]


def groups(names: Sequence[str], depth: int | None = None, everything: bool = False) -> Groups:
    """A row for each of ``names``, or for blocks if they are many; with ``depth``, for that many parts of their paths.

    >>> groups(["h.0.a.weight", "h.0.b.weight", "head.weight"], depth=2).titles
    ('h.0', 'head.weight')
    """
    if depth is None:
        by_block = blocks(names, len(names) if everything else MOST)
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
    """Values of all rows over steps, float64 ``[steps, rows]``; NaN for none."""

    steps: list[int] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)

    def add(self, steps: Sequence[int], values: Tensor) -> None:
        self.steps += steps
        self.parts.append(values)

    @property
    def values(self) -> Tensor:
        return torch.cat(self.parts)


class _Merger:
    """Merges the rows of parameters into those of groups."""

    def __init__(self, grouped: Groups) -> None:
        self._grouped = grouped
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], list[int]]] = {}  # nearly all stacks have the same names

    def __call__(self, stack: StatsSeries) -> StatsSeries:
        if stack.names not in self._known:
            kept = tuple(name for name in stack.names if name in self._grouped.place)
            self._known[stack.names] = kept, [self._grouped.place[name] for name in kept]
        names, places = self._known[stack.names]
        return stack.of(names).merged(self._grouped.titles, places)


def rows(run: Run, grouped: Groups, since: int | None = None) -> list[LayerRow]:
    """A row for each group, from the statistics of the steps from ``since`` on; empty if no gradient was measured.

    Raises:
        ValueError: a table of these steps and groups would be far larger than the run, as nearly all of its cells are empty.
    """
    source = gradient_source(run)
    if source is not None and len(grouped.titles) > _FEW:
        _check_size(run, source, grouped, since)
    merged = _Merger(grouped)
    norms, zeros, nonfinite, shares = _Collected(), _Collected(), _Collected(), _Collected()
    for whole in () if source is None else run.stacks(source, since):
        stack = merged(whole)
        norm = _values(stack, "norm")
        norms.add(stack.steps, norm)
        zeros.add(stack.steps, _values(stack, "sparsity"))
        nonfinite.add(stack.steps, stack.values("nonfinite"))
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
    if after.steps and _same(norms, after):  # nothing is clipped
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
        *_count_nonfinite(nonfinite),
        strict=True,
    )
    return [LayerRow(*each) for each in columns]


def _check_size(run: Run, source: str, grouped: Groups, since: int | None) -> None:
    if len(grouped.titles) * len(run.steps) <= most_cells(0):
        return
    steps = values = 0
    for stack in run.stacks(source, since):
        steps += len(stack.steps)
        values += len(stack.steps) * len(stack.names)
    if len(grouped.titles) * steps > most_cells(values):
        raise ValueError(
            f"a table of {len(grouped.titles):,} rows is too large for {steps:,} steps that have {values / steps:,.1f} layers "
            "on average: use --filter, --depth or --last"
        )


def gradient_source(run: Run) -> str | None:
    """The gradients before clipping if they were measured, otherwise those after it; None without any."""
    return next((source for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if source in run.sources), None)


def _values(stack: StatsSeries, metric: str) -> Tensor:
    """A metric of merged rows; NaN for groups without values in these steps."""
    return torch.where(stack.rows[..., Column.COUNT] > 0, stack.values(metric), torch.nan)


def _medians(collected: _Collected, grouped: Groups) -> list[float]:
    if not collected.steps:
        return [math.nan] * len(grouped.titles)
    values = collected.values
    found: list[float] = torch.where(values.isinf(), torch.nan, values).nanmedian(dim=0).values.tolist()
    return found


def _largest(norms: _Collected) -> tuple[list[float], list[int | None]]:
    """The largest finite value of each row, and the first step with it."""
    values = norms.values
    finite = torch.where(values.isfinite(), values, -math.inf)
    places = finite.argmax(0)
    found = finite.gather(0, places.unsqueeze(0)).squeeze(0).tolist()
    steps = [norms.steps[place] if value > -math.inf else None for place, value in zip(places.tolist(), found, strict=True)]
    return [value if value > -math.inf else math.nan for value in found], steps


def _count_nonfinite(counts: _Collected) -> tuple[list[int], list[int | None]]:
    """The number of steps in which each row is not finite, and the first of these."""
    bad = (counts.values > 0).int()
    found, places = bad.sum(0).tolist(), bad.argmax(0).tolist()
    return found, [counts.steps[place] if count else None for count, place in zip(found, places, strict=True)]


def _same(before: _Collected, after: _Collected) -> bool:
    """Whether the norms are equal in all steps that have both."""
    place = {step: number for number, step in enumerate(before.steps)}
    there = [number for number, step in enumerate(after.steps) if step in place]
    rows = before.values[[place[after.steps[number]] for number in there]]
    return torch.allclose(rows, after.values[there], rtol=1e-6, atol=0.0, equal_nan=True)
