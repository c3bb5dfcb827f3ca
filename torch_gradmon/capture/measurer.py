"""Measure the tensors of one source according to its plan: statistics, and metric functions. A function that fails is switched off."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from itertools import chain, compress, count
from operator import not_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import torch_modes
from ..core.errors import WarningLog
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.records import Metric
from ..core.torch_modes import no_autocast
from ..statistics.dispatch import Statistics
from ..statistics.eager import inner_product, sum_of_squared_ratios
from ..statistics.request import PLAIN, accumulator_dtype, as_plain, on_accelerator, refusal
from ..step.buffer import StepBuffer, cosine, growth, turn
from ..step.plan import OF_MATRICES, BuiltIn, SourcePlan
from ..step.ranks import Ranks

# --- Metrics of the optimizer's state, and of updates beside their parameters ---

State = Mapping[str, Any]
#: For each of several pairs that a parameter has, the first tensors of all parameters and the second ones; None where one has no pairs.
_Pairs = Sequence[tuple[Sequence[Any], Sequence[Any]]]


class OfProducts:
    """A ``value`` of inner products of the ``pairs`` of tensors in states, which add up over ranks; a state without pairs has no value."""

    def __init__(self, reducer: str, value: Callable[..., Tensor], pairs: Callable[[Mapping[int, State]], _Pairs]) -> None:
        self._reducer, self.value, self.pairs = reducer, value, pairs

    def __call__(self, state: State) -> Tensor | None:
        found = self.contribution(state)
        return None if found is None else self.value(*found[1].unbind())

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """What one rank's part of a tensor contributes, and how contributions merge."""
        pairs = self.pairs({0: state})
        if pairs[0][0][0] is None:
            return None
        return self._reducer, torch.stack([inner_product(a, b) for (a,), (b,) in pairs])


def _first_of(states: Mapping[int, State], *names: str) -> list[Any]:
    """The first of these entries that is a tensor, of each state."""
    first = [state.get(names[0]) for state in states.values()]
    if PLAIN.issuperset(map(type, first)):
        return first
    return [next((x for x in map(state.get, names) if isinstance(x, Tensor)), None) for state in states.values()]


def _norm_of(*names: str) -> OfProducts:
    return OfProducts("norm", torch.sqrt, lambda states: [(found := _first_of(states, *names), found)])


def _with_momentum(states: Mapping[int, State]) -> _Pairs:
    momenta = _first_of(states, "exp_avg", "momentum_buffer")
    gradients = [state["grad"] for state in states.values()]
    for place, (gradient, momentum) in enumerate(zip(gradients, momenta, strict=True)):
        if gradient is None or momentum is None or momentum.shape != gradient.shape:
            gradients[place] = None
    return [(gradients, momenta), (gradients, gradients), (momenta, momenta)]


def _with_change(states: Mapping[int, State]) -> _Pairs:
    before, changes = [x["param"] for x in states.values()], [x["change"] for x in states.values()]
    return [(before, before), (before, changes), (changes, changes)]


class OutOfStep:
    """How far the gradient has left Adam's second moment behind: ``sqrt(mean(g^2 / max(v, eps^2)))``, v with Adam's correction for the
    first steps. StableAdamW divides its rate by this number where it is above 1; its authors saw that spikes of the loss come one to
    eight steps after it has risen (Wortsman et al. 2023, arXiv 2304.13013, abstract).
    """

    def __call__(self, state: State) -> Tensor | None:
        found = self.contribution(state)
        return None if found is None else (found[1][0] / found[1][1]).sqrt()

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """The sum over the elements and their number, ``[2]``; None without a second moment of Adam."""
        gradient, moment, step, group = (state.get(name) for name in ("grad", "exp_avg_sq", "step", "group"))
        if gradient is None or not isinstance(moment, Tensor) or moment.shape != gradient.shape or gradient.is_complex():
            return None
        if not group or step is None or not {"betas", "eps"} <= group.keys():
            return None
        if isinstance(step, Tensor):  # on the CPU, unless the optimizer is fused or capturable
            step = step.to(accumulator_dtype(step.device))
        corrected = 1 - group["betas"][1] ** step
        sums = sum_of_squared_ratios(gradient, moment, corrected, group["eps"] ** 2)
        return "rms", torch.stack([sums, sums.new_full((), moment.numel())])


