"""What a run was made with: model, optimizers, torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.trained_parts import before_schedule

#: Settings of an optimizer that are about how it computes, not what.
_INTERNAL = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize"})
#: The rate that a schedule multiplies, which stands for ``lr`` already.
_TWICE = "initial_lr"


def settings_of(meta: Mapping[str, Any], internal: bool = False) -> dict[str, str]:
    """What a run was made with, as text: values of several parameter groups stand one after the other.

    Args:
        meta: facts about the run.
        internal: with settings that are about how an optimizer computes, not what.
    """
    groups = meta.get("optimizers") or ()
    found: dict[str, list[str]] = {"model": [str(meta.get("model", ""))], "optimizer": [group["optimizer"] for group in groups]}
    for group in groups:
        for name, value in before_schedule(group["settings"]).items():
            if name != _TWICE and (internal or name not in _INTERNAL):
                found.setdefault(name, []).append(_text(value))
    if "parameters" in meta:
        found["parameters"] = [f"{sum(math.prod(each['shape']) for each in meta['parameters'].values()):,}"]
    for name in ("preset", "every", "torch"):
        found[name] = [str(meta.get(name, ""))]
    return {name: " | ".join(dict.fromkeys(values)) for name, values in found.items() if any(values)}


def settings_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings by name that two runs with these facts do not share; empty text for what one of them lacks."""
    own, others = settings_of(first, internal=True), settings_of(second, internal=True)
    both = {name: (own.get(name, ""), others.get(name, "")) for name in {**own, **others}}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def optimizer_settings(meta: Mapping[str, Any]) -> frozenset[str]:
    """The names of the settings of its optimizers."""
    groups = meta.get("optimizers") or ()
    return frozenset({"optimizer"}.union(*(group["settings"] for group in groups)))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
