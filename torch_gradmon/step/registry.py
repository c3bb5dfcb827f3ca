"""The registry of metrics, and the plan that it compiles to: which metric on which tensor.

The registry stores and refuses, nothing more: everything is checked before anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import keys as n
from ..core.errors import display, nearest
from ..core.keys import compile_pattern
from ..core.metric import REDUCERS, ForModule, Metric
from ..core.moments import VIEWS, Column
from ..statistics import histogram, kurtosis


@dataclass(frozen=True)
class BuiltIn:
    """What a source offers by name: a view of its statistics (``function`` is None) or a function."""

    columns: frozenset[Column]
    unit: str
    documentation: str
    function: Callable[..., Any] | ForModule | None = None
    aggregation: Callable[..., Any] | None = None


def _of_tensors(subject: str) -> dict[str, BuiltIn]:
    found = {name: BuiltIn(v.columns, v.unit, f"{v.documentation} of the {subject}") for name, v in VIEWS.items()}
    words = f"number of elements of the {subject} with that floor(log2 |x|), and of zeros; a class without any is absent"
    found[histogram.NAME] = BuiltIn(frozenset(), "count", words, histogram.log2_counts, histogram.as_metrics)
    words = f"Pearson's kurtosis of the {subject}, 3 for a normal distribution; absent where all elements are equal"
    found[kurtosis.NAME] = BuiltIn(frozenset(), "1", words, kurtosis.central_sums, kurtosis.kurtosis)
    return found


#: Built-in metrics by source. The optimizer's come from :mod:`torch_gradmon.capture.parameters`.
RATIO = BuiltIn(
    frozenset({Column.SQUARE_SUM}),
    "1",
    "norm of the update over the norm of the parameter before it; absent for a zero parameter",
)
_ATTENTION = (
    ("nats", "entropy of the attention weights, mean over queries"),
    ("share", "the same over the logarithm of how many keys the query sees; queries that see one key do not count"),
    ("1", "largest logit of any query"),
    ("share", "weight on the first key, mean over queries"),
)
VIEW_BUILT_INS: dict[str, dict[str, BuiltIn]] = {
    n.GRADIENT: _of_tensors("gradient that the optimizer uses"),
    n.GRADIENT_BEFORE_CLIP: _of_tensors("gradient before clipping"),
    n.GRADIENT_LOCAL: _of_tensors("gradients of the micro-batches, merged"),
    n.PARAMETER: _of_tensors("parameter"),
    n.PARAMETER_DIFFERENCE: _of_tensors("difference to the reference parameter"),
    n.UPDATE: {**_of_tensors("change that the optimizer made"), "ratio": RATIO},
    n.ACTIVATION: _of_tensors("module's output"),
    n.ACTIVATION_GRADIENT: _of_tensors("gradient of the module's output"),
    n.ACTIVATION_DIFFERENCE: _of_tensors("difference to the output of the reference module"),
    n.INPUT: _of_tensors("module's input"),
    n.INPUT_GRADIENT: _of_tensors("gradient of the module's input"),
    **{
        source: {metric: BuiltIn(frozenset(), unit, words)}
        for (metric, source), (unit, words) in zip(n.ATTENTION_SOURCES.items(), _ATTENTION, strict=True)
    },
}


@dataclass(frozen=True)
class Overlay:
    """Metrics for a while, none of which is shown; ``replaces_hidden``: in the place of the script's hidden ones."""

    metrics: tuple[Metric, ...]
    replaces_hidden: bool


