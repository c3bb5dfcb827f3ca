"""Where the values of a spike report come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...core.keys import SUMMARY, Key, format_key, parse_key
from ...core.records import SpikeEvent, StepRecord
from ...spikes.attribution import GradientNormHistory, ParameterAttribution
from ...spikes.signals import value_of
from ...step.plan import value_in


class StepSource(Protocol):
    """The steps of a run: a :class:`torch_gradmon.analysis.run.Run`, or a monitor's :class:`RecentSteps`."""

    @property
    def steps(self) -> list[int]:
        """The known steps, ascending."""

    @property
    def events(self) -> list[SpikeEvent]:
        """The spikes, in order."""

    def context(self, step: int) -> Mapping[str, Any]:
        """The facts of a step."""

    def metrics(self, step: int) -> Mapping[str, float]:
        """The values of a step by key."""

    def value(self, signal: str, step: int) -> float | None:
        """The value of a key, or of a whole-model value by its name, in a step; None if it is unknown."""

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step, ranked by suspicion; empty if its gradients are unknown."""


class RecentSteps:
    """The last steps in a monitor's memory.

    Args:
        records: the last records by step.
        gradients: statistics of the gradients of some of them.
        suspects: the ranked parameters at the time of each spike.
    """

    def __init__(
        self,
        records: Mapping[int, StepRecord],
        gradients: GradientNormHistory,
        suspects: Mapping[int, Sequence[ParameterAttribution]],
    ) -> None:
        self._records, self._gradients, self._suspects = dict(records), gradients, suspects

    @property
    def steps(self) -> list[int]:
        """The steps in memory, ascending."""
        return sorted(self._records)

    @property
    def events(self) -> list[SpikeEvent]:
        """Their spikes, in order."""
        return [event for step in self.steps for event in self._records[step].events]

    def context(self, step: int) -> Mapping[str, Any]:
        """The facts of a step."""
        return {"applied": self._records[step].applied, **self._records[step].context}

    def metrics(self, step: int) -> Mapping[str, float]:
        """The values of a step by key."""
        return {format_key(key): value for key, value in self._records[step].values.items()}

    def value(self, signal: str, step: int) -> float | None:
        """The value of a key, or of a whole-model value by its name, in a step; None if it is unknown."""
        key = parse_key(signal)
        found = value_of(signal, self._records[step], {})
        if found is None and not key.source:
            found = self._records[step].values.get(Key(SUMMARY, "", signal))
        return value_in(self._gradients.table(step), key) if found is None and key.source == self._gradients.source else found

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step, ranked by suspicion; empty if its gradients are no longer in memory."""
        return self._suspects.get(step) or self._gradients.suspects(step)
