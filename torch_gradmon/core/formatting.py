"""How names, numbers, times and lists are written for people. Every message, table and picture uses these functions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A no-op without tqdm, or if it is not ``wanted``, by default without a terminal."""

    def __init__(self, total: int, what: str, unit: str, wanted: bool | None) -> None:
        self._bar: Any = None
        if wanted or (wanted is None and sys.stderr.isatty()):
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=what, unit=unit, leave=False)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)


# --- numbers that JSON does not have ---


def plain(value: float) -> float | str:
    """The value, or a string if it is not finite: ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def strict(value: Any) -> Any:
    """The same for all numbers in nested dicts and lists."""
    if isinstance(value, Mapping):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return plain(value) if isinstance(value, float) else value


# --- numbers -------------------------------------------------------------------------------------------------------------------


def factor_text(factor: float) -> str:
    """A factor, such as the ratio of two norms: ``1.23``, ``988``, ``12,346`` or ``1.2e+09``."""
    return f"{factor:.3g}" if factor < 999.5 else f"{factor:,.0f}" if factor < 1e6 else f"{factor:.2g}"


def times(factor: float) -> str:
    """A factor within a sentence: ``1.23 times``."""
    return f"{factor_text(factor)} times"


def is_multiple(value: float, usual: float | None) -> bool:
    """Whether a spike is told as a multiple of the usual value: not if that lies above it, or is nothing in comparison."""
    return usual is not None and value * sys.float_info.epsilon < usual < value


def significant(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def number(value: float | None) -> str:
    """A value for a narrow cell: three digits, or two where three take more than seven characters without the sign."""
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
    """A share in percent: ``0%``, ``<0.1%`` or ``12.3%``."""
    if share is None or not math.isfinite(share):
        return number(share)
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}"


def part_of(part: int, whole: int) -> str:
    """How many of a group differ from the rest: ``2 of 5``, or ``5 same``."""
    return "-" if not whole else f"{part} of {whole}" if part else f"{whole} same"


# --- times -----------------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A duration in its two largest units: ``2 h 2 min``."""
    minutes, second = divmod(int(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days or hours:
        return f"{days} d {hour} h" if days else f"{hours} h {minute} min"
    return f"{minutes} min {second} s" if minutes else f"{second} s"


def step_range(first: int, last: int) -> str:
    """``step 3``, or ``steps 3 to 5``."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


# --- names and lists -------------------------------------------------------------------------------------------------------------


def listed(names: Iterable[str], most: int) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def also_in(names: Sequence[str], most: int = 3) -> str:
    """A sentence that lists all names but the first, which the text before it mentions; empty if there is only one."""
    return f" Also in {listed(names[1:], most)}." if len(names) > 1 else ""


def placed(what: str, where: str) -> str:
    """A finding with its layer, if it is of one: ``spike in fc.weight``."""
    return f"{what} in {where}" if where else what


def printable(text: str) -> str:
    """``text`` on one line, with escapes in place of characters that would control a terminal or are half of one."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))


class ShownAsText:
    """Shown as its text where Python would show its fields: at a prompt, and as the last line of a cell in a notebook."""

    def __repr__(self) -> str:
        return printable_lines(str(self))

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(printable_lines(str(self)))}</pre>"  # names are anything


class ShownText(ShownAsText, str):
    """A text of several lines."""


def cut_start(name: str, width: int, ellipsis: str = "…") -> str:
    """``name`` without its start if it is too long; the end of a path distinguishes layers."""
    return name if len(name) <= width else ellipsis[: max(width, 0)] + name[len(name) - max(width - len(ellipsis), 0) :]


def cut_middle(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"