class Registry:
    """All metrics that were asked for.

    Args:
        built_ins: what each source offers by name.
    """

    def __init__(self, built_ins: Mapping[str, Mapping[str, BuiltIn]]) -> None:
        self.built_ins = built_ins
        self.metrics: tuple[Metric, ...] = ()
        self._asked: tuple[Metric, ...] = ()  # what the script asked for, its preset's among it
        self._overlays: dict[str, Overlay] = {}
        self._once_overlaid: set[tuple[str, str]] = set()

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
        """A checked metric, not yet added.

        Raises:
            TypeError: a name, pattern, function or aggregation of the wrong type.
            ValueError: an empty name or one with a slash, an unknown built-in, an invalid pattern, an unknown reducer.
        """
        _check_name(name, source)
        pattern = compile_pattern(regex)
        if function is not None and not callable(function):
            raise TypeError(
                f"metric_fn of {name!r} must be callable or None for the built-in of that name, got {display(function)}"
            )
        if shardwise and (function is None or callable(aggregation)):
            raise ValueError(
                f"shardwise=True is for a metric_fn whose values on parts of a tensor merge by 'mean', 'sum', 'min' or 'max'; {name!r} has "
                f"metric_fn={display(function)} and metric_aggregation_fn={display(aggregation)}"
            )
        asked, aggregation = aggregation, checked_aggregation(aggregation, "metric_aggregation_fn")
        if function is not None:
            documentation = (getattr(function, "__doc__", None) or "your function").strip().splitlines()[0]
            return Metric(
                name,
                source,
                pattern,
                function,
                aggregation,
                documentation=documentation,
                every=every,
                shown=shown,
                split_calls=split_calls,
                shardwise=shardwise,
            )
        built_in = self.built_ins.get(source, {}).get(name)
        if built_in is None:
            known = self.built_ins.get(source, {})
            raise ValueError(
                f"there is no built-in {source} metric {name!r}{nearest(name, known)}; for your own pass a function as metric_fn"
            )
        if built_in.aggregation is not None and asked is not None:
            raise ValueError(f"the built-in {name!r} merges its values itself; leave metric_aggregation_fn={asked!r} out")
        return Metric(
            name,
            source,
            pattern,
            built_in.function,
            built_in.aggregation or aggregation,
            built_in.columns,
            built_in.unit,
            built_in.documentation,
            every,
            shown,
            split_calls,
            per_head,
            built_in=True,
        )

    def add(self, new: Sequence[Metric], tensors: Mapping[str, Sequence[str]] | None = None) -> None:
        """Add all of ``new`` or nothing. ``tensors`` are the known names by source, for the check of duplicates.

        Raises:
            ValueError: the same metric twice on the same tensor.
        """
        asked_for = {(metric.source, metric.name) for metric in new}
        # what a preset added out of sight makes way for what somebody asks for
        kept = tuple(metric for metric in self._asked if metric.shown or (metric.source, metric.name) not in asked_for)
        candidates = kept + tuple(new)
        _refuse_overlaps(candidates, new, tensors)
        self._asked = candidates
        self._compose()

    def replace_hidden(self, new: Sequence[Metric]) -> None:
        """Let ``new`` take the place of all metrics that are not shown; what is there by name already stays as it is."""
        shown = tuple(metric for metric in self._asked if metric.shown)
        self._asked = shown + _unknown(new, shown)
        self._compose()

    def set_overlay(self, name: str, metrics: Sequence[Metric] | None, replaces_hidden: bool = False) -> None:
        """Measure ``metrics``, none of which is shown, besides those of the script, until this is called with None.

        A metric that is already there by source and name stays as it is; what the script adds meanwhile stays too. With
        ``replaces_hidden`` they take the place of all metrics of the script that are not shown.
        """
        self._overlays.pop(name, None)
        if metrics is not None:
            first = {(metric.source, metric.name): metric for metric in reversed(metrics)}
            self._overlays[name] = Overlay(tuple(first.values())[::-1], replaces_hidden)
        self._compose()

    def _compose(self) -> None:
        found = self._asked
        # those that replace come first
        for overlay in sorted(self._overlays.values(), key=lambda each: not each.replaces_hidden):
            if overlay.replaces_hidden:
                found = tuple(metric for metric in found if metric.shown)
            new = _unknown(overlay.metrics, found)
            self._once_overlaid |= {
                (metric.source, metric.name) for metric in (overlay.metrics if overlay.replaces_hidden else new)
            }
            found += new
        self.metrics = found

    @property
    def unseen(self) -> tuple[Metric, ...]:
        """What the script asked for and is not shown."""
        return tuple(metric for metric in self._asked if not metric.shown)

    @property
    def own(self) -> tuple[Metric, ...]:
        """The metrics that every rank has: all that the script asked for, and what replaces some of it on all ranks."""
        return self._asked + tuple(m for overlay in self._overlays.values() if overlay.replaces_hidden for m in overlay.metrics)

    def hidden(self) -> set[tuple[str, str]]:
        """Source and name of the metrics that are not shown, or were in an overlay: their last values may still be on their way."""
        hidden = self._once_overlaid.union((metric.source, metric.name) for metric in self.metrics if not metric.shown)
        return hidden.difference((metric.source, metric.name) for metric in self.metrics if metric.shown)

    def check(self, tensors: Mapping[str, Sequence[str]]) -> None:
        """Check all metrics once the names are known.

        Raises:
            ValueError: two metrics of one name match the same tensor.
        """
        _refuse_overlaps(self.metrics, self.metrics, tensors)

    def of(self, source: str) -> list[Metric]:
        """The metrics of ``source``, in the order in which they were added."""
        return [metric for metric in self.metrics if metric.source == source]


def checked_aggregation(aggregation: str | Callable[..., Any] | None, argument: str) -> str | Callable[..., Any]:
    """``aggregation``, or the mean for None.

    Raises:
        TypeError: neither a name nor a callable.
        ValueError: a name that is not in :data:`REDUCERS`.
    """
    if aggregation is None:
        return "mean"
    if isinstance(aggregation, str) and aggregation not in REDUCERS:
        raise ValueError(f"{argument}={aggregation!r} is not a known reducer{nearest(aggregation, REDUCERS)}; or pass a callable")
    if not isinstance(aggregation, str) and not callable(aggregation):
        raise TypeError(f"{argument} must be callable or one of {', '.join(REDUCERS)}, got {display(aggregation)}")
    return aggregation


def _unknown(new: Iterable[Metric], known: Iterable[Metric]) -> tuple[Metric, ...]:
    """Those of ``new`` that are not ``known`` by source and name."""
    names = {(metric.source, metric.name) for metric in known}
    return tuple(metric for metric in new if (metric.source, metric.name) not in names)


def _refuse_overlaps(metrics: Sequence[Metric], new: Iterable[Metric], tensors: Mapping[str, Sequence[str]] | None) -> None:
    for metric in new:
        for other in metrics[: metrics.index(metric)]:
            if (other.source, other.name, other.split_calls) != (metric.source, metric.name, metric.split_calls):
                continue
            both = _first_common(metric, other, None if tensors is None else tensors.get(metric.source, ()))
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


def _first_common(a: Metric, b: Metric, tensors: Iterable[str] | None) -> str | None:
    if tensors is None:
        return f"the pattern {a.pattern.pattern!r}" if a.pattern.pattern == b.pattern.pattern else None
    return next((repr(name) for name in tensors if a.matches(name) and b.matches(name)), None)
