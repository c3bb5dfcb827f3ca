"""Measure the tensors of one source according to its plan, and store the results in the step's buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import Key
from ..statistics.dispatch import Statistics
from ..statistics.histogram import OF_MATRICES
from ..statistics.request import as_plain, on_accelerator, refusal
from ..step.buffer import StepBuffer
from ..step.plan import SourcePlan
from ..step.ranks import Ranks
from .metric_functions import (
    NO_STATE,
    MetricFunctions,
    Products,
    by_device,
    each_tensor,
    tensors_in,
    unscaled,
    untouched_rng,
    values_of,
)


class Measurement(NamedTuple):
    buffer: StepBuffer  # gets the results
    plan: SourcePlan  # of the source
    tensors: Mapping[int, Any]  # by their position in the plan
    inverse_scale: Tensor | None = None  # 0-d tensor that multiplies each tensor first, or None
    # tensors by position to subtract from each before statistics, and the second argument of metric functions
    second: Mapping[int, Tensor] | None = None
    merging: bool = False  # merge with earlier results of the step instead of replacing them
    # the tensors are already what this rank counts of them; the plan's functions, which get whole ones, are not run
    are_parts: bool = False


class Measurer:
    def __init__(self, built_in: Statistics, complaints: WarningLog, ranks: Ranks | None = None) -> None:
        self.built_in = built_in
        self.ranks = ranks or Ranks()
        self.complaints = complaints
        self.functions = MetricFunctions(complaints)

    def measure(self, wanted: Measurement) -> None:
        plan, tensors, others = wanted.plan, wanted.tensors, None
        if plan.measured != tuple(tensors):  # in most steps all are there
            tensors = {p: tensors[p] for p in plan.measured if p in tensors}
        parts = tensors if wanted.are_parts else self.ranks.own_parts(tensors, plan.spread)
        found = list(parts.values())
        together = (as_plain(found) or on_accelerator(found)) if found else None
        for positions, values in [(list(parts), together)] if together else self._by_device(wanted, parts):
            if wanted.second is not None:
                second = {p: wanted.second[p] for p in positions}
                others = list((second if wanted.are_parts else self.ranks.own_parts(second, plan.spread)).values())
            scale = None if wanted.inverse_scale is None else wanted.inverse_scale.to(values[0].device)
            rows = self.built_in.measure(values, plan.columns, scale, others)
            put = wanted.buffer.merge_rows if wanted.merging else wanted.buffer.put_rows
            put(plan.source, plan.names_at(positions), rows, plan.columns)
        if plan.functions and not wanted.are_parts:
            self.run_functions(wanted)

    def _by_device(self, wanted: Measurement, parts: Mapping[int, Tensor]) -> Iterable[tuple[list[int], list[Tensor]]]:
        groups: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for position, part in parts.items():
            if (reason := refusal(part)) is None:
                positions, values = groups.setdefault(part.device, ([], []))
                positions.append(position)
                values.append(part)
            else:
                wanted.buffer.refuse(wanted.plan.source, wanted.plan.names[position], reason)
        return groups.values()

    def run_functions(self, wanted: Measurement) -> None:
        plan, second = wanted.plan, wanted.second
        due = [position for position in plan.functions if position in wanted.tensors]
        if self.ranks.has_parts:
            for position in plan.functions.keys() - set(due):
                for metric in plan.functions[position]:
                    path = f"{plan.names[position]}/{metric.name}"
                    wanted.buffer.absent.setdefault((plan.source, path), "no value came from the rank that has it")
        if not due:
            return
        spread = plan.spread if self.ranks.count > 1 else frozenset()
        done = self._products(wanted, set(due) - spread)
        left = {p: metrics for p in due if (metrics := [m for m in plan.functions[p] if (p, m.name) not in done])}
        if not left:
            return
        # those of this package draw no numbers; and to restore a generator that another thread draws from would repeat numbers there
        is_ours = all(metric.built_in for metrics in left.values() for metric in metrics)
        with nullcontext() if is_ours else untouched_rng():
            for position, metrics in left.items():
                is_here_alone = position in spread and self.ranks.is_at_home(position, tensors_in([wanted.tensors[position]]))
                if position in spread and not is_here_alone:
                    self._shardwise(wanted, position)
                    continue
                value = each_tensor(wanted.tensors[position], lambda t: self.ranks.own_part(t, spread=False))
                if isinstance(value, Tensor) and (reason := refusal(value)) is not None:
                    wanted.buffer.absent[plan.source, plan.names[position]] = reason
                    continue
                if wanted.inverse_scale is not None:
                    value = unscaled(value, wanted.inverse_scale)
                inputs = [value] if second is None else [value, second[position]]
                run = partial(self.functions.run, wanted.buffer, plan.source, plan.names[position], merging=wanted.merging)
                if position in plan.kernels and (of_matrices := [m for m in metrics if m.function in OF_MATRICES]):
                    run(of_matrices, [value.flatten(1)])
                    metrics = [metric for metric in metrics if metric not in of_matrices]
                run(metrics, inputs)
                if is_here_alone:  # the other ranks add nothing to the sum
                    for metric in metrics:
                        wanted.buffer.share(Key(plan.source, plan.names[position], metric.name), "sum")

    def _products(self, wanted: Measurement, due: Set[int]) -> set[tuple[int, str]]:
        """Store the values of metrics that follow from inner products, all on one device at once. Returns their positions and metrics; the
        caller calls others one by one, such as those of a tensor that cannot be read.
        """
        plan, buffer = wanted.plan, wanted.buffer
        found: list[Products] = []
        done: set[tuple[int, str]] = set()
        for metric, applied in plan.applied:
            if not hasattr(metric.function, "pairs"):
                continue
            pairs = {p: metric.function.pairs(wanted.tensors[p]) for p in applied if p in due}  # type: ignore[union-attr]
            for position in [position for position, of_one in pairs.items() if not of_one]:
                del pairs[position]
                buffer.absent[plan.source, f"{plan.names[position]}/{metric.name}"] = NO_STATE
                done.add((position, metric.name))
            if pairs:
                found.append(Products(metric, list(pairs), list(pairs.values())))
        for together in by_device(found, lambda tensor: self.ranks.own_part(tensor, spread=False)):
            try:
                values = values_of(together, self.built_in.inner_products)
            except Exception:  # whose tensor it was is found out where they are called one by one
                continue
            for one, own in zip(together, values, strict=True):
                buffer.put_values([Key(plan.source, plan.names[position], one.metric.name) for position in one.positions], own)
                done |= {(position, one.metric.name) for position in one.positions}
        return done

    def _shardwise(self, wanted: Measurement, position: int) -> None:
        """Run functions that accept this rank's part of a sharded tensor; their values are merged over ranks."""
        buffer, source = wanted.buffer, wanted.plan.source
        name, metrics = wanted.plan.names[position], wanted.plan.functions[position]
        summable = [metric for metric in metrics if hasattr(metric.function, "contribution")]
        for metric in metrics:
            if not metric.shardwise and metric not in summable:
                buffer.absent[source, f"{name}/{metric.name}"] = (
                    "its elements are sharded over ranks, so no rank can compute a function of all of them; shardwise=True declares "
                    "that the values of parts can be merged"
                )
        due = [metric for metric in metrics if metric.shardwise]
        if not due and not summable:
            return
        values = [wanted.tensors[position], None if wanted.second is None else wanted.second[position]]
        inputs = [each_tensor(x, lambda t: self.ranks.part_at(position, t)) for x in values if x is not None]
        part = inputs[0]["param"] if isinstance(inputs[0], Mapping) else inputs[0]
        if not (weight := part.numel()):  # another rank has it
            return
        if wanted.inverse_scale is not None:
            inputs = [unscaled(tensor, wanted.inverse_scale) for tensor in inputs]
        for metric in summable:
            found = metric.function.contribution(*inputs)  # type: ignore[union-attr]
            if found is not None:
                buffer.contribute(Key(source, name, metric.name), *found)
        self.functions.run(buffer, source, name, due, inputs, wanted.merging, weight)
        for metric in due:
            buffer.share(Key(source, name, metric.name), str(metric.aggregation))
