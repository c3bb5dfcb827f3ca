"""The results of a step. Sinks, detectors, the run directory and the report know these, and nothing of the monitor."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress, filterfalse, takewhile
from operator import attrgetter, is_
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .formatting import listed, percent
from .keys import PARAMETER_SOURCES, ROOT, Key, blocks_of, format_key, owner_of
from .moments import ALWAYS, VIEWS, Column


class Block(NamedTuple):
    """Keys, and a value for each."""

    keys: Sequence[Key] = ()
    numbers: Sequence[float] = ()
    table: str = ""  # the source whose table of statistics these values are views of; empty if they are no views


_TABLE = attrgetter("table")


def in_blocks(values: Mapping[Key, float]) -> tuple[Block, ...]:
    """These values as blocks, as one if they are none yet."""
    return values.blocks if isinstance(values, StepValues) else (Block(tuple(values), tuple(values.values())),)


#: A loop that logs more often than this in one step gets what it logged merged.
_BLOCKS = 16


class StepValues(Mapping[Key, float]):
    """Values in blocks, of which a later one replaces an earlier one of the same key. Most have the keys of the last step, as the same
    tuple, so they need not be renamed again.

    The dict that a lookup needs is built when one is first asked for, and of views only if one of these is: hashing thousands of keys costs
    more than computing their values, and a record that is kept keeps its dict, ten times as large as the values.
    """

    __slots__ = ("_by_key", "_rest", "blocks", "has_views")

    def __init__(self, *blocks: Block) -> None:
        self.blocks, self.has_views = blocks, any(map(_TABLE, blocks))  # of tables
        self._by_key: dict[Key, float] | None = None
        self._rest: StepValues | None = None

    @classmethod
    def of(cls, values: Mapping[Key, float]) -> StepValues:
        return values if isinstance(values, cls) else cls(*in_blocks(values))

    def updated(self: Mapping[Key, float], more: Mapping[Key, float]) -> StepValues:
        """These values, which may be plain ones, with ``more``, which replace those of the same keys."""
        blocks = self.blocks if isinstance(self, StepValues) else in_blocks(self)
        if len(blocks) >= _BLOCKS:
            late = len(list(takewhile(lambda block: not block.table, reversed(blocks))))
            if late >= _BLOCKS:
                blocks = (*blocks[:-late], *in_blocks(StepValues(*blocks[-late:]).by_key))
        return StepValues(*blocks, Block(tuple(more), tuple(more.values())))

    def since(self, before: StepValues) -> StepValues:
        """The values that came after ``before``, which these were made from by :meth:`updated`; else all."""
        is_continued = len(self.blocks) >= len(before.blocks) and all(map(is_, before.blocks, self.blocks))
        return StepValues(*self.blocks[len(before.blocks) if is_continued else 0 :])

    @property
    def rest(self) -> StepValues:
        """The values that are no views of tables."""
        if not self.has_views:
            return self
        if self._rest is None:
            self._rest = StepValues(*filterfalse(_TABLE, self.blocks))
        return self._rest

    def without(self, keys: Container[Key]) -> StepValues:
        left = []
        for block in self.blocks:
            some = [key not in keys for key in block.keys]
            left.append(Block(tuple(compress(block.keys, some)), tuple(compress(block.numbers, some)), block.table))
        return StepValues(*left)

    @property
    def by_key(self) -> dict[Key, float]:
        if self._by_key is None:
            found: dict[Key, float] = {}
            for keys, numbers, _ in self.blocks:
                found.update(zip(keys, numbers, strict=True))
            self._by_key = found  # complete, since other threads may read it
        return self._by_key

    def _by_key_with(self, key: object) -> dict[Key, float]:
        """A dict that has ``key`` if there is a value of it; a plain tuple of its three parts is equal to it."""
        if self._by_key is not None:
            return self._by_key
        for block in self.blocks:
            if block.table and isinstance(key, tuple) and block.table in key[:1]:
                return self.by_key
        return self.rest.by_key

    def __getitem__(self, key: Key) -> float:
        return self._by_key_with(key)[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key_with(key)

    # those of a dict need no call for each value
    def get(self, key, default=None):  # type: ignore[no-untyped-def]
        return self._by_key_with(key).get(key, default)

    def items(self):  # type: ignore[no-untyped-def]
        return self.by_key.items()

    def keys(self):  # type: ignore[no-untyped-def]
        return self.by_key.keys()

    def values(self):  # type: ignore[no-untyped-def]
        return self.by_key.values()

    def __repr__(self) -> str:
        return f"StepValues({self.by_key!r})"


#: Named ways to merge the values of micro-batches; ``mean`` is weighted by elements.
REDUCERS = ("mean", "sum", "min", "max")
#: The reason for a missing value of a metric that was added during the step.
ASKED_LATE = "it was asked for after the step had begun"


class ForModule(NamedTuple):
    """A metric's function that depends on the module: ``bind`` gives it, or why there is none; it gets None if only a name is known."""

    bind: Callable[[Any], Callable[..., Any] | str]


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric on one source: what to compute, on which tensors, how often, and how values merge."""

    name: str  # last part of the key; without a slash
    source: str  # first part of the key, see :mod:`torch_gradmon.core.keys`
    pattern: re.Pattern[str]  # searched in the canonical name of a tensor
    # of the tensor, or a :class:`ForModule`; None for a view of the one-pass statistics
    function: Callable[..., Any] | ForModule | None = None
    # one of :data:`REDUCERS`, or a callable that gets all values of a step as one flat tensor and returns a scalar or a dict of
    # scalars
    aggregation: str | Callable[..., Any] = "mean"
    columns: frozenset[Column] = frozenset()  # the statistics that a built-in needs
    unit: str = "1"  # of its values
    documentation: str = ""  # one line
    every: int = 1  # computed on steps divisible by it
    shown: bool = True  # in ``get_step_metrics()``; otherwise only in the run directory
    split_calls: bool = False  # for modules: the calls of one forward have keys of their own, ``name@0`` and so on
    per_head: bool = False  # for attention: the values of single heads are shown too
    built_in: bool = False  # its function is one of this package, and is not called for a tensor without elements
    shardwise: bool = False  # its function may be called for each rank's part of a sharded tensor, and the values are merged

    def matches(self, name: str) -> bool:
        return self.pattern.search(name) is not None

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def why_nothing(self, what: str = "here") -> str:
        """The reason for a missing value where its function returned None. ``what``: for what it did."""
        return f"it is not defined {what}: {self.documentation}" if self.built_in else "its function returned nothing"


class KeyFormatter:
    """Gives values their flat keys, and builds each key once."""

    def __init__(self, style: str, prefix: str) -> None:
        self.form = self._style, self._prefix = style, prefix
        self._known: dict[Key, str] = {}
        self._of_block: list[tuple[Sequence[Key], list[str]]] = []  # of the last step
        self._layout: dict[str, float] = {}  # its keys; filling a copy is faster than a new dict

    def __call__(self, values: Mapping[Key, float]) -> dict[str, float]:
        blocks, last = in_blocks(values), self._of_block
        is_new, texts_of = len(blocks) != len(last), []
        for place, (keys, *_) in enumerate(blocks):
            known, texts = last[place] if place < len(last) else ((), [])
            if known is not keys and known != keys:  # not as in most steps
                texts, is_new = [self._known.get(key) or self.text(key) for key in keys], True
            texts_of.append((keys, texts))
        if is_new:
            self._layout = {text: 0.0 for _, texts in texts_of for text in texts}
        self._of_block, found = texts_of, self._layout.copy()
        for (_, texts), (_, numbers, _) in zip(texts_of, blocks, strict=True):
            found.update(zip(texts, numbers, strict=True))
        return found

    def text(self, key: Key) -> str:
        if key not in self._known:
            self._known[key] = format_key(key, self._style, self._prefix)
        return self._known[key]


# --- Which logged value is the loss ---

#: The networks of a GAN, which have a loss each.
_NETWORK = "d|g|dis|disc|discriminator|gen|generator|critic"
_IS_LOSS = re.compile(rf"(?:^|[/_.\s-])loss(?:[/_.\s-](?:train|training|total|step|batch|{_NETWORK}))*$", re.IGNORECASE)
_OF_NETWORK = re.compile(rf"loss[/_.\s-](?:.*[/_.\s-])?(?:{_NETWORK})(?:$|[/_.\s-])", re.IGNORECASE)
_OF_EVALUATION = re.compile(r"(?:^|[/_.\s-])(?:val|valid|validation|eval|evaluation|test)(?:$|[/_.\s-])", re.IGNORECASE)
#: Other words in the name of a loss that make it a part of the training loss, such as a penalty, are not in this set.
_WHOLE = frozenset({"train", "training", "total", "step", "batch", "loss", ""})
#: The source of logged values.
_LOGGED = ""


def is_loss(key: Key) -> bool:
    """Whether it is a logged value with the name of a training loss, or of a part of one."""
    return key.source == _LOGGED and bool(_IS_LOSS.search(key.name)) and not _OF_EVALUATION.search(key.name)


def is_whole_loss(key: Key) -> bool:
    """Whether it is a logged value with the name of a whole training loss, such as ``loss`` or ``train/loss``."""
    return is_loss(key) and not _partial(key)[0]


def is_loss_of_network(key: Key) -> bool:
    """Whether it is the loss of one network of a GAN, such as ``loss_d``, which need not fall."""
    return is_loss(key) and bool(_OF_NETWORK.search(key.name))


def loss_among(keys: Iterable[Key]) -> Key | None:
    """The shortest key such as ``loss``, ``train/loss`` or ``loss/train``; a partial loss such as ``kl_loss`` only if there is no other."""
    return min(filter(is_loss, keys), key=_partial, default=None)


def loss_in(values: Mapping[Key, float]) -> float | None:
    key = loss_among(values)
    return None if key is None else values[key]


def _partial(key: Key) -> tuple[bool, int, str]:
    return not _WHOLE.issuperset(re.split(r"[/_.\s-]", key.name.lower())), len(key.name), key.name


# --- The order of a model's parameters and modules, for rows of plots, tables and lists of keys ---

_DIGITS = re.compile(r"(\d+)")


class ModelOrder:
    """Sorts names of measured tensors as the model has them."""

    def __init__(self, parameters: Iterable[str] = (), modules: Iterable[str] = ()) -> None:
        self._parameters, self._modules = ({name: place for place, name in enumerate(names)} for names in (parameters, modules))

    def sorted(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, lists of tensors of a source that were measured together, each name once.

        A tensor inside a module's output, an output of one of several calls, and an attention head are placed with their module. A name
        that the model no longer has keeps its place among the names measured with it.
        """
        orders = sorted(measured, key=len, reverse=True)  # the longest list places unknown names best
        place = self._parameters if source in PARAMETER_SOURCES else self._modules
        owners = {name: owner_of(name, place) for order in orders for name in order}
        known = (name for name, owner in owners.items() if owner in place)
        return merged([sorted(known, key=lambda name: (place[owners[name]], _natural(name))), *orders])