#: A metric whose values follow from inner products, the keys of all its values, the positions of those that have pairs, and these.
_Products = tuple[Metric, dict[int, Key], list[int], _Pairs]


def _numbered(wanted: Sequence[_Products]) -> tuple[list[Sequence[Tensor]], list[tuple[int, int]], list[list[tuple[int, int]]]]:
    """The columns in pairs and pairs of their numbers, each once though several metrics may need it, and the pairs of each metric."""
    columns = {id(column): column for *_, pairs in wanted for pair in pairs for column in pair}
    contents = {number: (*map(id, column),) for number, column in columns.items()}
    once = dict(zip(contents.values(), columns.values(), strict=True))
    number = dict(zip(once, count()))
    kinds = [[(number[contents[id(a)]], number[contents[id(b)]]) for a, b in pairs] for *_, pairs in wanted]
    return [*once.values()], [*dict.fromkeys(chain.from_iterable(kinds))], kinds


def _where(there: Sequence[bool], pairs: _Pairs) -> _Pairs:
    return [([*compress(first, there)], [*compress(second, there)]) for first, second in pairs]


def _apart(wanted: Sequence[_Products], own_part: Callable[[Tensor], Tensor]) -> Iterable[Sequence[_Products]]:
    """What can be computed together, of the part of each tensor that this rank has. A parameter is left out if a tensor of its pairs
    cannot be read, or lies on another device.
    """
    every = [tensor for *_, pairs in wanted for pair in pairs for column in pair for tensor in column]
    tensors = dict(zip(map(id, every), every, strict=True))
    if not tensors or as_plain(together := list(tensors.values())) or on_accelerator(together):
        return [wanted] if tensors else []
    parts = {number: own_part(tensor) for number, tensor in tensors.items()}  # of a tensor in several pairs there is one
    groups: dict[torch.device, list[_Products]] = {}
    for metric, keys, positions, pairs in wanted:
        own = [([parts[id(a)] for a in first], [parts[id(b)] for b in second]) for first, second in pairs]
        devices: list[torch.device | None] = []
        for of_one in zip(*chain.from_iterable(own), strict=True):
            is_readable = len({tensor.device for tensor in of_one}) == 1 and all(refusal(tensor) is None for tensor in of_one)
            devices.append(of_one[0].device if is_readable else None)
        for device in dict.fromkeys(filter(None, devices)):
            there = [each == device for each in devices]
            groups.setdefault(device, []).append((metric, keys, [*compress(positions, there)], _where(there, own)))
    return groups.values()


#: Built-ins of the optimizer's state after the step, which includes this step's gradient. The cosine is MosaicML Composer's
#: ``cosine/moment_grad``.
OPTIMIZER_BUILT_INS = {
    "exp_avg_norm": BuiltIn("1", "norm of the first moment or momentum", _norm_of("exp_avg", "momentum_buffer")),
    "exp_avg_sq_norm": BuiltIn("1", "norm of the second moment of Adam and its kin", _norm_of("exp_avg_sq", "square_avg")),
    "grad_momentum_cosine": BuiltIn(
        "1", "cosine between the gradient and the momentum", OfProducts("cosine", cosine, _with_momentum)
    ),
    "second_moment_ratio": BuiltIn("1", "root mean square of the gradient over the root of Adam's second moment", OutOfStep()),
}


#: Built-ins of the change beside the parameter before it.
UPDATE_BUILT_INS = {
    "angle": BuiltIn(
        "rad",
        "angle between the parameter before and after the step; absent for a zero parameter",
        OfProducts("angle", turn, _with_change),
    ),
    "growth": BuiltIn(
        "1",
        "relative growth of the parameter's norm in the step; absent for a zero parameter",
        OfProducts("growth", growth, _with_change),
    ),
}


#: The reason for a missing value of an optimizer's state.
NO_STATE = "the optimizer keeps no such state for it"


def _why_nothing(metric: Metric, value: Any) -> str:
    if metric.built_in and not isinstance(value, Tensor):
        return NO_STATE
    if metric.built_in and metric.source in PARAMETER_SOURCES:
        return metric.why_nothing(f"for a tensor of shape {list(value.shape)}")
    return metric.why_nothing()


