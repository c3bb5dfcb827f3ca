"""The live view of ``gradmon watch``. Needs rich."""

from __future__ import annotations

import contextlib
import time

from rich.console import Group
from rich.live import Live as Display
from rich.text import Text

from .console import QuietConsole
from .keyboard import keys
from .live import Follower
from .live_view import Screen, frame

_QUIT = ("q", "Q", "\x03", "\x04")


def once(console: QuietConsole, follower: Follower) -> None:
    """Print one frame."""
    screen = Screen(console.width, None, _has_unicode(console))
    for line in frame(follower, screen, time.time()):
        console.print(line, soft_wrap=True)


def watch(console: QuietConsole, follower: Follower, interval: float) -> None:
    """Show a frame every ``interval`` seconds until somebody presses q or Ctrl-C, then leave the last one on the terminal."""
    display = Display(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with contextlib.suppress(KeyboardInterrupt), keys() as pressed, display:
        while True:
            follower.look()
            width, height = console.size
            lines = frame(follower, Screen(width, height - 1, _has_unicode(console)), time.time())
            lines += [Text()] * (height - 1 - len(lines))
            lines.append(Text(f"q ends; every {interval:g} s", style="dim"))
            display.update(Group(*lines), refresh=True)
            if pressed(interval).startswith(_QUIT):
                break
    once(console, follower)


def wait(follower: Follower, interval: float) -> None:
    """Wait until there is a step."""
    while follower.live is None or follower.live.last is None:
        time.sleep(interval)
        follower.look()


def _has_unicode(console: QuietConsole) -> bool:
    return console.encoding.lower().startswith("utf")
