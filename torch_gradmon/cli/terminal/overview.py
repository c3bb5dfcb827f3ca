"""A run in a few lines: its steps, times and learning rates, and what each value of the whole model did."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...analysis.diagnosis.series import lower_median
from ...core.keys import SUMMARY, Key
from ...core.loss_keys import loss_among
from ...core.records import SpikeEvent, StepRecord
from ...step.summary import DOCUMENTATION

#: Running totals, which are told as numbers of steps.
_TOTALS = frozenset({"steps_not_applied", "steps_skipped"})
_ORDER = {name: place for place, name in enumerate(DOCUMENTATION)}


def is_of_the_whole(key: Key) -> bool:
    """Whether ``key`` is a value of the whole model, or was logged by hand."""
    return key.source in (SUMMARY, "")


@dataclass(frozen=True)
class Line:
    """What a value did over the steps.

    Attributes:
        name: of the value; without ``gradmon/``.
        is_logged: whether it was logged by hand.
        count: how many steps have it.
        first: the earliest value.
        median: the lower median of the finite ones; NaN without any, as for the next.
        last: the latest value.
        largest: the largest finite one.
        at: the first step that has it.
        nonfinite: how many are NaN or infinite.
        since: the first step with such a one.
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
    def of(cls, key: Key, steps: array[int], values: array[float]) -> Line:
        """The line of the ``values`` of a key, of which there is at least one."""
        finite = [value for value in values if math.isfinite(value)]
        largest = max(finite, default=math.nan)
        spoiled = len(values) - len(finite)
        since = next(step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)) if spoiled else None
        at = steps[values.index(largest)] if finite else None
        name, is_logged = (key.metric, False) if key.source == SUMMARY else (key.name, True)
        return cls(name, is_logged, len(values), values[0], lower_median(finite), values[-1], largest, at, spoiled, since)


@dataclass
class Overview:
    """What is told of the steps of a run as they come, ascending.

    Attributes:
        steps: how many.
        first: the first of them; None without any, as for the next.
        last: the last one.
        began: when the first one ended, in seconds since the epoch.
        ended: when the last one did.
        rates: the smallest, the largest and the latest learning rate; of several parameter groups the last ones' largest.
        not_applied: steps that the optimizer did not apply.
        skipped: of these, those skipped because of a spike.
        events: what detectors found.
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
        """Of these records."""
        found = cls()
        for record in records:
            found._see(record)
        return found

    def _see(self, record: StepRecord) -> None:
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
            if is_of_the_whole(key) and key.metric not in _TOTALS:
                steps, values = self._values.setdefault(key, (array("q"), array("d")))
                steps.append(record.step)
                values.append(value)

    @property
    def lines(self) -> list[Line]:
        """The loss, then the values of the whole model in the order of their documentation, then what else was logged."""
        loss = loss_among(self._values)
        keys = sorted(self._values, key=lambda key: (key != loss, key.source != SUMMARY, _ORDER.get(key.metric, len(_ORDER))))
        return [Line.of(key, *self._values[key]) for key in keys]


def rates_in(context: Mapping[str, Any]) -> list[float]:
    """The learning rates of the parameter groups, as a record has them."""
    rates = context.get("lr", [])
    return [float(rate) for rate in (rates if isinstance(rates, list) else [rates]) if isinstance(rate, (int, float))]
