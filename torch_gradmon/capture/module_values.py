"""Statistics of the tensors of modules, where each is kept until its step is read."""

from __future__ import annotations

import math
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import keys as n
from ..core.errors import WarningLog
from ..core.keys import ACTIVATION, UNDEFINED, Key
from ..core.moments import ALL_COLUMNS, WIDTH, Column
from ..core.records import Block, ForModule, Metric, StatsTable
from ..core.torch_modes import current_stream, keep_for_current_stream, on_stream, spare_memory, stream_number
from ..statistics.dispatch import Statistics
from ..statistics.eager import SMALL
from ..statistics.request import NARROW, accumulator_dtype, is_plain, refusal, threshold
from ..step.buffer import StepBuffer
from ..step.plan import PARTICIPATION_RATIO, BuiltIn, Views, view_blocks
from .hooks import tensors_of
from .measurer import Measurer, unscaled, untouched_rng


def rest_of(path: str, name: str, taken: Container[str]) -> str:
    """What ``path`` adds to its prefix ``name``; in brackets if a module has that name.

    >>> rest_of("head.logits", "head", {"head"}), rest_of("head.logits", "head", {"head", "head.logits"})
    ('.logits', '[logits]')
    """
    rest = path[len(name) :]
    ends = [place for place in range(len(name) + 1, len(path) + 1) if place == len(path) or path[place] in ".[@"]
    if not rest.startswith(".") or not any(path[:end] in taken for end in ends):
        return rest
    first = ends[0] - len(name)
    return f"[{rest[1:first]}]{rest[first:]}"


# --- Metrics of units ---

#: Consecutive monitored steps without output after which a unit counts as dead.
WINDOW = 100
#: Distance from either bound of a sigmoid or tanh within which an output counts as saturated.
MARGIN = 0.05

#: Share of the mean over the units at or below which a unit is dormant (Sokar et al. 2023, arXiv 2302.12902, definition 3.1, whose code
#: takes 0.025 and 0.1).
DORMANT_SHARE = 0.025

_BOUNDS = ((nn.Sigmoid, 0.0, 1.0), (nn.Hardsigmoid, 0.0, 1.0), (nn.Tanh, -1.0, 1.0))
_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._LPPoolNd,
)


def _saturation(module: Any) -> Callable[[Tensor], Tensor] | str:
    bounds = next(((low, high) for kind, low, high in _BOUNDS if isinstance(module, kind)), None)
    if bounds is None:
        return f"its module is no {', '.join(kind.__name__ for kind, *_ in _BOUNDS)}, whose outputs have bounds"
    low, high = bounds

    def share(output: Tensor) -> Tensor:
        wide = output.to(accumulator_dtype(output.device))  # in which the bounds are exact
        return ((wide < low + MARGIN) | (wide > high - MARGIN)).to(wide.dtype)

    return share


def _unit_dimension(module: Any) -> Callable[[Tensor], int]:
    """A function that finds the dimension of the units in an output of the module, which has one at least: the first one after the batch
    for convolutions, batch norms, pooling and other modules with outputs of four dimensions or more; else the last.
    """
    has_channels, is_linear = isinstance(module, _CHANNELS_FIRST), isinstance(module, nn.Linear)
    of_one_sample = len(module.kernel_size) + 1 if isinstance(module, nn.modules.conv._ConvNd) else -1

    def dimension(output: Tensor) -> int:
        if output.dim() == of_one_sample:
            return 0
        channels = has_channels or (output.dim() >= 4 and not is_linear)
        return 1 if channels and output.dim() >= 3 else output.dim() - 1

    return dimension


