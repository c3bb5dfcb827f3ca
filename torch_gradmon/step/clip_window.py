"""Which of the last steps were clipped, as their gradient norms show. Gradients that are only scaled by a constant factor do not count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, le, mul, sub
from typing import NamedTuple

#: Number of steps over which clipping is counted.
WINDOW = 100
#: Relative difference below which factors are equal. Rounding of float32 gradients is far smaller, that of narrow ones larger.
_SAME = 1e-5
#: Relative difference above which norms are different, even if a clip has rounded both of them and its factor.
_DIFFERENT, _ROUNDINGS = 1e-3, 8
#: A single step's factor is taken for a division by a whole number up to this one, if it is this close to its reciprocal.
_MOST, _EXACT = 64, 1e-6
#: Smallest share of the edited steps for a constant factor.
_OFTEN = 0.1


class _Step(NamedTuple):
    edited: bool  # gradients were written to between backward and the optimizer's step
    norm: float  # before
    factor: float  # norm after over norm before
    slack: float = _SAME  # relative error of the factor


_FACTOR, _SLACK = attrgetter("factor"), attrgetter("slack")


class ClipWindow:
    """The last :data:`WINDOW` steps whose gradients were seen before and after clipping.

    A clip by norm scales by ``max_norm / norm``: two steps with equal factors have equal norms. So a factor below 1 that steps of
    different norms share is not a clip but a scaling, such as a division by the number of micro-batches. A single step shows only the
    reciprocal of a whole number, which is taken for a division until other factors come. So are steps with narrow gradients, whose
    rounding makes factors alike.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)

    def add(self, edited: bool, before: float, after: float, rounding: float = 0.0) -> None:
        """Add a step.

        Args:
            edited: its gradients were written to between the two measurements.
            before: norm before clipping.
            after: norm after clipping.
            rounding: relative rounding of the gradients in between.
        """
        factor = after / before if 0 < before < float("inf") else 1.0
        self._steps.append(_Step(edited, before, factor, _SAME if _is_one(factor) else max(_SAME, rounding)))

    def extend(self, other: ClipWindow) -> None:
        """Add the steps of ``other``."""
        self._steps.extend(other._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_edits(self) -> bool:
        """Whether the gradients of any step were written to."""
        return any(step.edited for step in self._steps)

    def share(self) -> tuple[float | None, float | None]:
        """Share of clipped steps. None if gradients were only scaled; then also the largest factor."""
        edited = [step for step in self._steps if step.edited]
        factors = _scalings(edited)
        usual = max(factors, default=1.0)
        reduced = [step for step in edited if step.factor < usual * (1 - _SAME)]
        for factor in factors:
            is_exact = _is_one(factor)
            # so that a factor of NaN differs from all
            reduced = [step for step in reduced if not abs(step.factor - factor) <= (_SAME if is_exact else step.slack) * factor]
        clipped = len(reduced)
        below = [factor for factor in factors if factor < 1 - _SAME]
        if below and not clipped:
            return None, max(below)
        return clipped / len(self._steps) if self._steps else 0.0, None

    def state(self) -> list[list[float]]:
        """As plain numbers, for :meth:`load`."""
        return [[int(step.edited), step.norm, step.factor, step.slack] for step in self._steps]

    def load(self, state: Iterable[Sequence[float]]) -> None:
        """The inverse of :meth:`state`."""
        self._steps = deque((_Step(bool(edited), *map(float, rest)) for edited, *rest in state), maxlen=WINDOW)


def _is_one(factor: float) -> bool:
    """Whether multiplying by it rounds nothing."""
    return abs(factor - 1) <= _SAME


def _scalings(steps: Sequence[_Step]) -> list[float]:
    """Constant factors of gradients, whatever their norm. 1 is one of them if a clip does not always act."""
    ordered, slack = sorted(steps, key=_FACTOR), max(map(_SLACK, steps), default=_SAME)
    factors = [step.factor for step in ordered]
    # the factors of an active clip all differ: then no two are of one run, which is found without making any
    is_any_run = any(map(le, map(sub, factors[1:], factors), map(mul, factors[1:], repeat(slack))))
    runs: list[list[_Step]] = []
    for step in ordered if is_any_run else ():
        if runs and step.factor - runs[-1][0].factor <= step.slack * step.factor:
            runs[-1].append(step)
        else:
            runs.append([step])
    fewest = max(2, _OFTEN * len(steps))
    found = [factor for run in runs if len(run) >= fewest for factor in _scaling(run)]
    reduced = [step.factor for step in steps if step.factor < 1 - _SAME]
    return [max(reduced)] if reduced and not found and all(map(_is_reciprocal, reduced)) else found


def _is_reciprocal(factor: float, slack: float = _EXACT) -> bool:
    """Whether it is the reciprocal of a whole number, as for a mean over micro-batches or ranks. One clipped step in 10,000 is by
    chance.
    """
    number = round(1 / factor) if factor > 0 else 0
    return 2 <= number <= _MOST and abs(factor * number - 1) <= slack


def _scaling(run: Sequence[_Step]) -> list[float]:
    factor, slack = run[len(run) // 2].factor, max(map(_SLACK, run))
    if not factor > 0 or (slack > _SAME and not _is_reciprocal(factor, slack)):
        return []
    norms, different = [step.norm for step in run], max(_DIFFERENT, _ROUNDINGS * slack)
    return [factor] if max(norms) > min(norms) * (1 + different) else []
