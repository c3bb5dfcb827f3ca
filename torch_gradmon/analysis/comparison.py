"""The comparison of two runs: which values are compared, in which order, and where the runs diverge."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import keys as n
from ..core.errors import display
from ..core.formatting import listed
from ..core.keys import Key, compile_pattern, format_key, parse_key
from ..core.moments import VIEWS
from ..core.records import is_loss, loss_among
from ..runs.reader import COUNT, RunReader, ValueMatrix, Window, is_of_layer

# --- The order of a step ---

#: The source of a step's facts: ``context/lr``, ``context/amp_scale`` and ``context/applied``.
CONTEXT = "context"
#: Several parameter groups have a learning rate each.
FACTS = (Key(CONTEXT, "lr", ""), Key(CONTEXT, "lr", "0"), Key(CONTEXT, "amp_scale", ""), Key(CONTEXT, "applied", ""))

#: The stages of a step, in their order, and the sources of each.
STAGES: dict[str, tuple[str, ...]] = {
    "parameters": (n.PARAMETER, n.PARAMETER_DIFFERENCE),
    "activations": (n.INPUT, n.ACTIVATION, n.ACTIVATION_DIFFERENCE, *n.RCC_SOURCES, *n.ATTENTION_SOURCES.values()),
    "loss": (),
    "gradients of activations": (n.ACTIVATION_GRADIENT, n.INPUT_GRADIENT),
    "gradients before clipping": (n.GRADIENT_LOCAL, n.GRADIENT_BEFORE_CLIP),
    "gradients for the optimizer": (n.GRADIENT,),
    "settings": (CONTEXT,),
    "optimizer state": (n.OPTIMIZER,),
    "updates": (n.UPDATE,),
    "other values": (),
}
_STAGE_OF = {source: stage for stage, sources in STAGES.items() for source in sources}
#: Stages of whole-model values by the start of their names; others are known at the end of a step.
_OF_WHOLE = {
    "param_": "parameters",
    "update_": "updates",
    "grad_norm_after_clip": "gradients for the optimizer",
    "grad_": "gradients before clipping",
    "clip": "gradients for the optimizer",
}
_NUMBER = {stage: number for number, stage in enumerate(STAGES)}
_BACKWARD = ("gradients of activations", "gradients before clipping", "gradients for the optimizer")
#: The most informative metric of a tensor comes first.
_METRICS = {metric: rank for rank, metric in enumerate(dict.fromkeys((COUNT, "nonfinite_count", *VIEWS)))}
_INSIDE = re.compile(r"(?<=.)[\[@].*$")
#: After all tensors of a stage: values of the whole model.
_LAST = 1 << 40


def stage_of(key: Key) -> str:
    if key.source == n.SUMMARY:
        return next((stage for start, stage in _OF_WHOLE.items() if key.metric.startswith(start)), "other values")
    return "loss" if is_loss(key) else _STAGE_OF.get(key.source, "other values")


class Order:
    """Ranks keys: by stage, by place (in the order of calls; backward for gradients; parameters with modules), by metric."""

    def __init__(self, tensors: Mapping[str, Iterable[str]]) -> None:
        calls = [_INSIDE.sub("", name) for name in tensors.get(n.ACTIVATION, ())]
        self._ends: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        for place, name in enumerate(calls):
            self._ends.setdefault(name, place)
            while name:  # the module, those that contain it, and the model
                self._begins.setdefault(name, place)
                name = name.rpartition(".")[0]
            self._begins.setdefault(n.ROOT, place)
        for name in (name for source in STAGES["activations"] for name in tensors.get(source, ())):
            self._begins.setdefault(_INSIDE.sub("", name), len(self._begins))
        self._parameters: dict[str, tuple[int, int]] = {}
        reached = -1
        names = dict.fromkeys(name for source in n.PARAMETER_SOURCES for name in tensors.get(source, ()))
        for number, name in enumerate(names):
            reached = self._ends.get(name.rpartition(".")[0], reached)
            self._parameters[name] = (reached, number)

    def rank(self, key: Key) -> tuple[int, int, int, int]:
        stage = stage_of(key)
        place, within = self._place(key)
        if stage in _BACKWARD and place != _LAST:
            place, within = -place, -within
        return _NUMBER[stage], place, within, _METRICS.get(key.metric, len(_METRICS))

    def _place(self, key: Key) -> tuple[int, int]:
        if key.name in self._parameters and key.source in n.PARAMETER_SOURCES:
            return self._parameters[key.name]
        if key.source in n.MODULE_SOURCES or stage_of(key) == "activations":
            name = _INSIDE.sub("", key.name)
            module = n.owner_of(name, self._begins)
            takes = key.source in (n.INPUT, n.INPUT_GRADIENT)
            if takes or module not in self._ends:
                return self._begins.get(module, len(self._begins)), 0 if takes else 1
            return self._ends[module], 1
        return _LAST, 0


# --- Which values are compared, and how ---

#: Words in the names of clocks, speeds and memory, which differ from run to run.
_CLOCKS = frozenset(
    {"time", "second", "seconds", "secs", "sec", "ms", "elapsed", "eta", "duration", "latency", "timestamp", "walltime"}
    | {"throughput", "speed", "fps", "mfu", "tflops", "flops", "memory", "mem", "overhead"}
)
#: Values that follow from earlier steps.
_WITH_MEMORY = frozenset({"spike_score", "clip_fraction", "steps_not_applied", "steps_skipped", "clip_limit", "dead"})
Patterns = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


class Rules:
    def __init__(
        self,
        rtol: float = 0.0,
        atol: float = 0.0,
        tolerances: Mapping[str, float] | None = None,
        keys: Patterns | None = None,
        ignore: Patterns | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        own = _mapping("tolerances", tolerances, "{'update/': 1e-3}")
        new = _mapping("rename", rename, "{'^encoder': 'enc'}")
        self.rtol, self.atol = _tolerance("rtol", rtol), _tolerance("atol", atol)
        # relative; the first pattern found in a key decides
        self.tolerances = [(compile_pattern(p, "tolerances"), _tolerance(f"tolerances[{p!r}]", v)) for p, v in own.items()]
        self.keys = _patterns("keys", keys)  # without any, all keys except those of clocks are compared
        self.ignore = _patterns("ignore", ignore)
        # of patterns in the names of the first run's tensors
        self.rename = [(compile_pattern(p, "rename"), _replacement(p, place)) for p, place in new.items()]
        # also values that follow from earlier steps, which differ if the runs have other earlier steps
        self.with_memory = True

    def renamed(self, key: Key) -> Key:
        if key.source not in n.TENSOR_SOURCES and key.source not in n.NAME_SOURCES:
            return key
        name = key.name
        for pattern, place in self.rename:
            name = pattern.sub(place, name)
        return key if name == key.name else key._replace(name=name)

    def tolerance(self, key: Key, other: Key) -> float | None:
        """The relative tolerance for ``key``, which is ``other`` in the second run; None if it is not compared."""
        texts = {format_key(key), format_key(other)}
        if (not _found(self.keys, texts) if self.keys else self.leaves_out(key)) or _found(self.ignore, texts):
            return None
        return next((value for pattern, value in self.tolerances if _found([pattern], texts)), self.rtol)

    def leaves_out(self, key: Key) -> bool:
        """Whether a value is compared only if ``keys`` ask for it."""
        has_memory = key.source == n.SPIKE_SCORE or key.metric in _WITH_MEMORY
        return is_clock(key) or (has_memory and not self.with_memory)

    def check_use(self, keys: Iterable[str], names: Iterable[str]) -> None:
        """Refuse a pattern that matches nothing: after a typo, a comparison would pass."""
        for argument, patterns, texts in (
            ("keys", self.keys, list(keys)),
            ("ignore", self.ignore, list(keys)),
            ("tolerances", [pattern for pattern, _ in self.tolerances], list(keys)),
            ("rename", [pattern for pattern, _ in self.rename], list(names)),
        ):
            for pattern in patterns:
                if not any(map(pattern.search, texts)):
                    like = f"; one of them is {texts[0]!r}" if texts else ""
                    what = "name of a tensor of the first run" if argument == "rename" else "key of the two runs"
                    raise ValueError(f"{argument}: {pattern.pattern!r} matches no {what}{like}")


def renamer(rename: Mapping[str, str] | None) -> Callable[[str], str]:
    """The function from the name of a tensor or module in the first run to that in the second; raises as :class:`Rules`."""
    rules = Rules(rename=rename)
    return lambda name: rules.renamed(Key(n.PARAMETER, name, "")).name


def is_clock(key: Key) -> bool:
    """Whether a value is a time, a speed or an amount of memory.

    >>> is_clock(Key("", "tokens_per_sec", "")), is_clock(Key("", "timestep_loss", "")), is_clock(Key("gradmon", "", "overhead_fraction"))
    (True, False, True)
    """
    if key.source not in ("", n.SUMMARY):
        return False
    text = format_key(key)
    return not _CLOCKS.isdisjoint(re.split(r"[^a-z]+", text.lower())) and not is_loss(key)


def _found(patterns: Iterable[re.Pattern[str]], texts: Iterable[str]) -> bool:
    return any(pattern.search(text) for pattern in patterns for text in texts)


def _patterns(argument: str, given: Patterns | None) -> list[re.Pattern[str]]:
    each = [given] if isinstance(given, (str, re.Pattern)) else () if given is None else given
    if not isinstance(each, Sequence):
        raise TypeError(f"{argument} must be a pattern or a list of them, got {display(given)}")
    return [compile_pattern(pattern, argument) for pattern in each]


def _tolerance(argument: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument} must be a number, such as 1e-5, got {display(value)}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{argument}={value!r} must be a number of at least 0, such as 1e-5")
    return float(value)


def _mapping(argument: str, given: Mapping[str, Any] | None, example: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be a dict by pattern, such as {example}, got {display(given)}")
    return given or {}


def _replacement(pattern: str, place: str) -> str:
    if not isinstance(place, str):
        raise TypeError(f"rename[{pattern!r}] must be its replacement (str), got {display(place)}")
    try:
        compile_pattern(pattern, "rename").sub(place, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"rename: {place!r} cannot replace {pattern!r}: {error}") from error
    return place


# --- The comparison of two sheets ---

#: A value that may be close to zero because it is a difference, or a count of few, is compared relative to a share of another
#: metric.
_BESIDE = {"mean": ("rms", 1.0), "std": ("rms", 1e-2), "zero_count": (COUNT, 1.0), "grad_mean": ("grad_std", 1.0)}
#: Shares, cosines, scores, entropies and logits are compared relative to 1.
_OF_UNIT_ONE = frozenset({"sparsity", "grad_sparsity", "grad_momentum_cosine", "clip_fraction", "spike_score"})
_SOURCES_OF_UNIT_ONE = frozenset({*n.ATTENTION_SOURCES.values(), n.SPIKE_SCORE})
#: Metrics of near-zero elements. Rounding may move this many of them across the threshold.
_OF_ELEMENTS, _STRAY = ("sparsity", "zero_count"), 2.0


_Keys = tuple[Key, ...]


class _Scales(NamedTuple):
    """Columns that are compared relative to more than their own size: to ``share`` of ``left`` and ``right``, at least ``unit``."""

    columns: Tensor
    left: Tensor
    right: Tensor
    share: Tensor
    unit: Tensor

    def of(self, left: ValueMatrix, right: ValueMatrix) -> Tensor:
        size = torch.maximum(left.values[:, self.left].abs(), right.values[:, self.right].abs())
        return torch.maximum(size.nan_to_num_(0.0, posinf=0.0) * self.share, self.unit)


@dataclass(frozen=True)
class Compared:
    """Some steps of two runs compared; all tensors are ``[steps, pairs of columns]``."""

    keys: _Keys
    others: _Keys  # of the second run
    rtol: Tensor
    left: Tensor
    right: Tensor
    has_left: Tensor
    has_right: Tensor
    relative: Tensor  # infinite where one value is not finite
    differs: Tensor
    diverges: Tensor  # differs by more than the tolerance

    def share(self, column: int) -> float | None:
        """A value of the first step over the largest one of its source and metric; None if it is no value of a tensor."""
        own = self.keys[column]
        if not is_of_layer(own):
            return None
        alike = [place for place, key in enumerate(self.keys) if (key.source, key.metric) == (own.source, own.metric)]
        sizes = torch.maximum(self.left[0].abs(), self.right[0].abs()).nan_to_num(0.0)
        return float(sizes[column] / sizes[alike].max())

    def divergence(self, column: int, step: int, metrics: int = 1) -> Divergence:
        key, other = self.keys[column], format_key(self.others[column])
        a, b, relative = (float(of[0, column]) for of in (self.left, self.right, self.relative))
        return Divergence(step, format_key(key), other, stage_of(key), a, b, relative, float(self.rtol[column]), metrics)


class Pairing:
    """Which columns of two sheets are compared, and how: all that both runs have, if in other steps, and ``rules`` compare."""

    def __init__(self, sheets: tuple[_Keys, _Keys], absent: tuple[_Keys, _Keys], rules: Rules) -> None:
        self.sheets, self._absent, self._atol = sheets, absent, rules.atol
        all_keys = [(*own, *more) for own, more in zip(sheets, absent, strict=True)]
        self._places = [{key: column for column, key in enumerate(keys)} for keys in all_keys]
        pairs = [(key, other) for key in all_keys[0] if (other := rules.renamed(key)) in self._places[1]]
        found = [(*pair, rtol) for pair in pairs if (rtol := rules.tolerance(*pair)) is not None]
        self.keys, self.others = tuple(key for key, _, _ in found), tuple(other for _, other, _ in found)
        self._columns = [[place[key] for key in keys] for place, keys in zip(self._places, (self.keys, self.others), strict=True)]
        self.rtol = _real([rtol for _, _, rtol in found])
        floors = {row: _floor(key) for row, key in enumerate(self.keys)}
        self._floors = self._scales({row: floor for row, floor in floors.items() if any(floor[1:])})
        # with the number of all elements
        self._elements = self._scales({row: (COUNT, 1.0, 1.0) for row, key in enumerate(self.keys) if key.metric in _OF_ELEMENTS})

    def _scales(self, wanted: Mapping[int, tuple[str, float, float]]) -> _Scales:
        rows = []
        for row, (metric, share, unit) in wanted.items():
            pair = self.keys[row], self.others[row]
            at = [place.get(key._replace(metric=metric)) for place, key in zip(self._places, pair, strict=True)]
            rows.append((row, at[0] or 0, at[1] or 0, 0.0 if None in at else share, unit))
        columns = list(zip(*rows, strict=True)) if rows else [()] * 5
        return _Scales(*(_real(column).long() for column in columns[:3]), *map(_real, columns[3:]))

    def compare(self, *sheets: ValueMatrix) -> Compared:
        """Compare two sheets of the same steps. NaN equals NaN, and an infinite value equals itself."""
        left, right = (sheet.with_absent(keys) for sheet, keys in zip(sheets, self._absent, strict=True))
        left_part, right_part = left.columns(self._columns[0]), right.columns(self._columns[1])
        a, b, has_a, has_b = left_part.values, right_part.values, left_part.there, right_part.there
        differs = has_a & has_b & ~((a == b) | (a.isnan() & b.isnan()))
        is_number = a.isfinite() & b.isfinite()
        gap = (a - b).abs_()
        scale = torch.maximum(a.abs(), b.abs())
        scale[:, self._floors.columns] = torch.maximum(scale[:, self._floors.columns], self._floors.of(left, right))
        allowed = scale * self.rtol + self._atol
        allowed[:, self._elements.columns] += self._stray(left, right)
        diverges = differs & ~((gap <= allowed) & is_number)
        relative = torch.where(differs, torch.where(is_number, gap.div_(scale), torch.inf), 0.0)
        return Compared(self.keys, self.others, self.rtol, a, b, has_a, has_b, relative, differs, diverges)

    def _stray(self, left: ValueMatrix, right: ValueMatrix) -> Tensor:
        """The difference that rounding allows in metrics of single elements; 0 if equal bits are required."""
        columns = self._elements.columns
        is_count = torch.tensor(
            [self.keys[column].metric == "zero_count" for column in columns.tolist()], dtype=torch.bool, device="cpu"
        )
        per_element = torch.where(is_count, 1.0, 1.0 / self._elements.of(left, right))
        return torch.where(self.rtol[columns] > 0, _STRAY * per_element, 0.0)


def _floor(key: Key) -> tuple[str, float, float]:
    """The metric that gives the scale, its share, and the smallest scale; zeros without any."""
    is_of_one = key.metric in _OF_UNIT_ONE or key.source in _SOURCES_OF_UNIT_ONE
    return (*_BESIDE.get(key.metric, ("", 0.0)), 1.0 if is_of_one else 0.0)


def _real(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


# --- The result of comparing two runs, as data ---


@dataclass(frozen=True)
class Divergence:
    """A value that differs between the runs.

    Attributes:
        step: number of the step.
        key: of the value in the first run.
        other: its key in the second run.
        stage: of the step, such as ``parameters``, ``activations`` or ``updates``.
        a, b: the value in the first and in the second run.
        relative: the difference relative to the larger value; that of a mean relative to the root mean square, and so on.
        rtol: the tolerated difference.
        metrics: how many metrics of the same tensor diverge.
    """

    step: int
    key: str
    other: str
    stage: str
    a: float
    b: float
    relative: float
    rtol: float
    metrics: int = 1


@dataclass(frozen=True)
class StageCounts:
    """How many tensors and other values of a stage diverge in one step.

    Attributes:
        tensors, values: how many were compared.
        tensors_part, values_part: how many of them diverge.
        largest: the largest relative difference.
    """

    tensors: int
    tensors_part: int
    values: int
    values_part: int
    largest: float


@dataclass(frozen=True)
class Unmatched:
    """What only one of the runs has.

    Attributes:
        steps: numbers of steps.
        keys: whole-model and logged values by key, and tensors as ``source/name``.
        gaps: by key or tensor that both runs have in other steps, in how many compared steps only this run has it, and the first.
    """

    steps: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.keys or self.gaps)


# --- The facts of a step ---


def item_key(key: Key) -> Key:
    return key._replace(metric="") if is_of_layer(key) else key


def facts_of(window: Window) -> ValueMatrix:
    rows: list[dict[Key, float]] = []
    for record in window.records.values():
        facts = {**record.context, "applied": record.applied}
        rates = facts.get("lr", [])
        row = {Key(CONTEXT, "lr", "" if len(rates) == 1 else str(group)): float(rate) for group, rate in enumerate(rates)}
        row |= {Key(CONTEXT, name, ""): float(facts[name]) for name in ("amp_scale", "applied") if facts.get(name) is not None}
        rows.append(row)
    keys = tuple(dict.fromkeys(key for row in rows for key in row))
    values = torch.tensor([[row.get(key, math.nan) for key in keys] for row in rows], dtype=torch.float64, device="cpu")
    there = torch.tensor([[key in row for key in keys] for row in rows], dtype=torch.bool, device="cpu")
    return ValueMatrix(keys, values.reshape(len(rows), len(keys)), there.reshape(len(rows), len(keys)))


# --- What the first difference points to ---

#: The largest difference that rounding in float32, and sums of it, can cause.
_ROUNDING = 2e-6
#: A gradient below this share of the largest one may be nothing but rounding.
_NOISE = 1e-6
_OF_FORWARD = "other data, other random numbers such as those of dropout, or other code in the forward pass"
_OF_BACKWARD = (
    "the backward pass, or hooks that change gradients; torch.use_deterministic_algorithms(True) reports operations that "
    "are not deterministic"
)
_OF_OPTIMIZER = "the optimizer's settings, its state (a checkpoint without it, for example), or its code"


def interpret(onset: Divergence, before: int | None, compared: Container[str], settings: Sequence[str]) -> str:
    """What the first value that differs points to; ``settings`` are those of optimizers that differ."""
    text = _of_place(onset, before, compared)
    if not (math.isfinite(onset.a) and math.isfinite(onset.b)):
        return f"{text} Not all of the values are finite."
    if settings and onset.stage in _OF_STEP and (onset.stage != "parameters" or before is not None):
        return f"{text} The optimizers differ in {listed(settings, 3)}, which may be the cause."
    if onset.stage in ("settings", "other values"):
        return text
    if onset.relative > _ROUNDING:
        return f"{text} At {onset.relative:.1e} it is more than rounding in float32."
    return (
        f"{text} At {onset.relative:.1e} it is of the size of rounding in float32: sums in another order, from kernels that are not "
        "deterministic, another number of threads, or code that is equal in exact arithmetic. Such a difference grows during training."
    )


def interpret_noise(stage: str, key: str, share: float | None) -> str:
    """A sentence on a gradient that may be nothing but rounding: its ``share`` of the largest of its kind is tiny."""
    if not stage.startswith("gradients") or share is None or share >= _NOISE:
        return ""
    name = ".".join(parse_key(key).name.split(".")[-2:])
    return (
        f"{key} is {share:.0e} of the largest such gradient: it may be nothing but rounding, as for a bias before a normalisation, or of "
        f"the keys in attention. If so, leave it out, with all that follows from it: ignore={name!r}."
    )


def _of_place(onset: Divergence, before: int | None, compared: Container[str]) -> str:
    def same(*stages: str) -> str:
        """Which of ``stages`` are the same, and which were not recorded in both runs."""
        known = [_SHORT.get(each, each) for each in stages if each in compared]
        unknown = " and ".join(_SHORT.get(each, each) for each in stages if each not in compared)
        if not known:
            return f"{unknown.capitalize()} were not recorded in both runs"
        text = f"The {' and '.join(known)} {'is' if known == ['loss'] else 'are'} the same"
        return f"{text} ({unknown}: not recorded in both runs)" if unknown else text

    stage, forward = onset.stage, _OF_FORWARD if "parameters" in compared else f"other parameters, {_OF_FORWARD}"
    if stage == "parameters" and before is None:
        return (
            f"The parameters differ in the first compared step ({onset.step}): another seed, initialisation or checkpoint, or the runs "
            "diverged before."
        )
    if stage == "parameters":
        return (
            f"All values that both runs recorded in step {before} are the same, and then the parameters differ: {_OF_OPTIMIZER}, or "
            f"another change between steps {before} and {onset.step}."
        )
    if stage == "activations" and onset.key.startswith(f"{n.INPUT}/{n.ROOT}/"):
        return f"{same('parameters')}, and the input of the model differs: other data."
    if stage == "activations":
        return f"{same('parameters')}, and this is the first activation that differs: {forward}."
    if stage == "loss" and "activations" in compared:
        return f"{same('parameters', 'activations')}, and the loss differs: other targets, or other code of the loss."
    if stage == "loss":
        return f'{same("parameters")}, and the loss differs: {forward}. Activations (preset="full") would show more.'
    if stage == "gradients for the optimizer" and "gradients before clipping" in compared:
        return "The gradients are the same before clipping, and those that the optimizer uses differ: the clip, or its limit."
    if stage in _BACKWARD:
        if known := [each for each in ("activations", "loss") if each in compared]:
            return f"{same('parameters', *known)}, and gradients differ: {_OF_BACKWARD}."
        hint = 'A logged loss, or activations (preset="full"), would show which.'
        return f"{same('parameters')}, and gradients differ: {forward}, or in the backward pass. {hint}"
    if stage == "other values":
        return "The step itself does not differ, only values that were logged beside it or follow from earlier steps."
    if stage == "settings":
        return f"{same(*_FOR_STEP)}, and {_SETTINGS.get(onset.key, 'the learning rate')} differs."
    return f"{same(*_FOR_STEP)}, and the optimizer's result differs: {_OF_OPTIMIZER}."


_SETTINGS = {"context/amp_scale": "the loss scale", "context/applied": "whether the step was applied"}
#: Stages that follow from the optimizer's step, or from the one before.
_OF_STEP = frozenset({"parameters", "settings", "optimizer state", "updates"})
_SHORT = {"gradients for the optimizer": "gradients"}
_FOR_STEP = ("parameters", "gradients for the optimizer")


# --- What only one of the runs has ---

#: By key or tensor, in how many steps only this run has it, and the first of them.
Gaps = dict[Key, tuple[int, int]]


def compared_items(run: RunReader) -> Iterator[Key]:
    """Tensors, without a metric, and the keys of all other values."""
    for source in run.sources:
        yield from (Key(source, name, "") for name in run.tensors(source))
    yield from run.scalars


def item_of(key: Key) -> Key | None:
    """The item that a value belongs to; None for a statistic other than the count, as others may be measured less often."""
    if key.source not in n.TENSOR_SOURCES or key.metric not in (*VIEWS, COUNT):
        return key
    return key._replace(metric="") if key.metric == COUNT else None


def _is_compared(key: Key, other: Key, rules: Rules) -> bool:
    is_tensor = key.source in n.TENSOR_SOURCES and not key.metric
    metrics = tuple(VIEWS) if is_tensor else (key.metric,)
    return any(rules.tolerance(key._replace(metric=m), other._replace(metric=m)) is not None for m in metrics)


# --- Step by step ---

#: Values that are compared at once, over all steps of a window; and the steps of the first window.
_CELLS, _FIRST = 1 << 19, 8
#: Whole-model values whose growth is shown, in addition to the loss.
_OF_GROWTH = ("param_norm", "grad_norm", "update_norm")


class Comparison:
    """Compares two runs; raises ValueError where a pattern matches nothing, two names become one, or nothing in common is compared."""

    def __init__(self, left: RunReader, right: RunReader, rules: Rules) -> None:
        self._runs, self._rules = (left, right), rules
        tensors = {source: left.tensors_as_measured(source) for source in left.sources}
        self._order = Order(tensors)
        self._width = sum(map(len, tensors.values())) * (len(VIEWS) + 1) + len(left.scalars)
        # what each run has, by its key in the second
        self._items: tuple[dict[Key, Key], dict[Key, Key]] = {}, {key: key for key in compared_items(right)}
        self._pairing: Pairing | None = None
        self._check()
        # what is found step by step
        self.steps: list[int] = []  # the compared ones
        self.first: int | None = None  # that diverges
        self.onset: int | None = None  # the first with a difference of any size
        self._largest, self._of_largest = 0.0, -1  # the largest relative difference within the tolerance, and its step
        self._gaps: tuple[Gaps, Gaps] = {}, {}  # what only one run has

    def _check(self) -> None:
        own, rules, (left, right) = list(compared_items(self._runs[0])), self._rules, self._runs
        names = dict.fromkeys(key.name for key in own if key.source and key.name)
        rules.check_use((*left.keys(), *right.keys(), *map(format_key, FACTS)), names)
        for key in own:
            renamed = rules.renamed(key)
            first = self._items[0].setdefault(renamed, key)
            if first.name != key.name:
                both = f"{first.name!r} and {key.name!r} would both be called {renamed.name!r}"
                raise ValueError(f"rename: {both}; give a narrower pattern")
        common = [(key, other) for other, key in self._items[0].items() if other in self._items[1]]
        if not common:
            hint = "" if rules.rename else "; rename= (--rename) maps the names that differ"
            raise ValueError(f"the runs have no tensor and no value in common{hint}")
        if not any(_is_compared(key, other, rules) for key, other in (*common, *zip(FACTS, FACTS, strict=True))):
            raise ValueError("keys= and ignore= leave out all that the runs have in common")

    def scan(self, steps: Sequence[int], advance: Callable[[int], None]) -> None:
        """Compare common ``steps`` up to the first that diverges; calls ``advance`` with the number of steps done."""
        most, size, done = max(_CELLS // max(self._width, 1), 1), _FIRST, 0
        while done < len(steps) and self.first is None:
            some = steps[done : done + min(size, most)]
            self._record(some, self._compared(some))
            advance(len(some))
            done, size = done + len(some), 4 * size

    def _compared(self, steps: Sequence[int], thorough: bool = False) -> Compared:
        """All values of ``steps``; unless ``thorough``, without the sources whose stored statistics are byte for byte equal."""
        left, right = (run.window(steps) for run in self._runs)
        is_exact = thorough or bool(self._rules.rename)
        sources = [each for each in dict.fromkeys((*left.sources, *right.sources)) if is_exact or not left.is_like(right, each)]
        return self._pair(*(_beside([*map(each.sheet, sources), each.others, facts_of(each)]) for each in (left, right)))

    def _pair(self, left: ValueMatrix, right: ValueMatrix) -> Compared:
        if self._pairing is None or self._pairing.sheets != (left.keys, right.keys):
            self._pairing = Pairing((left.keys, right.keys), self._absent(left.keys, right.keys), self._rules)
        return self._pairing.compare(left, right)

    def _absent(self, left: _Keys, right: _Keys) -> tuple[_Keys, _Keys]:
        """The keys that one run lacks in these steps but has in others."""
        renamed, there = {self._rules.renamed(key) for key in left}, set(right)
        items = ((key, item_of(key)) for key in right if key not in renamed)
        more = tuple(key._replace(name=self._items[0][item].name) for key, item in items if item and item in self._items[0])
        return more, tuple(key for key in renamed if key not in there and item_of(key) in self._items[1])

    def _record(self, steps: Sequence[int], found: Compared) -> None:
        divergence, onset = map(_first_row, (found.diverges, found.differs))
        rows = len(steps) if divergence is None else divergence + 1
        self.steps += steps[:rows]
        self.first = None if divergence is None else steps[divergence]
        if self.onset is None and onset is not None:
            self.onset = steps[onset]
        within = torch.where(found.diverges, 0.0, found.relative)[:divergence]
        if within.numel() and float(within.max()) > self._largest:
            self._largest, self._of_largest = float(within.max()), steps[int(within.amax(1).argmax())]
        there = found.has_left[:rows], found.has_right[:rows]
        for gaps, alone in zip(self._gaps, (there[0] & ~there[1], there[1] & ~there[0]), strict=True):
            for column in torch.nonzero(alone.any(0)).flatten().tolist():
                if (item := item_of(found.keys[column])) is not None:
                    count, first = gaps.get(item, (0, steps[int(alone[:, column].int().argmax())]))
                    gaps[item] = (count + int(alone[:, column].sum()), first)

    def unmatched(self, steps: tuple[Sequence[int], Sequence[int]]) -> tuple[Unmatched, Unmatched]:
        """What only one run has in its ``steps``."""

        def of_one(at: int) -> Unmatched:
            others, present = self._items[1 - at], self._runs[at].present(steps[at])
            lacking = ((key, other) for other, key in self._items[at].items() if other not in others and key in present)
            return Unmatched(
                tuple(sorted(set(steps[at]).difference(steps[1 - at]))),
                tuple(format_key(key) for key, other in lacking if _is_compared(key, other, self._rules)),
                {format_key(key): value for key, value in self._gaps[at].items()},
            )

        return of_one(0), of_one(1)

    def divergences(self) -> tuple[list[Divergence], str]:
        """The divergent values of the first step with any, one for each tensor, in the order of computation; and a remark on the first."""
        if self.first is None:
            return [], ""
        found, by_item = self._compared([self.first], thorough=True), dict[Key, list[int]]()
        for column in self._in_order(found, found.diverges):
            by_item.setdefault(item_key(found.keys[column]), []).append(column)
        each = [found.divergence(columns[0], self.first, len(columns)) for columns in by_item.values()]
        share = found.share(next(iter(by_item.values()))[0])
        return each, interpret_noise(each[0].stage, each[0].key, share)

    def first_difference(self, settings: Sequence[str]) -> tuple[Divergence | None, str]:
        """The value that differs first in the first step with a difference, and what that points to; None without any."""
        if self.onset is None:
            return None, ""
        found, row = self._compared([self.onset], thorough=True), bisect_left(self.steps, self.onset)
        onset = found.divergence(self._in_order(found, found.differs)[0], self.onset)
        meaning = interpret(onset, self.steps[row - 1] if row else None, self.stages(self.onset), settings)
        missing, comes_first = self._missing(onset)
        because = "The differences follow from that, or have the same cause."
        return onset, f"{missing} {because}" if comes_first else f"{meaning} {missing}".strip()

    def _in_order(self, found: Compared, chosen: Tensor) -> list[int]:
        """The chosen columns of a single step in the order of computation."""
        return sorted(torch.nonzero(chosen[0]).flatten().tolist(), key=lambda column: self._order.rank(found.keys[column]))

    def _missing(self, onset: Divergence) -> tuple[str, bool]:
        """A sentence on what a run first lacks in the step of ``onset``, and whether that is computed no later than its stage."""
        sentences, stages = [], []
        for run, found in zip(("second", "first"), self._gaps, strict=True):  # what only the first has is missing from the second
            keys = sorted((key for key, (_, first) in found.items() if first == onset.step), key=self._order.rank)
            if keys:
                lacks = f"{format_key(keys[0])}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}"
                sentences.append(f"In step {onset.step} the {run} run lacks {lacks}, which it has in other steps.")
                stages.append(stage_of(keys[0]))
        return " ".join(sentences), any(_NUMBER[stage] <= _NUMBER[onset.stage] for stage in stages)

    def largest(self) -> Divergence | None:
        """The largest relative difference within the tolerance."""
        if not self._largest:
            return None
        found = self._compared([self._of_largest], thorough=True)
        columns = self._in_order(found, found.differs & ~found.diverges)
        best = max(columns, key=lambda column: float(found.relative[0, column]), default=None)
        return None if best is None else found.divergence(best, self._of_largest)

    def growth(self, steps: Sequence[int]) -> dict[str, dict[int, float]]:
        """The relative difference of the loss and of whole-model norms in these steps, by key; infinite if one is not finite."""
        found = self._pair(*(run.window(steps).others for run in self._runs))
        wanted = [loss_among(found.keys), *(Key(n.SUMMARY, "", name) for name in _OF_GROWTH)]
        growth: dict[str, dict[int, float]] = {}
        for key in wanted:
            if key is not None and key in found.keys:
                column = found.keys.index(key)
                there = (found.has_left & found.has_right)[:, column].tolist()
                values = zip(steps, found.relative[:, column].tolist(), there, strict=True)
                if known := {step: value for step, value, is_there in values if is_there}:
                    growth[format_key(key)] = known
        return growth

    def stages(self, step: int) -> dict[str, StageCounts]:
        found = self._compared([step], thorough=True)
        both = (found.has_left & found.has_right)[0].tolist()
        cells: dict[str, dict[Key, tuple[bool, bool, float]]] = {}
        for key, is_compared, diverges, relative in zip(
            found.keys, both, found.diverges[0].tolist(), found.relative[0].tolist(), strict=True
        ):
            if is_compared:
                items = cells.setdefault(stage_of(key), {})
                _, earlier, largest = items.get(item_key(key), (False, False, 0.0))
                items[item_key(key)] = is_of_layer(key), earlier or diverges, max(largest, relative)
        return {stage: _counts(list(cells[stage].values())) for stage in STAGES if stage in cells}


def _beside(sheets: Sequence[ValueMatrix]) -> ValueMatrix:
    keys = tuple(key for sheet in sheets for key in sheet.keys)
    return ValueMatrix(keys, torch.cat([sheet.values for sheet in sheets], 1), torch.cat([sheet.there for sheet in sheets], 1))


def _first_row(flags: Tensor) -> int | None:
    rows = flags.any(1)
    return int(rows.int().argmax()) if bool(rows.any()) else None


def _counts(items: list[tuple[bool, bool, float]]) -> StageCounts:
    tensors = [diverges for is_tensor, diverges, _ in items if is_tensor]
    values = [diverges for is_tensor, diverges, _ in items if not is_tensor]
    return StageCounts(len(tensors), sum(tensors), len(values), sum(values), max(relative for *_, relative in items))