def _dormant(module: Any) -> Callable[[Tensor], Tensor | None]:
    unit_dimension = _unit_dimension(module)

    def share(output: Tensor) -> Tensor | None:
        """Of the units whose mean |x| is :data:`DORMANT_SHARE` of the mean over the units or less; NaN with what is not finite."""
        if not output.dim() or output.layout != torch.strided:
            return None
        dim = unit_dimension(output)
        others = [other for other in range(output.dim()) if other != dim]
        wide = accumulator_dtype(output.device)
        sums = torch.linalg.vector_norm(output, 1, dim=others, dtype=wide) if others else output.abs().to(wide)
        return torch.where(sums.isfinite().all(), (sums <= DORMANT_SHARE * sums.mean()).to(wide).mean(), torch.nan)

    return share


def _participation(module: Any) -> Callable[[Tensor], Tensor | None]:
    from ..statistics.histogram import participation_ratio  # loaded with the metric, see BuiltIn

    unit_dimension = _unit_dimension(module)
    return lambda x: participation_ratio(x.movedim(unit_dimension(x), -1)) if x.dim() else None


def _singular_side(module: Any) -> Callable[[Tensor], Tensor | None] | str:
    if not isinstance(module, nn.Linear):
        return "its module is no Linear, whose output shows on which side of a singular vector an input lies"
    from ..statistics.histogram import first_left_vector

    reference = weakref.ref(module)

    def sides(output: Tensor) -> Tensor | None:
        """For each row, whether it lies on the one side of the first singular vector (1) or on the other (0)."""
        alive = reference()
        # the attribute could be a parametrization that runs
        weight = None if alive is None else alive._parameters.get("weight")
        if alive is None or weight is None or not output.dim() or refusal(weight) is not None:
            return None
        if (vector := first_left_vector(weight)) is None:
            return None
        bias = alive._parameters.get("bias")
        wide = output.to(vector.dtype) if bias is None else output.to(vector.dtype) - bias.to(vector.dtype)
        along = wide @ vector
        found = torch.where(along.isnan(), torch.nan, (along > 0).to(vector.dtype))
        return torch.where(vector.any(), found, UNDEFINED)

    return sides


class DeadUnits:
    """Counts, for one module's output, the consecutive monitored steps in which each unit was silent. Memory: five bytes per unit."""

    def __init__(self, module: Any) -> None:
        self._unit_dimension = _unit_dimension(module)
        self._alive: Tensor | None = None
        self._silent: Tensor | None = None
        self.steps, self.is_seen = 0, False  # is_seen: there was an output in this step

    def see(self, output: Tensor, eps: float) -> None:
        """Add one output of this step; a unit is alive if ``|x| > eps`` or NaN for any sample. Does not synchronise."""
        self.is_seen = True
        if output.dim() == 0:
            return
        if output.layout != torch.strided:
            output = output.to_dense()
        units = self._unit_dimension(output)
        others = [dim for dim in range(output.dim()) if dim != units]
        magnitude = output.detach().abs()
        magnitude = magnitude.float() if magnitude.dtype in NARROW else magnitude
        awake = (magnitude <= threshold(eps, magnitude.dtype)).logical_not()
        alive = awake.any(dim=others) if others else awake
        if self._alive is None or self._alive.shape != alive.shape or self._alive.device != alive.device:
            self._alive = alive
        else:
            self._alive |= alive

    def discard(self) -> None:
        self._alive, self.is_seen = None, False

    def end_step(self) -> Tensor | None:
        """The share of dead units, 0-d; None before :data:`WINDOW` steps."""
        if (alive := self._alive) is None:
            return None
        if self._silent is None or self._silent.shape != alive.shape or self._silent.device != alive.device:
            self._silent, self.steps = torch.zeros_like(alive, dtype=torch.int32), 0
        keep_for_current_stream(alive)
        keep_for_current_stream(self._silent)
        self._silent = torch.where(alive, 0, self._silent + 1)
        self.steps += 1
        dead = (self._silent >= WINDOW).to(accumulator_dtype(self._silent.device))
        return dead.mean() if self.steps >= WINDOW else None


