"""Metric: what to compute, on which tensors, how often, and how values merge."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .moments import Column

#: Named ways to merge the values of micro-batches; ``mean`` is weighted by elements.
REDUCERS = ("mean", "sum", "min", "max")
#: The reason for a missing value of a metric that was added during the step.
ASKED_LATE = "it was asked for after the step had begun"


class ForModule(Protocol):
    """A metric's function that depends on the module whose output it gets."""

    def bind(self, module: Any) -> Callable[..., Any] | str:
        """The function for ``module`` (None if only its name is known), or the reason why there is none."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric on one source.

    Attributes:
        name: last part of the key; without a slash.
        source: first part of the key, see :mod:`torch_gradmon.core.keys`.
        pattern: searched in the canonical name of a tensor.
        function: of the tensor, or a :class:`ForModule`; None for a view of the one-pass statistics.
        aggregation: one of :data:`REDUCERS`, or a callable that gets all values of a step as one flat tensor and returns a
            scalar or a dict of scalars.
        columns: the statistics that a built-in needs.
        unit: of its values.
        documentation: one line.
        every: computed on steps divisible by it.
        shown: in ``get_step_metrics()``; otherwise only in the run directory.
        split_calls: for modules: the calls of one forward have keys of their own, ``name@0`` and so on.
        per_head: for attention: the values of single heads are shown too.
        built_in: its function is one of this package, and is not called for a tensor without elements.
        shardwise: its function may be called for each rank's part of a sharded tensor, and the values are merged.
    """

    name: str
    source: str
    pattern: re.Pattern[str]
    function: Callable[..., Any] | ForModule | None = None
    aggregation: str | Callable[..., Any] = "mean"
    columns: frozenset[Column] = frozenset()
    unit: str = "1"
    documentation: str = ""
    every: int = 1
    shown: bool = True
    split_calls: bool = False
    per_head: bool = False
    built_in: bool = False
    shardwise: bool = False

    def matches(self, name: str) -> bool:
        """Whether this metric applies to the tensor or module of that canonical name."""
        return self.pattern.search(name) is not None

    def due(self, step: int) -> bool:
        """Whether it is computed on ``step``."""
        return step % self.every == 0

    def why_nothing(self, what: str = "here") -> str:
        """The reason for a missing value where its function returned None. ``what``: for what it did."""
        return f"it is not defined {what}: {self.documentation}" if self.built_in else "its function returned nothing"
