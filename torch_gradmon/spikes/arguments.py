"""Checks of the arguments of rules."""

from __future__ import annotations

import math
from typing import overload

from ..core.errors import display


@overload
def positive(name: str, value: float, *, above: float = 0.0) -> float: ...
@overload
def positive(name: str, value: int, *, above: float = 0.0, whole: bool) -> int: ...
def positive(name: str, value: float, *, above: float = 0.0, whole: bool = False) -> float:
    """Return ``value`` if it is a finite number above ``above``; with ``whole`` it must be an int.

    Raises:
        TypeError: it is not a number.
        ValueError: it is out of range.
    """
    kinds = (int,) if whole else (int, float)
    wanted = f"{'an int' if whole else 'a number'} above {above:g}" if above else f"a positive {'int' if whole else 'number'}"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {display(value)}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be {wanted}, got {display(value)}")
    return value if whole else float(value)


def share(name: str, value: float) -> float:
    """Return ``value`` if it is between 0 and 1, both excluded.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not positive(name, value) < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
    return float(value)