#: Marks the metric, whose :class:`DeadUnits` outlive a call.
DEAD = ForModule(lambda _: "it is measured for outputs of modules only")
INPUT_BUILT_INS = {
    PARTICIPATION_RATIO: BuiltIn(
        "1",
        "participation ratio: how many directions the rows of units fill; mean of the micro-batches",
        ForModule(_participation),
        module="histogram",
    )
}
ACTIVATION_BUILT_INS = {
    "dead": BuiltIn(
        "share", f"units with |output| <= zero_threshold for every sample of the last {WINDOW} monitored steps", DEAD
    ),
    "saturation": BuiltIn(
        "share", f"share of the outputs of a sigmoid or tanh that are within {MARGIN} of either bound", ForModule(_saturation)
    ),
    "dormant": BuiltIn(
        "share",
        f"share of units whose mean |output| is {DORMANT_SHARE} of the mean over units or less; mean of the micro-batches",
        ForModule(_dormant),
    ),
    "spectral_alignment": BuiltIn(
        "share",
        "share of the inputs of a Linear on one side of the first singular vector of its weight: 0 or 1 if all lie on one side",
        ForModule(_singular_side),
        module="histogram",
    ),
    **INPUT_BUILT_INS,
}


class RequestedMetrics:
    """The metrics requested of one module and source. ``split``: each call of a forward has keys of its own. ``columns``: what the views of
    the source need, of any module, since a record has one set of columns for each source.
    """

    def __init__(self, metrics: Iterable[Metric], module: nn.Module | None, split: bool, columns: frozenset[Column]) -> None:
        self.split, self.dead = split, False  # dead: the share of dead units is requested
        self.views: list[Metric] = []  # built-ins that are views of the statistics
        self.functions: list[Metric] = []
        self.reasons: dict[str, str] = {}  # why a metric does not apply to this module, by name
        for metric in metrics:
            function: Any = metric.function
            bound = function.bind(module) if isinstance(function, ForModule) and function is not DEAD else function
            if function is None:
                self.views.append(metric)
            elif function is DEAD:
                self.dead = True
            elif isinstance(bound, str):
                self.reasons[metric.name] = bound
            else:
                self.functions.append(metric if bound is function else replace(metric, function=bound))
        self.columns = columns if self.views else frozenset[Column]()
        self.others = self.dead or len(self.functions) + len(self.reasons) > 0


_Place = tuple[str, str]
_Modules = Mapping[str, Callable[[], nn.Module | None]]  # by name


class Asked:
    """What the metrics of a step ask of modules. It is kept, since those of other steps are the same."""

    def __init__(self, metrics: tuple[Metric, ...], modules: _Modules) -> None:
        self._metrics, self._modules = metrics, modules
        self._found: dict[_Place, tuple[RequestedMetrics, ...]] = {}
        # the columns where only views are asked for, of all calls together; for places that were measured
        self.simple: dict[_Place, frozenset[Column]] = {}
        # by source, of the last table: the names of its rows, what was known of their calls, and its metrics
        self.last: dict[str, tuple[tuple[str, ...], tuple[object, ...], list[Views]]] = {}

    def of(self, source: str, name: str) -> tuple[RequestedMetrics, ...]:
        """What is requested of a source of a module: for all its calls together, and for each call."""
        found = self._found.get((source, name))
        if found is None:
            module, of_source = self._modules.get(name, lambda: None)(), [m for m in self._metrics if m.source == source]
            halves = [(x, [m for m in of_source if m.split_calls == x and m.matches(name)]) for x in (False, True)]
            columns = frozenset[Column]().union(*(metric.columns for metric in of_source if metric.function is None))
            requested = (RequestedMetrics(some, module, split, columns) for split, some in halves if some)
            found = self._found[source, name] = tuple(requested)
        return found


#: What is known of the calls of a step: what is asked for; by source and path of a row the name of the module, and whether its calls have
#: keys of their own; and the columns of rows that a compiled graph wrote, where rows without a count were not called.
_Calls = tuple[Asked, dict[_Place, tuple[str, bool]], dict[_Place, frozenset[Column]]]


