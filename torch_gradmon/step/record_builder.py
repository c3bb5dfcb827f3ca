"""Build the record of a step from its values on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from ..core import keys as n
from ..core.keys import Key
from ..core.metric import ASKED_LATE, Metric
from ..core.moments import VIEWS
from ..core.records import StatsTable, StepRecord
from ..core.step_values import Block, StepValues
from ..statistics import histogram, kurtosis, spectrum
from .layer_values import LayerSelection
from .micro_batches import norms_by_rank
from .plan import SourcePlan
from .reasons import CLIP_SEEN, FROZEN, ReasonContext, not_applied, of_layers
from .summary import Summary
from .summary_keys import StepFacts
from .summary_keys import key as summary_key

_UNDEFINED = {
    "grad_momentum_cosine": "the gradient or the momentum is zero",
    kurtosis.NAME: "all its elements are equal",
    spectrum.STABLE_RANK: "all its elements are zero",
}
_UNDEFINED_OF = {
    (n.UPDATE, "angle"): "the parameter is zero before the step, or after it",
    (n.UPDATE, "growth"): "the parameter is zero before the step",
    (n.ACTIVATION, "singular_side"): "the weight is zero",
}
_CLASS_OF_HISTOGRAM = f"{histogram.NAME}."


def assemble(
    facts: StepFacts,
    tables: dict[str, StatsTable],
    custom: Mapping[Key, float],
    plans: Mapping[str, SourcePlan],
    modules: Sequence[Block],
    unshown: Set[tuple[str, str]],
    heads: frozenset[Key],
    summary: Summary,
    layers: LayerSelection,
    names: Sequence[str],
    absent: dict[tuple[str, str], str],
) -> tuple[StepRecord, dict[str, float]]:
    """The record of one step, and all whole-model values by name.

    ``modules`` are values of modules' inputs and outputs, ``heads`` those of their keys that no dashboard gets, and ``absent`` gets
    reasons for missing values; ``names`` are all parameters.
    """
    base = tables.pop(n.UPDATE_BASE, None)
    batches = tables.pop(n.BATCH_GRADIENT, None)
    norms = {} if batches is None else norms_by_rank(batches)
    if facts.updates_void:
        tables.pop(n.UPDATE, None)
        custom = {key: value for key, value in custom.items() if key.source != n.UPDATE}
    if not facts.applied:
        absent[n.UPDATE, ""] = absent[n.OPTIMIZER, ""] = not_applied(facts.context)
    undefined = {
        key: why
        for key, value in custom.items()
        if value == n.UNDEFINED and (why := _UNDEFINED.get(key.metric) or _UNDEFINED_OF.get((key.source, key.metric)))
    }
    absent.update({(key.source, f"{key.name}/{key.metric}"): why for key, why in undefined.items()})
    custom = _without_empty_classes(custom, absent)
    # a sum over a part of the model must not be taken for one over the whole
    whole = {source: table for source, table in tables.items() if source not in facts.refused}
    tables.update({source: replace(tables[source], is_part=True) for source in plans if source in tables and source not in whole})
    reasons: dict[str, str] = {}
    summarised = summary.compute(facts, whole, base, reasons, norms)
    absent.update({(n.SUMMARY, name): reason for name, reason in reasons.items()})
    first = {summary_key(name): summarised[name] for name in summary.choice.shown if name in summarised}
    first.update({key: value for key, value in custom.items() if key.source == n.SUMMARY})
    of_layers = layers.values(whole if layers.takes_sums else tables, base, facts.groups, names)
    last = {key: value for key, value in custom.items() if key not in undefined}
    blocks = [block for source, plan in plans.items() if source in tables for block in plan.evaluate(tables[source], base)]
    values = StepValues(Block(tuple(first), tuple(first.values())), *modules, *blocks, *of_layers).updated(last)
    hidden = heads
    if unshown:
        # the metric in a key of attention is the aggregation over heads
        sources = {source for source, _ in unshown}
        attention = sources.intersection(n.ATTENTION_SOURCES.values())
        hidden |= {
            key
            for block in values.blocks
            if not block.table or block.table in sources
            for key in block.keys
            if key.source in attention or (key.source, key.metric.partition(".")[0]) in unshown
        }
    context = {**facts.context, "batch_norms": norms} if norms else facts.context
    record = StepRecord(facts.step, time.time(), facts.applied, values, tables, context, hidden=hidden)
    return record, summarised


def _without_empty_classes(custom: Mapping[Key, float], absent: dict[tuple[str, str], str]) -> Mapping[Key, float]:
    """``custom`` without empty classes of histograms, which most are."""
    classes = [key for key in custom if key.metric.startswith(_CLASS_OF_HISTOGRAM)]
    if not classes:
        return custom
    empty = {key for key in classes if not custom[key]}
    for source, name in {key[:2] for key in classes} - {key[:2] for key in classes if key not in empty}:
        absent[source, f"{name}/{histogram.NAME}"] = "it has no finite element"
    return {key: value for key, value in custom.items() if key not in empty}


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

    def why(metric: Metric, name: str) -> str:
        return _why_absent(metric, name, record, absent, owners, of_parts, situation, owned)

    known = {source: frozenset(of) for source, of in names.items()}
    # of all names at once, since each missing value asks for them
    owners = {
        source: {n.owner_of(path, known.get(source, frozenset())) for path in table.names}
        for source, table in record.tables.items()
    }
    of_parts = _reasons_of_parts(absent, known)
    found = {summary_key(name): absent.get((n.SUMMARY, name), "not measured in this step") for name in situation.shown}
    found.update(of_layers(layers, situation, record, why))
    attends = n.has_attention(situation.inventory.kinds)
    for metric in metrics:
        if metric.source in n.ATTENTION_SOURCES.values():
            # a preset's values are in no key, but where attention is not seen in a model that has it, nothing else would say so
            is_told = metric.shown or (attends and (metric.source, "") in absent)
            if is_told and not any(key.source == metric.source for key in record.values):  # only calls show which modules attend
                found[Key(metric.source, metric.pattern.pattern, "")] = _why_no_attention(metric, absent, known, why)
            continue
        if not metric.shown:
            continue
        for name in names.get(metric.source, ()):
            if metric.matches(name):
                found[Key(metric.source, name, metric.name)] = why(metric, name)
    # tensors in containers are named by their path, and an aggregation that returns a dict adds to the metric's name
    children = {
        (key.source, key.metric.partition(".")[0], n.owner_of(key.name, known.get(key.source, frozenset())))
        for key in record.values
        if not (key.source in n.RCC_SOURCES and ("/" in key.name or key.name.endswith(".weight")))  # not the module's own
    }
    return {
        key: reason
        for key, reason in found.items()
        if key not in record.values and (key.source, key.metric.partition(".")[0], key.name) not in children
    }


def _why_no_attention(
    metric: Metric, absent: Mapping[tuple[str, str], str], known: Mapping[str, frozenset[str]], why: Callable[[Metric, str], str]
) -> str:
    """One reason for the whole pattern, since only calls show which modules attend; then the reasons of modules."""
    reason = why(metric, "")
    known_reasons = {
        place: why for (source, place), why in absent.items() if source == metric.source and place and metric.matches(place)
    }
    outermost = [place for place in known_reasons if place.rpartition(".")[0] not in known_reasons]
    reasons = [f"{place} is {known_reasons[place]}" for place in outermost[:3]]
    if len(outermost) > 3:
        reasons.append(f"and {len(outermost) - 3} more")
    if not known_reasons or any(metric.matches(name) for name in known.get(metric.source, ())):
        reasons.insert(0, reason)
    return "; ".join(reasons)


def _reasons_of_parts(
    absent: Mapping[tuple[str, str], str], known: Mapping[str, frozenset[str]]
) -> dict[tuple[str, str, str], str]:
    """By source, module and metric: why the first tensor of a container has no value."""
    found: dict[tuple[str, str, str], str] = {}
    for (source, place), reason in absent.items():
        path, _, metric = place.rpartition("/")
        if source in n.MODULE_SOURCES or source in n.RCC_SOURCES:
            owner = n.owner_of(path, known.get(source, frozenset()))
            if owner != path:
                found.setdefault((source, owner, metric), reason)
    return found


def _why_absent(
    metric: Metric,
    name: str,
    record: StepRecord,
    absent: Mapping[tuple[str, str], str],
    owners: Mapping[str, Set[str]],
    of_parts: Mapping[tuple[str, str, str], str],
    situation: ReasonContext,
    owned: Set[str] | None,
) -> str:
    if not metric.due(record.step):
        last = absent.get((metric.source, "")) if metric.source in n.ATTENTION_SOURCES.values() else None
        return f"measured on steps divisible by {metric.every}{'' if last is None else f'; in the last of them {last}'}"
    if metric.shown and not situation.planned(metric):
        return ASKED_LATE
    for place in (f"{name}/{metric.name}", name, ""):
        if not place and situation.is_frozen(metric.source, name):
            return FROZEN
        if (metric.source, place) in absent:
            return absent[metric.source, place]
    if (metric.source, name, metric.name) in of_parts:
        return of_parts[metric.source, name, metric.name]
    if name in owners.get(metric.source, ()):
        if metric.name == "ratio":
            return "the norm of the parameter was zero or NaN before the update"
        return f"the tensor has no {VIEWS[metric.name].needs}" if metric.name in VIEWS else metric.why_nothing()
    reason = situation.reason(metric.source, name, record, owned) if metric.source in n.PARAMETER_SOURCES else ""
    return reason or _DEFAULT_REASONS.get(metric.source, "not measured in this step")


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
