"""The exception with which a training ends."""

from __future__ import annotations

import sys
from types import TracebackType

#: How loops and generators end that are not interrupted.
_REGULAR = (StopIteration, StopAsyncIteration, GeneratorExit)


def ending(handled: int, is_last: bool) -> str:
    """The exception that ends a training now, as text; empty without one.

    It is the one that passes through the caller or is handled there, as in a ``finally``, unless the training went on inside of the
    handler; or at the end of the interpreter the one that ended the script.

    Args:
        handled: the id of the exception that the script handled when the training last called the model.
        is_last: whether nothing else was trained since then, so that an exception that ended the script may be that of this training.
    """
    error = sys.exc_info()[1]
    if id(error) == handled:
        error = _of_script() if is_last else None
    if error is None or isinstance(error, _REGULAR) or (isinstance(error, SystemExit) and not error.code):
        return ""
    name, text = type(error).__name__, " ".join(str(error).split())
    return f"{name}: {text[:200]}" if text else name


def _of_script() -> BaseException | None:
    """The exception that Python has printed last, if that ended the script: neither in a prompt, nor by a runner of tests or notebooks."""
    error = getattr(sys, "last_value", None)
    trace: TracebackType | None = getattr(error, "__traceback__", None)
    if not isinstance(error, BaseException) or trace is None or hasattr(sys, "ps1"):
        return None
    return error if trace.tb_frame.f_globals.get("__name__") in ("__main__", "runpy") else None
