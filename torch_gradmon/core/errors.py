"""What goes wrong, said once and in words that help.

Users see :class:`ValueError` and :class:`TypeError` with the offending value and the remedy. What fails inside a running
training step is reported through :class:`WarningLog`: one warning per cause, everything after it only counted.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Iterable


class GradmonWarning(UserWarning):
    """The category of every warning that torch_gradmon gives, so that one filter can address them all."""


class SpikeError(RuntimeError):
    """Raised at the end of a step when ``on_spike="raise"`` and a detector called the step a spike."""


class NotMeasurable(Exception):
    """Internal: a tensor of a kind that cannot be measured; the message becomes the reason in ``missing()``."""


class WarningLog:
    """Warns once for each cause and counts how often it came back.

    Args:
        raising: raise instead of warning, for tests (``on_metric_error="raise"``).
    """

    def __init__(self, raising: bool = False) -> None:
        self.raising = raising
        self.counts: Counter[str] = Counter()

    def unused(self, cause: str) -> str:
        """``cause``, with a number where another one has that name; it counts from zero."""
        number = 1
        name = cause
        while name in self.counts:
            number += 1
            name = f"{cause}:{number}"
        self.counts[name] = 0
        return name

    def add(self, cause: str, message: str, error: BaseException | None = None) -> None:
        """Count ``cause``; warn with ``message`` the first time. With ``raising``, re-raise ``error`` instead."""
        self.counts[cause] += 1
        if self.raising and error is not None:
            raise error
        if self.counts[cause] == 1:
            self.say(message, error)

    def say(self, message: str, error: BaseException | str | None = None) -> None:
        """Warn, whether something was said before or not; of an ``error`` that is long past there are :func:`error_text`."""
        detail = "" if error is None else f" ({error if isinstance(error, str) else error_text(error)})"
        # stacklevel is of no use here: the callers are hooks, below them stands the user's optimizer.step() or backward()
        warnings.warn(f"torch_gradmon: {message}{detail}", GradmonWarning, stacklevel=3)


def error_text(error: BaseException) -> str:
    """The class and the message of ``error``, to keep in its place: it holds the frames that it came through, and all that is in them."""
    return f"{type(error).__name__}: {error}"


def display(value: object, width: int = 80) -> str:
    """What somebody passed, on one line and cut to a length that a message can bear, with its type.

    >>> display("adam")
    "'adam' of type str"
    """
    text = " ".join(repr(value).split())
    return f"{text[: width - 3] + '...' if len(text) > width else text} of type {type(value).__name__}"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A clause that names the likeliest intended spellings, or all that is known where there is little of it.

    >>> nearest("nrom", ["norm", "mean"])
    '; did you mean norm?'
    >>> nearest("zzz", ["norm", "mean"])
    '; known are mean, norm'
    """
    options = sorted(set(known))
    close = difflib.get_close_matches(name, options, n=count, cutoff=0.5)
    if close:
        return f"; did you mean {', '.join(close)}?"
    if not options:
        return ""
    shown = ", ".join(options[:20]) + (", ..." if len(options) > 20 else "")
    return f"; known are {shown}"
