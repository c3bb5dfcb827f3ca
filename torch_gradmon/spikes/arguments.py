"""Checks of what rules are made with."""

from __future__ import annotations

import math
from typing import overload

from ..core.errors import display


@overload
def positive(name: str, value: float, *, above: float = 0.0) -> float: ...
@overload
def positive(name: str, value: int, *, above: float = 0.0, whole: bool) -> int: ...
def positive(name: str, value: float, *, above: float = 0.0, whole: bool = False) -> float:
    """``value``, if it is a finite number above ``above``, or a whole one from 1 on.

    Raises:
        TypeError: it is no number.
        ValueError: it is another one.
    """
    kinds = (int,) if whole else (int, float)
    wanted = f"{'an int' if whole else 'a number'} above {above:g}" if above else f"a positive {'int' if whole else 'number'}"
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {display(value)}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be {wanted}, got {display(value)}")
    return value if whole else float(value)
