"""Strings for numbers that JSON does not have: NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: float) -> float | str:
    """The value, or a string if it is not finite: ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def strict(value: Any) -> Any:
    """The same for all numbers in nested dicts and lists."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return plain(value) if isinstance(value, float) else value
