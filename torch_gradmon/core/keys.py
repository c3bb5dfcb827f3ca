"""Canonical tensor names, and the keys of logged values.

:func:`format_key` is the only function that builds keys, :func:`parse_key` the only one that parses them. All other code passes the three
parts of a :class:`Key`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from functools import cache
from itertools import takewhile
from typing import NamedTuple

from .errors import display

GRADIENT = "gradient"
GRADIENT_BEFORE_CLIP = "gradient_before_clip"
GRADIENT_LOCAL = "gradient_local"
PARAMETER = "parameter"
PARAMETER_DIFFERENCE = "parameter_difference"
UPDATE = "update"
OPTIMIZER = "optimizer"
ACTIVATION = "activation"
ACTIVATION_GRADIENT = "activation_gradient"
ACTIVATION_DIFFERENCE = "activation_difference"
INPUT = "input"
INPUT_GRADIENT = "input_gradient"
RCC_UPDATE = "RCC (W_t-W_0)x_t"
RCC_PROPAGATED = "RCC W_0(x_t-x_0)"
RCC_INPUT = "RCC x_t"
RCC_INPUT_DIFFERENCE = "RCC (x_t-x_0)"
ATTENTION_ENTROPY = "attention_entropy"
ATTENTION_ENTROPY_NORMALIZED = "attention_entropy_normalized"
ATTENTION_MAX_LOGIT = "attention_max_logit"
ATTENTION_FIRST_KEY = "attention_first_key"
SUMMARY = "gradmon"
SPIKE_SCORE = "spike_score"
#: Sources of the refined coordinate check, as torch-module-monitor names them.
RCC_SOURCES = (RCC_UPDATE, RCC_PROPAGATED, RCC_INPUT, RCC_INPUT_DIFFERENCE)
#: Internal: statistics of the updated parameters before the update; they have no keys.
UPDATE_BASE = "update_base"
#: Internal: a row for the gradient of each micro-batch, named by rank and number.
BATCH_GRADIENT = "batch_gradient"

#: Returned by built-ins of the optimizer's state for an undefined value; defined values are finite or NaN.
UNDEFINED = float("inf")
#: Sources with one tensor for each parameter, whose number of elements never changes.
PARAMETER_SOURCES = (GRADIENT, GRADIENT_BEFORE_CLIP, GRADIENT_LOCAL, PARAMETER, PARAMETER_DIFFERENCE, UPDATE, OPTIMIZER)
#: Sources whose keys are ``source/name/metric``.
TENSOR_SOURCES = (
    *PARAMETER_SOURCES,
    *(ACTIVATION, ACTIVATION_GRADIENT, ACTIVATION_DIFFERENCE, INPUT, INPUT_GRADIENT),
    *RCC_SOURCES,
)
#: Sources of inputs and outputs of modules, by the names that :meth:`add_activation_metric` accepts.
MODULE_KINDS = {"output": ACTIVATION, "output_gradient": ACTIVATION_GRADIENT, "input": INPUT, "input_gradient": INPUT_GRADIENT}
MODULE_SOURCES = (*MODULE_KINDS.values(), ACTIVATION_DIFFERENCE)
#: Sources of attention by the name of the metric. Keys are ``source/module.head_i``, and ``source/module/min`` over the heads.
ATTENTION_SOURCES = {
    "entropy": ATTENTION_ENTROPY,
    "entropy_normalized": ATTENTION_ENTROPY_NORMALIZED,
    "max_logit": ATTENTION_MAX_LOGIT,
    "first_key": ATTENTION_FIRST_KEY,
}
#: In the context of a step that should have had values of attention: why it has none.
NO_ATTENTION = "no_attention"
#: Aggregations over the heads of a layer.
OVER_HEADS = ("min", "mean", "max")
#: Sources whose keys are ``source/name``, since the source is the metric.
NAME_SOURCES = (*ATTENTION_SOURCES.values(), SPIKE_SCORE)
#: Stages of a gradient, in the order of a step.
GRADIENT_STAGES = {"local": GRADIENT_LOCAL, "before_clip": GRADIENT_BEFORE_CLIP, "after_clip": GRADIENT}

ROOT = "[root module]"
KEY_ORDERS = ("name_first", "metric_first")

#: Path components that a wrapper adds: DDP and DataParallel, torch.compile, FSDP1, activation checkpointing, Megatron and
#: DeepSpeed style holders.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})


def has_attention(kinds: Mapping[str, str]) -> bool:
    """Whether a model has attention, by the classes of its modules."""
    return "attention" in "\n".join(kinds.values()).lower()


class Key(NamedTuple):
    """The three parts of a logged value's name. Free keys, such as those of ``log_scalar``, have only a name."""

    source: str
    name: str
    metric: str