# --- Metrics of the refined coordinate check ---


def l2norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last dimension, computed in float64: ``[..., n]`` to ``[...]``."""
    wide = torch.promote_types(x.dtype, accumulator_dtype(x.device))
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
    return norm


def rms(x: Tensor) -> Tensor:
    """:func:`l2norm` over the square root of the size, which does not grow with the width."""
    return l2norm(x) / math.sqrt(x.shape[-1] if x.dim() else 1)


def _of_terms(subject: str) -> dict[str, BuiltIn]:
    return {
        "l2norm": BuiltIn("1", f"Euclidean norm over the last dimension of {subject}, mean over the rest", l2norm),
        "rms": BuiltIn("1", f"root mean square over the last dimension of {subject}, mean over the rest", rms),
    }


#: Built-in metrics by source, in addition to the views of statistics.
MODULE_BUILT_INS: dict[str, dict[str, BuiltIn]] = {
    n.ACTIVATION: ACTIVATION_BUILT_INS,
    n.INPUT: INPUT_BUILT_INS,
    n.RCC_UPDATE: _of_terms("what the change of the weights does to the output, f(x_t; W_t) - f(x_t; W_0)"),
    n.RCC_PROPAGATED: _of_terms(
        "what the change of the input does to the output at the first weights, f(x_t; W_0) - f(x_0; W_0)"
    ),
    n.RCC_INPUT: _of_terms("the input"),
    n.RCC_INPUT_DIFFERENCE: _of_terms("the difference to the reference's input"),
}


# --- Rows of small and of large CPU tensors, which are kept as numbers and stored all at once ---

#: Elements of the copies of small tensors that are measured together: 4 MB of float32, copied while they are in a cache.
CAPACITY = 1 << 20


#: What was measured in one call: the source, the columns (None for those of all small tensors), and whether there are rows of several
#: tensors; their paths; and the numbers of one row, rows as a tensor, or None for a row of one of the small tensors.
_MeasuredCall = tuple[tuple[str, frozenset[Column] | None, bool], list[str], list[float] | Tensor | None]
_KIND = itemgetter(0)


class HostRows:
    """The rows of one step in the order of the calls, until :meth:`flush`. Small tensors are copied, and measured together."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._buffer: StepBuffer | None = None
        self._rows: list[_MeasuredCall] = []
        self._used = 0  # elements of the copies
        self._small: list[tuple[frozenset[Column], Tensor]] = []

    def begin(self, buffer: StepBuffer | None) -> None:
        """Start a step, or None: hold nothing of the last one. An interrupt at its end may have left rows."""
        self._buffer, self._rows, self._small, self._used = buffer, [], [], 0

    def append(self, source: str, paths: list[str], columns: frozenset[Column], rows: Tensor) -> None:
        if self._rows:  # keeps the order of the calls
            self._rows.append(((source, columns, True), paths, rows))
        elif self._buffer is not None:
            self._buffer.merge_rows(source, paths, rows, columns)

    def measure(self, source: str, path: str, columns: frozenset[Column], tensor: Tensor, inverse_scale: Tensor | None) -> bool:
        """Measure a CPU tensor into numbers, or copy a small one. Returns False if neither is possible."""
        if inverse_scale is not None and not inverse_scale.is_cpu:
            return False
        row, kernel = None, self._statistics.kernel
        if kernel is not None:
            row = kernel.row_of(tensor, self._statistics.eps, inverse_scale, (source, path))
        if row is None:
            if not (is_plain(tensor) and tensor.numel() <= SMALL and tensor.dtype in NARROW):
                return False
            if self._used + tensor.numel() > CAPACITY:
                self.flush()
            copy = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            self._used += tensor.numel()
            # as GradScaler.unscale_ does, in float32
            self._small.append((columns, copy if inverse_scale is None else copy.mul_(inverse_scale)))
        self._rows.append(((source, None if row is None else columns, False), [path], row))
        return True

    def flush(self) -> None:
        """Store all rows in the buffer, after measuring the small tensors."""
        assert self._buffer is not None
        measured, small = self._rows, self._small
        self._rows, self._small, self._used = [], [], 0
        if not measured:
            return
        together = frozenset[Column]().union(*{of for of, _ in small})
        waited = iter(self._statistics.measure([tensor for _, tensor in small], together).tolist())
        rows = [next(waited) if row is None else row for (*_, is_table), _, row in measured if not is_table]
        # a copy: a thread that frees the last tensor in memory of Python's waits for the interpreter
        table, start = torch.frombuffer(array("d", chain.from_iterable(rows)), dtype=torch.float64).view(-1, WIDTH).clone(), 0
        for (source, columns, is_table), calls in groupby(measured, _KIND):
            if is_table:  # they may lie on several devices
                for _, paths, row in calls:
                    self._buffer.merge_rows(source, paths, row, columns)  # type: ignore[arg-type]
            else:
                paths = [path for _, of_call, _ in calls for path in of_call]
                start += len(paths)
                own = table[start - len(paths) : start]
                self._buffer.merge_rows(source, paths, own, together if columns is None else columns)


