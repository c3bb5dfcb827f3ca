"""The metrics requested of each module, and the built-in values of a step's tables."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from ...core import keys as n
from ...core.keys import Key
from ...core.metric import Metric
from ...core.moments import ALL_COLUMNS, Column
from ...core.records import StatsTable
from ...core.step_values import Block
from ...step.view_values import ViewGroup, blocks_of, view_group
from .unit_metrics import DEAD


@dataclass(frozen=True)
class RequestedMetrics:
    """The metrics requested of one module and source.

    Attributes:
        columns: the statistics that the views of the source need, of any module: a record has one set of columns for each source.
        views: built-ins that are views of them.
        functions: metrics with a function.
        dead: the share of dead units is requested.
        split: each call of a forward has keys of its own.
        reasons: why a metric does not apply to this module, by name.
    """

    columns: frozenset[Column]
    views: tuple[Metric, ...]
    functions: tuple[Metric, ...]
    dead: bool
    split: bool
    reasons: Mapping[str, str]

    @property
    def others(self) -> bool:
        """Whether metrics other than views are requested."""
        return bool(self.functions or self.dead or self.reasons)


class _Calls(NamedTuple):
    """What is known of the calls of a step: the metrics requested, and attributes of :class:`MetricLookup`."""

    asked: Mapping[tuple[str, str], tuple[RequestedMetrics, ...]]
    owner: Mapping[tuple[str, str], tuple[str, bool]]
    traced: Mapping[tuple[str, str], frozenset[Column]]


class MetricLookup:
    """The metrics of modules that are due in a step.

    Attributes:
        modules: by name.
        owner: by source and path of a row, the name of the module, and whether its calls have keys of their own.
        traced: columns of rows that a compiled graph wrote, by source and path; rows without a count were not called.
    """

    def __init__(self) -> None:
        self.modules: Mapping[str, Callable[[], nn.Module | None]] = {}
        self.owner: dict[tuple[str, str], tuple[str, bool]] = {}
        self.traced: dict[tuple[str, str], frozenset[Column]] = {}
        self._metrics: tuple[Metric, ...] = ()
        self._asked: dict[tuple[str, str], tuple[RequestedMetrics, ...]] = {}
        self._columns: dict[str, frozenset[Column]] = {}
        self._last: dict[str, tuple[tuple[str, ...], _Calls, list[ViewGroup]]] = {}

    def begin(self, metrics: tuple[Metric, ...], modules: Mapping[str, Callable[[], nn.Module | None]]) -> None:
        """Start a step with the metrics due in it; ``modules`` by name."""
        if metrics != self._metrics or modules is not self.modules:
            self._metrics, self.modules, self._asked, self._columns = metrics, modules, {}, {}
            for metric in metrics:
                if metric.function is None:
                    self._columns[metric.source] = self._columns.get(metric.source, frozenset()) | metric.columns

    def requested(self, source: str, name: str) -> tuple[RequestedMetrics, ...]:
        """What is requested of a source of a module: for all its calls together, and for each call."""
        found = self._asked.get((source, name))
        if found is None:
            metrics = [metric for metric in self._metrics if metric.source == source and metric.matches(name)]
            reference = self.modules.get(name)
            module = None if reference is None else reference()
            halves = [(split, [m for m in metrics if m.split_calls == split]) for split in (False, True)]
            columns = self._columns.get(source, frozenset())
            found = tuple(_asked(some, module, split, columns) for split, some in halves if some)
            self._asked[source, name] = found
        return found

    def evaluator(self) -> Callable[[dict[str, StatsTable]], list[Block]]:
        """A function that computes the built-in values of this step's tables, even after the next step has begun.

        It drops rows of modules that were not called.
        """
        calls = _Calls(self._asked, dict(self.owner), dict(self.traced))

        def evaluate(tables: dict[str, StatsTable]) -> list[Block]:
            blocks = []
            for source in n.MODULE_SOURCES:
                if source in tables:
                    table = tables[source] = _called(source, tables[source], calls.traced)
                    blocks += blocks_of(self._groups(source, table.names, calls), table)
            return blocks

        return evaluate

    def _groups(self, source: str, names: tuple[str, ...], calls: _Calls) -> list[ViewGroup]:
        """The metrics of a table with rows of these ``names``, as in the last step if the same modules were called and asked for."""
        last_names, last_calls, groups = self._last.get(source) or ((), None, [])
        # what is asked may not have been looked up for all modules yet, so an equal one is not enough
        if last_calls is not None and last_names == names and last_calls.asked is calls.asked and last_calls == calls:
            return groups
        places: dict[str, list[int]] = {}
        for place, path in enumerate(names):
            # if only other ranks have called the module, its path gives its name
            name, split = calls.owner.get((source, path)) or (n.owner_of(path, self.modules), "@" in path)
            columns = calls.traced.get((source, path), ALL_COLUMNS)
            for each in calls.asked.get((source, name)) or self.requested(source, name):
                for metric in each.views if each.split == split else ():
                    if metric.columns <= columns:
                        places.setdefault(metric.name, []).append(place)
        found = [(metric, [Key(source, names[place], metric) for place in rows], rows) for metric, rows in places.items()]
        groups = [view_group(found, len(names), source)] if found else []
        self._last[source] = names, calls, groups
        return groups


def _called(source: str, table: StatsTable, traced: Container[tuple[str, str]]) -> StatsTable:
    if not traced:
        return table
    counts = table.rows[:, Column.COUNT].tolist()
    kept = [p for p, name in enumerate(table.names) if counts[p] or (source, name) not in traced]
    return replace(table, names=tuple(table.names[p] for p in kept), rows=table.rows[kept])


def _asked(metrics: Iterable[Metric], module: nn.Module | None, split: bool, columns: frozenset[Column]) -> RequestedMetrics:
    views: list[Metric] = []
    functions: list[Metric] = []
    reasons: dict[str, str] = {}
    dead = False
    for metric in metrics:
        function: Any = metric.function
        if function is None:
            views.append(metric)
        elif function is DEAD:
            dead = True
        elif hasattr(function, "bind"):
            bound = function.bind(module)
            if isinstance(bound, str):
                reasons[metric.name] = bound
            else:
                functions.append(replace(metric, function=bound))
        else:
            functions.append(metric)
    return RequestedMetrics(columns if views else frozenset(), tuple(views), tuple(functions), dead, split, reasons)