@cache
def shared_key(source: str, name: str, metric: str) -> Key:
    """The key, as one object for the records of all steps: what each of them keeps costs time in Python's garbage collection."""
    return Key(source, name, metric)


def canonical_name(name: str) -> str:
    """``name`` without path components of wrappers; :data:`ROOT` for the root module.

    >>> canonical_name("module._orig_mod.h.0.attn.weight")
    'h.0.attn.weight'
    >>> canonical_name("module")
    '[root module]'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or ROOT


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name of each of ``names``. Names with the same canonical name stay unchanged.

    >>> canonical_names(["_orig_mod.a.weight", "module.b", "b"])
    {'_orig_mod.a.weight': 'a.weight', 'module.b': 'module.b', 'b': 'b'}
    """
    mapping = {name: canonical_name(name) for name in names}
    taken = Counter(mapping.values())
    return {name: short if taken[short] == 1 else name or ROOT for name, short in mapping.items()}


def blocks_of(names: Iterable[str], of_modules: bool = False) -> dict[str, str]:
    """The block of each of a model's parameters, or modules: its path up to the first number, else up to the first module that
    neither holds numbered blocks nor wraps all of the model.

    >>> blocks_of(["m.wte.weight", "m.h.0.attn.weight", "m.norm.weight", "lm_head.weight"])
    {'m.wte.weight': 'm.wte', 'm.h.0.attn.weight': 'm.h.0', 'm.norm.weight': 'm.norm', 'lm_head.weight': 'lm_head'}
    """
    paths = {name: name.split(".") for name in names}
    modules = {name: path if of_modules else path[:-1] for name, path in paths.items()}
    numbers = {name: next((at for at, part in enumerate(path) if part.isdecimal()), -1) for name, path in modules.items()}
    opened = {tuple(modules[name][:depth]) for name, at in numbers.items() for depth in range(1, at + 1)}
    shared = [alike[0] for alike in takewhile(lambda parts: len(set(parts)) == 1, zip(*modules.values(), strict=False))]
    is_one = all(path == shared for path in modules.values())  # a module, not a wrapper
    opened.update(tuple(shared[:depth]) for depth in range(1, len(shared) + 1 - is_one))

    def depth_of(name: str) -> int:
        path = modules[name]
        if (number := numbers[name]) >= 0:
            return number + 1
        return next((depth for depth in range(1, len(path) + 1) if tuple(path[:depth]) not in opened), len(paths[name]))

    return {name: ".".join(path[: depth_of(name)]) for name, path in paths.items()}


def format_key(key: Key, style: str = "name_first", prefix: str = "") -> str:
    """The flat string for ``key``: ``source/name/metric``, or ``source_metric/name`` in the style ``metric_first``.

    >>> format_key(Key("gradient", "fc.weight", "norm"))
    'gradient/fc.weight/norm'
    >>> format_key(Key("gradient", "fc.weight", "norm"), "metric_first")
    'gradient_norm/fc.weight'
    """
    if style == "metric_first" and key.source and key.name and key.metric:
        return f"{prefix}{key.source}_{key.metric}/{key.name}"
    return prefix + "/".join(part for part in key if part)


def parse_key(text: str, style: str = "name_first", prefix: str = "") -> Key:
    """The inverse of :func:`format_key`. A text without a known source is a free key.

    >>> parse_key("gradient/fc.weight/norm")
    Key(source='gradient', name='fc.weight', metric='norm')
    >>> parse_key("loss")
    Key(source='', name='loss', metric='')
    """
    text = text.removeprefix(prefix)
    head, slash, rest = text.partition("/")
    if slash and head == SUMMARY:
        return Key(SUMMARY, "", rest)
    if slash and head in NAME_SOURCES:
        name, inner, metric = rest.rpartition("/")
        return Key(head, name, metric) if inner and metric in OVER_HEADS else Key(head, rest, "")
    if slash and style == "metric_first":
        for source in sorted((*TENSOR_SOURCES, *ATTENTION_SOURCES.values()), key=len, reverse=True):
            if head.startswith(source + "_"):
                return Key(source, rest, head[len(source) + 1 :])
    elif slash and head in TENSOR_SOURCES:
        name, inner, metric = rest.rpartition("/")
        if inner:
            return Key(head, name, metric)
    return Key("", text, "")


def owner_of(path: str, known: Container[str]) -> str:
    """The module of a path: ``encoder.layer`` for ``encoder.layer@1[0].hidden``."""
    while path not in known and (cut := max(map(path.rfind, ".[@"))) > 0:
        path = path[:cut]
    return path


Pattern = str | re.Pattern[str]


def compile_pattern(pattern: str | re.Pattern[str], argument: str = "metric_regex") -> re.Pattern[str]:
    """``pattern`` compiled. Errors name the argument."""
    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(f"{argument} must be a regular expression (str), got {display(pattern)}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{argument}={pattern!r} is not a valid regular expression: {error}") from error
