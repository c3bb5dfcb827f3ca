"""What pictures are made of: the values of a run over its steps, from a run directory or from what a monitor remembers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...core import keys as n
from ...core.keys import Key, format_key
from ...core.loss_keys import loss_among
from ...core.model_order import ModelOrder
from ...core.moments import Column
from ...core.records import SpikeEvent, StepRecord
from ...runs.stats_series import StatsSeries
from ..diagnosis.series import Series
from .gaps import Gap, Recorded

if TYPE_CHECKING:
    from ...analysis.run import Run


@dataclass(frozen=True)
class View:
    """A value of each layer that can be looked at.

    Attributes:
        title: in words.
        sources: where it comes from, the first of them that was measured.
        metric: the built-in metric.
        base: the source that it is divided by; empty for none.
        is_log: whether it is shown on a logarithmic scale.
        adds_up: whether that of a block is the root of the sum of the squares of its layers; else it is the largest of them.
        otherwise: in words, where it does not come from the first source.
        is_apart: whether it is how far two runs are apart, of which the largest is what counts.
    """

    title: str
    sources: tuple[str, ...]
    metric: str
    base: str = ""
    is_log: bool = True
    adds_up: bool = False
    otherwise: str = ""
    is_apart: bool = False


#: By name, in the order in which they are offered.
LAYER_VIEWS: Mapping[str, View] = {
    "gradient": View(
        "gradient norm before clipping",
        (n.GRADIENT_BEFORE_CLIP, n.GRADIENT),
        "norm",
        adds_up=True,
        otherwise="gradient norm at the step",
    ),
    "clipped": View("gradient norm after clipping", (n.GRADIENT,), "norm", adds_up=True),
    "update": View("update norm / parameter norm", (n.UPDATE,), "norm", base=n.PARAMETER),
    "sparsity": View("share of gradients near zero", (n.GRADIENT_BEFORE_CLIP, n.GRADIENT), "sparsity", is_log=False),
    "activation": View("output root mean square", (n.ACTIVATION,), "rms"),
    "parameter": View("parameter norm", (n.PARAMETER,), "norm", adds_up=True),
}


class Source(Protocol):
    """Where values come from."""

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""

    @property
    def is_whole(self) -> bool:
        """Whether these are all steps that were recorded."""

    @property
    def events(self) -> list[SpikeEvent]:
        """What detectors found."""

    def stacks(self, source: str) -> Iterable[StatsSeries]:
        """Statistics over the steps, ascending."""

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``."""

    def values(self, key: Key) -> Mapping[int, float]:
        """One value by step; empty without any."""

    def logged(self) -> Iterable[Key]:
        """The keys of the values that were logged by hand."""

    def rates(self) -> Mapping[int, float]:
        """The largest learning rate by step."""

    def refused(self) -> Sequence[int]:
        """Steps that were not applied."""


class OfRecords:
    """What a monitor remembers.

    Args:
        records: of some steps.
        order: that of the model.
        is_whole: whether these are all records that there were.
    """

    def __init__(self, records: Iterable[StepRecord], order: ModelOrder | None = None, is_whole: bool = True) -> None:
        self._records, self._order, self.is_whole = list(records), order or ModelOrder(), is_whole

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return [record.step for record in self._records]

    @property
    def events(self) -> list[SpikeEvent]:
        """What detectors found."""
        return [event for record in self._records for event in record.events]

    def stacks(self, source: str) -> Iterator[StatsSeries]:
        """Statistics over the steps, ascending."""
        found = [(record.step, record.tables[source]) for record in self._records if source in record.tables]
        for (names, columns), some in groupby(found, key=lambda pair: (pair[1].names, pair[1].columns)):
            pairs = list(some)
            yield StatsSeries(tuple(step for step, _ in pairs), names, torch.stack([table.rows for _, table in pairs]), columns)

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``."""
        return self._order.sorted(source, measured)

    def values(self, key: Key) -> dict[int, float]:
        """One value by step; empty without any."""
        return {record.step: record.values[key] for record in self._records if key in record.values}

    def logged(self) -> set[Key]:
        """The keys of the values that were logged by hand."""
        return {key for record in self._records for key in record.values if not key.source}

    def rates(self) -> dict[int, float]:
        """The largest learning rate by step."""
        return {record.step: max(rates) for record in self._records if (rates := record.context.get("lr"))}

    def refused(self) -> list[int]:
        """Steps that were not applied."""
        return [record.step for record in self._records if not record.applied]


class OfRun:
    """A run directory."""

    is_whole = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._contexts = {step: run.context(step) for step in run.steps}
        self._keys = dict.fromkeys(run.scalars)

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return list(self._contexts)

    @property
    def events(self) -> list[SpikeEvent]:
        """What detectors found."""
        return self._run.events

    def stacks(self, source: str) -> Iterator[StatsSeries]:
        """Statistics over the steps, ascending."""
        return self._run.stacks(source)

    def in_model_order(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, which are of ``source``."""
        return self._run.in_model_order(source, measured)

    def values(self, key: Key) -> dict[int, float]:
        """One value by step; empty without any."""
        return self._run.series(format_key(key)) if key in self._keys else {}

    def logged(self) -> list[Key]:
        """The keys of the values that were logged by hand."""
        return [key for key in self._keys if not key.source]

    def rates(self) -> dict[int, float]:
        """The largest learning rate by step."""
        return {step: max(rates) for step, context in self._contexts.items() if (rates := context.get("lr"))}

    def refused(self) -> list[int]:
        """Steps that were not applied."""
        return [step for step, context in self._contexts.items() if not context["applied"]]


