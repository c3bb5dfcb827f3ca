"""A detector watches one signal with one rule and turns its scores into verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import display
from ..record import Event
from .rules import MedianMad, Rule


@dataclass(frozen=True)
class Verdict:
    """What a detector says of one value.

    Attributes:
        is_spike: the verdict.
        score: infinite for NaN and Inf, None while the rule warms up.
        threshold: of the score.
        reason: in words; empty when there is no spike.
    """

    is_spike: bool
    score: float | None
    threshold: float
    reason: str


class SpikeDetector:
    """Judges a signal step by step. Usable with a monitor and without one.

    >>> detector = SpikeDetector()
    >>> verdicts = [detector.update(step, value) for step, value in enumerate([1.0, 1.1, 0.9, 1.0] * 10 + [9.0])]
    >>> [v.is_spike for v in verdicts].index(True)
    40

    Args:
        rule: an object with ``score`` and ``update``, see :mod:`torch_gradmon.spikes.rules`; :class:`MedianMad` by default.
        signal: name of a whole-model value, such as ``grad_norm``, that a monitor feeds to it.
    """

    def __init__(self, rule: Rule | None = None, signal: str = "grad_norm") -> None:
        if rule is not None and not (callable(getattr(rule, "score", None)) and callable(getattr(rule, "update", None))):
            raise TypeError(f"rule must have the methods score and update, such as MedianMad(), got {display(rule)}")
        if not isinstance(signal, str) or not signal:
            raise ValueError(f"signal must be the name of a value, such as 'grad_norm', got {display(signal)}")
        self.rule: Rule = MedianMad() if rule is None else rule
        self.signal = signal

    def update(self, step: int, value: float) -> Verdict:
        """Judge ``value``, then learn it. NaN and Inf are spikes of their own kind and are never learned.

        Raises:
            TypeError: ``value`` is no number.
        """
        try:
            value = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"value must be a number, got {display(value)} in step {step}") from error
        threshold = self.rule.threshold
        if not math.isfinite(value):
            return Verdict(True, math.inf, threshold, f"{self.signal} is {value}")
        score = self.rule.score(value)
        is_spike = score is not None and score > threshold
        reason = f"{self.signal} = {value:.4g} lies {score:.1f} robust standard deviations above normal" if is_spike else ""
        self.rule.update(value, is_spike)
        return Verdict(is_spike, score, threshold, reason)

    def event(self, step: int, value: float, verdict: Verdict) -> Event:
        """The event that a spike becomes."""
        score = math.inf if verdict.score is None else verdict.score
        return Event(step, self.signal, value, score, verdict.threshold, verdict.reason)

    def state_dict(self) -> dict[str, Any]:
        """What the rule has learned, as plain numbers and lists."""
        return {"signal": self.signal, "rule": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.rule.load_state_dict(state["rule"])
