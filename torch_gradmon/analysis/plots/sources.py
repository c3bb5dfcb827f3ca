"""Where drawn values come from: a run directory, or the records in a monitor's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch

from ...core.keys import Key, format_key
from ...core.model_order import ModelOrder
from ...core.records import Event, StepRecord
from ...runs.reader import RunReader
from ...runs.stats_series import Stack


class ValueSource(Protocol):
    """The values of a run."""

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""

    @property
    def is_whole(self) -> bool:
        """Whether these are all recorded steps."""

    @property
    def events(self) -> list[Event]:
        """The spikes."""

    def stacks(self, source: str) -> Iterable[Stack]:
        """The statistics of ``source`` over the steps, ascending."""

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, lists of tensors of ``source``."""

    def values(self, key: Key) -> Mapping[int, float]:
        """One value by step; empty if it is unknown."""

    def logged(self) -> Iterable[Key]:
        """The keys of values that the script logged."""

    def rates(self) -> Mapping[int, float]:
        """The largest learning rate by step."""

    def not_applied(self) -> Sequence[int]:
        """Steps that the optimizer did not apply."""


class RecordValues:
    """The records in a monitor's memory.

    Args:
        records: of some steps.
        order: of the model's tensors.
        is_whole: whether these are all records of the run.
    """

    def __init__(self, records: Iterable[StepRecord], order: ModelOrder | None = None, is_whole: bool = True) -> None:
        self._records, self._order, self.is_whole = list(records), order or ModelOrder(), is_whole

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return [record.step for record in self._records]

    @property
    def events(self) -> list[Event]:
        """The spikes."""
        return [event for record in self._records for event in record.events]

    def stacks(self, source: str) -> Iterator[Stack]:
        """The statistics of ``source``: one stack for each run of steps with the same tensors and columns."""
        found = [(record.step, record.tables[source]) for record in self._records if source in record.tables]
        for (names, columns), some in groupby(found, key=lambda pair: (pair[1].names, pair[1].columns)):
            pairs = list(some)
            yield Stack(tuple(step for step, _ in pairs), names, torch.stack([table.rows for _, table in pairs]), columns)

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``."""
        return self._order.sorted(source, measured)

    def values(self, key: Key) -> dict[int, float]:
        """One value by step."""
        return {record.step: record.values[key] for record in self._records if key in record.values}

    def logged(self) -> set[Key]:
        """The keys of values that the script logged."""
        return {key for record in self._records for key in record.values if not key.source}

    def rates(self) -> dict[int, float]:
        """The largest learning rate by step."""
        return {record.step: max(rates) for record in self._records if (rates := record.context.get("lr"))}

    def not_applied(self) -> list[int]:
        """Steps that the optimizer did not apply."""
        return [record.step for record in self._records if not record.applied]


class RunValues:
    """A run directory."""

    is_whole = True

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._contexts = {step: run.context(step) for step in run.steps}
        self._keys = dict.fromkeys(run.scalars)
        self.stacks, self.in_model_order = run.stacks, run.in_model_order

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return list(self._contexts)

    @property
    def events(self) -> list[Event]:
        """The spikes."""
        return self._run.events

    def values(self, key: Key) -> dict[int, float]:
        """One value by step."""
        return self._run.series(format_key(key)) if key in self._keys else {}

    def logged(self) -> list[Key]:
        """The keys of values that the script logged."""
        return [key for key in self._keys if not key.source]

    def rates(self) -> dict[int, float]:
        """The largest learning rate by step."""
        return {step: max(rates) for step, context in self._contexts.items() if (rates := context.get("lr"))}

    def not_applied(self) -> list[int]:
        """Steps that the optimizer did not apply."""
        return [step for step, context in self._contexts.items() if not context["applied"]]
