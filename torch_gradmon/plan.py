"""The plan that a registry compiles to: which metric on which tensor of one source, and its values from measured rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .metric import Metric
from .names import Key
from .record import Table
from .statistics.moments import VIEWS, Column, View


@dataclass(frozen=True)
class SourcePlan:
    """What is computed on the tensors of one source.

    Attributes:
        source: of all of it.
        names: canonical names of the tensors, in model order.
        columns: statistics that are measured.
        measured: positions in ``names`` that need a row of statistics.
        views: each built-in with the positions that it applies to.
        functions: for each position, the metrics with a function.
    """

    source: str
    names: tuple[str, ...] = ()
    columns: frozenset[Column] = frozenset()
    measured: tuple[int, ...] = ()
    views: tuple[tuple[Metric, tuple[int, ...]], ...] = ()
    functions: Mapping[int, tuple[Metric, ...]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Nothing to do for this source."""
        return not self.measured and not self.functions

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the tensors that anything is computed on."""
        return tuple(sorted({*self.measured, *self.functions}))

    def evaluate(self, table: Table, base: Table | None = None) -> dict[Key, float]:
        """The values of all views for the rows of ``table``; ``base`` holds the rows that ratios refer to."""
        where = {name: row for row, name in enumerate(table.names)}
        values: dict[Key, float] = {}
        for metric, positions in self.views:
            found = [(self.names[p], where[self.names[p]]) for p in positions if self.names[p] in where]
            if not found:
                continue
            keys = [Key(self.source, name, metric.name) for name, _ in found]
            rows = table.rows[[row for _, row in found]]
            if metric.name == "ratio":
                defined, numbers = _ratios(rows, base, [name for name, _ in found])
            else:
                defined, numbers = evaluate_view(VIEWS[metric.name], rows)
            values.update((key, x) for key, x, there in zip(keys, numbers, defined, strict=True) if there)
        return values


def evaluate_view(view: View, rows: Tensor) -> tuple[list[bool], list[float]]:
    """For each of the rows ``[n, 8]`` whether the value exists, and the value."""
    return view.defined(rows).tolist(), view.compute(rows).tolist()


def _ratios(rows: Tensor, base: Table | None, found: list[str]) -> tuple[list[bool], list[float]]:
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
) -> SourcePlan:
    """The plan of one source: ``metrics`` against ``names`` less ``excluded``, and the columns ``always`` on ``always_on``."""
    columns = set(always)
    measured = {position for position, name in enumerate(names) if always and name in always_on}
    views: list[tuple[Metric, tuple[int, ...]]] = []
    functions: dict[int, list[Metric]] = {}
    for metric in metrics:
        positions = tuple(p for p, name in enumerate(names) if name not in excluded and metric.matches(name))
        if metric.function is not None:
            for position in positions:
                functions.setdefault(position, []).append(metric)
        elif positions:
            columns |= metric.columns
            measured.update(positions)
            views.append((metric, positions))
    return SourcePlan(
        source,
        tuple(names),
        frozenset(columns),
        tuple(sorted(measured)),
        tuple(views),
        {position: tuple(found) for position, found in functions.items()},
    )
