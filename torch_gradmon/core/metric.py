"""Metric: what is computed, on which tensors, how often, and how its values merge."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .moments import Column

#: Named ways to merge the values of micro-batches; ``mean`` is weighted by elements.
REDUCERS = ("mean", "sum", "min", "max")
#: Why what is asked for has no value in a step that was planned before.
ASKED_LATE = "it was asked for after the step had begun"


class ForModule(Protocol):
    """Stands for a metric's function that depends on the module whose output it gets."""

    def bind(self, module: Any) -> Callable[..., Any] | str:
        """The function for ``module`` (None where only a name is known), or the reason why there is none."""


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric on one source.

    Attributes:
        name: last part of the key; without a slash.
        source: first part of the key, see :mod:`torch_gradmon.core.keys`.
        pattern: searched in the canonical name of a tensor.
        function: of the tensor, or what gives it for a module; ``None`` for a view of the one-pass statistics.
        aggregation: one of :data:`REDUCERS`, or a callable that gets all values of a step as one flat tensor and returns a
            scalar or a dict of scalars.
        columns: the statistics that a built-in needs.
        unit: of its values.
        documentation: one line.
        every: computed on steps that are divisible by it.
        split_calls: of a module: the calls of one forward have keys of their own, ``name@0`` and so on.
        built_in: its function is ours, and says nothing of a tensor without elements.
        per_head: of attention: the values of single heads are shown too.
        shardwise: of a tensor that is spread over ranks, its function is called for each rank's part, and the values are merged.
        shown: belongs into ``get_step_metrics()``; otherwise it goes to the run directory only.
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
