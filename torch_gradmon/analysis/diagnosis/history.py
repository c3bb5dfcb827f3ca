"""The input of the rules: the records of a run, subsampled if there are many, as series and matrices."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...core import keys as n
from ...core.keys import Key, parse_key
from ...core.loop_findings import LoopFinding
from ...core.loss_keys import loss_among
from ...core.moments import Column
from ...core.records import Severity, SpikeEvent, StatsTable, StepRecord
from ...core.subsampling import subsample_steps
from ...core.trainers import advice_for
from ...runs.window import Window
from ...spikes.episodes import Episode, by_size, episodes
from ...spikes.suspect_history import GradientNormHistory
from ...spikes.suspects import ParameterAttribution
from ..run import Run
from .findings import Finding
from .learning import Learning, learning, spread
from .series import Matrix, Series

#: Steps of a long run that are looked at: the first, the last, those around spikes, and evenly spaced ones.
MOST = 400
#: By how much the logged loss may differ from the one that goes backward, the first of several where a closure is called again.
_AGREES = 0.4
#: Where plugins keep what they found in the facts about a run.
_FINDINGS = ("audit", "replicas", "setup", "data", "foresight")
#: The noise of a loss that rests, relative to it.
_QUIET = 0.01
#: The outputs that can be the loss of a model that computes its own.
_OWN_LOSS = (f"{n.ROOT}.loss", n.ROOT, f"{n.ROOT}[0]")


class History:
    """The records of a run, ascending by step.

    Args:
        records: with their statistics.
        events: the spikes.
        facts: the findings of the loop audit.
        matrices: parameters of two or more dimensions, with their fan in, or 0 if it is unknown.
        kinds: types of the modules by name.
        place: path of the run as in a command line; empty for a run without a directory.
        steps: all recorded steps, ascending; by default those of ``records``.
        suspects: ranks the parameters of a step by suspicion; by default from the gradients in ``records``.
        chance: the loss of the best constant answer, see ``Targets.chance``; empty if it is unknown.
        groups: the groups of the optimizers, with their settings and the names of their parameters.
        frozen: names of parameters that did not require a gradient when the optimizers were attached.
        acts: the data depend on the model, as those of a policy or of a GAN do.
        trainer: name of the trainer that has the loop, see :mod:`torch_gradmon.core.trainers`; empty without.
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
        chance: Mapping[str, float] | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        frozen: Iterable[str] = (),
        acts: bool = False,
        trainer: object = "",
    ) -> None:
        self.records = sorted(records, key=lambda record: record.step)
        self.events = list(events) or [event for record in self.records for event in record.events]
        self.facts = list(facts)
        self.matrices = dict(matrices or {})
        self.kinds = dict(kinds or {})
        self.place = place
        self._recorded, self._suspects = steps, suspects
        self._chance, self.groups, self.frozen, self.acts = dict(chance or {}), list(groups), frozenset(frozen), acts
        self.advice, self._trainer = advice_for(trainer), trainer
        self._matrices: dict[tuple[str, str], Matrix | None] = {}

    @classmethod
    def of_run(cls, run: Run, most: int = MOST) -> History:
        """Read at most ``most`` steps of a run directory."""
        events = run.events
        loss = loss_among(map(parse_key, run.keys()))
        liked = [] if loss is None or len(run.steps) <= most else sorted(run.series(loss.name))
        chosen = subsample_steps(run.steps, by_size(events), most, liked)
        facts = loop_findings(run.meta)
        window = run.window(chosen)
        records = [_record(window, step) for step in window.steps]
        place = shlex.quote(str(run.path))
        known = run.meta.get("matrices"), run.meta.get("kinds"), place, run.steps, run.suspects
        of_setup = (
            run.meta.get("chance"),
            run.meta.get("optimizers") or (),
            run.meta.get("frozen") or (),
            bool(run.meta.get("acts")),
            run.meta.get("trainer", ""),
        )
        return cls(records, events, facts, *known, *of_setup)

    def before_nonfinite(self) -> History:
        """The part before parameters become NaN or infinite and stay so; itself if they never do."""
        last = len(self.records)
        while last and _is_nonfinite(self.records[last - 1].tables.get(n.PARAMETER)):
            last -= 1
        if last == len(self.records):
            return self
        kept = self.records[:last], self.events, self.facts, self.matrices, self.kinds, self.place
        return History(*kept, self._recorded, self._suspects, self._chance, self.groups, self.frozen, self.acts, self._trainer)

    @property
    def steps(self) -> list[int]:
        """The steps that are looked at."""
        return [record.step for record in self.records]

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last of these steps."""
        return (self.records[0].step, self.records[-1].step) if self.records else None

    @property
    def spikes(self) -> list[Episode]:
        """The finite spikes up to the last step that is looked at, ascending."""
        steps = self.steps if self._recorded is None else self._recorded
        last = self.steps[-1] if self.records else -math.inf
        return episodes([event for event in self.events if event.step <= last and math.isfinite(event.value)], steps)

    def suspects(self, step: int) -> Sequence[ParameterAttribution]:
        """The parameters of a step, ranked by suspicion; empty if its gradients are unknown."""
        if self._suspects is not None:
            return self._suspects(step)
        gradients = GradientNormHistory()
        for record in self.records:
            if record.step <= step:
                gradients.add(record.step, record.tables)
        return gradients.suspects(step)

    def series(self, name: str) -> Series:
        """A whole-model value by its name, such as ``grad_norm``, or a logged value by its key; empty without any."""
        return self._of_keys(Key(n.SUMMARY, "", name), Key("", name, ""))

    def _of_keys(self, *keys: Key) -> Series:
        return Series.of((record.step, record.values[key]) for record in self.records for key in keys if key in record.values)

    @cached_property
    def loss(self) -> Series:
        """The logged loss; otherwise the only number that the model returns, if its outputs were measured; empty without any.

        The loss is the shortest key like ``loss``, ``train/loss`` or ``loss/train``; a key like ``kl_loss`` is used only if there
        is no other.
        """
        chosen = loss_among({key for record in self.records for key in record.values})
        return _returned_loss(self) if chosen is None else self._of_keys(chosen)

    @cached_property
    def chance(self) -> dict[str, float]:
        """As given, unless another loss is logged than the one that goes backward, such as a sum for a mean."""
        known, step = self._chance.get("went backward"), self._chance.get("step")
        logged = next((value for at, value in zip(self.loss.steps, self.loss.values, strict=True) if at == step), known)
        is_other = known is not None and logged is not None and abs(logged - known) > _AGREES * abs(known)
        return {} if is_other else self._chance

    @cached_property
    def learning(self) -> Learning:
        """The trend of the loss. That of a model which gets other data when it is better need not fall."""
        found = learning(self.loss, self.is_resumed, self.chance.get("loss", 0.0))
        return replace(found, is_stuck=False, is_at_chance=False, is_worse=False) if self.acts else found

    @cached_property
    def rates(self) -> list[float]:
        """The largest learning rate of each step; 0 if it is unknown."""
        return list(map(max, self.group_rates))

    @cached_property
    def group_rates(self) -> list[Sequence[float]]:
        """The learning rates of each step, by parameter group; a single 0 if they are unknown."""
        return [record.context.get("lr") or [0.0] for record in self.records]

    @property
    def rests_at_chance(self) -> bool:
        """Whether the loss has come down to that of a constant answer and stays there without noise: no rate is at fault."""
        tail = self.loss.finite.part(0.8, 1)
        return self.learning.is_at_chance and spread(tail) < _QUIET * abs(tail.median)

    @property
    def need_not_fall(self) -> bool:
        """Whether the loss means little: the model acts, or optimizers alternate, as in a GAN."""
        return self.acts or sum("by_turns" in record.context for record in self.records) > len(self.records) / 2

    @property
    def concern(self) -> Severity:
        """The severity of a problem that matters only if the model does not learn, which a loss that need not fall does not show."""
        return "info" if self.need_not_fall else self.learning.concern

    @property
    def is_resumed(self) -> bool:
        """Whether the training began earlier: the first step is not 0, or its optimizers had stepped before."""
        return bool(self.records) and (self.records[0].step > 0 or "goes_on" in self.records[0].context)

    def applied(self, name: str) -> Series:
        """A whole-model value over the applied steps."""
        not_applied = {record.step for record in self.records if not record.applied}
        series = self.series(name)
        return Series.of(pair for pair in zip(series.steps, series.values, strict=True) if pair[0] not in not_applied)

    def gradients(self, metric: str) -> Matrix | None:
        """A metric of the gradients before clipping; after clipping if only those are known."""
        before = self.matrix(n.GRADIENT_BEFORE_CLIP, metric)
        return self.matrix(n.GRADIENT, metric) if before is None else before

    @cached_property
    def always_reached(self) -> frozenset[str]:
        """Parameters with a gradient, possibly zero, in nearly all steps; not those that were frozen on the way."""
        norms = self.gradients("norm")
        if norms is None:
            return frozenset()
        there = (~norms.values.isnan()).double().mean(0).tolist()
        return frozenset(name for name, share in zip(norms.names, there, strict=True) if share > 0.9)

    def heads(self, source: str, over: str) -> dict[str, Series]:
        """The ``"min"``, ``"mean"`` or ``"max"`` over the heads of each attention module."""
        keys = {key for record in self.records for key in record.values if key.source == source and key.metric == over}
        return {key.name: self._of_keys(key) for key in sorted(keys)}

    def ratio(self, source: str, base: str) -> Matrix | None:
        """The norm of each parameter's tensor of ``source`` over that of ``base`` in the same step; None without any."""
        above, below = self.matrix(source, "norm"), self.matrix(base, "norm")
        return None if above is None or below is None else above.over(below)

    def matrix(self, source: str, metric: str) -> Matrix | None:
        """A built-in metric of all tensors of a source, of the steps that have it; None without any."""
        if (source, metric) not in self._matrices:
            tables = [(record.step, record.tables[source]) for record in self.records if source in record.tables]
            self._matrices[source, metric] = Matrix.of_tables(tables, metric)
        return self._matrices[source, metric]

    def finding(
        self,
        rule: str,
        where: str,
        evidence: Mapping[str, float],
        cause: str,
        advice: str,
        weight: float,
        severity: Severity | None = None,
        steps: tuple[int, int] | None = None,
    ) -> list[Finding]:
        """A list of one :class:`Finding`, as rules return it.

        The default severity is that of a problem that matters only if the model does not learn; the default steps are all steps.
        """
        steps = steps or (self.records[0].step, self.records[-1].step)
        return [Finding(rule, severity or self.concern, where, steps, evidence, cause, advice, weight)]

    def sizes(self, source: str) -> dict[str, float]:
        """The number of elements of each tensor of a source."""
        found: dict[str, float] = {}
        for record in reversed(self.records):
            table = record.tables.get(source)
            if table is not None:
                counts = zip(table.names, table.rows[:, Column.COUNT].tolist(), strict=True)
                found.update((name, count) for name, count in counts if name not in found)
        return found


def loop_findings(meta: Mapping[str, Any]) -> list[LoopFinding]:
    """What the training found itself, from the facts about a run."""
    return [LoopFinding.of_dict(fact) for source in _FINDINGS for fact in meta.get(source, [])]


def _returned_loss(history: History) -> Series:
    """The only number that the model returns."""
    outputs = history.matrix(n.ACTIVATION, "mean")
    sizes = history.sizes(n.ACTIVATION)
    numbers = {name for name, size in sizes.items() if size == 1}
    found = next((name for name in _OWN_LOSS if name in numbers), None)
    # a model with one output, given one example, also returns one number, as does its last module
    if outputs is None or found is None or any(n.ROOT not in name for name in numbers):
        return Series()
    return outputs.column(found)


def _is_nonfinite(parameters: StatsTable | None) -> bool:
    return parameters is not None and bool(parameters.rows[:, Column.NONFINITE].any())


def _record(window: Window, step: int) -> StepRecord:
    context = {name: value for name, value in window.facts[step].items() if name != "events"}
    tables = {source: table for source in n.TENSOR_SOURCES if (table := window.table(source, step)) is not None}
    return StepRecord(step, context.pop("time"), context.pop("applied"), window.scalars(step), tables, context)
