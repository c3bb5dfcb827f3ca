"""Means over the steps of an epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: The largest of this whole-model value in an epoch is kept, under its name with ``_max``.
_LARGEST = "gradmon/grad_norm"
#: Counters of the whole run; an epoch keeps their last values.
_COUNTERS = ("gradmon/steps_not_applied", "gradmon/steps_skipped")


class EpochMeans:
    """Collects the values of steps, each step once, and gives the mean of each key over the steps that had it.

    Values that are not finite, as in an overflowed step of a GradScaler, are left out of means.

    Attributes:
        last: number of the last added step; -1 before the first.
    """

    def __init__(self) -> None:
        self.last = -1
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._kept: dict[str, float] = {}

    def begin(self) -> None:
        """Begin an epoch."""
        self._sums, self._counts, self._kept = {}, {}, {}

    def add(self, values: Mapping[str, float], step: int) -> bool:
        """Add the values of ``step``; returns False, without effect, if it was added before."""
        if step <= self.last:
            return False
        self.last = step
        for key, value in values.items():
            if key.endswith(_COUNTERS):
                self._kept[key] = value
            elif math.isfinite(value):
                self._sums[key] = self._sums.get(key, 0.0) + value
                self._counts[key] = self._counts.get(key, 0) + 1
                if key.endswith(_LARGEST):
                    self._kept[f"{key}_max"] = max(value, self._kept.get(f"{key}_max", value))
        return True

    def values(self) -> dict[str, float]:
        """The means by key, the largest gradient norm and the counters; empty without a step."""
        return {key: total / self._counts[key] for key, total in self._sums.items()} | self._kept

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain numbers."""
        return {"last": self.last, "sums": dict(self._sums), "counts": dict(self._counts), "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.last = int(state["last"])
        self._sums, self._counts, self._kept = (dict(state[name]) for name in ("sums", "counts", "kept"))


def with_prefix(values: Mapping[str, float], prefix: str, everything: bool = False) -> dict[str, float]:
    """Whole-model values with ``prefix`` instead of ``gradmon/``; with ``everything``, it is also prepended to other keys."""
    found = {}
    for key, value in values.items():
        before, section, name = key.rpartition("gradmon/")
        found[before + prefix + name if section else (prefix if everything else "") + key] = value
    return found
