"""Quantities that grow as they have not grown before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Growth(NamedTuple):
    """The quantity that has left its past furthest behind.

    Attributes:
        name: of the tensor.
        now: its growth, as a logarithm.
        before: the largest one of its past, or 0 if it only shrank.
    """

    name: str
    now: float
    before: float

    @property
    def excess(self) -> float:
        """By how much it exceeds its past, as a logarithm."""
        return self.now - self.before


class _Window:
    """The last values of all tensors by step; begins anew when the tensors are others.

    Args:
        span: steps that are kept.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._names: tuple[str, ...] = ()
        self.rows: deque[tuple[int, Tensor]] = deque()

    def add(self, step: int, names: Sequence[str], values: Tensor) -> None:
        """Values ``[tensors]`` of a step after the last one."""
        if tuple(names) != self._names or (self.rows and self.rows[-1][0] >= step):
            self._names = tuple(names)
            self.rows.clear()
        self.rows.append((step, values))
        while self.rows[0][0] < step - self._span:
            self.rows.popleft()

    def at(self, step: int) -> Tensor | None:
        """The values of the last step that is not later."""
        return next((values for at, values in reversed(self.rows) if at <= step), None)

    def between(self, first: int, last: int) -> list[Tensor]:
        """The values of these steps."""
        return [values for step, values in self.rows if first <= step <= last]


class AcceleratedGrowth:
    """Compares the growth over the last steps with the growth over as many steps before: in sound training it only becomes slower.
    What has rested for as long in its past, as a frozen weight does, is left out.

    Args:
        over: the steps of one growth.
        past: the steps before these that are looked at.
    """

    def __init__(self, over: int = 20, past: int = 120) -> None:
        self._over, self._past = over, past
        self._logs, self._rates = _Window(over + 1), _Window(over + past)

    def update(self, step: int, names: Sequence[str], logs: Tensor) -> Growth | None:
        """Take the logarithms ``[tensors]`` of a step. Returns None until the past is known; what is not finite is left out."""
        self._logs.add(step, names, logs)
        first = self._logs.at(step - self._over)
        if first is None:
            return None
        rate = logs - first
        self._rates.add(step, names, rate)
        past = self._rates.between(step - self._over - self._past, step - self._over)
        if not past:
            return None
        rates = torch.stack(past)
        rate = torch.where((rates == 0).any(dim=0), -torch.inf, rate)
        return _furthest(names, rate, rates.amax(dim=0).clamp(min=0))


class RecordHigh:
    """Compares the median of the last values with the highest one before.

    Args:
        values: number of values of a median.
        gap: steps from the last one that counts as past.
        past: the steps before these that are looked at.
    """

    def __init__(self, values: int = 5, gap: int = 20, past: int = 120) -> None:
        self._values, self._gap, self._past = values, gap, past
        self._logs, self._medians = _Window(gap + past), _Window(gap + past)

    def update(self, step: int, names: Sequence[str], logs: Tensor) -> Growth | None:
        """As of :class:`AcceleratedGrowth`, from the highest value of the past on."""
        self._logs.add(step, names, logs)
        last = [values for _, values in list(self._logs.rows)[-self._values :]]
        if len(last) < self._values:
            return None
        middle = torch.stack(last).median(dim=0).values
        self._medians.add(step, names, middle)
        past = self._medians.between(step - self._gap - self._past, step - self._gap)
        if not past:
            return None
        return _furthest(names, middle - torch.stack(past).amax(dim=0), torch.zeros_like(middle))


def _furthest(names: Sequence[str], now: Tensor, before: Tensor) -> Growth | None:
    if not len(now):
        return None
    excess = now - before
    place = int(excess.nan_to_num(-torch.inf, -torch.inf, -torch.inf).argmax())
    found = Growth(names[place], float(now[place]), float(before[place]))
    return found if torch.isfinite(excess[place]) else None
