"""The plan compiled from a registry: which metric applies to which tensor of one source, and its values from measured rows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.keys import Key
from ..core.metric import Metric
from ..core.moments import NEEDS, VIEWS, Column, StatView, have
from ..core.records import StatsTable
from ..core.step_values import Block

#: Each view with keys, and the rows of their tensors; None for all rows.
_Found = list[tuple[Metric, list[Key], list[int] | None]]


class _Group(NamedTuple):
    """Metrics whose values are one block: all its keys, and the table that the values are views of, empty for none."""

    found: _Found
    keys: tuple[Key, ...]
    table: str


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
    """

    source: str
    names: tuple[str, ...] = ()
    columns: frozenset[Column] = frozenset()
    measured: tuple[int, ...] = ()
    views: tuple[tuple[Metric, tuple[Key, ...]], ...] = ()
    functions: Mapping[int, tuple[Metric, ...]] = field(default_factory=dict)
    spread: frozenset[int] = frozenset()
    is_whole: bool = False
    _last: dict[str, tuple[tuple[str, ...], list[_Group]]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        groups = self._groups(table.names)
        if not groups:
            return []
        columns = table.rows.unbind(1)
        finite = have("finite elements", columns)
        # where all rows have finite elements, as in nearly every step, they have all that a view needs
        there = dict.fromkeys(NEEDS, finite) if bool(finite.all()) else {"finite elements": finite}
        return [_block(group, table.rows, columns, there, base) for group in groups]

    def _groups(self, names: tuple[str, ...]) -> list[_Group]:
        """The metrics that apply to any of these tensors: those that the rows suffice for, and ratios."""
        known, groups = self._last.get(self.source, ((), []))
        if known != names:  # most tables of a source have the same names
            where, every = {name: row for row, name in enumerate(names)}, list(range(len(names)))
            applied = [(metric, [key for key in wanted if key.name in where]) for metric, wanted in self.views]
            placed = [(metric, keys, [where[key.name] for key in keys]) for metric, keys in applied if keys]
            found = [(metric, keys, None if places == every else places) for metric, keys, places in placed]
            views = [one for one in found if one[0].name != "ratio"]
            ratios = [one for one in found if one[0].name == "ratio"]
            groups = [
                _Group(of, tuple(key for _, keys, _ in of for key in keys), table)
                for of, table in ((views, self.source), (ratios, ""))
                if of
            ]
            self._last[self.source] = names, groups
        return groups


def _block(group: _Group, rows: Tensor, columns: tuple[Tensor, ...], there: dict[str, Tensor], base: StatsTable | None) -> Block:
    """The values of ``group``; ``there`` has for each need of a view the rows that meet it, as far as that is known."""
    values: list[Tensor] = []
    defined: list[Tensor] = []
    for metric, wanted, places in group.found:
        if metric.name == "ratio":
            value, exists = _ratios(rows if places is None else rows[places], base, [key.name for key in wanted])
        else:
            view = VIEWS[metric.name]
            of, known = (columns, there) if places is None else (rows[places].unbind(1), {})
            if view.needs not in known:
                known[view.needs] = have(view.needs, of)
            value, exists = view.of(of), known[view.needs]
        values.append(value)
        defined.append(exists)
    numbers = _numbers(values[0] if len(values) == 1 else torch.cat(values))
    if all(exists.all() for exists in set(defined)):  # views with the same needs share one tensor
        return Block(group.keys, numbers, group.table)
    chosen = torch.cat(defined).tolist()
    return Block(tuple(compress(group.keys, chosen)), array("d", compress(numbers, chosen)), group.table)


def _numbers(values: Tensor) -> array[float]:
    """float64, copied: a list of Python's numbers takes four times the memory, which a history of many steps shows."""
    values = values.contiguous()
    return array("d", ctypes.string_at(values.data_ptr(), 8 * len(values)))


def evaluate_view(view: StatView, rows: Tensor) -> tuple[list[bool], list[float]]:
    """For each row ``[n, 8]`` whether the value exists, and the value."""
    return view.defined(rows).tolist(), view.compute(rows).tolist()


def _ratios(rows: Tensor, base: StatsTable | None, found: list[str]) -> tuple[Tensor, Tensor]:
    if base is None:
        return rows.new_zeros(len(found)), torch.zeros(len(found), dtype=torch.bool, device=rows.device)
    where = {name: row for row, name in enumerate(base.names)}
    denominators = base.rows[[where[name] for name in found]][:, Column.SQUARE_SUM].sqrt()
    ratios = rows[:, Column.SQUARE_SUM].sqrt() / denominators
    return ratios, denominators > 0


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
    """The plan of one source: ``metrics`` on ``names`` without ``excluded``, and the columns ``always`` on ``always_on``."""
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
    """The value of ``key`` if it is a built-in metric of a tensor in ``table``, else None."""
    if table is None or key.name not in table.names or not table.has(key.metric):
        return None
    return values_in(key.metric, table, [table.names.index(key.name)])[0]


def values_in(metric: str, table: StatsTable, rows: list[int]) -> list[float | None]:
    """The values of a built-in metric in these rows; None if undefined."""
    there, values = evaluate_view(VIEWS[metric], table.rows[rows])
    return [value if defined else None for defined, value in zip(there, values, strict=True)]
