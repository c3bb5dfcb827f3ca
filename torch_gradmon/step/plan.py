"""The plan compiled from a registry: which metric applies to which tensor of one source."""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core import keys as n
from ..core.errors import display, nearest
from ..core.keys import Key, compile_pattern
from ..core.moments import NEEDS, VIEWS, Column, StatView, have
from ..core.records import REDUCERS, Block, ForModule, Metric, StatsTable

if TYPE_CHECKING:
    from .model_index import ModelIndex

#: Built-in metrics by name.
HISTOGRAM_NAME, KURTOSIS = "log2_histogram", "kurtosis"
SPECTRAL_NORM, STABLE_RANK, PARTICIPATION_RATIO = "spectral_norm", "stable_rank", "participation_ratio"
#: Those of matrices, which take the kernels of convolutions as ``[first, all others]``, also those of three dimensions.
OF_MATRICES = (SPECTRAL_NORM, STABLE_RANK)


@dataclass(frozen=True)
class BuiltIn:
    """A built-in metric of a source: a view of its statistics (``function`` is None) or a function."""

    unit: str
    documentation: str
    function: Callable[..., Any] | ForModule | str | None = None  # a str: its name in ``module``
    aggregation: str | None = None  # likewise
    columns: frozenset[Column] = frozenset()
    module: str = ""  # of the statistics, imported where the metric is asked for: most programs need none

    def loaded(self) -> tuple[Callable[..., Any] | ForModule | None, Callable[..., Any] | None]:
        home = import_module(f"..statistics.{self.module}", __package__) if self.module else None
        function = getattr(home, self.function) if isinstance(self.function, str) else self.function
        return function, None if self.aggregation is None else getattr(home, self.aggregation)


def _of_tensors(subject: str) -> dict[str, BuiltIn]:
    found = {name: BuiltIn(v.unit, f"{v.documentation} of the {subject}", columns=v.columns) for name, v in VIEWS.items()}
    words = f"number of elements of the {subject} with that floor(log2 |x|), and of zeros; a class without any is absent"
    found[HISTOGRAM_NAME] = BuiltIn("count", words, "log2_counts", "as_metrics", module="histogram")
    words = f"Pearson's kurtosis of the {subject}, 3 for a normal distribution; absent if all elements are equal"
    found[KURTOSIS] = BuiltIn("1", words, "central_sums", "kurtosis", module="histogram")
    return found


def _of_parameters(subject: str) -> dict[str, BuiltIn]:
    size = f"largest singular value of the {subject} as a matrix; of a stack of matrices the largest one"
    rank = (
        f"square of the norm of the {subject} over that of its largest singular value, 1 for rank 1; of a stack of matrices the smallest "
        "one; absent if all elements are zero"
    )
    return {
        **_of_tensors(subject),
        SPECTRAL_NORM: BuiltIn("1", size, "spectral_norm", module="histogram"),
        STABLE_RANK: BuiltIn("1", rank, "stable_rank", module="histogram"),
    }


def _of_features(subject: str) -> dict[str, BuiltIn]:
    of = f"of log(sum(exp(x))) over the rows of the {subject}"
    return {
        **_of_tensors(subject),
        "logsumexp": BuiltIn("nats", f"mean {of}", "logsumexp", module="attention"),
        "logsumexp_square": BuiltIn("nats^2", f"mean square {of}", "logsumexp_square", module="attention"),
    }