def merged(orders: Iterable[Sequence[str]]) -> list[str]:
    """Merge several orders; earlier ones take precedence. A name missing in one is placed before its successor in a later one.

    >>> merged([["a", "c"], ["b", "c", "d"], ["a", "aa", "b"]])
    ['a', 'aa', 'b', 'c', 'd']
    """
    found: list[str] = []
    for order in orders:
        known, waiting, before = set(found), list[str](), dict[str, list[str]]()
        for name in dict.fromkeys(order):
            if name in known:
                before.setdefault(name, []).extend(waiting)
                waiting = []
            else:
                waiting.append(name)
        found = [name for old in found for name in (*before.get(old, ()), old)] + waiting
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key with numbers compared as numbers: ``head_2`` before ``head_10``."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in _DIGITS.split(name)]


# --- What trains: the groups of the optimizers, with what is frozen and what no optimizer has ---

#: Blocks, and kinds of modules, that are named.
_NAMED, _KINDS = 3, 6


@dataclass(frozen=True)
class TrainedPart:
    """A part of a model's parameters."""

    what: str  # such as ``"AdamW, group 0"``, ``"frozen"`` or ``"in no optimizer"``
    tensors: int  # number of parameters
    elements: int  # number of their elements
    share: float  # of all elements of the model
    settings: Mapping[str, float]  # learning rate and weight decay of the group, where it has them
    blocks: Sequence[str]  # names of the parameters without their last part, each once

    def __str__(self) -> str:
        settings = "".join(f", {name} {value:g}" for name, value in self.settings.items())
        where = f": {listed(self.blocks, _NAMED)}" if self.blocks else ""
        tensors = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return f"{self.what}{settings}, {tensors} of {self.elements:,} elements ({percent(self.share)}){where}"


