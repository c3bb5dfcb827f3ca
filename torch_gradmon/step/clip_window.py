"""Which of the last steps were clipped, as their gradient norms show; gradients that are only scaled by one factor are told apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

#: How many steps back clipping is counted.
WINDOW = 100
#: Factors that differ by less, relatively, are the same: rounding of float32 gradients stays far below. Narrow ones round by more.
_SAME = 1e-5
#: Norms that differ by more, relatively, are different ones, also behind a clip that has rounded both of them, and its factor.
_DIFFERENT, _ROUNDINGS = 1e-3, 8
#: Up to this number, and this close to its reciprocal, a single step's factor is taken for a division by it.
_MOST, _EXACT = 64, 1e-6
#: Share of the edited steps that one factor has to have.
_OFTEN = 0.1


class _Step(NamedTuple):
    edited: bool  # gradients were written to between backward and the optimizer's step
    norm: float  # before
    factor: float  # norm after over norm before
    slack: float = _SAME  # how far the factor may be from the one that the gradients were multiplied by, relatively


_FACTOR = attrgetter("factor")


class ClipWindow:
    """The last :data:`WINDOW` steps whose gradients were seen before and after clipping.

    A clip by norm scales by ``max_norm / norm``: where two steps have one factor they have one norm. So a factor below 1 that
    steps of different norms have is no clip but a scaling, such as a division by the number of micro-batches. A single step
    shows only the reciprocal of a whole number, which is taken for a division until other factors come; and so do steps whose gradients
    are narrow, since their rounding makes many factors look like one.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)

    def add(self, edited: bool, before: float, after: float, rounding: float = 0.0) -> None:
        """A step's norms before and after clipping, whether its gradients were written to in between, and by how much they were then
        rounded, relatively.
        """
        factor = after / before if 0 < before < float("inf") else 1.0
        self._steps.append(_Step(edited, before, factor, _SAME if _is_one(factor) else max(_SAME, rounding)))

    def extend(self, other: ClipWindow) -> None:
        """Add the steps of ``other``."""
        self._steps.extend(other._steps)

    @property
    def is_known(self) -> bool:
        """Whether there was any such step."""
        return bool(self._steps)

    @property
    def has_edits(self) -> bool:
        """Whether the gradients of any step were written to."""
        return any(step.edited for step in self._steps)

    def share(self) -> tuple[float | None, float | None]:
        """Share of the steps that were clipped; None where gradients were only scaled, and then the largest factor besides."""
        edited = [step for step in self._steps if step.edited]
        factors = _scalings(edited)
        usual = max(factors, default=1.0)
        reduced = [step for step in edited if step.factor < usual * (1 - _SAME)]
        for factor in factors:
            is_exact = _is_one(factor)
            reduced = [step for step in reduced if not _are_same(step.factor, factor, _SAME if is_exact else step.slack)]
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
    """By which nothing is rounded."""
    return abs(factor - 1) <= _SAME


def _are_same(one: float, other: float, slack: float) -> bool:
    return abs(one - other) <= slack * other


def _scalings(steps: Sequence[_Step]) -> list[float]:
    """The factors that gradients are scaled by whatever their norm; 1 is one of them where a clip does not always act."""
    runs: list[list[_Step]] = []
    for step in sorted(steps, key=_FACTOR):  # of a clip that acts all factors differ, so that there are many runs
        if runs and step.factor - runs[-1][0].factor <= step.slack * step.factor:
            runs[-1].append(step)
        else:
            runs.append([step])
    fewest = max(2, _OFTEN * len(steps))
    found = [factor for run in runs if len(run) >= fewest for factor in _scaling(run)]
    reduced = [step.factor for step in steps if step.factor < 1 - _SAME]
    return [max(reduced)] if reduced and not found and all(map(_is_reciprocal, reduced)) else found


def _is_reciprocal(factor: float, slack: float = _EXACT) -> bool:
    """Of a whole number, as a mean over micro-batches or ranks has it. One clipped step in 10,000 looks so by chance."""
    number = round(1 / factor) if factor > 0 else 0
    return 2 <= number <= _MOST and abs(factor * number - 1) <= slack


def _scaling(run: Sequence[_Step]) -> list[float]:
    factor, slack = run[len(run) // 2].factor, max(step.slack for step in run)
    if not factor > 0 or (slack > _SAME and not _is_reciprocal(factor, slack)):
        return []
    norms, different = [step.norm for step in run], max(_DIFFERENT, _ROUNDINGS * slack)
    return [factor] if max(norms) > min(norms) * (1 + different) else []