RATIO = BuiltIn(
    "1",
    "norm of the update over the norm of the parameter before it; absent for a zero parameter",
    columns=frozenset({Column.SQUARE_SUM}),
)
_ATTENTION = (
    ("nats", "entropy of the attention weights, mean over queries"),
    ("share", "the same over the logarithm of how many keys the query sees; queries that see one key do not count"),
    ("1", "largest logit of any query"),
    ("share", "weight on the first key that the query sees, mean over queries"),
)
#: Built-in metrics by source.
VIEW_BUILT_INS: dict[str, dict[str, BuiltIn]] = {
    n.GRADIENT: _of_parameters("gradient that the optimizer uses"),
    n.GRADIENT_BEFORE_CLIP: _of_parameters("gradient before clipping"),
    n.GRADIENT_LOCAL: _of_tensors("gradients of the micro-batches, merged"),
    n.PARAMETER: _of_parameters("parameter"),
    n.PARAMETER_DIFFERENCE: _of_tensors("difference to the reference parameter"),
    n.UPDATE: {**_of_parameters("change that the optimizer made"), "ratio": RATIO},
    n.ACTIVATION: _of_features("module's output"),
    n.ACTIVATION_GRADIENT: _of_tensors("gradient of the module's output"),
    n.ACTIVATION_DIFFERENCE: _of_tensors("difference to the output of the reference module"),
    n.INPUT: _of_features("module's input"),
    n.INPUT_GRADIENT: _of_tensors("gradient of the module's input"),
    **{
        source: {metric: BuiltIn(unit, words)}
        for (metric, source), (unit, words) in zip(n.ATTENTION_SOURCES.items(), _ATTENTION, strict=True)
    },
}


# --- The registry of metrics ---


class Registry:
    def __init__(self, built_ins: Callable[[str], Mapping[str, BuiltIn]]) -> None:
        self._built_ins = built_ins  # of a source, by name
        self.metrics: tuple[Metric, ...] = ()
        self._asked: tuple[Metric, ...] = ()  # metrics of the script, including those of its preset
        self._overlays: dict[str, tuple[tuple[Metric, ...], bool]] = {}  # hidden metrics, and whether they replace hidden ones
        self._once_overlaid: set[tuple[str, str]] = set()
        #: Source and name of the metrics that are hidden or were in an overlay: their last values may still be on their way.
        self.hidden: set[tuple[str, str]] = set()
        #: Of the last record with this number of blocks: :attr:`hidden`, the keys of its blocks, and those of them that are hidden.
        self.hidden_keys: dict[int, tuple[Set[tuple[str, str]], list[Sequence[Key]], frozenset[Key]]] = {}

    def make(
        self,
        source: str,
        name: str,
        function: Callable[..., Any] | None = None,
        regex: str | re.Pattern[str] = ".*",
        aggregation: str | Callable[..., Any] | None = None,
        *,
        every: int = 1,
        shown: bool = True,
        split_calls: bool = False,
        per_head: bool = False,
        shardwise: bool = False,
    ) -> Metric:
        _check_name(name, source)
        pattern = compile_pattern(regex)
        if function is not None and not callable(function):
            raise TypeError(
                f"metric_fn of {name!r} must be callable or None for the built-in of that name, got {display(function)}"
                + f"; to choose tensors by name, pass metric_regex={function!r}" * isinstance(function, (str, re.Pattern))
            )
        if shardwise and (function is None or callable(aggregation)):
            raise ValueError(
                f"shardwise=True is for a metric_fn whose values on parts of a tensor merge by 'mean', 'sum', 'min' or 'max'; {name!r} has "
                f"metric_fn={display(function)} and metric_aggregation_fn={display(aggregation)}"
            )
        asked, aggregation = aggregation, checked_aggregation(aggregation, "metric_aggregation_fn")
        known = self._built_ins(source)
        if function is not None:
            documentation = (getattr(function, "__doc__", None) or "your function").strip().splitlines()[0]
            meant = BuiltIn("1", documentation, function)
        elif name in known:
            meant = known[name]
        else:
            raise ValueError(
                f"there is no built-in {source} metric {name!r}{nearest(name, known)}; for your own pass a function as metric_fn"
            )
        if meant.aggregation is not None and asked is not None:
            raise ValueError(f"the built-in {name!r} merges its values itself; leave metric_aggregation_fn={asked!r} out")
        measures, merges = meant.loaded()
        return Metric(
            name,
            source,
            pattern,
            measures,
            merges or aggregation,
            meant.columns,
            meant.unit,
            meant.documentation,
            every,
            shown,
            split_calls,
            per_head,
            function is None,
            shardwise,
        )

    def add(self, new: Sequence[Metric], tensors: Mapping[str, Sequence[str]] | None = None) -> None:
        """Add all of ``new`` or nothing. ``tensors``: the known names by source, to find the same metric twice on one of them."""
        asked_for = {(metric.source, metric.name) for metric in new}
        # hidden metrics of a preset are replaced by requested ones
        kept = tuple(metric for metric in self._asked if metric.shown or (metric.source, metric.name) not in asked_for)
        candidates = kept + tuple(new)
        _refuse_overlaps(candidates, new, tensors)
        self._asked = candidates
        self._compose()

    def replace_hidden(self, new: Sequence[Metric]) -> None:
        """Replace all hidden metrics by ``new``, except those that exist by name."""
        shown = tuple(metric for metric in self._asked if metric.shown)
        self._asked = shown + _unknown(new, shown)
        self._compose()

    def set_overlay(self, name: str, metrics: Sequence[Metric] | None, replaces_hidden: bool = False) -> None:
        """Measure ``metrics``, all hidden, beside those of the script of other names, or in the place of its hidden ones; None ends it."""
        self._overlays.pop(name, None)
        if metrics is not None:
            first = {(metric.source, metric.name): metric for metric in reversed(metrics)}
            self._overlays[name] = tuple(first.values())[::-1], replaces_hidden
        self._compose()

    def _compose(self) -> None:
        found = self._asked
        # those that replace come first
        for metrics, replaces_hidden in sorted(self._overlays.values(), key=lambda each: not each[1]):
            if replaces_hidden:
                found = tuple(metric for metric in found if metric.shown)
            new = _unknown(metrics, found)
            self._once_overlaid |= {(metric.source, metric.name) for metric in (metrics if replaces_hidden else new)}
            found += new
        self.metrics = found
        shown = {(metric.source, metric.name) for metric in found if metric.shown}
        self.hidden = self._once_overlaid.union((metric.source, metric.name) for metric in found if not metric.shown) - shown

    @property
    def unseen(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in self._asked if not metric.shown)

    @property
    def own(self) -> tuple[Metric, ...]:
        """The metrics that every rank has: those of the script, and overlays that replace some of them."""
        return self._asked + tuple(m for metrics, replaces_hidden in self._overlays.values() if replaces_hidden for m in metrics)

    def check(self, tensors: Mapping[str, Sequence[str]]) -> None:
        """ValueError where two metrics of one name match the same tensor; the names are known now."""
        _refuse_overlaps(self.metrics, self.metrics, tensors)


