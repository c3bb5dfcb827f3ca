"""The plan compiled from a registry: which metric applies to which tensor of one source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from ..core.keys import Key
from ..core.metric import Metric
from ..core.moments import Column
from ..core.records import StatsTable
from ..core.step_values import Block
from .view_values import ViewGroup, blocks_of, view_group


@dataclass(frozen=True)
class SourcePlan:
    """What to compute on the tensors of one source.

    Attributes:
        source: of all tensors.
        names: canonical names of the tensors, in model order.
        columns: statistics to measure.
        measured: positions in ``names`` that need a row of statistics.
        views: each built-in with the keys of its values, one for each tensor that it applies to.
        functions: for each position, the metrics with a function.
        spread: positions of sharded tensors, whose rows are merged over ranks.
        is_whole: the squares of all tensors of whole-model values are measured.
        kernels: positions of kernels of convolutions with three dimensions.
    """

    source: str
    names: tuple[str, ...] = ()
    columns: frozenset[Column] = frozenset()
    measured: tuple[int, ...] = ()
    views: tuple[tuple[Metric, tuple[Key, ...]], ...] = ()
    functions: Mapping[int, tuple[Metric, ...]] = field(default_factory=dict)
    spread: frozenset[int] = frozenset()
    is_whole: bool = False
    kernels: frozenset[int] = frozenset()
    _last: dict[str, tuple[tuple[str, ...], list[ViewGroup]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def exchanged(self) -> list[str]:
        """Names of the tensors whose rows are merged over ranks; the same on all ranks."""
        return [self.names[position] for position in self.measured if position in self.spread]

    @cached_property
    def applied(self) -> list[tuple[Metric, list[int]]]:
        """Each metric with a function, and the positions of the tensors that it applies to."""
        found: dict[Metric, list[int]] = {}
        for position, metrics in self.functions.items():
            for metric in metrics:
                found.setdefault(metric, []).append(position)
        return list(found.items())

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do for this source."""
        return not self.measured and not self.functions

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the tensors on which anything is computed."""
        return tuple(sorted({*self.measured, *self.functions}))

    def names_at(self, positions: Sequence[int]) -> Sequence[str]:
        """The names at these ascending positions; all of them as one tuple, the same in each step."""
        return self.names if len(positions) == len(self.names) else [self.names[position] for position in positions]

    def evaluate(self, table: StatsTable, base: StatsTable | None = None) -> list[Block]:
        """The values of all views for the rows of ``table``; ``base`` holds the denominators of ratios."""
        return blocks_of(self._groups(table.names), table, base)

    def _groups(self, names: tuple[str, ...]) -> list[ViewGroup]:
        """The metrics that apply to any of these tensors: those that the rows suffice for, and ratios."""
        known, groups = self._last.get(self.source, ((), []))
        if known != names:  # most tables of a source have the same names
            where = {name: row for row, name in enumerate(names)}
            applied = [(metric, [key for key in wanted if key.name in where]) for metric, wanted in self.views]
            found = [(metric.name, keys, [where[key.name] for key in keys]) for metric, keys in applied if keys]
            views = [one for one in found if one[0] != "ratio"]
            ratios = [one for one in found if one[0] == "ratio"]
            groups = [view_group(of, len(names), table) for of, table in ((views, self.source), (ratios, "")) if of]
            self._last[self.source] = names, groups
        return groups


def compile_plan(
    source: str,
    metrics: Iterable[Metric],
    names: Sequence[str],
    *,
    excluded: Set[str] = frozenset(),
    always: frozenset[Column] = frozenset(),
    always_on: Set[str] = frozenset(),
    spread: Set[str] = frozenset(),
    kernels: Set[str] = frozenset(),
) -> SourcePlan:
    """The plan of one source: ``metrics`` on ``names`` without ``excluded``, and the columns ``always`` on ``always_on``.

    The selections are sets: each name is looked for in all of them.
    """
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
        frozenset(position for position, name in enumerate(names) if name in kernels),
    )
