"""Numbers that JSON does not have: NaN and the infinite ones are strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: float) -> float | str:
    """The value, or the string that stands for one that is not finite."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def strict(value: Any) -> Any:
    """For JSON, which has no numbers that are not finite: these as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in a JsonlSink."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return plain(value) if isinstance(value, float) else value
