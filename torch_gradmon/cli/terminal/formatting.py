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
    """Three digits, or two where it takes more than seven letters besides a sign.

    >>> [number(value) for value in (0.0, 1.0, 1.23456, 120.0, 1234.6, 0.000123, -1.5e-11, float("nan"), None)]
    ['0', '1.00', '1.23', '120', '1235', '1.23e-4', '-1.5e-11', 'nan', '-']
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-2 <= size < 99_999.5:
        mantissa, _, exponent = (f"{value:.2e}" if 1e-9 < size < 1e99 else f"{value:.1e}").partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0f}" if size >= 999.5 or not size else f"{value:#.3g}".rstrip(".")


def percent(share: float | None) -> str:
    """A share in percent.

    >>> [percent(share) for share in (0.0, 0.00004, 0.004, 0.123, 1.0, None)]
    ['0%', '<0.1%', '0.4%', '12.3%', '100%', '-']
    """
    if share is None or not math.isfinite(share):
        return number(share)
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}"


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


def span(began: float, ended: float) -> str:
    """From when to when, as the clock on the wall has it, and how long that is."""
    first, last = (datetime.fromtimestamp(time) for time in (began, ended))
    until = last.strftime("%H:%M:%S" if first.date() == last.date() else "%Y-%m-%d %H:%M:%S")
    return f"{first.strftime('%Y-%m-%d %H:%M:%S')} to {until}, {duration(ended - began)}"
