"""The registry of metrics.

It stores and rejects metrics, nothing more: everything is checked before anything is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import keys as n
from ..core.errors import display, nearest
from ..core.keys import compile_pattern
from ..core.metric import REDUCERS, Metric
from .built_ins import BuiltIn


@dataclass(frozen=True)
class Overlay:
    """Temporary hidden metrics; ``replaces_hidden``: instead of the script's hidden ones."""

    metrics: tuple[Metric, ...]
    replaces_hidden: bool


class Registry:
    """All requested metrics.

    Args:
        built_ins: built-in metrics of each source, by name.
    """

    def __init__(self, built_ins: Mapping[str, Mapping[str, BuiltIn]]) -> None:
        self.built_ins = built_ins
        self.metrics: tuple[Metric, ...] = ()
        self._asked: tuple[Metric, ...] = ()  # metrics of the script, including those of its preset
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
                f"{_meant_as_pattern(function)}"
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
        """Add all of ``new`` or nothing. ``tensors``: the known names by source, to find duplicates.

        Raises:
            ValueError: the same metric twice on the same tensor.
        """
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
        """Measure ``metrics``, all hidden, in addition to those of the script; None ends it.

        Metrics that exist by source and name stay, and so do those that the script adds meanwhile. With ``replaces_hidden`` they replace
        all hidden metrics of the script.
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
        """The script's hidden metrics."""
        return tuple(metric for metric in self._asked if not metric.shown)

    @property
    def own(self) -> tuple[Metric, ...]:
        """The metrics that every rank has: those of the script, and overlays that replace some of them."""
        return self._asked + tuple(m for overlay in self._overlays.values() if overlay.replaces_hidden for m in overlay.metrics)

    def hidden(self) -> set[tuple[str, str]]:
        """Source and name of the metrics that are hidden or were in an overlay: their last values may still be on their way."""
        hidden = self._once_overlaid.union((metric.source, metric.name) for metric in self.metrics if not metric.shown)
        return hidden.difference((metric.source, metric.name) for metric in self.metrics if metric.shown)

    def check(self, tensors: Mapping[str, Sequence[str]]) -> None:
        """Check all metrics once the names are known.

        Raises:
            ValueError: two metrics of one name match the same tensor.
        """
        _refuse_overlaps(self.metrics, self.metrics, tensors)

    def of(self, source: str) -> list[Metric]:
        """The metrics of ``source``, in the order of addition."""
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


def _meant_as_pattern(function: object) -> str:
    """A clause for an error about a function that is a pattern."""
    is_pattern = isinstance(function, (str, re.Pattern))
    return f"; to choose tensors by name, pass metric_regex={function!r}" if is_pattern else ""


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
