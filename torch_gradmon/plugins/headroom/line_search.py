"""The smallest step along a direction at which a loss rises, from few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: The search ends when the step is known to this factor; outside of these bounds it is not looked for.
_EXACT = 2**0.25
_LEAST, _MOST = 2.0**-10, 2.0**10


@dataclass(frozen=True)
class CriticalStep:
    """What a search has found.

    Attributes:
        low: the largest step at which the loss did not rise; 0 if it rose at each.
        high: the smallest one at which it rose; infinite if it rose at none.
        evaluations: of the loss, with that of no step.
    """

    low: float
    high: float
    evaluations: int

    @property
    def size(self) -> float:
        """The best guess: the geometric mean of both bounds, or the one that is known."""
        return math.sqrt(self.low * self.high) if self.low > 0 and self.high < math.inf else self.low or self.high


def critical_step(loss: Callable[[float], float], guess: float = 1.0, evaluations: int = 8) -> CriticalStep:
    """Look for the smallest multiple of a step at which the loss rises, by doubling or halving and then by halving the gap on a log scale.

    This is the critical learning rate of Kalra and others (2026, arXiv 2601.16979) over the learning rate: the smallest one that makes the
    loss rise in the next step. A loss that falls and rises several times has several such steps, and one of them is found.

    Args:
        loss: after this multiple of the step; NaN counts as risen.
        guess: the multiple to begin with.
        evaluations: the most of them.
    """
    begin, count = loss(0.0), 1
    low, high, step = 0.0, math.inf, min(max(guess, _LEAST), _MOST)
    while count < evaluations and not high <= low * _EXACT:
        if loss(step) <= begin:
            low = step
        else:
            high = step
        count += 1
        step = math.sqrt(low * high) if low > 0 and high < math.inf else 2 * low if low else high / 2
        if not _LEAST <= step <= _MOST:
            break
    return CriticalStep(low, high, count)
