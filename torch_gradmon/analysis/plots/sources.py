"""Where drawn values come from: a run directory, or the records in a monitor's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ...core.keys import Key
from ...core.model_order import ModelOrder
from ...core.records import SpikeEvent, StepRecord
from ...runs.reader import RunReader, StatsSeries


@dataclass(frozen=True)
class ValueSource:
    """The values of a run.

    Attributes:
        steps: all steps, ascending.
        is_whole: whether these are all recorded steps; a monitor keeps only some of many.
        events: the spikes.
        not_applied: steps that the optimizer did not apply.
        rates: the largest learning rate by step.
        logged: keys of values that the script logged.
        values: one value by step; empty if the key is unknown.
        names: the tensors with statistics of a source in any step.
        stacks: statistics of a source over the steps, ascending.
        in_model_order: sorts the names in lists of tensors of a source.
    """

    steps: Sequence[int]
    is_whole: bool
    events: Sequence[SpikeEvent]
    not_applied: Sequence[int]
    rates: Mapping[int, float]
    logged: Iterable[Key]
    values: Callable[[Key], Mapping[int, float]]
    names: Callable[[str], Iterable[str]]
    stacks: Callable[[str], Iterable[StatsSeries]]
    in_model_order: Callable[[str, Iterable[Sequence[str]]], list[str]]

    @classmethod
    def of_run(cls, run: RunReader) -> ValueSource:
        """The values in a run directory."""
        contexts = {step: run.context(step) for step in run.steps}
        return cls(
            list(contexts),
            True,
            run.events,
            [step for step, context in contexts.items() if not context["applied"]],
            {step: max(rates) for step, context in contexts.items() if (rates := context.get("lr"))},
            [key for key in run.scalars if not key.source],
            run.stored,
            run.tensors,
            run.stacks,
            run.in_model_order,
        )

    @classmethod
    def of_records(cls, records: Iterable[StepRecord], order: ModelOrder | None = None, is_whole: bool = True) -> ValueSource:
        """The values of records in memory; ``order`` is that of the model's tensors."""
        records = list(records)
        return cls(
            [record.step for record in records],
            is_whole,
            [event for record in records for event in record.events],
            [record.step for record in records if not record.applied],
            {record.step: max(rates) for record in records if (rates := record.context.get("lr"))},
            {key for record in records for key in record.values if not key.source},
            lambda key: {record.step: record.values[key] for record in records if key in record.values},
            lambda source: {name: None for record in records if source in record.tables for name in record.tables[source].names},
            lambda source: _stacks(records, source),
            (order or ModelOrder()).sorted,
        )


def _stacks(records: Sequence[StepRecord], source: str) -> Iterator[StatsSeries]:
    """One stack for each series of steps with the same tensors and columns."""
    found = [(record.step, record.tables[source]) for record in records if source in record.tables]
    for (names, columns), some in groupby(found, key=lambda pair: (pair[1].names, pair[1].columns)):
        pairs = list(some)
        yield StatsSeries(tuple(step for step, _ in pairs), names, torch.stack([table.rows for _, table in pairs]), columns)
