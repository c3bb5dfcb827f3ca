"""What rules look at: the records of a run, thinned where there are many, as series and as matrices."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ...analysis.run import Run
from ...core import keys as n
from ...core.keys import Key, parse_key
from ...core.loop_findings import LoopFinding
from ...core.loss_keys import loss_among
from ...core.moments import ALWAYS, VIEWS, Column
from ...core.records import SpikeEvent, StatsTable, StepRecord
from ...core.subsampling import subsample_steps
from ...spikes.episodes import Episode, by_size, episodes
from ...spikes.suspect_history import GradientNormHistory
from ...spikes.suspects import ParameterAttribution
from .learning import Learning, learning
from .series import Matrix, Series

#: Of a long run so many steps are looked at: the first ones, the last ones, those around spikes, and an even choice between.
MOST = 400
#: What a model returns that computes its loss itself.
_OWN_LOSS = (f"{n.ROOT}.loss", n.ROOT, f"{n.ROOT}[0]")


class History:
    """The records of a run, ascending by step.

    Args:
        records: with the statistics that they had.
        events: what detectors found.
        facts: what the audit of the loop saw.
        matrices: parameters of two or more dimensions, with the fan in, or 0 where that is unknown.
        kinds: the types of the modules, by name.
        place: of the run, as it stands in a command line; empty where it is in no directory.
        steps: all that were recorded, ascending; by default those of ``records``.
        suspects: gives the parameters of a step in the order of suspicion; by default told from ``records``.
    """

    def __init__(
        self,
        records: Iterable[StepRecord],
        events: Iterable[SpikeEvent] = (),
        facts: Iterable[LoopFinding] = (),
        matrices: Mapping[str, int] | None = None,
        kinds: Mapping[str, str] | None = None,
        place: str = "",
        steps: Sequence[int] | None = None,
        suspects: Callable[[int], Sequence[ParameterAttribution]] | None = None,
    ) -> None:
        self.records = sorted(records, key=lambda record: record.step)
        self.events = list(events) or [event for record in self.records for event in record.events]
        self.facts = list(facts)
        self.matrices = dict(matrices or {})
        self.kinds = dict(kinds or {})
        self.place = place
        self._recorded, self._suspects = steps, suspects
        self._matrices: dict[tuple[str, str], Matrix | None] = {}

    @classmethod
    def of_run(cls, run: Run, most: int = MOST) -> History:
        """Read a run directory, ``most`` steps of it."""
        events = run.events
        loss = loss_among(map(parse_key, run.keys()))
        liked = [] if loss is None or len(run.steps) <= most else sorted(run.series(loss.name))
        chosen = subsample_steps(run.steps, by_size(events), most, liked)
        facts = [LoopFinding.of_dict(fact) for fact in run.meta.get("audit", [])]
        records = (_record(run, step) for step in chosen)
        place = shlex.quote(str(run.path))
        return cls(records, events, facts, run.meta.get("matrices"), run.meta.get("kinds"), place, run.steps, run.suspects)

    def sound(self) -> History:
        """The part before parameters are NaN or infinite for good; itself where that never comes."""
        last = len(self.records)
        while last and _is_spoiled(self.records[last - 1].tables.get(n.PARAMETER)):
            last -= 1
        if last == len(self.records):
            return self
        kept = self.records[:last], self.events, self.facts, self.matrices, self.kinds, self.place
        return History(*kept, self._recorded, self._suspects)

    @property
    def steps(self) -> list[int]:
        """The steps that are looked at."""
        return [record.step for record in self.records]

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last of them."""
        return (self.records[0].step, self.records[-1].step) if self.records else None

    @property
    def spikes(self) -> list[Episode]:
        """The spikes up to the last step that is looked at, ascending, without what is NaN or infinite."""
        steps = self.steps if self._recorded is None else self._recorded
        last = self.steps[-1] if self.records else -math.inf
        return episodes([event for event in self.events if event.step <= last and math.isfinite(event.value)], steps)

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step in the order of suspicion; none where nothing is known of its gradients."""
        if self._suspects is not None:
            return self._suspects(step)
        gradients = GradientNormHistory()
        for record in self.records:
            if record.step <= step:
                gradients.add(record.step, record.tables)
        return gradients.suspects(step)

    def series(self, name: str) -> Series:
        """A whole-model value by its name, such as ``grad_norm``, or what was logged under that key; empty without any."""
        return self._of_keys(Key(n.SUMMARY, "", name), Key("", name, ""))

    def _of_keys(self, *keys: Key) -> Series:
        pairs = [(record.step, record.values[key]) for record in self.records for key in keys if key in record.values]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    @cached_property
    def loss(self) -> Series:
        """What was logged as ``loss``, ``train/loss``, ``loss/train`` or the like, the shortest such key, and ``kl_loss`` only where there
        is no other; else the one number that the model returns, where outputs were measured; empty without any.
        """
        chosen = loss_among({key for record in self.records for key in record.values})
        return self._own_loss() if chosen is None else self._of_keys(chosen)

    def _own_loss(self) -> Series:
        outputs = self.matrix(n.ACTIVATION, "mean")
        sizes = self.sizes(n.ACTIVATION)
        numbers = {name for name, size in sizes.items() if size == 1}
        found = next((name for name in _OWN_LOSS if name in numbers), None)
        # a model with one output, fed one example, returns one number too, as its last module does
        if outputs is None or found is None or any(n.ROOT not in name for name in numbers):
            return Series((), ())
        return outputs.column(found)

    @cached_property
    def learning(self) -> Learning:
        """How the loss goes."""
        return learning(self.loss, self.goes_on)

    @property
    def goes_on(self) -> bool:
        """Whether the training did not begin here: the first step has another number than 0, or its optimizers had stepped before."""
        return bool(self.records) and (self.records[0].step > 0 or "goes_on" in self.records[0].context)

    def applied(self, name: str) -> Series:
        """A whole-model value over the steps that were applied."""
        refused = {record.step for record in self.records if not record.applied}
        series = self.series(name)
        pairs = [pair for pair in zip(series.steps, series.values, strict=True) if pair[0] not in refused]
        return Series(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))

    def gradients(self, metric: str) -> Matrix | None:
        """A metric of the gradients before clipping, or after it where only those are known."""
        before = self.matrix(n.GRADIENT_BEFORE_CLIP, metric)
        return self.matrix(n.GRADIENT, metric) if before is None else before

    @cached_property
    def always_reached(self) -> frozenset[str]:
        """Parameters that have a gradient, be it zero, in all steps but a few; one that is frozen on the way is not among them."""
        norms = self.gradients("norm")
        if norms is None:
            return frozenset()
        there = (~norms.values.isnan()).double().mean(0).tolist()
        return frozenset(name for name, share in zip(norms.names, there, strict=True) if share > 0.9)

    def heads(self, source: str, over: str) -> dict[str, Series]:
        """What was measured of the heads of attention, by module: their ``"min"``, ``"mean"`` or ``"max"``."""
        keys = {key for record in self.records for key in record.values if key.source == source and key.metric == over}
        return {key.name: self._of_keys(key) for key in sorted(keys)}

    def ratio(self, source: str, base: str) -> Matrix | None:
        """The norm of each parameter's tensor of ``source`` over that of ``base`` in the same step; None without any."""
        above, below = self.matrix(source, "norm"), self.matrix(base, "norm")
        if above is None or below is None:
            return None
        row = {step: number for number, step in enumerate(below.steps)}
        column = {name: number for number, name in enumerate(below.names)}
        steps = [step for step in above.steps if step in row]
        names = [name for name in above.names if name in column]
        if not steps or not names:
            return None
        over = above.of(steps, names).values
        under = below.of(steps, names).values
        return Matrix(tuple(steps), tuple(names), torch.where(under > 0, over / under, math.nan))

    def matrix(self, source: str, metric: str) -> Matrix | None:
        """A built-in metric of all tensors of a source, of the steps that have it; None without any."""
        if (source, metric) not in self._matrices:
            self._matrices[source, metric] = self._matrix(source, metric)
        return self._matrices[source, metric]

    def _matrix(self, source: str, metric: str) -> Matrix | None:
        view = VIEWS[metric]
        tables = [(record.step, record.tables[source]) for record in self.records if source in record.tables]
        tables = [(step, table) for step, table in tables if view.columns <= table.columns | ALWAYS and table.names]
        if not tables:
            return None
        names = list(dict.fromkeys(name for _, table in tables for name in table.names))
        place = {name: column for column, name in enumerate(names)}
        values = torch.full((len(tables), len(names)), math.nan, dtype=torch.float64, device="cpu")
        columns: dict[tuple[str, ...], Tensor] = {}  # nearly all tables have the same names
        for row, (_, table) in enumerate(tables):
            if table.names not in columns:
                columns[table.names] = torch.tensor([place[name] for name in table.names], device="cpu")
            values[row, columns[table.names]] = torch.where(view.defined(table.rows), view.compute(table.rows), math.nan)
        return Matrix(tuple(step for step, _ in tables), tuple(names), values)

    def sizes(self, source: str) -> dict[str, float]:
        """How many elements each tensor of a source has."""
        found: dict[str, float] = {}
        for record in reversed(self.records):
            table = record.tables.get(source)
            if table is not None:
                counts = zip(table.names, table.rows[:, Column.COUNT].tolist(), strict=True)
                found.update((name, count) for name, count in counts if name not in found)
        return found


def _is_spoiled(parameters: StatsTable | None) -> bool:
    return parameters is not None and bool(parameters.rows[:, Column.NONFINITE].any())


def _record(run: Run, step: int) -> StepRecord:
    context = dict(run.context(step))
    tables = {source: table for source in n.TENSOR_SOURCES if (table := run.table(source, step)) is not None}
    values = {parse_key(key): value for key, value in run.metrics(step).items()}
    return StepRecord(step, context.pop("time"), context.pop("applied"), values, tables, context)