def model_text(model: str, parameters: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str]) -> str:
    """A model in one line; its class alone where nothing is known of its parameters. ``kinds`` are the classes of its modules.

    >>> model_text("Sequential", {"0.weight": {"shape": [2, 3], "dtype": "torch.float32"}}, {"[root module]": "Sequential", "0": "Linear"})
    'Sequential, 6 elements in 1 tensor, float32; 1 Linear'
    """
    if not parameters:
        return model
    elements = sum(math.prod(about["shape"]) for about in parameters.values())
    dtypes = dict.fromkeys(str(about["dtype"]).removeprefix("torch.") for about in parameters.values() if "dtype" in about)
    tensors = "1 tensor" if len(parameters) == 1 else f"{len(parameters):,} tensors"
    parts = Counter(kind for name, kind in kinds.items() if name != ROOT).most_common()
    of = f"; {listed((f'{count:,} {kind}' for kind, count in parts), _KINDS)}" if parts else ""
    return f"{', '.join([model, f'{elements:,} elements in {tensors}', *dtypes])}{of}"


def before_schedule(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a group with the learning rate that a schedule multiplies, not that of a first step of a warm-up."""
    return {**settings, "lr": settings["initial_lr"]} if settings.get("initial_lr") is not None else settings


def trained_parts(
    parameters: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], frozen: Collection[str]
) -> Iterator[TrainedPart]:
    """The parts of a model: groups in their order, with ``"optimizer"``, ``"settings"`` and ``"parameters"``, then parameters that do not
    require a gradient, then the rest.
    """
    sizes = {name: math.prod(about["shape"]) for name, about in parameters.items()}
    whole = max(sum(sizes.values()), 1)
    block_of = blocks_of(sizes)

    def part(what: str, names: Sequence[str], settings: Mapping[str, Any]) -> TrainedPart:
        shown = {"lr": settings.get("lr"), "weight decay": settings.get("weight_decay") or None}
        known = {name: float(value) for name, value in shown.items() if value is not None}
        elements = sum(sizes[name] for name in names)
        blocks = list(dict.fromkeys(block_of[name] for name in names))
        return TrainedPart(what, len(names), elements, elements / whole, known, blocks)

    owned: set[str] = set()
    for number, group in enumerate(groups):
        names = [name for name in group["parameters"] if name in sizes and name not in frozen]
        owned.update(names)
        yield part(f"{group['optimizer']}, group {number}", names, group["settings"])
    if still := [name for name in sizes if name in frozen]:
        yield part("frozen", still, {})
    if rest := [name for name in sizes if name not in frozen and name not in owned]:
        yield part("in no optimizer", rest, {})


# --- records ---

#: Relative difference below which norms of tensors have one factor in common; narrow gradients have as many roundings more.
_SAME, _ROUNDINGS = 1e-3, 8
#: Severity of a finding, most severe first.
Severity = Literal["error", "warning", "info"]
#: Two rules of findings: what the user has declared does not hold; NaN or Inf comes with the batch, of which the spike warns.
EXPECTATION, NON_FINITE_INPUT = "expectation-broken", "non-finite-input"
#: Figures of a run, and what draws them.
Chart = Literal["heatmap", "norm", "update", "depth", "layers"]
Engine = Literal["plotly", "matplotlib"]


class StepView:
    """What is known of one step: of the last one as ``monitor.last_record``, of a stored one as ``run.record(step)``.

    Args:
        step: its number.
        top_gradients: see the method.
        read: a function for each attribute.

    Attributes are read at their first use, which may synchronise the device. Those of a monitor are of its last step only: read them
    before the next one ends.

    Attributes:
        metrics: values by key, plain floats; empty where the step was not monitored.
        spikes: a tuple of :class:`SpikeEvent`.
        rollback: what ``on_spike=Rollback()`` did, or None.
        detail: the live change in force, a dict of ``every``, ``preset``, and the ``steps`` that are left; or None.
        context: facts about the step, those of ``log_context`` included.
    """

    def __init__(
        self, step: int | None, top_gradients: Callable[[int], list[tuple[str, float]]], **read: Callable[[], Any]
    ) -> None:
        self.step, self._top, self._read = step, top_gradients, read

    def top_gradients(self, count: int = 10) -> list[tuple[str, float]]:
        """The parameters with the largest share of the squared gradient norm, and the share, largest first."""
        return self._top(count)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._read:
            raise AttributeError(f"a record of a step has no {name!r}; it has step, {', '.join(self._read)}")
        value = self._read[name]()
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return ["step", *self._read]

    def __repr__(self) -> str:
        return f"StepView(step={self.step}, {', '.join(self._read)})"


@dataclass(frozen=True)
class SpikeEvent:
    """A spike in a signal.

    Attributes:
        step: of the spike.
        signal: its name, such as ``grad_norm``.
        value: of the signal.
        score: distance from normal, in the rule's own unit.
        threshold: the score above which the rule reports a spike.
        reason: the same as text.
        usual: the baseline, in units of the signal; None if the rule has none.
        where: the layers that moved, as text; empty if unknown.
        action: what was done about it, as text; empty if nothing.
    """

    step: int
    signal: str
    value: float
    score: float
    threshold: float
    reason: str
    usual: float | None = None
    where: str = ""
    action: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: " + "; ".join(filter(None, (self.reason, self.where, self.action)))


@cache
def views_of(columns: frozenset[Column]) -> frozenset[str]:
    return frozenset(metric for metric, view in VIEWS.items() if view.columns <= columns | ALWAYS)


@dataclass(frozen=True)
class StatsTable:
    """Statistics of one source in one step: ``rows`` is float64 ``[len(names), 8]`` on the host.

    Only ``columns`` were measured; the others hold the identity of their operation, which is no value: check with :meth:`has`. ``same_as``
    names a source of the same step with the same rows. ``is_part``: only a part of the model was measured, so no sum over these rows is
    one over the model.
    """

    names: tuple[str, ...]
    rows: Tensor
    columns: frozenset[Column]
    same_as: str = ""
    is_part: bool = False

    def has(self, metric: str) -> bool:
        return metric in views_of(self.columns)

    @cached_property
    def row_of(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def totals(self) -> list[float]:
        """The row of all tensors together."""
        *sums, least, most = self.rows.sum(0).tolist()
        if not {Column.MIN, Column.MAX}.isdisjoint(self.columns):  # else they are infinite in all rows
            least = min(self.rows.select(1, Column.MIN).tolist(), default=math.inf)
            most = max(self.rows.select(1, Column.MAX).tolist(), default=-math.inf)
        return [*sums, least, most]


class StepRecord(NamedTuple):
    """One monitored step.

    Attributes:
        step: its number.
        time: seconds since the epoch, at its end.
        applied: False if the optimizer did not apply it (an infinite gradient under a GradScaler, a skip, or an error in its closure).
        values: all values by key, plain floats.
        tables: statistics by source.
        context: learning rates, loss scale, tags: in every record, on no dashboard.
        events: the spikes.
        hidden: keys of values for the run directory only.
        rng: states of torch's random generators at the start of the step, by device; uint8 tensors.
        extras: small float64 tensors of plugins, see ``StepBuffer.extras``.
    """

    step: int
    time: float
    applied: bool
    values: Mapping[Key, float]
    tables: Mapping[str, StatsTable] = {}
    context: Mapping[str, Any] = {}
    events: tuple[SpikeEvent, ...] = ()
    hidden: frozenset[Key] = frozenset()
    rng: Mapping[str, Tensor] = {}
    extras: Mapping[str, Tensor] = {}

    def values_beside_views(self) -> StepValues:
        """Those that do not follow from the tables, which only :class:`StepValues` show; else all, as of a record without tables."""
        return self.values.rest if self.tables and isinstance(self.values, StepValues) else StepValues.of(self.values)

    @property
    def skipped(self) -> str:
        """Why the step was skipped; empty if it was not."""
        return str(self.context.get("skipped", ""))

    @property
    def interrupted(self) -> str:
        """By which error the loop left the step before it was applied; empty if it did not."""
        return str(self.context.get("interrupted", ""))


# --- the stages of a gradient ------------------------------------------------------------------------------------------------
#
# GRADIENT_BEFORE_CLIP is what the backward passes of a step have brought, GRADIENT what the optimizer then used. In between the loop clips,
# divides by a number of tokens, or writes gradients of its own. What looks for outliers reads the first, since a clip makes them like all
# others; what compares a gradient with the update that it caused reads the second. NaN and Inf count at either.


def brings_others(before: StatsTable | None, after: StatsTable) -> bool:
    """Whether the optimizer used gradients of tensors for which no backward pass brought any."""
    return before is None or not set(after.names) <= set(before.names)


def are_others(before: StatsTable, after: StatsTable, rounding: float, were_others: bool = False) -> bool:
    """Whether gradients that took the place of those of the backward passes are neither these scaled nor these clipped.

    A scaling makes all tensors longer or shorter alike, and no clip makes a tensor longer. ``rounding``: relative, of the gradients in
    between; ``were_others``: in earlier steps, so that they are again, though all of them may be shorter by chance.
    """
    if brings_others(before, after) or Column.SQUARE_SUM not in before.columns & after.columns:
        return False
    squares = before.rows[[before.row_of[name] for name in after.names], Column.SQUARE_SUM], after.rows[:, Column.SQUARE_SUM]
    known = squares[0].isfinite() & squares[1].isfinite() & ((squares[0] > 0) | (squares[1] > 0))
    factors = (squares[1][known] / squares[0][known]).sqrt()
    slack = 1 + max(_SAME, _ROUNDINGS * rounding)
    if not len(factors) or not bool(factors.max() > slack * factors.min()):
        return False
    return were_others or bool(factors.max() > slack)