@dataclass(frozen=True)
class Panel:
    """A view of all layers over the steps.

    Attributes:
        view: what it shows.
        steps: ascending.
        names: of the layers, in the order of the model.
        values: float64 ``[steps, layers]``: NaN where a layer has no value, infinity where it has elements that are NaN or infinite.
        source: where it comes from.
        gaps: where it was not measured.
        span: the first and the last step of the run, which may have more; None where these are its own.
    """

    view: View
    steps: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor
    source: str = ""
    gaps: tuple[Gap, ...] = ()
    span: tuple[int, int] | None = None

    @property
    def axis(self) -> tuple[int, int]:
        """The first and the last step that a picture of it shows."""
        return self.span or (self.steps[0], self.steps[-1])


class Reel:
    """The values of a run, each worked out when it is first asked for.

    Args:
        source: where they come from.
        title: what the run is called.
    """

    def __init__(self, source: Source, title: str = "") -> None:
        self._source, self.title = source, title
        self._panels: dict[str, Panel | None] = {}

    @property
    def steps(self) -> list[int]:
        """The steps that were monitored."""
        return self._source.steps

    @property
    def events(self) -> list[SpikeEvent]:
        """What detectors found, in order."""
        return self._source.events

    def gaps(self, steps: Sequence[int]) -> tuple[Gap, ...]:
        """Where a value is missing that is known of ``steps``, ascending; none where it is known of no step."""
        return self._recorded.gaps(steps) if steps else ()

    @cached_property
    def _recorded(self) -> Recorded:
        return Recorded(tuple(self.steps), self._source.is_whole)

    @property
    def refused(self) -> Sequence[int]:
        """Steps that were not applied."""
        return self._source.refused()

    def line(self, name: str) -> Series:
        """A whole-model value such as ``grad_norm``, or one that was logged; empty without any."""
        return _series(self._source.values(Key(n.SUMMARY, "", name)) or self._source.values(Key("", name, "")))

    def loss(self) -> Series:
        """The loss, as far as it was logged."""
        key = loss_among(self._source.logged())
        return _series({} if key is None else self._source.values(key))

    def rates(self) -> Series:
        """The largest learning rate of each step."""
        return _series(self._source.rates())

    def panel(self, name: str) -> Panel | None:
        """One of :data:`LAYER_VIEWS`; None where that was not measured.

        Raises:
            KeyError: there is no such view.
        """
        if name not in self._panels:
            self._panels[name] = self._panel(LAYER_VIEWS[name])
        return self._panels[name]

    def panels(self) -> Iterator[tuple[str, Panel]]:
        """All that were measured, by name, but for one that shows what an earlier one shows for want of something better."""
        shown = set()
        for name, view in LAYER_VIEWS.items():
            if (panel := self.panel(name)) is not None and (panel.source, view.metric, view.base) not in shown:
                shown.add((panel.source, view.metric, view.base))
                yield name, panel

    def _panel(self, view: View) -> Panel | None:
        for source in view.sources:
            titled = view if source == view.sources[0] or not view.otherwise else replace(view, title=view.otherwise)
            panel = self._of(titled, source)
            if panel is not None:
                return panel if not view.base else _over(panel, self._of(view, view.base))
        return None

    def _of(self, view: View, source: str) -> Panel | None:
        stacks = [stack for stack in self._source.stacks(source) if stack.has(view.metric) and stack.names]
        if not stacks:
            return None
        names = tuple(self._source.in_model_order(source, {stack.names: None for stack in stacks}))
        place = {name: column for column, name in enumerate(names)}
        steps = tuple(step for stack in stacks for step in stack.steps)
        values = torch.full((len(steps), len(names)), math.nan, dtype=torch.float64, device="cpu")
        first = 0
        for stack in stacks:
            last = first + len(stack.steps)
            found = torch.where(stack.rows[..., Column.NONFINITE] > 0, math.inf, stack.values(view.metric))
            values[first:last, [place[name] for name in stack.names]] = found
            first = last
        run = self.steps
        return Panel(view, steps, names, values, source, self.gaps(steps), (run[0], run[-1]))


def _over(panel: Panel, base: Panel | None) -> Panel | None:
    if base is None:
        return None
    row = {step: number for number, step in enumerate(base.steps)}
    column = {name: number for number, name in enumerate(base.names)}
    rows = [number for number, step in enumerate(panel.steps) if step in row]
    columns = [number for number, name in enumerate(panel.names) if name in column]
    steps, names = tuple(panel.steps[r] for r in rows), tuple(panel.names[c] for c in columns)
    if not steps or not names:
        return None
    under = base.values[[row[step] for step in steps]][:, [column[name] for name in names]]
    values = panel.values[rows][:, columns] / under
    values = torch.where(under.isinf(), math.inf, torch.where(under > 0, values, math.nan))
    return replace(panel, steps=steps, names=names, values=values)


def _series(values: Mapping[int, float]) -> Series:
    return Series(tuple(values), tuple(values.values()))
