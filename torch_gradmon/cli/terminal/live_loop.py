"""The live view of ``gradmon watch``. Needs rich."""

from __future__ import annotations

import contextlib
import time

from rich.console import Group
from rich.live import Live as Display
from rich.text import Text

from .console import QuietConsole
from .live_view import Screen, frame
from .run_follower import RunFollower


def print_frame(console: QuietConsole, follower: RunFollower) -> None:
    """Print one frame."""
    screen = Screen(console.width, None, _has_unicode(console))
    for line in frame(follower, screen, time.time()):
        console.print(line, soft_wrap=True)


def watch(console: QuietConsole, follower: RunFollower, interval: float) -> None:
    """Show a frame every ``interval`` seconds until Ctrl-C, then leave the last one on the terminal."""
    display = Display(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with contextlib.suppress(KeyboardInterrupt), display:
        while True:
            follower.refresh()
            width, height = console.size
            lines = frame(follower, Screen(width, height - 1, _has_unicode(console)), time.time())
            lines += [Text()] * (height - 1 - len(lines))
            lines.append(Text(f"Ctrl-C ends; every {interval:g} s", style="dim"))
            display.update(Group(*lines), refresh=True)
            time.sleep(interval)
    print_frame(console, follower)


def wait(follower: RunFollower, interval: float) -> None:
    """Wait for the first step."""
    while follower.live is None or follower.live.last is None:
        time.sleep(interval)
        follower.refresh()


def _has_unicode(console: QuietConsole) -> bool:
    return console.encoding.lower().startswith("utf")
