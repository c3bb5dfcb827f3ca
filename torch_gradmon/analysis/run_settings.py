"""What a run was made with: model, optimizers, torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.records import before_schedule

#: Settings of an optimizer that are about how it computes, not what.
_INTERNAL = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize"})
#: The rate that a schedule multiplies, which stands for ``lr`` already.
_TWICE = "initial_lr"


def settings_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with, as text: different values of several parameter groups stand one after the other."""
    return {name: _joined(values) for name, values in _values(meta).items() if name not in _INTERNAL}


def settings_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings by name that two runs with these facts do not share, as text; empty for what one of them lacks."""
    own, others = _values(first), _values(second)
    found = {}
    for name in {**own, **others}:
        sides = own.get(name, []), others.get(name, [])
        if sides[0] != sides[1] and (all(sides) or name != "lr"):  # one on a device is not known
            texts = _joined(sides[0]), _joined(sides[1])
            found[name] = texts if texts[0] != texts[1] else (" | ".join(sides[0]), " | ".join(sides[1]))
    return found


def optimizer_settings(meta: Mapping[str, Any]) -> frozenset[str]:
    """The names of the settings of its optimizers."""
    groups = meta.get("optimizers") or ()
    return frozenset({"optimizer"}.union(*(group["settings"] for group in groups)))


def _values(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings by name: those of optimizers for each group."""
    groups = meta.get("optimizers") or ()
    found: dict[str, list[str]] = {"model": [str(meta.get("model", ""))], "optimizer": [group["optimizer"] for group in groups]}
    for group in groups:
        for name, value in before_schedule(group["settings"]).items():
            if name != _TWICE:
                found.setdefault(name, []).append(_text(value))
    if "parameters" in meta:
        found["parameters"] = [f"{sum(math.prod(each['shape']) for each in meta['parameters'].values()):,}"]
    for name in ("preset", "every", "torch"):
        found[name] = [str(meta.get(name, ""))]
    return {name: values for name, values in found.items() if any(values)}


def _joined(values: Sequence[str]) -> str:
    return " | ".join(dict.fromkeys(values))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