def unscaled(tensor: Tensor, inverse_scale: Tensor) -> Tensor:
    """``tensor`` times ``inverse_scale``, in float32 or wider, since a narrow dtype cannot hold every inverse scale."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * inverse_scale.to(tensor.device)


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    return [t for x in values for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or refusal(a) is not None:
        return True  # only the version counter can show a change
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: change(item) if isinstance(item, Tensor) else item for name, item in value.items()}
    return value


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore all random generators afterwards, so training draws the same numbers as without."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = None if numpy is None else numpy.get_state()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch_modes.untouched_generators([torch_modes.in_use()]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


# --- Statistics and functions of the tensors of one source ---


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
    """Runs the statistics and the metric functions. One of these that fails is switched off, and training continues."""

    def __init__(self, statistics: Statistics, complaints: WarningLog, ranks: Ranks | None = None) -> None:
        self.statistics = statistics
        self.ranks = ranks or Ranks()
        self.complaints = complaints
        # of metric functions: those that ran on a copy, why others are off, and of each metric the first key without a value, if all are
        self._proven: set[Key] = set()
        self._off: dict[Key, str] = {}
        self._silent: dict[str, Key | None] = {}

    def measure(self, wanted: Measurement) -> None:
        plan, tensors, found = wanted.plan, wanted.tensors, None
        if plan.measured != tuple(tensors):  # in most steps all are there
            tensors = {p: tensors[p] for p in plan.measured if p in tensors}
        values, second, kernel = list(tensors.values()), wanted.second, self.statistics.kernel
        # a plain one is its own part
        if kernel and values and values[0].is_cpu and (wanted.are_parts or not self.ranks.has_parts):
            others = None if second is None else [second[position] for position in tensors]
            try:
                found = kernel.at_once(values, self.statistics.eps, wanted.inverse_scale, others, plan.source)
            except Exception:  # what is called then fails too, and says so
                found = None
        for positions, rows, *totals in self._measured_apart(wanted, tensors) if found is None else [(list(tensors), *found)]:
            names = plan.names if len(positions) == len(plan.names) else plan.names_at(positions)
            if wanted.merging:
                wanted.buffer.merge_rows(plan.source, names, rows, plan.columns)
            else:
                wanted.buffer.put_rows(plan.source, names, rows, plan.columns, *totals)
        if plan.functions and not wanted.are_parts:
            self.run_functions(wanted)

    def _measured_apart(self, wanted: Measurement, tensors: Mapping[int, Any]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Positions and rows of this rank's parts of the tensors, those of one device together."""
        plan, others = wanted.plan, None
        parts = tensors if wanted.are_parts else self.ranks.own_parts(tensors, plan.spread)
        found = list(parts.values())
        together = (as_plain(found) if found[0].is_cpu else on_accelerator(found)) if found else None
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for position, part in () if together else parts.items():
            if (reason := refusal(part)) is None:
                by_device.setdefault(part.device, {})[position] = part
            else:
                wanted.buffer.refuse(plan.source, plan.names[position], reason)
        for group in [parts] if together else by_device.values():
            if wanted.second is not None:
                second = {position: wanted.second[position] for position in group}
                others = list((second if wanted.are_parts else self.ranks.own_parts(second, plan.spread)).values())
            values = together or list(group.values())
            yield list(group), self.statistics.measure(values, plan.columns, wanted.inverse_scale, others)

    def run_functions(self, wanted: Measurement) -> None:
        plan, second = wanted.plan, wanted.second
        due = plan.functions.keys() & wanted.tensors.keys()
        if self.ranks.has_parts:
            for position in plan.functions.keys() - due:
                for metric in plan.functions[position]:
                    path = f"{plan.names[position]}/{metric.name}"
                    wanted.buffer.absent.setdefault((plan.source, path), "no value came from the rank that has it")
        if not due:
            return
        spread = plan.spread if self.ranks.count > 1 else frozenset()
        done = self._products(wanted, due - spread)
        if all(done[metric.name] >= due & keys.keys() for metric, keys in plan.applied):
            return
        left = {p: own for p, each in plan.functions.items() if p in due and (own := [m for m in each if p not in done[m.name]])}
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
                run = partial(self.apply, wanted.buffer, plan.source, plan.names[position], merging=wanted.merging)
                if position in plan.kernels and (of_matrices := [m for m in metrics if m.built_in and m.name in OF_MATRICES]):
                    run(of_matrices, [value.flatten(1)])
                    metrics = [metric for metric in metrics if metric not in of_matrices]
                run(metrics, inputs)
                if is_here_alone:  # the other ranks add nothing to the sum
                    for metric in metrics:
                        wanted.buffer.share(Key(plan.source, plan.names[position], metric.name), "sum")

    def _products(self, wanted: Measurement, due: Set[int]) -> dict[str, set[int]]:
        """Store the values of metrics that follow from inner products, all on one device at once. Returns their positions by metric; the
        caller calls others one by one, such as those of a tensor that cannot be read.
        """
        plan, buffer = wanted.plan, wanted.buffer
        found: list[_Products] = []
        done: dict[str, set[int]] = defaultdict(set)
        for metric, keys in plan.applied:
            if hasattr(metric.function, "pairs"):
                states = {position: wanted.tensors[position] for position in keys if position in due}
                pairs = metric.function.pairs(states)  # type: ignore[union-attr]
                there = [tensor is not None for tensor in pairs[0][0]]
                for position in sorted(compress(states, map(not_, there))):
                    buffer.absent[plan.source, f"{plan.names[position]}/{metric.name}"] = NO_STATE
                    done[metric.name].add(position)
                if any(there):
                    found.append((metric, keys, [*compress(states, there)], pairs if all(there) else _where(there, pairs)))
        numbered, kernel = _numbered(found), self.statistics.kernel
        try:
            at_once = None if kernel is None or not found else kernel.products_at_once(*numbered[:2], plan.source)
        except Exception:  # what is called then fails too
            at_once = None
        for together in _apart(found, partial(self.ranks.own_part, spread=False)) if at_once is None else [found]:
            columns, once, kinds = numbered if together is found else _numbered(together)
            try:
                products = at_once
                if products is None:
                    sides = ([*chain.from_iterable(columns[pair[side]] for pair in once)] for side in (0, 1))
                    products = self.statistics.inner_products(*sides)
                found_for = dict(zip(once, torch.split(products, [len(columns[first]) for first, _ in once]), strict=True))
                values = [
                    metric.function.value(*map(found_for.__getitem__, of_metric))  # type: ignore[union-attr]
                    for (metric, *_), of_metric in zip(together, kinds, strict=True)
                ]
            except Exception:  # whose tensor it was is found out where they are called one by one
                continue
            for (metric, keys, positions, _), own in zip(together, values, strict=True):
                buffer.put_values([*map(keys.__getitem__, positions)], own)
                done[metric.name].update(positions)
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
        self.apply(buffer, source, name, due, inputs, wanted.merging, weight)
        for metric in due:
            buffer.share(Key(source, name, metric.name), str(metric.aggregation))

    def apply(
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
                    # some tensors may have none; if the first comes round again before there was one of any, that is a mistake
                    if cause not in self._silent:
                        self._silent[cause] = key
                    elif self._silent[cause] == key and not metric.built_in:
                        message = f"the function of the metric {metric.name!r} has returned None each time so far: is its return missing?"
                        self.complaints.add(f"nothing:{metric.name}", message)
                else:
                    self._silent[cause] = None
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
        given = [each_tensor(x, (lambda t: t.detach().clone()) if first else (lambda t: t.detach())) for x in inputs]
        tensors = tensors_in(given)
        versions = [version_of(t) for t in tensors]
        with torch.no_grad(), no_autocast(next((tensor.device.type for tensor in tensors_in(inputs)), "cpu")):
            value = metric.function(*given)
        moved = versions != [version_of(t) for t in tensors]
        # NumPy and the like write without moving a version counter; on the copy the values show it
        if moved or (first and not all(_equal(a, b) for a, b in zip(tensors, tensors_in(inputs), strict=True))):
            raise ValueError("it changes its input in place, which would change the training; use abs() instead of abs_()")
        self._proven.add(key)
        return value
