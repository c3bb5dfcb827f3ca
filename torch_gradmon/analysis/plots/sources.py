"""Where drawn values come from: a run directory, or the records in a monitor's memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ...core import keys as n
from ...core.keys import Key
from ...core.moments import Column
from ...core.records import ModelOrder, SpikeEvent, StepRecord, loss_among
from ...runs.reader import RunReader, StatsSeries
from ..diagnosis.series import Series, assembled
from .elements import LAYER_VIEWS, Gap, Panel, PlotView, RecordedSteps


@dataclass(frozen=True)
class ValueSource:
    """The values of a run.

    Attributes:
        is_whole: whether ``steps`` are all recorded ones; a monitor keeps only some of many.
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
    found = [(record.step, record.tables[source]) for record in records if source in record.tables]
    for (names, columns), some in groupby(found, key=lambda pair: (pair[1].names, pair[1].columns)):
        pairs = list(some)
        yield StatsSeries(tuple(step for step, _ in pairs), names, torch.stack([table.rows for _, table in pairs]), columns)


# --- The drawn values of one run, computed on first use ---

#: Steps, tensors, and by metric values ``[steps, tensors]``.
_Part = tuple[tuple[int, ...], tuple[str, ...], dict[str, torch.Tensor]]


class PanelSet:
    """The values of a run, each computed on first use."""

    def __init__(self, source: ValueSource, title: str = "") -> None:
        self._source, self.title = source, title
        self.steps, self.events, self.not_applied = source.steps, source.events, source.not_applied
        self._recorded = RecordedSteps(tuple(source.steps), source.is_whole)
        self._panels: dict[str, Panel | None] = {}
        self._known: dict[str, list[_Part]] = {}

    def gaps(self, steps: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value that is known in ``steps``, ascending, is missing; empty for a value without steps."""
        return self._recorded.gaps(steps) if steps else ()

    def line(self, name: str) -> Series:
        """A whole-model value such as ``grad_norm``, or a logged value; empty if it is unknown."""
        return _series(self._source.values(Key(n.SUMMARY, "", name)) or self._source.values(Key("", name, "")))

    def loss(self) -> Series:
        """The logged loss; empty without one."""
        key = loss_among(self._source.logged)
        return _series({} if key is None else self._source.values(key))

    def rates(self) -> Series:
        return _series(self._source.rates)

    def panel(self, name: str) -> Panel | None:
        """The panel of one of :data:`LAYER_VIEWS`; None if it was not measured."""
        if name not in self._panels:
            self._panels[name] = self._panel(LAYER_VIEWS[name])
        return self._panels[name]

    def panels(self) -> Iterator[tuple[str, Panel]]:
        """All measured panels by name, without those that repeat an earlier one because they fell back to its source."""
        seen = set()
        for name, view in LAYER_VIEWS.items():
            if (panel := self.panel(name)) is not None and (panel.source, view.metric, view.base) not in seen:
                seen.add((panel.source, view.metric, view.base))
                yield name, panel

    def _panel(self, view: PlotView) -> Panel | None:
        for source in view.sources:
            is_fallback = source != view.sources[0] and bool(view.fallback_title)
            panel = self._of(replace(view, title=view.fallback_title) if is_fallback else view, source)
            if panel is not None:
                return panel if not view.base else _ratio(panel, self._of(view, view.base))
        return None

    def _of(self, view: PlotView, source: str) -> Panel | None:
        parts = [(steps, names, values[view.metric]) for steps, names, values in self._parts(source) if view.metric in values]
        if not parts:
            return None
        # where the norm of all gradients is known, each gradient that there was is measured
        is_of_all = source == n.GRADIENT_BEFORE_CLIP and len(self.line("grad_norm")) > 0
        due = tuple(self._source.names(n.PARAMETER)) if is_of_all else ()
        counts = Counter[tuple[str, ...]]()
        for some, measured, _ in parts:
            counts[measured] += len(some)
        steps = tuple(step for some, _, _ in parts for step in some)
        all_names = self._source.in_model_order(source, {**dict.fromkeys(counts), due: None})
        names, values = assembled(((measured, found) for _, measured, found in parts), counts, all_names)
        if len(names) < len(all_names):
            view = replace(view, title=f"{view.title}, of the {len(names):,} of {len(all_names):,} layers that have it most")
        run = self.steps
        return Panel(steps, names, values, view, source, self.gaps(steps), (run[0], run[-1]), frozenset(due))

    def _parts(self, source: str) -> list[_Part]:
        """All that is drawn of a source, read once; all of its rows would be several times as large."""
        if source not in self._known:
            metrics = {view.metric for view in LAYER_VIEWS.values() if source in (*view.sources, view.base)}
            self._known[source] = [
                (stack.steps, stack.names, {metric: _values(stack, metric) for metric in metrics if stack.has(metric)})
                for stack in self._source.stacks(source)
                if stack.names
            ]
        return self._known[source]


def _values(stack: StatsSeries, metric: str) -> torch.Tensor:
    return torch.where(stack.rows[..., Column.NONFINITE] > 0, math.inf, stack.values(metric))


def _ratio(panel: Panel, base: Panel | None) -> Panel | None:
    """``panel`` divided by ``base``, on the steps and layers of both; None without any."""
    if base is None:
        return None
    found = panel.over(base)
    values = torch.where(base.of(found.steps, found.names).values.isinf(), math.inf, found.values)
    return replace(found, values=values) if found else None


def _series(values: Mapping[int, float]) -> Series:
    return Series(tuple(values), tuple(values.values()))
