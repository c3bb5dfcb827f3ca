"""Checks of what rules are made with, and how factors are said."""

from __future__ import annotations

import math
from typing import overload

from ..errors import display


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


def times(factor: float) -> str:
    """A factor for people.

    >>> times(1.2345), times(987.6), times(12345.6), times(1.2e9)
    ('1.23 times', '988 times', '12,346 times', '1.2e+09 times')
    """
    text = f"{factor:.3g}" if factor < 999.5 else f"{factor:,.0f}" if factor < 1e6 else f"{factor:.2g}"
    return f"{text} times"
