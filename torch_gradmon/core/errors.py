"""Errors and warnings.

Users get :class:`ValueError` and :class:`TypeError` with the offending value and the remedy. A failure inside a running training step is
reported through :class:`WarningLog`: one warning per cause, after which it is only counted.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable


class GradmonWarning(UserWarning):
    """The category of all warnings of torch_gradmon, for warning filters."""


class TrainingStopped(RuntimeError):
    """Raised by a plugin, it stops the training: it leaves through ``optimizer.step()``. Any other exception of a plugin is a warning."""


class SpikeError(TrainingStopped):
    """Raised at the end of a step with a spike if ``on_spike="raise"``."""


class NotMeasurable(Exception):
    """Internal: a tensor cannot be measured; the message becomes the reason in ``missing()``."""


class WarningLog:
    """Warns once per cause and counts how often it occurs; where it is ``raising``, it raises instead (``on_metric_error="raise"``).

    Warnings begin with the directory of the ``run``, or else Python would show one that several runs of a process have in common once.
    """

    def __init__(self, raising: bool = False, run: str = "") -> None:
        self.raising, self.run = raising, run
        self.counts: Counter[str] = Counter()

    def new_cause(self, cause: str) -> str:
        """Register ``cause``, with a number appended if it is taken."""
        names = (cause, *(f"{cause}:{number}" for number in range(2, len(self.counts) + 2)))
        name = next(name for name in names if name not in self.counts)
        self.counts[name] = 0
        return name

    def add(self, cause: str, message: str, error: BaseException | None = None) -> None:
        """Count ``cause``; warn with ``message`` the first time. With ``raising``, re-raise ``error`` instead."""
        self.counts[cause] += 1
        if self.raising and error is not None:
            raise error
        if self.counts[cause] == 1:
            self.warn(message, error)

    def warn(self, message: str, error: BaseException | str | None = None) -> None:
        """Warn in any case. An earlier ``error`` is given as its :func:`error_text`."""
        detail = "" if error is None else f" ({error if isinstance(error, str) else error_text(error)})"
        about = f"{self.run}: " if self.run and self.run not in message else ""
        warn_user(about + message + detail)


#: Code whose lines no warning names: this package, and torch, whose optimizers and backward passes call its hooks.
_NOT_THE_USERS = ("torch_gradmon", "torch", "contextlib", "functools")


def warn_user(message: str) -> None:
    """Warn, and name the line of the script that is running: the innermost one that is neither of this package nor of torch."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    # on a thread of autograd there is no such line
    warnings.warn(f"torch_gradmon: {message}", GradmonWarning, stacklevel=2 if frame is None else level)


def error_text(error: BaseException) -> str:
    """The class and message of ``error``. Unlike the exception, the text keeps no frames alive."""
    return f"{type(error).__name__}: {error}"


def display(value: object, width: int = 80) -> str:
    """``value`` for an error message: on one line, shortened, with its type.

    >>> display("adam")
    "'adam' of type str"
    """
    text = " ".join(repr(value).split())
    return f"{text[: width - 3] + '...' if len(text) > width else text} of type {type(value).__name__}"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A clause for an error message with the most similar known names, or else the first known names.

    >>> nearest("nrom", ["norm", "mean"])
    '; did you mean norm?'
    >>> nearest("zzz", ["norm", "mean"])
    '; known are mean, norm'
    """
    options = sorted(set(known) - {name})
    close = difflib.get_close_matches(name, options, n=count, cutoff=0.6)
    if close:
        return f"; did you mean {', '.join(close)}?"
    if not options:
        return ""
    shown = ", ".join(options[:20]) + (", ..." if len(options) > 20 else "")
    return f"; known are {shown}"