# --- Rows of tensors on accelerators, which are copied in one launch each and measured many at once ---

#: Bytes of the largest tensor that is copied for stock operations: a larger one keeps a device busy for longer than its launches take.
LARGEST = 4 << 20
#: Bytes of all copies that wait for them on one stream.
DEVICE_ROWS_CAPACITY = 16 << 20
#: For a kernel of ours, which takes half a millisecond of the host for one tensor or for a hundred (seen on an H200), copies may take all
#: spare memory, and a single one this part of it.
_FOURTH = 4


class DeviceRows:
    """Copies of tensors until :meth:`flush`, or until they fill the memory that they may take."""

    def __init__(self, statistics: Statistics, complaints: WarningLog) -> None:
        self._statistics, self._complaints = statistics, complaints
        self.begin(None)

    def begin(self, buffer: StepBuffer | None) -> None:
        """Start a step, or None: hold nothing of the last one. An interrupt at its end may have left copies."""
        self._buffer = buffer
        self._failed: set[_Place] = set()
        self._limits: dict[torch.device, tuple[int, int]] = {}  # bytes of the largest tensor, and of all copies
        # by device and number of the stream on which copies were made: that stream, and the copies with what was asked of them
        self._copies: dict[tuple[torch.device, object], tuple[Any, list[tuple[Tensor, _Place, frozenset[Column]]]]] = {}
        self._nbytes: Counter[tuple[torch.device, object]] = Counter()

    def measure(self, source: str, path: str, columns: frozenset[Column], tensor: Tensor, inverse_scale: Tensor | None) -> bool:
        """Copy a dense tensor of an accelerator, times ``inverse_scale``, to be measured with others. Returns whether it was."""
        assert self._buffer is not None
        device = tensor.device
        if tensor.layout is not torch.strided or not tensor.is_floating_point() or refusal(tensor) is not None:
            return False
        largest, capacity = self._limits.get(device) or self._limits_on(device)
        if tensor.nbytes > largest:
            return False
        queue = device, stream_number(device)
        if queue in self._copies and self._nbytes[queue] + tensor.nbytes > capacity:
            self._flush(queue)
        self._buffer.expect_row(source, path)
        # before its queue: there may be no memory
        copy = tensor.clone() if inverse_scale is None else unscaled(tensor, inverse_scale)
        if queue not in self._copies:
            self._copies[queue] = current_stream(device), []
        self._copies[queue][1].append((copy, (source, path), columns))
        self._nbytes[queue] += copy.nbytes
        return True

    def _limits_on(self, device: torch.device) -> tuple[int, int]:
        spare, has_kernel = max(DEVICE_ROWS_CAPACITY, spare_memory(device)), self._statistics.has_kernel(device)
        return self._limits.setdefault(device, (spare // _FOURTH, spare) if has_kernel else (LARGEST, DEVICE_ROWS_CAPACITY))

    def flush(self) -> None:
        for queue in list(self._copies):
            self._flush(queue)

    def _flush(self, queue: tuple[torch.device, object]) -> None:
        (stream, waiting), self._nbytes[queue] = self._copies.pop(queue), 0
        assert self._buffer is not None
        copies, places, asked = zip(*waiting, strict=True)
        columns = frozenset[Column]().union(*asked)
        try:
            with on_stream(stream, queue[0]):
                rows = self._statistics.measure(copies, columns).unbind()
                kept = [(place, row) for place, row in zip(places, rows, strict=True) if place not in self._failed]
                for source in dict.fromkeys([of for (of, _), _ in kept]):
                    own = [(path, row) for (of, path), row in kept if of == source]
                    self._buffer.merge_rows(source, [path for path, _ in own], [row for _, row in own], columns)
        except Exception as error:  # a part of the micro-batches must not be taken for all
            lost = [place for place in places if place not in self._failed]
            self._complaints.add("activations", f"the activations of {len(lost)} calls could not be measured", error)
            for source, path in lost:
                self._buffer.drop_parts(source, path)
                self._buffer.absent[source, path] = f"it could not be measured: {type(error).__name__}"
            self._failed.update(lost)


class _Item(NamedTuple):
    """A tensor, its metrics, and the path of its values; ``plain`` is that path without the number of the call."""

    asked: RequestedMetrics
    name: str
    plain: str
    path: str
    tensor: Tensor
    other: Tensor | None = None


class ModuleValues:
    """Measures what the metrics of modules request, merged over calls and micro-batches. Tensors are not kept; small ones are copied."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._modules: _Modules = {}
        self.asked, self._known = Asked((), {}), dict[tuple[int, ...], Asked]()  # of this step, and by metrics
        self._owner: dict[_Place, tuple[str, bool]] = {}
        self._traced: dict[_Place, frozenset[Column]] = {}
        self._units: dict[str, DeadUnits] = {}  # by path
        self.rows = HostRows(measurer.statistics)
        self.device_rows = DeviceRows(measurer.statistics, measurer.complaints)

    def begin(self, buffer: StepBuffer, metrics: tuple[Metric, ...], modules: _Modules) -> None:
        self._buffer = buffer
        self.rows.begin(buffer)
        self.device_rows.begin(buffer)
        for units in self._units.values():
            units.discard()
        if modules is not self._modules or len(self._known) > 16:  # usually two are due by turns
            self._modules, self._known = modules, {}
        kind = tuple(map(id, metrics))
        self.asked = self._known.get(kind) or self._known.setdefault(kind, Asked(metrics, modules))

    def end(self) -> None:
        if self._buffer is not None:
            self.flush()
            for path, units in self._units.items():
                if units.is_seen and (share := units.end_step()) is not None:
                    self._buffer.put_value(Key(ACTIVATION, path, "dead"), share)
                elif units.is_seen:
                    reason = f"it takes {WINDOW} monitored steps, and {units.steps} were seen"
                    self._buffer.absent[ACTIVATION, f"{path}/dead"] = reason
        self._buffer = None
        self.rows.begin(None)
        self.device_rows.begin(None)

    def discard(self) -> None:
        """Drop what was measured in this step and is not stored yet. Allocates nothing large, since memory may have run out."""
        assert self._buffer is not None
        self.rows.begin(self._buffer)
        self.device_rows.begin(self._buffer)
        for units in self._units.values():
            units.discard()

    def evaluator(self) -> Callable[[dict[str, StatsTable]], list[Block]]:
        """Computes the built-in values of this step's tables, even in the next step; drops rows of modules that were not called."""
        calls = self.asked, dict(self._owner), dict(self._traced)

        def evaluate(tables: dict[str, StatsTable]) -> list[Block]:
            blocks = []
            for source in [each for each in n.MODULE_SOURCES if each in tables]:
                table = tables[source]
                if traced := calls[2]:
                    counts = table.rows[:, Column.COUNT].tolist()
                    kept = [p for p, name in enumerate(table.names) if counts[p] or (source, name) not in traced]
                    names = tuple(table.names[p] for p in kept)
                    table = tables[source] = replace(table, names=names, rows=table.rows[kept])
                blocks += view_blocks(self._groups(source, table.names, calls), table, source)
            return blocks

        return evaluate

    def _groups(self, source: str, names: tuple[str, ...], calls: _Calls) -> list[Views]:
        """The metrics of a table with rows of these ``names``, as in the last step if the same modules were called and asked for."""
        asked, owner, traced = calls
        last = asked.last.get(source)
        if last is not None and last[:2] == (names, calls[1:]):
            return last[2]
        places: dict[str, list[int]] = {}
        for place, path in enumerate(names):
            # if only other ranks have called the module, its path gives its name
            name, split = owner.get((source, path)) or (n.owner_of(path, self._modules), "@" in path)
            columns = traced.get((source, path), ALL_COLUMNS)
            for each in asked.of(source, name):
                for metric in each.views if each.split == split else ():
                    if metric.columns <= columns:
                        places.setdefault(metric.name, []).append(place)
        found = [Views.of(name, (Key(source, names[at], name) for at in rows), rows, len(names)) for name, rows in places.items()]
        asked.last[source] = names, calls[1:], found
        return found

    def adopt(self, name: str, path: str, columns: frozenset[Column]) -> bool:
        """Take the row of ``path``, a tensor in the output of module ``name``, that a graph wrote with these columns only, if views of the
        statistics are requested in this step, of all its calls together. Returns whether they are.
        """
        asked = self.asked.of(n.ACTIVATION, name) if name in self._modules else ()
        if is_wanted := any(each.views and not each.split for each in asked):
            self._owner[n.ACTIVATION, path], self._traced[n.ACTIVATION, path] = (name, False), columns
        return is_wanted

    def wants(self, source: str, name: str) -> bool:
        return bool(self.asked.of(source, name))

    def measure(
        self, source: str, name: str, value: Any, call: int, path: str | None = None, inverse_scale: Tensor | None = None
    ) -> None:
        """Measure ``value``, a tensor or a container of tensors, that the module took or returned in its ``call``-th call (negative if
        unknown), if anything is requested of it; under ``path``, by default the name.
        """
        assert self._buffer is not None
        asked = self.asked.of(source, name)
        if not asked:
            return
        if len(asked) == 1 and not (asked[0].split or asked[0].others):
            self._owner[source, name] = name, False
            self.asked.simple[source, name] = asked[0].columns
        items = list(self._items(source, name, value, call, path))
        if not items and (source, name) not in self._buffer.absent:
            what = "output" if source == n.ACTIVATION else "value"
            reason = f"its {what}, a {type(value).__name__}, holds no tensor of real numbers"
            self._buffer.absent[source, name] = reason
        self.measure_items(source, items, inverse_scale)

    def measure_pairs(self, name: str, value: Any, call: int, other_of: Callable[[str], Tensor | str]) -> None:
        """Measure the difference of each tensor in ``value`` to ``other_of(path)``, or store the reason that it returns."""
        assert self._buffer is not None
        source, items = n.ACTIVATION_DIFFERENCE, []
        found: dict[str, Tensor | str] = {}
        for item in self._items(source, name, value, call):
            if item.plain not in found:  # fetched once, even for two keys
                found[item.plain] = other_of(item.plain)
            other = found[item.plain]
            if not isinstance(other, str) and other.shape != item.tensor.shape:
                other = f"it has another shape in the reference module, {tuple(other.shape)}"
            if isinstance(other, str):
                self._buffer.absent[source, item.path] = other
            else:
                items.append(item._replace(other=other.to(item.tensor.device)))
        self.measure_items(source, items)

    def named(self, tensors: Mapping[str, Tensor]) -> None:
        """Measure tensors that are not a module's output, each under its own name."""
        items: list[_Item] = []
        for name, tensor in tensors.items():
            of = name.rpartition(".")[0]
            items += self._items(n.ACTIVATION, of + rest_of(name, of, self._modules), tensor, 0)
        self.measure_items(n.ACTIVATION, items)

    def _items(self, source: str, name: str, value: Any, call: int, path: str | None = None) -> Iterator[_Item]:
        assert self._buffer is not None
        asked = self.asked.of(source, name)
        for plain, tensor in tensors_of(value, path or name) if asked else ():
            reason = refusal(tensor)
            if reason is None and not (tensor.is_floating_point() or tensor.is_complex()):
                reason = f"a tensor of dtype {tensor.dtype}, which is not an activation"
            if reason is not None:
                self._buffer.absent[source, plain] = reason
                continue
            for each in asked:
                if each.split and call < 0:
                    self._buffer.absent[source, name] = "in a recomputation the number of the call is unknown"
                    continue
                rest = rest_of(plain, name, self._modules)
                place = f"{name}@{call}{rest}" if each.split else name + rest
                self._owner[source, place] = name, each.split
                yield _Item(each, name, plain, place, tensor.detach())

    def measure_items(self, source: str, items: Sequence[_Item], inverse_scale: Tensor | None = None) -> None:
        """Measure the items, batched by device; ``inverse_scale`` is applied to gradients first."""
        assert self._buffer is not None
        groups: dict[torch.device, list[_Item]] = {}
        for item in items:
            if not item.asked.views:
                continue
            columns, tensor = item.asked.columns, item.tensor
            rows = self.rows if tensor.is_cpu else self.device_rows
            if item.other is not None or not rows.measure(source, item.path, columns, tensor, inverse_scale):
                groups.setdefault(item.tensor.device, []).append(item)
        for device, members in groups.items():
            columns = members[0].asked.columns.union(*(item.asked.columns for item in members[1:]))
            scale = None if inverse_scale is None else inverse_scale.to(device)
            others = [item.other for item in members if item.other is not None] or None
            found = self._measurer.statistics.measure([item.tensor for item in members], columns, scale, others)
            self.rows.append(source, [item.path for item in members], columns, found)
        for item in items:
            if item.asked.others:
                self._measure_others(source, item, inverse_scale)

    def flush(self) -> None:
        self.rows.flush()
        self.device_rows.flush()

    def _measure_others(self, source: str, item: _Item, inverse_scale: Tensor | None) -> None:
        assert self._buffer is not None
        for metric, reason in item.asked.reasons.items():
            self._buffer.absent[source, f"{item.path}/{metric}"] = reason
        if item.asked.dead:
            if item.path not in self._units:
                self._units[item.path] = DeadUnits(self._modules.get(item.name, lambda: None)())
            self._units[item.path].see(item.tensor, self._measurer.statistics.eps)
        functions = item.asked.functions
        if item.tensor.numel() == 0 and (own := [metric for metric in functions if metric.built_in]):
            functions = [metric for metric in functions if not metric.built_in]
            for left_out in own:
                self._buffer.absent.setdefault((source, f"{item.path}/{left_out.name}"), "it has no elements")
        if functions:
            tensor = item.tensor if inverse_scale is None else unscaled(item.tensor, inverse_scale)
            inputs = [tensor] if item.other is None else [tensor, item.other]
            with nullcontext() if all(metric.built_in for metric in functions) else untouched_rng():
                self._measurer.apply(self._buffer, source, item.path, functions, inputs, merging=True)
