"""The metrics requested of each module, and the built-in values of a step's tables."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...core import keys as n
from ...core.keys import Key
from ...core.metric import Metric
from ...core.moments import ALL_COLUMNS, VIEWS, Column
from ...core.records import StatsTable
from ...step.plan import evaluate_view
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

    def evaluator(self) -> Callable[[dict[str, StatsTable]], dict[Key, float]]:
        """A function that computes the built-in values of this step's tables, even after the next step has begun.

        It drops rows of modules that were not called.
        """
        asked, owner, traced = self._asked, dict(self.owner), dict(self.traced)

        def evaluate(tables: dict[str, StatsTable]) -> dict[Key, float]:
            values: dict[Key, float] = {}
            for source in n.MODULE_SOURCES:
                if source in tables:
                    table = tables[source] = _called(source, tables[source], traced)
                    places: dict[str, list[int]] = {}
                    for place, path in enumerate(table.names):
                        # if only other ranks have called the module, its path gives its name
                        name, split = owner.get((source, path)) or (n.owner_of(path, self.modules), "@" in path)
                        columns = traced.get((source, path), ALL_COLUMNS)
                        for each in asked.get((source, name)) or self.requested(source, name):
                            for metric in each.views if each.split == split else ():
                                if not metric.columns <= columns:
                                    continue
                                places.setdefault(metric.name, []).append(place)
                    values.update(_evaluated(source, table, places))
            return values

        return evaluate


def _called(source: str, table: StatsTable, traced: Container[tuple[str, str]]) -> StatsTable:
    if not traced:
        return table
    counts = table.rows[:, Column.COUNT].tolist()
    kept = [p for p, name in enumerate(table.names) if counts[p] or (source, name) not in traced]
    return replace(table, names=tuple(table.names[p] for p in kept), rows=table.rows[kept])


def _evaluated(source: str, table: StatsTable, places: Mapping[str, Sequence[int]]) -> Iterator[tuple[Key, float]]:
    for metric, wanted in places.items():
        rows = table.rows if len(wanted) == len(table.names) else table.rows[list(wanted)]
        for place, there, value in zip(wanted, *evaluate_view(VIEWS[metric], rows), strict=True):
            if there:
                yield Key(source, table.names[place], metric), value


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
