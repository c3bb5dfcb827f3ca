"""Rules that tell how far a value lies above normal. A rule scores first and learns afterwards, and never learns NaN or Inf."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..errors import display


class Rule(Protocol):
    """What a detector needs of a rule."""

    threshold: float

    def score(self, value: float) -> float | None:
        """How far above normal; None while the rule knows too little."""

    def update(self, value: float, is_spike: bool) -> None:
        """Learn a finite value; ``is_spike`` is the verdict on it."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class MedianMad:
    """Robust z-score of the logarithm: ``(log x - median) / max(1.4826 * MAD, floor)`` over the last ``window`` values.

    Gradient norms are positive and skewed, so their logarithm is what scatters evenly; scaling the signal changes nothing.
    Values called spikes stay out of the window, but ``accept`` of them in a row are a new level, and the window starts again
    from them.

    Args:
        window: how many values are remembered.
        threshold: robust standard deviations above the median.
        floor: smallest standard deviation of the logarithm; 0.03 is 3 %. Keeps constant signals quiet.
        warmup: values before the first score.
        accept: spikes in a row that become the new normal.

    Source: median and MAD as location and scale are Hampel's identifier (Davies and Gather 1993, The Identification of
    Multiple Outliers); 1.4826 makes MAD a standard deviation for normal data. The defaults are conventional, not tuned.
    """

    def __init__(self, window: int = 128, threshold: float = 6.0, floor: float = 0.03, warmup: int = 16, accept: int = 5) -> None:
        for name, number in (("window", window), ("warmup", warmup), ("accept", accept)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive int, got {display(number)}")
        for name, real in (("threshold", threshold), ("floor", floor)):
            if not isinstance(real, (int, float)) or not 0 < real < math.inf:
                raise ValueError(f"{name} must be a positive number, got {display(real)}")
        if warmup > window:
            raise ValueError(f"warmup={warmup} is larger than window={window}: no value would ever be scored")
        self.threshold = float(threshold)
        self.floor = float(floor)
        self.warmup = warmup
        self.accept = accept
        self._values: deque[float] = deque(maxlen=window)
        self._run: list[float] = []

    def score(self, value: float) -> float | None:
        """Robust standard deviations above the median; negative below it; None in the warm-up."""
        if len(self._values) < self.warmup:
            return None
        median = _median(self._values)
        deviation = _median(abs(x - median) for x in self._values)
        return (_log(value) - median) / max(1.4826 * deviation, self.floor)

    def update(self, value: float, is_spike: bool) -> None:
        """Learn ``value``; a spike is learned only as part of a lasting change of level."""
        if not is_spike:
            self._run.clear()
            self._values.append(_log(value))
            return
        self._run.append(_log(value))
        if len(self._run) >= self.accept:
            self._values.clear()
            # repeated up to the warm-up, so that the detector does not go blind on the new level
            copies = -(-self.warmup // len(self._run))
            self._values.extend(self._run * copies)
            self._run.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain lists of numbers."""
        return {"values": list(self._values), "run": list(self._run)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._values.clear()
        self._values.extend(float(x) for x in state["values"])
        self._run = [float(x) for x in state["run"]]


def _median(values: Iterable[float]) -> float:
    # the standard library's module for this takes longer to import than most of this package
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _log(value: float) -> float:
    # a norm of exactly zero is legal (nothing to learn from that batch) and far below normal, not an error
    return math.log(value) if value > 0 else -745.0
