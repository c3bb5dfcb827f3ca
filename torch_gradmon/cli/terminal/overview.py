"""A run on a few lines: its steps, times and learning rates, and a summary of each value of the whole model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...analysis.diagnosis.series import lower_median
from ...core.keys import SUMMARY, Key
from ...core.records import SpikeEvent, StepRecord, loss_among
from ...step.summary import KEY_DOCUMENTATION

#: Counters, which are shown as numbers of steps.
_TOTALS = frozenset({"steps_not_applied", "steps_skipped"})
_ORDER = {name: place for place, name in enumerate(KEY_DOCUMENTATION)}


def is_of_whole_model(key: Key) -> bool:
    """Whether ``key`` is a value of the whole model or a logged value."""
    return key.source in (SUMMARY, "")


@dataclass(frozen=True)
class ValueSummary:
    """A value over the steps.

    Attributes:
        name: of the value, without ``gradmon/``.
        is_logged: whether the script logged it.
        count: number of steps that have it.
        first: earliest value.
        median: lower median of the finite values; NaN without any, as for ``largest``.
        last: latest value.
        largest: largest finite value.
        at: the first step with it.
        nonfinite: number of values that are NaN or infinite.
        since: the first step with such a value.
    """

    name: str
    is_logged: bool
    count: int
    first: float
    median: float
    last: float
    largest: float
    at: int | None
    nonfinite: int
    since: int | None

    @classmethod
    def of(cls, key: Key, steps: array[int], values: array[float]) -> ValueSummary:
        """The summary of the ``values`` of a key, at least one."""
        finite = [value for value in values if math.isfinite(value)]
        largest = max(finite, default=math.nan)
        spoiled = len(values) - len(finite)
        since = next(step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)) if spoiled else None
        at = steps[values.index(largest)] if finite else None
        name, is_logged = (key.metric, False) if key.source == SUMMARY else (key.name, True)
        return cls(name, is_logged, len(values), values[0], lower_median(finite), values[-1], largest, at, spoiled, since)


@dataclass
class Overview:
    """A summary of records, ascending by step.

    Attributes:
        steps: number of steps.
        first, last: the first and the last of them; None without any.
        began, ended: when these two steps ended, in seconds since the epoch.
        rates: the smallest, the largest and the latest learning rate; of several parameter groups, the latest largest one.
        not_applied: number of steps that the optimizer did not apply.
        skipped: number of these that were skipped because of a spike.
        events: the spikes.
    """

    steps: int = 0
    first: int | None = None
    last: int | None = None
    began: float = math.nan
    ended: float = math.nan
    rates: tuple[float, float, float] | None = None
    not_applied: int = 0
    skipped: int = 0
    events: list[SpikeEvent] = field(default_factory=list)
    _values: dict[Key, tuple[array[int], array[float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Overview:
        """The overview of ``records``."""
        found = cls()
        for record in records:
            found._add(record)
        return found

    def _add(self, record: StepRecord) -> None:
        if not self.steps:
            self.first, self.began = record.step, record.time
        self.steps += 1
        self.last, self.ended = record.step, record.time
        self.not_applied += not record.applied
        self.skipped += bool(record.skipped)
        self.events += record.events
        rates = rates_in(record.context)
        if rates:
            low, high = (min(rates), max(rates)) if self.rates is None else self.rates[:2]
            self.rates = min(low, *rates), max(high, *rates), max(rates)
        for key, value in record.values.items():
            if is_of_whole_model(key) and key.metric not in _TOTALS:
                steps, values = self._values.setdefault(key, (array("q"), array("d")))
                steps.append(record.step)
                values.append(value)

    @property
    def lines(self) -> list[ValueSummary]:
        """The loss, then the values of the whole model in the order of their documentation, then other logged values."""
        loss = loss_among(self._values)
        keys = sorted(self._values, key=lambda key: (key != loss, key.source != SUMMARY, _ORDER.get(key.metric, len(_ORDER))))
        return [ValueSummary.of(key, *self._values[key]) for key in keys]


def rates_in(context: Mapping[str, Any]) -> list[float]:
    """The learning rates of the parameter groups in the context of a record."""
    rates = context.get("lr", [])
    return [float(rate) for rate in (rates if isinstance(rates, list) else [rates]) if isinstance(rate, (int, float))]
