"""Build the record of a step from its values on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ..core import keys as n
from ..core.keys import Key
from ..core.moments import VIEWS, Column
from ..core.records import ASKED_LATE, Block, Metric, StatsTable, StepRecord, StepValues, in_blocks
from .active_step import ActiveStep
from .buffer import PendingReadback, StepBuffer, merged
from .model_index import ModelIndex
from .plan import HISTOGRAM_NAME, KURTOSIS, STABLE_RANK, Registry
from .summary import (
    CLIP_SEEN,
    FROZEN,
    OTHERS,
    LayerSelection,
    ReasonContext,
    StepFacts,
    Summary,
    head_values,
    norms_by_rank,
    not_applied,
    of_layers,
)
from .summary import key as summary_key

_UNDEFINED = {
    "grad_momentum_cosine": "the gradient or the momentum is zero",
    KURTOSIS: "all its elements are equal",
    STABLE_RANK: "all its elements are zero",
}
_UNDEFINED_OF = {
    (n.UPDATE, "angle"): "the parameter is zero before the step, or after it",
    (n.UPDATE, "growth"): "the parameter is zero before the step",
    (n.ACTIVATION, "spectral_alignment"): "the weight is zero",
}
_CLASS_OF_HISTOGRAM = f"{HISTOGRAM_NAME}."


def _defined(custom: Mapping[Key, float], absent: dict[tuple[str, str], str]) -> dict[Key, float]:
    """``custom`` without values that the device marked as undefined, nor empty classes of histograms, which most are."""
    found: dict[Key, float] = {}
    classes: dict[tuple[str, str], bool] = {}  # by source and name, whether any has an element
    for key, value in custom.items():
        if value == n.UNDEFINED and (why := _UNDEFINED.get(key.metric) or _UNDEFINED_OF.get((key.source, key.metric))):
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


def asked_for(metrics: Iterable[Metric], names: Mapping[str, Sequence[str]], summary: Iterable[str]) -> list[Key]:
    """The keys of all requested values; attention under its pattern, since only calls show which modules attend."""
    found = [summary_key(name) for name in summary]
    for metric in metrics:
        if metric.source in n.ATTENTION_SOURCES.values():
            found += [Key(metric.source, metric.pattern.pattern, "")] if metric.shown else []
        elif metric.shown:
            found += [Key(metric.source, name, metric.name) for name in names.get(metric.source, ()) if metric.matches(name)]
    return found


def missing(
    record: StepRecord,
    metrics: Sequence[Metric],
    names: Mapping[str, Sequence[str]],
    absent: Mapping[tuple[str, str], str],
    situation: ReasonContext,
    layers: LayerSelection,
    owned: Set[str] | None,
) -> dict[Key, str]:
    """The reason for each requested key that is not in ``record``. ``owned``: the parameters of attached optimizers, if known."""
    reasons = _Reasons(record, names, absent, situation, owned)
    found = {summary_key(name): absent.get((n.SUMMARY, name), "not measured in this step") for name in situation.shown}
    found.update(of_layers(layers, situation, record, reasons.why))
    attends = n.has_attention(situation.inventory.kinds)
    for metric in metrics:
        if metric.source in n.ATTENTION_SOURCES.values():
            # a preset's values are in no key, but where attention is not seen in a model that has it, nothing else would say so
            is_told = metric.shown or (attends and (metric.source, "") in absent)
            if is_told and not any(key.source == metric.source for key in record.values):  # only calls show which modules attend
                found[Key(metric.source, metric.pattern.pattern, "")] = reasons.why_no_attention(metric)
            continue
        if not metric.shown:
            continue
        for name in names.get(metric.source, ()):
            if metric.matches(name):
                found[Key(metric.source, name, metric.name)] = reasons.why(metric, name)
    # tensors in containers are named by their path, and an aggregation that returns a dict adds to the metric's name
    children = {
        (key.source, key.metric.partition(".")[0], reasons.owner(key.source, key.name))
        for key in record.values
        if not (key.source in n.RCC_SOURCES and ("/" in key.name or key.name.endswith(".weight")))  # not the module's own
    }
    return {
        key: reason
        for key, reason in found.items()
        if key not in record.values and (key.source, key.metric.partition(".")[0], key.name) not in children
    }


class _Reasons:
    def __init__(
        self,
        record: StepRecord,
        names: Mapping[str, Sequence[str]],
        absent: Mapping[tuple[str, str], str],
        situation: ReasonContext,
        owned: Set[str] | None,
    ) -> None:
        self._record, self._absent, self._situation, self._owned = record, absent, situation, owned
        self._known = {source: frozenset(of) for source, of in names.items()}
        # of all names at once, since each missing value asks for them
        tables = record.tables.items()
        self._owners = {source: {self.owner(source, path) for path in table.names} for source, table in tables}
        self._of_parts: dict[tuple[str, str, str], str] = {}  # why the first tensor of a container has no value
        for (source, place), reason in absent.items():
            path, _, metric = place.rpartition("/")
            if (source in n.MODULE_SOURCES or source in n.RCC_SOURCES) and (owner := self.owner(source, path)) != path:
                self._of_parts.setdefault((source, owner, metric), reason)

    def owner(self, source: str, path: str) -> str:
        return n.owner_of(path, self._known.get(source, frozenset()))

    def why_no_attention(self, metric: Metric) -> str:
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
            reasons.insert(0, self.why(metric, ""))
        return "; ".join(reasons)

    def why(self, metric: Metric, name: str) -> str:
        absent, source = self._absent, metric.source
        if not metric.due(self._record.step):
            last = absent.get((source, "")) if source in n.ATTENTION_SOURCES.values() else None
            return f"measured on steps divisible by {metric.every}{'' if last is None else f'; in the last of them {last}'}"
        if metric.shown and not self._situation.planned(metric):
            return ASKED_LATE
        for place in (f"{name}/{metric.name}", name, ""):
            if not place and self._situation.is_frozen(source, name):
                return FROZEN
            if (source, place) in absent:
                return absent[source, place]
        if (source, name, metric.name) in self._of_parts:
            return self._of_parts[source, name, metric.name]
        if name in self._owners.get(source, ()):
            if metric.name == "ratio":
                return "the norm of the parameter was zero or NaN before the update"
            return f"the tensor has no {VIEWS[metric.name].needs}" if metric.name in VIEWS else metric.why_nothing()
        is_parameter = source in n.PARAMETER_SOURCES
        reason = self._situation.reason(source, name, self._record, self._owned) if is_parameter else ""
        return reason or _DEFAULT_REASONS.get(source, "not measured in this step")


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
    n.ACTIVATION: "the module was not called in a training forward that hooks can see",
    n.ACTIVATION_GRADIENT: "no backward pass that ends in parameters brought a gradient for its output in a training forward",
    n.ACTIVATION_DIFFERENCE: "the module was not called in a training forward that hooks can see",
    n.INPUT: "the module was not called in a training forward that hooks can see",
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
            self.late = self.readback.buffer.scalars()
        self.late.absorb(late)

    def count_refusal_after(self, is_interrupted: bool) -> None:
        self.refusals_after += 1
        self.interruptions_after += is_interrupted

    def seal(self) -> None:
        """The next step begins: copy late values to the host now, while they are not yet behind its work."""
        if self.late is not None and self.late_readback is None:
            self.late_readback = self.late.start_readback()

    def record(self, summary: Summary, layers: LayerSelection, registry: Registry) -> tuple[StepRecord, dict[str, float]]:
        """The record, and all whole-model values by name. Waits for the values."""
        buffer = self.readback.buffer
        tables, custom, noted = self.readback.land()
        base, batches = tables.pop(n.UPDATE_BASE, None), tables.pop(n.BATCH_GRADIENT, None)
        gone = self._drop_others(summary, tables, noted)
        facts = self._facts(tables, noted)
        if facts.updates_void:
            tables.pop(n.UPDATE, None)
            gone.add(n.UPDATE)
        if not facts.applied:
            buffer.absent[n.UPDATE, ""] = buffer.absent[n.OPTIMIZER, ""] = not_applied(facts.context)
        if self.cost is not None and "overhead_fraction" in summary.choice.keys:
            custom[summary_key("overhead_fraction")] = self.cost
        custom.update(self.active.values)
        if gone:
            custom = {key: value for key, value in custom.items() if key.source not in gone}
        custom = _defined(custom, buffer.absent)
        attention, heads = head_values(tables, buffer.unshown)
        blocks = [] if self.modules is None else self.modules(tables)
        if attention:
            blocks = [*blocks, *in_blocks(attention)]
        # a sum over a part of the model must not be taken for one over the whole
        whole = tables.copy()
        for source in facts.refused:
            whole.pop(source, None)
        for source in tables.keys() & self.active.plans.keys() - whole.keys():
            tables[source] = replace(tables[source], is_part=True)
        norms = {} if batches is None else norms_by_rank(batches)
        reasons: dict[str, str] = {}
        summarised = summary.compute(facts, whole, base, reasons, norms)
        for name, why in reasons.items():
            buffer.absent[n.SUMMARY, name] = why
        first: dict[Key, float] = {}
        for name in summary.choice.shown:
            if name in summarised:
                first[summary_key(name)] = summarised[name]
        for key, value in custom.items():
            if key.source == n.SUMMARY:
                first[key] = value
        for source, plan in self.active.plans.items():
            if plan.views and source in tables:
                blocks += plan.evaluate(tables[source], base)
        if layers.choice is not None:
            of_several = layers.choice in ("blocks", "top")  # which all have to be measured for that
            blocks += layers.values(whole if of_several else tables, base, facts.groups, self.inventory.names)
        values = StepValues(Block(tuple(first), tuple(first.values())), *blocks, Block(tuple(custom), tuple(custom.values())))
        hidden = heads | _hidden(values, registry.hidden) if registry.hidden else heads
        context = {**facts.context, "batch_norms": norms} if norms else facts.context
        record = StepRecord(
            facts.step,
            time.time(),
            facts.applied,
            values,
            tables,
            context,
            hidden=hidden,
            rng=buffer.rng,
            extras=self.readback.extras,
        )
        return record, summarised

    def _drop_others(self, summary: Summary, tables: dict[str, StatsTable], noted: dict[str, float]) -> set[str]:
        """Drop the gradients before clipping if the optimizer used others; returns the sources that are gone."""
        if refusals := int(noted.pop("unseen_refusals", 0)):
            summary.count_rejected(refusals)
        is_assigned, is_dropped = bool(noted.pop("assigned", 0)), bool(noted.pop("dropped", 0))
        if not summary.sets_others(tables, noted.get("rounding", 0.0), is_assigned, is_dropped):
            return set()
        tables.pop(n.GRADIENT_BEFORE_CLIP, None)
        self.readback.buffer.absent[n.GRADIENT_BEFORE_CLIP, ""] = OTHERS
        return {n.GRADIENT_BEFORE_CLIP}

    def _facts(self, tables: Mapping[str, StatsTable], noted: dict[str, float]) -> StepFacts:
        buffer, active, inventory = self.readback.buffer, self.active, self.inventory
        edited, found_inf = bool(noted.pop("edited", 0)), bool(noted.pop("found_inf", 0))
        rounding, rounds = noted.pop("rounding", 0.0), bool(noted.pop("rounds", 0))
        # what of the whole model was not measured in this step, although a whole-model value of it was requested since
        refused: dict[str, str] = {}
        for source, plan in active.plans.items():
            if not plan.is_whole:
                refused[source] = ASKED_LATE
        for (source, name), why in buffer.absent.items():
            if not name:
                refused[source] = why
        nonfinite = False
        for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT):
            if source in tables and tables[source].sums[Column.NONFINITE] > 0:
                nonfinite = True
        return StepFacts(
            buffer.step,
            applied=not (active.is_overflowed or found_inf or active.is_skipped),
            updates_void=found_inf,
            edited=edited,
            used=buffer.used,
            trainable=inventory.trainable.trained(buffer.thawed) - buffer.frozen,
            matrices=inventory.matrices.keys(),
            groups=self.groups,
            refused={**refused, **buffer.refused},
            rounding=rounding,
            rounds=rounds,
            context=self._context(noted),
            ranks=self.ranks,
            refusal=found_inf or (active.is_overflowed and not active.is_interrupted and inventory.source.searches_scale()),
            is_interrupted=active.is_interrupted,
            nonfinite=nonfinite,
            attached=self.attached,
        )

    def _context(self, noted: Mapping[str, float]) -> dict[str, Any]:
        buffer, due = self.readback.buffer, self.active.due
        context: dict[str, Any] = {} if self.cost is None else {"overhead_fraction": self.cost}
        rates: list[float] = []
        for name, value in noted.items():
            if name.startswith("lr/"):
                rates.append(value)
            elif "/" not in name:
                context[name] = value
        if rates:
            context["lr"] = rates
        context.update(self.active.annotations)
        if self.tags:
            context["tags"] = self.tags
        if due and n.has_attention(self.inventory.kinds):
            attention = {metric.source for metric in due}.intersection(n.ATTENTION_SOURCES.values())
            if why := next(filter(None, (buffer.absent.get((source, "")) for source in attention)), None):
                context[n.NO_ATTENTION] = why
        if buffer.rows:
            context["rows"] = merged([(*row, self.readback.extras[f"rows/{call}"]) for call, row in enumerate(buffer.rows)])
        return context


def _hidden(values: StepValues, unshown: Set[tuple[str, str]]) -> frozenset[Key]:
    # the metric in a key of attention is the aggregation over heads
    sources = {source for source, _ in unshown}
    attention = sources.intersection(n.ATTENTION_SOURCES.values())
    return frozenset(
        key
        for block in values.blocks
        if not block.table or block.table in sources
        for key in block.keys
        if key.source in attention or (key.source, key.metric.partition(".")[0]) in unshown
    )
