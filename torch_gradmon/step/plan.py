"""The plan that a registry compiles to: which metric on which tensor of one source, and its values from measured rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from ..core.keys import Key
from ..core.metric import Metric
from ..core.moments import VIEWS, Column, StatView
from ..core.records import StatsTable


@dataclass(frozen=True)
class SourcePlan:
    """What is computed on the tensors of one source.

    Attributes:
        source: of all of it.
        names: canonical names of the tensors, in model order.
        columns: statistics that are measured.
        measured: positions in ``names`` that need a row of statistics.
        views: each built-in with the keys of its values, one for each tensor that it applies to.
        functions: for each position, the metrics with a function.
        spread: positions of tensors of which each rank has a part, so that their rows are merged over ranks.
        is_whole: the squares of all tensors that whole-model values are made of are measured.
    """

    source: str
    names: tuple[str, ...] = ()
    columns: frozenset[Column] = frozenset()
    measured: tuple[int, ...] = ()
    views: tuple[tuple[Metric, tuple[Key, ...]], ...] = ()
    functions: Mapping[int, tuple[Metric, ...]] = field(default_factory=dict)
    spread: frozenset[int] = frozenset()
    is_whole: bool = False

    @property
    def exchanged(self) -> list[str]:
        """Names of the tensors whose rows are merged over ranks, the same on all of them."""
        return [self.names[position] for position in self.measured if position in self.spread]

    @property
    def empty(self) -> bool:
        """Nothing to do for this source."""
        return not self.measured and not self.functions

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the tensors that anything is computed on."""
        return tuple(sorted({*self.measured, *self.functions}))

    def evaluate(self, table: StatsTable, base: StatsTable | None = None) -> dict[Key, float]:
        """The values of all views for the rows of ``table``; ``base`` holds the rows that ratios refer to."""
        where = {name: row for row, name in enumerate(table.names)}
        values: dict[Key, float] = {}
        for metric, wanted in self.views:
            keys = [key for key in wanted if key.name in where]
            if not keys:
                continue
            places = [where[key.name] for key in keys]
            rows = table.rows if places == list(range(len(table.names))) else table.rows[places]
            if metric.name == "ratio":
                defined, numbers = _ratios(rows, base, [key.name for key in keys])
            else:
                defined, numbers = evaluate_view(VIEWS[metric.name], rows)
            found = zip(keys, numbers, strict=True)
            values.update(found if all(defined) else compress(found, defined))
        return values


def evaluate_view(view: StatView, rows: Tensor) -> tuple[list[bool], list[float]]:
    """For each of the rows ``[n, 8]`` whether the value exists, and the value."""
    return view.defined(rows).tolist(), view.compute(rows).tolist()


def _ratios(rows: Tensor, base: StatsTable | None, found: list[str]) -> tuple[list[bool], list[float]]:
    if base is None:
        return [False] * len(found), [0.0] * len(found)
    where = {name: row for row, name in enumerate(base.names)}
    denominators = base.rows[[where[name] for name in found]][:, Column.SQUARE_SUM].sqrt()
    ratios = rows[:, Column.SQUARE_SUM].sqrt() / denominators
    return (denominators > 0).tolist(), torch.where(denominators > 0, ratios, 0.0).tolist()


def compile_plan(
    source: str,
    metrics: Iterable[Metric],
    names: Sequence[str],
    *,
    excluded: Container[str] = (),
    always: frozenset[Column] = frozenset(),
    always_on: Container[str] = (),
    spread: Container[str] = (),
) -> SourcePlan:
    """The plan of one source: ``metrics`` against ``names`` less ``excluded``, and the columns ``always`` on ``always_on``."""
    columns = set(always)
    measured = {position for position, name in enumerate(names) if always and name in always_on}
    views: list[tuple[Metric, tuple[Key, ...]]] = []
    functions: dict[int, list[Metric]] = {}
    for metric in metrics:
        positions = tuple(p for p, name in enumerate(names) if name not in excluded and metric.matches(name))
        if metric.function is not None:
            for position in positions:
                functions.setdefault(position, []).append(metric)
        elif positions:
            columns |= metric.columns
            measured.update(positions)
            views.append((metric, tuple(Key(source, names[p], metric.name) for p in positions)))
    return SourcePlan(
        source,
        tuple(names),
        frozenset(columns),
        tuple(sorted(measured)),
        tuple(views),
        {position: tuple(found) for position, found in functions.items()},
        frozenset(position for position, name in enumerate(names) if name in spread),
        Column.SQUARE_SUM in columns and all(p in measured for p, name in enumerate(names) if name in always_on),
    )


def value_in(table: StatsTable | None, key: Key) -> float | None:
    """The value of ``key``, if it is a built-in metric of a tensor in ``table``."""
    if table is None or key.name not in table.names or not table.has(key.metric):
        return None
    return values_in(key.metric, table, [table.names.index(key.name)])[0]


def values_in(metric: str, table: StatsTable, rows: list[int]) -> list[float | None]:
    """The values of a built-in metric in these rows; None where it is not defined."""
    there, values = evaluate_view(VIEWS[metric], table.rows[rows])
    return [value if defined else None for defined, value in zip(there, values, strict=True)]
