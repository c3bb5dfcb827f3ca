"""Build the record of a step from its values on the host."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from ..core import keys as n
from ..core.keys import Key
from ..core.moments import VIEWS, Column
from ..core.records import ASKED_LATE, Block, Metric, StatsTable, StepRecord, StepValues, in_blocks
from .active_step import ActiveStep
from .buffer import PendingReadback, StepBuffer, merged_losses
from .model_index import ModelIndex
from .plan import HISTOGRAM_NAME, KURTOSIS, STABLE_RANK, Registry, SourcePlan
from .summary import CLIP_SEEN, OTHERS, SET_BY_HAND, LayerSelection, StepFacts, Summary, head_values, norms_by_rank, not_applied
from .summary import key as summary_key

#: By source, empty for any, and metric.
_UNDEFINED = {
    ("", "grad_momentum_cosine"): "the gradient or the momentum is zero",
    ("", KURTOSIS): "all its elements are equal",
    ("", STABLE_RANK): "all its elements are zero",
    (n.UPDATE, "angle"): "the parameter is zero before the step, or after it",
    (n.UPDATE, "growth"): "the parameter is zero before the step",
    (n.ACTIVATION, "spectral_alignment"): "the weight is zero",
}
_CLASS_OF_HISTOGRAM, _METRIC = f"{HISTOGRAM_NAME}.", attrgetter("metric")
_ATTENTION = frozenset(n.ATTENTION_SOURCES.values())


def _defined(custom: dict[Key, float], absent: dict[tuple[str, str], str]) -> dict[Key, float]:
    """``custom`` without values that the device marked as undefined, nor empty classes of histograms, which most are."""
    if n.UNDEFINED not in custom.values() and not any(name.startswith(_CLASS_OF_HISTOGRAM) for name in {*map(_METRIC, custom)}):
        return custom
    found: dict[Key, float] = {}
    classes: dict[tuple[str, str], bool] = {}  # by source and name, whether any has an element
    for key, value in custom.items():
        if value == n.UNDEFINED and (why := _UNDEFINED.get(("", key.metric)) or _UNDEFINED.get((key.source, key.metric))):
            absent[key.source, f"{key.name}/{key.metric}"] = why
            continue
        if key.metric.startswith(_CLASS_OF_HISTOGRAM):
            classes[key[:2]] = classes.get(key[:2], False) or bool(value)
            if not value:
                continue
        found[key] = value
    for (source, name), has_elements in classes.items():
        if not has_elements:
            absent[source, f"{name}/{HISTOGRAM_NAME}"] = "it has no finite element"
    return found


def _requested(metrics: Iterable[Metric], names: Mapping[str, Sequence[str]]) -> Iterator[tuple[Metric, str, Key]]:
    """Metrics with the names and keys of their values; attention under its pattern, since only calls show which modules attend."""
    for metric in metrics:
        if metric.source in n.ATTENTION_SOURCES.values():
            yield metric, "", Key(metric.source, metric.pattern.pattern, "")
        elif metric.shown:
            for name in filter(metric.matches, names.get(metric.source, ())):
                yield metric, name, Key(metric.source, name, metric.name)


class ReasonContext(NamedTuple):
    inventory: ModelIndex
    plans: Mapping[str, SourcePlan]  # the requested measurements of parameters, by source
    due: tuple[Metric, ...]  # the metrics of modules that were due
    shown: tuple[str, ...]  # the names of the requested whole-model values; a live change may have requested others since
    attached: bool
    refused: Mapping[str, str]  # a reason by source if some of its tensors could not be measured


class Reasons:
    """Why values are not in ``record``. ``owned``: the parameters of attached optimizers, if known."""

    def __init__(
        self,
        record: StepRecord,
        names: Mapping[str, Sequence[str]],
        absent: Mapping[tuple[str, str], str],
        situation: ReasonContext,
        owned: Set[str] | None,
    ) -> None:
        self._record, self._names, self._absent, self._situation, self._owned = record, names, absent, situation, owned
        self._known = {source: frozenset(of) for source, of in names.items()}
        self._measured = {source: table.row_of.keys() for source, table in record.tables.items()}
        # of all names at once, since each missing value asks for them
        self._owners = {source: {self._owner(source, path) for path in paths} for source, paths in self._measured.items()}
        self._of_parts: dict[tuple[str, str, str], str] = {}  # why the first tensor of a container has no value
        for (source, place), reason in absent.items():
            path, _, metric = place.rpartition("/")
            if (source in n.MODULE_SOURCES or source in n.RCC_SOURCES) and (owner := self._owner(source, path)) != path:
                self._of_parts.setdefault((source, owner, metric), reason)

    def missing(self, metrics: Sequence[Metric], layers: LayerSelection) -> dict[Key, str]:
        """The reason for each requested key that is not in the record."""
        record, absent = self._record, self._absent
        found = {summary_key(name): absent.get((n.SUMMARY, name), "not measured in this step") for name in self._situation.shown}
        found.update(self._of_layers(layers))
        attends = n.has_attention(self._situation.inventory.kinds)
        for metric, name, key in _requested(metrics, self._names):
            if metric.source not in n.ATTENTION_SOURCES.values():
                found[key] = self._why(metric, name)
            # a preset's values are in no key, but where attention is not seen in a model that has it, nothing else would say so
            elif (metric.shown or (attends and (metric.source, "") in absent)) and not any(
                known.source == metric.source for known in record.values
            ):
                found[key] = self._why_no_attention(metric)
        # tensors in containers are named by their path, and an aggregation that returns a dict adds to the metric's name
        children = {
            (key.source, key.metric.partition(".")[0], self._owner(key.source, key.name))
            for key in record.values
            if not (key.source in n.RCC_SOURCES and ("/" in key.name or key.name.endswith(".weight")))  # not the module's own
        }
        return {
            key: reason
            for key, reason in found.items()
            if key not in record.values and (key.source, key.metric.partition(".")[0], key.name) not in children
        }

    def _of_layers(self, layers: LayerSelection) -> dict[Key, str]:
        found: dict[Key, str] = {}
        for source, name in ((n.GRADIENT_BEFORE_CLIP, "norm"), (n.UPDATE, "ratio")):
            plan = self._situation.plans.get(source)
            if plan is None or Column.SQUARE_SUM not in plan.columns:  # updates are shown in the steps that measure them
                continue
            metric = Metric(name, source, _ANY, shown=False)
            for label, members in layers.members(self._situation.inventory.names).items():
                reasons = [self._why(metric, each) for each in members if each not in self._measured.get(source, ())]
                distinct = dict.fromkeys(filter(None, (self._situation.refused.get(source), *reasons)))
                found[Key(source, label, name)] = (
                    "; ".join(distinct) or "the norm of its parameters was zero or NaN before the update"
                )
        return found

    def _owner(self, source: str, path: str) -> str:
        return n.owner_of(path, self._known.get(source, frozenset()))

    def _why_no_attention(self, metric: Metric) -> str:
        """One reason for the whole pattern, since only calls show which modules attend; then the reasons of modules."""
        known = {
            place: why
            for (source, place), why in self._absent.items()
            if source == metric.source and place and metric.matches(place)
        }
        outermost = [place for place in known if place.rpartition(".")[0] not in known]
        reasons = [f"{place} is {known[place]}" for place in outermost[:3]]
        if len(outermost) > 3:
            reasons.append(f"and {len(outermost) - 3} more")
        if not known or any(map(metric.matches, self._known.get(metric.source, ()))):
            reasons.insert(0, self._why(metric, ""))
        return "; ".join(reasons)

    def _is_planned(self, metric: Metric) -> bool:
        plan = self._situation.plans.get(metric.source)
        if plan is None:
            return metric in self._situation.due
        return any(metric is known for known, _ in plan.views) or any(metric in some for some in plan.functions.values())

    def _why(self, metric: Metric, name: str) -> str:
        absent, source, inventory = self._absent, metric.source, self._situation.inventory
        if not metric.due(self._record.step):
            last = absent.get((source, "")) if source in n.ATTENTION_SOURCES.values() else None
            return f"measured on steps divisible by {metric.every}{'' if last is None else f'; in the last of them {last}'}"
        if metric.shown and not self._is_planned(metric):
            return ASKED_LATE
        for place in (f"{name}/{metric.name}", name):
            if (source, place) in absent:
                return absent[source, place]
        if source in _OF_GRADIENTS and inventory.trainable.is_frozen(name) and name in inventory.parameters:
            return "it is frozen: its requires_grad is False"  # since the step began, so that no gradient could come
        if (source, "") in absent:
            return absent[source, ""]
        if (source, name, metric.name) in self._of_parts:
            return self._of_parts[source, name, metric.name]
        if name in self._owners.get(source, ()):
            if metric.name == "ratio":
                return "the norm of the parameter was zero or NaN before the update"
            return f"the tensor has no {VIEWS[metric.name].needs}" if metric.name in VIEWS else metric.why_nothing()
        reason = self._of_parameter(source, name) if source in n.PARAMETER_SOURCES else ""
        return reason or _DEFAULT_REASONS.get(source, "not measured in this step")

    def _of_parameter(self, source: str, name: str) -> str:
        """Why nothing was measured of a parameter; empty if unknown."""
        inventory, attached = self._situation.inventory, self._situation.attached
        if name in inventory.excluded:
            return "exclude= (excluded_modules_regex=) leaves it out"
        if not attached and source in _NEEDS_HOOKS:
            return _NEEDS_HOOKS[source]
        if source == n.GRADIENT_LOCAL and name in inventory.spread:
            return "ranks have parts of it or of the model, whose gradients are measured only once they are reduced"
        if source in _OF_OPTIMIZERS and self._owned is not None:
            frozen = "it is frozen, and " * inventory.trainable.is_frozen(name)
            return "its optimizer did not step" if name in self._owned else f"{frozen}no attached optimizer has it"
        if source not in (n.GRADIENT, n.GRADIENT_BEFORE_CLIP):
            return ""
        if source == n.GRADIENT_BEFORE_CLIP and attached and name in self._measured.get(n.GRADIENT, ()):
            return f"no gradient before clipping was seen: no backward pass ran through the parameter's hook; {SET_BY_HAND}"
        has_others = bool(self._measured.get(source))
        if has_others and source == n.GRADIENT and name in self._measured.get(n.GRADIENT_BEFORE_CLIP, ()):
            stepped = "the optimizer stepped, or its optimizer did not step"
            return f"its gradient was gone when {stepped if attached else 'monitor.monitor_gradients() was called'}"
        if has_others:
            return "it had no gradient: the loss does not depend on it, or its gradient was removed"
        if attached:
            return ""
        if source == n.GRADIENT:
            return "no gradient of it was measured: call monitor.monitor_gradients() between backward and the optimizer's step"
        return f"no gradient of it was measured before clipping: {CLIP_SEEN}"


_ANY = re.compile("")
_OF_GRADIENTS = frozenset({n.GRADIENT, n.GRADIENT_BEFORE_CLIP, n.GRADIENT_LOCAL})
_OF_OPTIMIZERS = frozenset({n.UPDATE, n.OPTIMIZER})
_NEEDS_HOOKS = {
    n.GRADIENT_LOCAL: "gradients of micro-batches are measured by hooks, which attach() installs",
    n.UPDATE: "updates are measured by hooks on the optimizer, which attach() installs",
    n.OPTIMIZER: "the optimizer's state is measured by hooks on it, which attach() installs",
}
_DEFAULT_REASONS = {
    n.GRADIENT: "no gradient in this step, or nothing was measured when the optimizer stepped",
    n.GRADIENT_BEFORE_CLIP: (
        f"no gradient before clipping was seen: no backward pass ran through the parameter's hook; {CLIP_SEEN}"
    ),
    n.GRADIENT_LOCAL: "no backward pass brought a gradient for it",
    n.PARAMETER: "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()",
    n.PARAMETER_DIFFERENCE: "no reference module is set, or the parameters were not measured",
    n.UPDATE: "no attached optimizer changes it",
    **dict.fromkeys(n.ATTENTION_SOURCES.values(), "no call of scaled_dot_product_attention by a module of that name was seen"),
    n.OPTIMIZER: "the optimizer keeps no such state for it, or is not attached",
    **dict.fromkeys(
        (n.ACTIVATION, n.ACTIVATION_DIFFERENCE, n.INPUT), "the module was not called in a training forward that hooks can see"
    ),
    n.ACTIVATION_GRADIENT: "no backward pass that ends in parameters brought a gradient for its output in a training forward",
    **dict.fromkeys(n.RCC_SOURCES, "the module was not called in a training forward of the whole model"),
    n.INPUT_GRADIENT: "no backward pass that ends in parameters brought a gradient for its input in a training forward",
}


# --- A step between its end and its record: its facts, and its values on their way to the host ---


@dataclass
class PendingStep:
    readback: PendingReadback
    active: ActiveStep  # what was known of it when it closed
    inventory: ModelIndex
    # computes the built-in values of modules from tables; None if none are due
    modules: Callable[[dict[str, StatsTable]], list[Block]] | None
    groups: list[tuple[str, frozenset[str]]]  # names of the parameters of each of the optimizers' groups
    tags: dict[str, Any]  # facts for its context
    # time spent in the monitor, as a share of the time since the last monitored step; None for an unmonitored one
    cost: float | None
    ranks: int = 1
    attached: bool = False
    late: StepBuffer | None = None  # merges values that were logged after its end
    late_readback: PendingReadback | None = None  # these on their way to the host, once the next step has begun
    refusals_after: int = 0  # steps neither monitored nor applied, between this one and the next monitored one
    interruptions_after: int = 0  # those of them that the loop left by an error

    @property
    def step(self) -> int:
        return self.readback.buffer.step

    def add(self, late: StepBuffer) -> None:
        if self.late is None:
            self.late = self.readback.buffer.part()
        self.late.absorb(late)

    def seal(self) -> None:
        """The next step begins: copy late values to the host now, while they are not yet behind its work."""
        if self.late is not None and self.late_readback is None:
            self.late_readback = PendingReadback(self.late)

    def facts(self, tables: Mapping[str, StatsTable], noted: dict[str, float], found_inf: bool) -> StepFacts:
        buffer, active, inventory, absent = self.readback.buffer, self.active, self.inventory, self.readback.buffer.absent
        # what of the whole model was not measured in this step, although a whole-model value of it was requested since
        refused: dict[str, str] = {}
        for source, plan in active.plans.items():
            if not plan.is_whole:
                refused[source] = ASKED_LATE
        for (source, name), why in absent.items():
            if not name:
                refused[source] = why
        refused.update(buffer.refused)
        edited, rounding, rounds = bool(noted.pop("edited", 0)), noted.pop("rounding", 0.0), bool(noted.pop("rounds", 0))
        context: dict[str, Any] = {} if self.cost is None else {"overhead_fraction": self.cost}
        rates: list[float] = []
        for name, value in noted.items():
            if name.startswith("lr/"):
                rates.append(value)
            elif "/" not in name:
                context[name] = value
        if rates:
            context["lr"] = rates
        context.update(active.annotations)
        if self.tags:
            context["tags"] = self.tags
        if active.due and n.has_attention(inventory.kinds):
            attention = {metric.source for metric in active.due}.intersection(_ATTENTION)
            if reason := next(filter(None, (absent.get((source, "")) for source in attention)), None):
                context[n.NO_ATTENTION] = reason
        if self.readback.rows:
            context["rows"] = merged_losses(self.readback.rows)
        trainable = inventory.trainable.names
        if buffer.frozen or inventory.trainable.doubtful:
            trainable = inventory.trainable.trained(buffer.thawed) - buffer.frozen
        nonfinite = found_inf or (active.is_overflowed and "interrupted" not in context and inventory.source.searches_scale())
        for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT):
            if source in tables and tables[source].totals[Column.NONFINITE] > 0:
                nonfinite = True
        return StepFacts(
            buffer.step,
            applied=not (active.is_overflowed or found_inf or active.is_skipped),
            edited=edited,
            used=buffer.used,
            trainable=trainable,
            matrices=inventory.matrices.keys(),
            refused=refused,
            context=context,
            ranks=self.ranks,
            nonfinite=nonfinite,
            attached=self.attached,
            rounding=rounding,
            rounds=rounds,
        )


# --- From a step whose values have come to its record ---


class RecordFactory:
    """Makes the records of steps, and knows why the last one lacks values.

    Attributes:
        layers: which per-layer values are shown.
        summary: the whole-model values.
        model: facts about the model of the last record, which ``annotate`` puts in the run directory; see
            :attr:`torch_gradmon.step.model_index.ModelIndex.facts`.
    """

    def __init__(
        self, registry: Registry, layers: LayerSelection, summary: Summary, annotate: Callable[..., object] = dict
    ) -> None:
        self._registry, self.layers, self.summary, self._annotate = registry, layers, summary, annotate
        self.model: Mapping[str, Any] = {}
        self._reasons: ReasonContext | None = None

    def know(self, facts: Mapping[str, Any]) -> None:
        # alternating models, as in a GAN, change the inventory in every step, but no other fact
        new = {name: fact for name, fact in facts.items() if fact != self.model.get(name)}
        self.model = facts
        if new:
            self._annotate(**new)

    def make(self, pending: PendingStep) -> tuple[StepRecord, dict[str, float]]:
        """The record of a step, and all whole-model values by name. Waits for the values."""
        active, inventory, readback, summary = pending.active, pending.inventory, pending.readback, self.summary
        buffer, absent, shown = readback.buffer, readback.buffer.absent, summary.choice.shown
        if inventory.matrices is not self.model.get("matrices"):
            self.know(inventory.facts)
        self._reasons = ReasonContext(inventory, active.plans, active.due, shown, pending.attached, buffer.refused)
        tables, custom, noted = readback.land()
        base, batches = tables.pop(n.UPDATE_BASE, None), tables.pop(n.BATCH_GRADIENT, None)
        if refusals := int(noted.pop("unseen_refusals", 0)):
            summary.count_rejected(refusals)
        found_inf = bool(noted.pop("found_inf", 0))
        gone = {n.UPDATE} if found_inf else set()  # of zero, as a fused optimizer has measured them
        before, after, rounding = tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.GRADIENT), noted.get("rounding", 0.0)
        is_assigned, is_dropped = bool(noted.pop("assigned", 0)), bool(noted.pop("dropped", 0))
        if not (is_assigned or is_dropped):
            if before is not None and after is not None:
                summary.plain.append((before, after, rounding))
        elif summary.sets_others(before, after, rounding, is_assigned):
            gone.add(n.GRADIENT_BEFORE_CLIP)
            absent[n.GRADIENT_BEFORE_CLIP, ""] = OTHERS
        if gone:
            tables = {source: table for source, table in tables.items() if source not in gone}
            custom = {key: value for key, value in custom.items() if key.source not in gone}
        facts = pending.facts(tables, noted, found_inf)
        if not facts.applied:
            absent[n.UPDATE, ""] = absent[n.OPTIMIZER, ""] = not_applied(facts.context)
        custom = _defined(custom, absent) if custom else custom
        if pending.cost is not None and "overhead_fraction" in summary.choice.keys:
            custom[summary_key("overhead_fraction")] = pending.cost
        custom.update(active.values)
        attention, heads = ({}, frozenset[Key]()) if _ATTENTION.isdisjoint(tables) else head_values(tables, buffer.unshown)
        modules = pending.modules
        blocks = [*(() if modules is None else modules(tables)), *(in_blocks(attention) if attention else ())]
        whole = tables if facts.refused.keys().isdisjoint(tables) else _of_all(tables, facts.refused, active)
        norms = {} if batches is None else norms_by_rank(batches)
        reasons: dict[str, str] = {}
        summarised = summary.compute(facts, whole, base, reasons, norms)
        for name, why in reasons.items():
            absent[n.SUMMARY, name] = why
        for source, plan in active.plans.items():
            if plan.views and source in tables:
                blocks += plan.evaluate(tables[source], base)
        if self.layers.choice is not None:
            of_several = self.layers.choice in ("blocks", "top")  # which all have to be measured for that
            blocks += self.layers.values(whole if of_several else tables, base, pending.groups, inventory.names)
        first: dict[Key, float] = {}
        for name in shown:
            if name in summarised:
                first[summary_key(name)] = summarised[name]
        for key, value in custom.items():
            if key.source == n.SUMMARY:
                first[key] = value
        values = StepValues(Block(tuple(first), tuple(first.values())), *blocks, Block(tuple(custom), tuple(custom.values())))
        hidden = _hidden(values, self._registry, heads) if self._registry.hidden else heads
        context, of_step = facts.context, (facts.step, time.time(), facts.applied)
        context = {**context, "batch_norms": norms} if norms else context
        return StepRecord(*of_step, values, tables, context, (), hidden, buffer.rng, readback.extras), summarised

    def requested(self, names: Mapping[str, Any]) -> list[Key]:
        """The keys of all requested values; ``names`` are those of parameters and modules, by source."""
        of_metrics = (key for metric, _, key in _requested(self._registry.metrics, names) if metric.shown)
        return [*map(summary_key, self.summary.choice.shown), *of_metrics]

    def missing(
        self, record: StepRecord, absent: Mapping[tuple[str, str], str], names: Mapping[str, Any], owned: Set[str] | None
    ) -> dict[Key, str]:
        """Why requested values are not in ``record``, the last one. ``owned``: the parameters of attached optimizers, if known."""
        if self._reasons is None:
            return {}
        return Reasons(record, names, absent, self._reasons, owned).missing(self._registry.metrics, self.layers)


def _of_all(tables: dict[str, StatsTable], refused: Mapping[str, str], active: ActiveStep) -> dict[str, StatsTable]:
    """The tables of all parameters. The others are marked: a sum over a part of the model must not be taken for one over the whole."""
    whole = {source: table for source, table in tables.items() if source not in refused}
    for source in tables.keys() & active.plans.keys() - whole.keys():
        tables[source] = replace(tables[source], is_part=True)
    return whole


def _hidden(values: StepValues, registry: Registry, heads: frozenset[Key]) -> frozenset[Key]:
    """``heads``, and keys of values that no metric shows: with the same blocks the same set, since there may be thousands."""
    unshown, keys = registry.hidden, [block.keys for block in values.blocks]
    known = registry.hidden_keys.get(len(keys))
    if known is None or known[:2] != (unshown, keys):
        # the metric in a key of attention is the aggregation over heads
        attention = {source for source, _ in unshown}.intersection(n.ATTENTION_SOURCES.values())
        found = (
            key
            for key in chain.from_iterable(keys)
            if key.source in attention or (key.source, key.metric.partition(".")[0]) in unshown
        )
        known = registry.hidden_keys[len(keys)] = unshown, keys, frozenset(found)
    return known[2] | heads if heads else known[2]
