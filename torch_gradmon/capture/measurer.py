"""Measure the tensors of one source according to its plan, and store the results in the step's buffer."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import accelerator
from ..core.errors import WarningLog
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.metric import Metric
from ..core.torch_modes import no_autocast
from ..statistics.dispatch import Statistics
from ..statistics.tensor_access import on_one_device, refusal
from ..step.buffer import StepBuffer
from ..step.plan import SourcePlan
from ..step.ranks import Ranks
from .parameter_functions import Products, by_device, values_of

_SPREAD = (
    "its elements are sharded over ranks, so no rank can compute a function of all of them; shardwise=True declares that "
    "the values of parts can be merged"
)
_NOT_HERE = "no value came from the rank that has it"
_NO_STATE = "the optimizer keeps no such state for it"


@dataclass(frozen=True)
class Measurement:
    """Tensors of one source to measure.

    Attributes:
        buffer: gets the results.
        plan: of the source.
        tensors: by their position in the plan.
        inverse_scale: 0-d tensor that multiplies each tensor first, or None.
        second: tensors by position to subtract from each before statistics, and the second argument of metric functions.
        merging: merge with earlier results of the step instead of replacing them.
        are_parts: the tensors are already what this rank counts of them.
    """

    buffer: StepBuffer
    plan: SourcePlan
    tensors: Mapping[int, Any]
    inverse_scale: Tensor | None = None
    second: Mapping[int, Tensor] | None = None
    merging: bool = False
    are_parts: bool = False


class Measurer:
    """Runs the statistics and the metric functions; a function that fails is switched off, and training continues.

    Args:
        built_in: measures the statistics of built-in metrics.
        complaints: gets failures.
        ranks: those over which rows are merged.
    """

    def __init__(self, built_in: Statistics, complaints: WarningLog, ranks: Ranks | None = None) -> None:
        self.built_in = built_in
        self.ranks = ranks or Ranks()
        self.complaints = complaints
        self._proven: set[Key] = set()
        self._off: dict[Key, str] = {}

    def measure(self, wanted: Measurement) -> None:
        """Run the statistics and the metric functions of the plan."""
        self.statistics(wanted)
        self.run_functions(wanted)

    def statistics(self, wanted: Measurement) -> None:
        """Measure the statistics that the plan needs."""
        plan, tensors = wanted.plan, wanted.tensors
        if plan.measured != tuple(tensors):  # in most steps all are there
            tensors = {p: tensors[p] for p in plan.measured if p in tensors}
        parts = tensors if wanted.are_parts else self.ranks.own_parts(tensors, plan.spread)
        if not parts:
            return
        if (values := on_one_device(list(parts.values()))) is not None:
            self._measure(wanted, list(parts), values)
            return
        groups: dict[torch.device, dict[int, Tensor]] = {}
        for position, part in parts.items():
            if (reason := refusal(part)) is None:
                groups.setdefault(part.device, {})[position] = part
            else:
                wanted.buffer.refuse(plan.source, plan.names[position], reason)
        for found in groups.values():
            self._measure(wanted, list(found), list(found.values()))

    def _measure(self, wanted: Measurement, positions: Sequence[int], values: Sequence[Tensor]) -> None:
        """Store the statistics of these tensors, all on one device."""
        plan, others = wanted.plan, None
        if wanted.second is not None:
            second = {p: wanted.second[p] for p in positions}
            others = list((second if wanted.are_parts else self.ranks.own_parts(second, plan.spread)).values())
        scale = None if wanted.inverse_scale is None else wanted.inverse_scale.to(values[0].device)
        rows = self.built_in.measure(values, plan.columns, scale, others)
        put = wanted.buffer.merge_rows if wanted.merging else wanted.buffer.put_rows
        put(plan.source, plan.names_at(positions), rows, plan.columns)

    def run_functions(self, wanted: Measurement) -> None:
        """Run the metric functions of the plan."""
        plan, second = wanted.plan, wanted.second
        due = [position for position in plan.functions if position in wanted.tensors]
        if self.ranks.has_parts:
            for position in plan.functions.keys() - set(due):
                for metric in plan.functions[position]:
                    wanted.buffer.absent.setdefault((plan.source, f"{plan.names[position]}/{metric.name}"), _NOT_HERE)
        if not due:
            return
        spread = plan.spread if self.ranks.count > 1 else frozenset()
        done = self._products(wanted, set(due) - spread)
        left = {p: metrics for p in due if (metrics := [m for m in plan.functions[p] if (p, m.name) not in done])}
        if not left:
            return
        with untouched_rng():
            for position, metrics in left.items():
                is_here_alone = position in spread and self.ranks.is_at_home(position, _tensors_in([wanted.tensors[position]]))
                if position in spread and not is_here_alone:
                    self._shardwise(wanted, position)
                    continue
                value = _each_tensor(wanted.tensors[position], lambda t: self.ranks.own_part(t, spread=False))
                if isinstance(value, Tensor) and (reason := refusal(value)) is not None:
                    wanted.buffer.absent[plan.source, plan.names[position]] = reason
                    continue
                if wanted.inverse_scale is not None:
                    value = unscaled(value, wanted.inverse_scale)
                inputs = [value] if second is None else [value, second[position]]
                self.functions(wanted.buffer, plan.source, plan.names[position], metrics, inputs, wanted.merging)
                if is_here_alone:  # the other ranks add nothing to the sum
                    for metric in metrics:
                        wanted.buffer.share(Key(plan.source, plan.names[position], metric.name), "sum")

    def _products(self, wanted: Measurement, due: Set[int]) -> set[tuple[int, str]]:
        """Store the values of metrics that follow from inner products, all on one device at once.

        Returns:
            The positions and metrics that were; the caller calls others one by one, such as those of a tensor that cannot be read.
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
                buffer.absent[plan.source, f"{plan.names[position]}/{metric.name}"] = _NO_STATE
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
                buffer.absent[source, f"{name}/{metric.name}"] = _SPREAD
        due = [metric for metric in metrics if metric.shardwise]
        if not due and not summable:
            return
        values = [wanted.tensors[position], None if wanted.second is None else wanted.second[position]]
        inputs = [_each_tensor(x, lambda t: self.ranks.part_at(position, t)) for x in values if x is not None]
        part = inputs[0]["param"] if isinstance(inputs[0], Mapping) else inputs[0]
        if not (weight := part.numel()):  # another rank has it
            return
        if wanted.inverse_scale is not None:
            inputs = [unscaled(tensor, wanted.inverse_scale) for tensor in inputs]
        for metric in summable:
            found = metric.function.contribution(*inputs)  # type: ignore[union-attr]
            if found is not None:
                buffer.contribute(Key(source, name, metric.name), *found)
        self.functions(buffer, source, name, due, inputs, wanted.merging, weight)
        for metric in due:
            buffer.share(Key(source, name, metric.name), str(metric.aggregation))

    def functions(
        self,
        buffer: StepBuffer,
        source: str,
        name: str,
        metrics: Sequence[Metric],
        inputs: Sequence[Any],
        merging: bool = False,
        weight: int = 1,
    ) -> None:
        """Store the value of each metric function of ``inputs``; ``weight``: of a single value in a mean."""
        for metric in metrics:
            key, cause = Key(source, name, metric.name), f"metric:{source}:{metric.name}"
            if key in self._off:
                self.complaints.counts[cause] += 1
                buffer.absent[key.source, f"{name}/{metric.name}"] = self._off[key]
                continue
            try:
                value = self._call(metric, key, inputs)
                if value is None:
                    buffer.absent[key.source, f"{name}/{metric.name}"] = _why_nothing(metric, inputs[0])
                else:
                    (buffer.merge_value if merging else buffer.put_value)(key, value, metric.aggregation, weight)
            except Exception as error:
                self._off[key] = f"its function raised {type(error).__name__}: {error}"
                buffer.absent[key.source, f"{name}/{metric.name}"] = self._off[key]
                message = f"the {metric.source} metric {metric.name!r} failed on {name} and is off for it; training continues"
                self.complaints.add(cause, message, error)

    def _call(self, metric: Metric, key: Key, inputs: Sequence[Any]) -> Any:
        """The value of the metric's function. Rejects in-place functions; the first call on each tensor runs on a copy."""
        assert callable(metric.function)
        first = key not in self._proven
        given = [_each_tensor(x, (lambda t: t.detach().clone()) if first else (lambda t: t.detach())) for x in inputs]
        tensors = _tensors_in(given)
        versions = [_version(t) for t in tensors]
        with torch.no_grad(), no_autocast(_device_type(inputs)):
            value = metric.function(*given)
        moved = versions != [_version(t) for t in tensors]
        # NumPy and the like write without moving a version counter; on the copy the values show it
        moved = moved or (first and not all(_equal(a, b) for a, b in zip(tensors, _tensors_in(inputs), strict=True)))
        if moved:
            raise ValueError("it changes its input in place, which would change the training; use abs() instead of abs_()")
        self._proven.add(key)
        return value


def _why_nothing(metric: Metric, value: Any) -> str:
    """Why the function of a metric returns None for this value."""
    if metric.built_in and not isinstance(value, Tensor):
        return _NO_STATE
    if metric.built_in and metric.source in PARAMETER_SOURCES:
        return metric.why_nothing(f"for a tensor of shape {list(value.shape)}")
    return metric.why_nothing()


def unscaled(tensor: Tensor, inverse_scale: Tensor) -> Tensor:
    """``tensor`` times ``inverse_scale``, in float32 or wider, since a narrow dtype cannot hold every inverse scale."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * inverse_scale.to(tensor.device)


def _tensors_in(values: Sequence[Any]) -> list[Tensor]:
    return [t for x in values for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or refusal(a) is not None:
        return True  # only the version counter can show a change
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: change(item) if isinstance(item, Tensor) else item for name, item in value.items()}
    return value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _device_type(inputs: Sequence[Any]) -> str:
    return next((tensor.device.type for tensor in _tensors_in(inputs)), "cpu")


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore all random generators afterwards, so training draws the same numbers as without."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = None if numpy is None else numpy.get_state()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), accelerator.untouched_generators([accelerator.in_use()]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)