def checked_aggregation(aggregation: str | Callable[..., Any] | None, argument: str) -> str | Callable[..., Any]:
    if aggregation is None:
        return "mean"
    if isinstance(aggregation, str) and aggregation not in REDUCERS:
        raise ValueError(f"{argument}={aggregation!r} is not a known reducer{nearest(aggregation, REDUCERS)}; or pass a callable")
    if not isinstance(aggregation, str) and not callable(aggregation):
        raise TypeError(f"{argument} must be callable or one of {', '.join(REDUCERS)}, got {display(aggregation)}")
    return aggregation


def _unknown(new: Iterable[Metric], known: Iterable[Metric]) -> tuple[Metric, ...]:
    names = {(metric.source, metric.name) for metric in known}
    return tuple(metric for metric in new if (metric.source, metric.name) not in names)


def _refuse_overlaps(metrics: Sequence[Metric], new: Iterable[Metric], tensors: Mapping[str, Sequence[str]] | None) -> None:
    for metric in new:
        for other in metrics[: metrics.index(metric)]:
            if (other.source, other.name, other.split_calls) != (metric.source, metric.name, metric.split_calls):
                continue
            if tensors is None:
                both = f"the pattern {metric.pattern.pattern!r}" if metric.pattern.pattern == other.pattern.pattern else None
            else:
                names = tensors.get(metric.source, ())
                both = next((repr(name) for name in names if metric.matches(name) and other.matches(name)), None)
            if both is not None:
                raise ValueError(
                    f"the {metric.source} metric {metric.name!r} is already registered for {both} "
                    f"(patterns {other.pattern.pattern!r} and {metric.pattern.pattern!r}); "
                    "choose another name or patterns that do not overlap"
                )


