"""Rebuild histograms from the values of a step, for trackers that can show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..statistics.histogram import HIGHEST, LOWEST, NAME

_CLASS = re.compile(rf"^(.*{NAME})\.(-?\d+)(/.*)?$")  # in both styles of keys


@dataclass
class Histogram:
    """Elements by the logarithm of their magnitude, without zeros, which are a value of their own.

    Attributes:
        counts: from the lowest class to the highest.
        edges: ``log2 |x|`` at the start of each class, and at the end of the last.
    """

    counts: list[float] = field(default_factory=lambda: [0.0] * (HIGHEST - LOWEST + 1))
    edges: list[int] = field(default_factory=lambda: list(range(LOWEST, HIGHEST + 2)))


def without_histograms(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Histogram]]:
    """``values`` without the classes of histograms, and the histograms by key."""
    scalars: dict[str, float] = {}
    found: dict[str, Histogram] = {}
    for key, value in values.items():
        part = _CLASS.match(key) if NAME in key else None
        if part is None or not LOWEST <= int(part[2]) <= HIGHEST:
            scalars[key] = value
        else:
            found.setdefault(part[1] + (part[3] or ""), Histogram()).counts[int(part[2]) - LOWEST] = value
    return scalars, found
