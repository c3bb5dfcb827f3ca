"""Keys that are pressed while something else goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

if sys.platform == "win32":
    import msvcrt
else:
    import select
    import termios
    import tty


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits for a key for so many seconds, and returns it, or nothing; keys are not shown meanwhile.

    Where nobody can press keys, the function waits.
    """
    if not sys.stdin or not sys.stdin.isatty():
        yield _wait
    elif sys.platform == "win32":
        yield _poll
    else:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        try:
            tty.setcbreak(descriptor)
            yield lambda seconds: _select(descriptor, seconds)
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


if sys.platform == "win32":

    def _poll(seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if msvcrt.kbhit():
                return msvcrt.getwch()
            time.sleep(0.05)
        return ""

else:

    def _select(descriptor: int, seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(descriptor, 64)
        if not pressed:  # the terminal is gone, and would say so at once again and again
            time.sleep(seconds)
        return pressed.decode(errors="replace")