def _check_name(name: object, source: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"metric_name must be a str, got {display(name)}")
    if not name or "/" in name or name != name.strip():
        raise ValueError(f"metric_name={name!r} must be a non-empty string without slashes and outer spaces, such as 'norm'")
    for other in (*n.TENSOR_SOURCES, *n.ATTENTION_SOURCES.values()):
        if other.startswith(f"{source}_") and f"{source}_{name}".startswith(f"{other}_"):
            raise ValueError(f"metric_name={name!r} of {source!r} reads like a metric of {other!r}; choose another name")


# --- Values of built-in metrics, which are views of measured rows of statistics ---


class Views(NamedTuple):
    """The values of one metric in a table of statistics."""

    metric: str
    keys: tuple[Key, ...]  # a table with the same tensors has the same tuple
    places: Sequence[int] | None  # the rows of their tensors; None for all rows

    @classmethod
    def of(cls, metric: str, keys: Iterable[Key], places: Sequence[int], rows: int) -> Views:
        """``places`` in a table with this number of ``rows``."""
        return cls(metric, tuple(keys), None if places == [*range(rows)] else places)


def view_blocks(found: Sequence[Views], table: StatsTable, source: str, base: StatsTable | None = None) -> list[Block]:
    """The defined values for the rows of the ``table`` of ``source``. Ratios, whose denominators are in ``base``, are views of no table."""
    if not found:
        return []
    columns = table.rows.unbind(1)
    finite = have("finite elements", columns)
    are_finite = bool(finite.all())
    # where all rows have finite elements, as in nearly every step, they have all that a view needs
    there = dict.fromkeys(NEEDS, finite) if are_finite else {"finite elements": finite}
    blocks = []
    for metric, keys, places in found:
        rows = table.rows if places is None else table.rows[places]
        if metric == "ratio":
            values, exists = _ratios(rows, base, [key.name for key in keys])
        else:
            of, known = (columns, there) if places is None else (rows.unbind(1), {})
            view = VIEWS[metric]
            if view.needs not in known:
                known[view.needs] = have(view.needs, of)
            values, exists = view.of(of), known[view.needs]
        # copied float64: a list of Python's numbers takes four times the memory, which a history of many steps shows
        values = values.contiguous()
        numbers = array("d", ctypes.string_at(values.data_ptr(), 8 * len(values)))
        if not ((are_finite and exists is finite) or exists.all()):
            chosen = exists.tolist()
            keys, numbers = tuple(compress(keys, chosen)), array("d", compress(numbers, chosen))
        blocks.append(Block(keys, numbers, "" if metric == "ratio" else source))
    return blocks


def evaluate_view(view: StatView, rows: Tensor) -> tuple[list[bool], list[float]]:
    return view.defined(rows).tolist(), view.compute(rows).tolist()


def _ratios(rows: Tensor, base: StatsTable | None, found: list[str]) -> tuple[Tensor, Tensor]:
    if base is None:
        return rows.new_zeros(len(found)), torch.zeros(len(found), dtype=torch.bool, device=rows.device)
    denominators = base.rows[[base.row_of[name] for name in found]][:, Column.SQUARE_SUM].sqrt()
    return rows[:, Column.SQUARE_SUM].sqrt() / denominators, denominators > 0


def value_in(table: StatsTable | None, key: Key) -> float | None:
    if table is None or key.name not in table.row_of or not table.has(key.metric):
        return None
    return values_in(key.metric, table, [table.row_of[key.name]])[0]


