"""What a finished step leaves behind. Sinks, detectors, the store and the report know these, and nothing of the monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from .keys import Key
from .moments import ALWAYS, VIEWS, Column

#: How grave a finding is, from the gravest.
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class SpikeEvent:
    """A spike in a signal.

    Attributes:
        step: when.
        signal: what was judged, such as ``grad_norm``.
        value: the value of the signal.
        score: how far from normal, in the rule's own unit.
        threshold: the score above which the rule calls it a spike.
        reason: the same in words.
        usual: what was normal, in units of the signal; None where the rule does not say.
        where: which layers moved, in words; empty where that is not known.
        action: what was done about it, in words; empty where nothing was.
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


@dataclass(frozen=True)
class StatsTable:
    """Statistics of one source in one step: ``rows`` is float64 ``[len(names), 8]`` on the host.

    Only ``columns`` were measured; the others hold the identity of their operation, which is no value: ask :meth:`has` first.
    ``same_as`` names a source of the same step whose rows these are, all of them. ``is_part``: only a part of the model was to be
    measured, or could be, so no sum over these rows is one over the model.
    """

    names: tuple[str, ...]
    rows: Tensor
    columns: frozenset[Column]
    same_as: str = ""
    is_part: bool = False

    def has(self, metric: str) -> bool:
        """Whether what was measured suffices for a built-in metric."""
        return metric in VIEWS and VIEWS[metric].columns <= self.columns | ALWAYS


@dataclass(frozen=True)
class StepRecord:
    """One monitored step.

    Attributes:
        step: its number.
        time: seconds since the epoch, when it ended.
        applied: False when the optimizer did not apply it (an infinite gradient under a GradScaler, or a skip).
        values: all values by key, plain floats.
        tables: statistics by source.
        context: learning rates, loss scale, tags: in every record, on no dashboard.
        events: what the detectors found.
        derived: keys whose values follow from the tables.
        hidden: keys of values that are for the run directory only.
        rng: states of torch's random generators at the step's beginning, by device; bytes as uint8 tensors.
    """

    step: int
    time: float
    applied: bool
    values: Mapping[Key, float]
    tables: Mapping[str, StatsTable] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[SpikeEvent, ...] = ()
    derived: frozenset[Key] = frozenset()
    hidden: frozenset[Key] = frozenset()
    rng: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def skipped(self) -> str:
        """Why it was skipped; empty where it was not."""
        return str(self.context.get("skipped", ""))
