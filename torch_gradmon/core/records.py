"""The results of a step. Sinks, detectors, the run directory and the report know these, and nothing of the monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from torch import Tensor

from .keys import GRADIENT, GRADIENT_BEFORE_CLIP, Key
from .moments import ALWAYS, VIEWS, Column
from .step_values import StepValues

#: Relative difference below which norms of tensors have one factor in common; narrow gradients have as many roundings more.
_SAME, _ROUNDINGS = 1e-3, 8
#: Severity of a finding, most severe first.
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class SpikeEvent:
    """A spike in a signal.

    Attributes:
        step: of the spike.
        signal: its name, such as ``grad_norm``.
        value: of the signal.
        score: distance from normal, in the rule's own unit.
        threshold: the score above which the rule reports a spike.
        reason: the same as text.
        usual: the baseline, in units of the signal; None if the rule has none.
        where: the layers that moved, as text; empty if unknown.
        action: what was done about it, as text; empty if nothing.
    """

    step: int
    signal: str
    value: float
    score: float
    threshold: float
    reason: str
    usual: float | None = None
    where: str = ""
    action: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: " + "; ".join(filter(None, (self.reason, self.where, self.action)))


@cache
def views_of(columns: frozenset[Column]) -> frozenset[str]:
    """The built-in metrics for which these measured columns suffice."""
    return frozenset(metric for metric, view in VIEWS.items() if view.columns <= columns | ALWAYS)


@dataclass(frozen=True)
class StatsTable:
    """Statistics of one source in one step: ``rows`` is float64 ``[len(names), 8]`` on the host.

    Only ``columns`` were measured; the others hold the identity of their operation, which is no value: check with :meth:`has`. ``same_as``
    names a source of the same step with the same rows. ``is_part``: only a part of the model was measured, so no sum over these rows is
    one over the model.
    """

    names: tuple[str, ...]
    rows: Tensor
    columns: frozenset[Column]
    same_as: str = ""
    is_part: bool = False

    def has(self, metric: str) -> bool:
        """Whether the measured columns suffice for a built-in metric."""
        return metric in views_of(self.columns)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The number of each tensor's row, by name."""
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def sums(self) -> list[float]:
        """Each column's sum over all tensors; that of an extreme has no meaning."""
        return self.rows.sum(0).tolist()

    @cached_property
    def largest(self) -> list[float]:
        """The largest value in each column, NaN where there is a NaN; there must be a tensor."""
        return self.rows.amax(0).tolist()


@dataclass(frozen=True)
class StepRecord:
    """One monitored step.

    Attributes:
        step: its number.
        time: seconds since the epoch, at its end.
        applied: False if the optimizer did not apply it (an infinite gradient under a GradScaler, a skip, or an error in its closure).
        values: all values by key, plain floats.
        tables: statistics by source.
        context: learning rates, loss scale, tags: in every record, on no dashboard.
        events: the spikes.
        hidden: keys of values for the run directory only.
        rng: states of torch's random generators at the start of the step, by device; uint8 tensors.
        extras: small float64 tensors of plugins, see ``StepBuffer.extras``.
    """

    step: int
    time: float
    applied: bool
    values: Mapping[Key, float]
    tables: Mapping[str, StatsTable] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[SpikeEvent, ...] = ()
    hidden: frozenset[Key] = frozenset()
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def values_beside_views(self, among: Mapping[Key, float] | None = None) -> StepValues:
        """Those of the values, or of those ``among`` them, that do not follow from the tables, which only :class:`StepValues` show; else
        all, as of a record without tables.
        """
        values = StepValues.of(self.values if among is None else among)
        return values.rest if self.tables else values

    @property
    def skipped(self) -> str:
        """Why the step was skipped; empty if it was not."""
        return str(self.context.get("skipped", ""))

    @property
    def interrupted(self) -> str:
        """By which error the loop left the step before it was applied; empty if it did not."""
        return str(self.context.get("interrupted", ""))


# --- the stages of a gradient ------------------------------------------------------------------------------------------------
#
# GRADIENT_BEFORE_CLIP is what the backward passes of a step have brought, GRADIENT what the optimizer then used. In between the loop clips,
# divides by a number of tokens, or writes gradients of its own. What looks for outliers reads the first, since a clip makes them like all
# others; what compares a gradient with the update that it caused reads the second. NaN and Inf count at either.


def nonfinite_names(table: StatsTable | None) -> list[str]:
    """The tensors with NaN or Inf, or whose sum of squares overflows."""
    if table is None:
        return []
    bad = table.rows[:, Column.NONFINITE] > 0
    if Column.SQUARE_SUM in table.columns:
        bad |= ~table.rows[:, Column.SQUARE_SUM].isfinite()
    return [name for name, is_bad in zip(table.names, bad.tolist(), strict=True) if is_bad]


def spoiled_between(tables: Mapping[str, StatsTable]) -> tuple[str, ...]:
    """The tensors that hold NaN or Inf as the optimizer used them, if no gradient did when the backward passes ended."""
    before, after = tables.get(GRADIENT_BEFORE_CLIP), tables.get(GRADIENT)
    if before is None or after is None or not after.sums[Column.NONFINITE] or before.sums[Column.NONFINITE]:
        return ()
    return tuple(name for name, bad in zip(after.names, after.rows[:, Column.NONFINITE].tolist(), strict=True) if bad)


def brings_others(before: StatsTable | None, after: StatsTable) -> bool:
    """Whether the optimizer used gradients of tensors for which no backward pass brought any."""
    return before is None or not set(after.names) <= set(before.names)


def are_others(before: StatsTable, after: StatsTable, rounding: float, were_others: bool = False) -> bool:
    """Whether gradients that took the place of those of the backward passes are neither these scaled nor these clipped.

    A scaling makes all tensors longer or shorter alike, and no clip makes a tensor longer.

    Args:
        before: as the backward passes brought them.
        after: as they were used.
        rounding: relative rounding of the gradients in between.
        were_others: they were others in earlier steps, so that they are again, though all of them may be shorter by chance.
    """
    if brings_others(before, after) or Column.SQUARE_SUM not in before.columns & after.columns:
        return False
    squares = before.rows[[before.row_of[name] for name in after.names], Column.SQUARE_SUM], after.rows[:, Column.SQUARE_SUM]
    known = squares[0].isfinite() & squares[1].isfinite() & ((squares[0] > 0) | (squares[1] > 0))
    factors = (squares[1][known] / squares[0][known]).sqrt()
    slack = 1 + max(_SAME, _ROUNDINGS * rounding)
    if not len(factors) or not bool(factors.max() > slack * factors.min()):
        return False
    return were_others or bool(factors.max() > slack)
