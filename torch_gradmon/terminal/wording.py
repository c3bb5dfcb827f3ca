"""Names, numbers and times as a terminal shows them."""

from __future__ import annotations

import math
from datetime import datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def printable(text: str) -> str:
    """``text`` without characters that would do something to a terminal, in one line.

    >>> printable("layer" + chr(27) + "[31m")
    'layer?[31m'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def cut(name: str, width: int, ellipsis: str = "…") -> str:
    """The end of ``name``, which tells layers apart, where it is too long.

    >>> cut("blocks.11.attention.weight", 16)
    '…ttention.weight'
    """
    return name if len(name) <= width else ellipsis[: max(width, 0)] + name[len(name) - max(width - len(ellipsis), 0) :]


def number(value: float | None) -> str:
    """Three digits in seven letters at most, eight where it is negative.

    >>> [number(value) for value in (0.0, 1.23456, 1234.6, 0.000123, 123456789.0, float("nan"), None)]
    ['0', '1.23', '1235', '1.23e-4', '1.23e8', 'nan', '-']
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-2 <= size < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0f}" if size >= 1000 or not size else f"{value:.3g}"


def percent(share: float | None) -> str:
    """A share in percent.

    >>> [percent(share) for share in (0.0, 0.004, 0.123, 1.0, None)]
    ['0%', '0.4%', '12.3%', '100%', '-']
    """
    if share is None or not math.isfinite(share):
        return number(share)
    return f"{100 * share:.3g}%"


def duration(seconds: float) -> str:
    """How long, in its two largest units.

    >>> [duration(seconds) for seconds in (0.2, 42, 125, 7325, 180_000)]
    ['0 s', '42 s', '2 min 5 s', '2 h 2 min', '2 d 2 h']
    """
    whole = int(max(seconds, 0))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def moment(time: float) -> str:
    """A time of day with its date, as the clock on the wall has it."""
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