def values_in(metric: str, table: StatsTable, rows: list[int]) -> list[float | None]:
    there, values = evaluate_view(VIEWS[metric], table.rows[rows])
    return [value if defined else None for defined, value in zip(there, values, strict=True)]


# --- The plan compiled from a registry: which metric applies to which tensor of one source ---


_GRADIENTS = frozenset({n.GRADIENT, n.GRADIENT_BEFORE_CLIP})


@dataclass(frozen=True)
class SourcePlan:
    source: str
    names: tuple[str, ...] = ()  # canonical names of the tensors, in model order
    columns: frozenset[Column] = frozenset()
    measured: tuple[int, ...] = ()  # positions in ``names`` that need a row of statistics
    # each built-in with the keys of its values, one for each tensor that it applies to
    views: tuple[tuple[Metric, tuple[Key, ...]], ...] = ()
    functions: Mapping[int, tuple[Metric, ...]] = field(default_factory=dict)  # for each position, the metrics with a function
    spread: frozenset[int] = frozenset()  # positions of sharded tensors, whose rows are merged over ranks
    is_whole: bool = False  # the squares of all tensors of whole-model values are measured
    kernels: frozenset[int] = frozenset()  # positions of kernels of convolutions with three dimensions
    _last: dict[tuple[str, ...], list[Views]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def exchanged(self) -> list[str]:
        """Names of the tensors whose rows are merged over ranks; the same on all ranks."""
        return [self.names[position] for position in self.measured if position in self.spread]

    @cached_property
    def applied(self) -> list[tuple[Metric, dict[int, Key]]]:
        found: dict[Metric, dict[int, Key]] = {}
        for position, metrics in self.functions.items():
            for metric in metrics:
                found.setdefault(metric, {})[position] = Key(self.source, self.names[position], metric.name)
        return list(found.items())

    @cached_property
    def empty(self) -> bool:
        return not self.measured and not self.functions

    @cached_property
    def positions(self) -> tuple[int, ...]:
        return tuple(sorted({*self.measured, *self.functions}))

    def names_at(self, positions: Sequence[int]) -> Sequence[str]:
        """The names at these ascending positions; all of them as one tuple, the same in each step."""
        return self.names if len(positions) == len(self.names) else [self.names[position] for position in positions]

    def evaluate(self, table: StatsTable, base: StatsTable | None = None) -> list[Block]:
        found = self._last.get(table.names)
        if found is None:  # most tables of a source have the same names
            found, row_of = [], table.row_of
            # those that the rows suffice for, then ratios
            for metric, wanted in sorted(self.views, key=lambda view: view[0].name == "ratio"):
                if keys := [key for key in wanted if key.name in row_of]:
                    found.append(Views.of(metric.name, keys, [row_of[key.name] for key in keys], len(row_of)))
            self._last.clear()
            self._last[table.names] = found
        return view_blocks(found, table, self.source, base)


def compile_plan(source: str, metrics: Iterable[Metric], inventory: ModelIndex, always: frozenset[Column]) -> SourcePlan:
    """The plan of one source: ``metrics`` on all names that match, and the columns ``always`` on all that whole-model values need."""
    names, columns = inventory.names, set(always)
    # the optimizer moves a frozen parameter that still has a gradient, and its gradient is clipped
    of_model = inventory.parameters.keys() if source in _GRADIENTS else inventory.trainable.names

    def places(chosen: Set[str]) -> frozenset[int]:
        return frozenset(position for position, name in enumerate(names) if name in chosen)

    always_on = places(of_model)
    measured = set(always_on if always else ())
    views: list[tuple[Metric, tuple[Key, ...]]] = []
    functions: dict[int, list[Metric]] = {}
    for metric in metrics:
        positions = tuple(p for p, name in enumerate(names) if name not in inventory.excluded and metric.matches(name))
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
        frozenset() if source == n.GRADIENT_LOCAL else places(inventory.spread),
        Column.SQUARE_SUM in columns and measured >= always_on,
        places(inventory.kernels),
    )
