"""``gradmon watch``: a run while it goes on."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

from ..terminal.live import Follower
from .common import WrongRequest, add_parser, needing, opened, positive

EXAMPLES = (
    ("gradmon watch runs/first", "live, until q or Ctrl-C"),
    ("gradmon watch runs/next --wait", "also if it has not begun yet"),
    ("gradmon watch runs/first --steps 5000 --interval 5", "farther back, and less often"),
    ("gradmon watch runs/first --once", "one picture of how it stands"),
)
_NOTES = """\
Sparklines show the largest value of the steps in a column, on a logarithmic
scale; ! is NaN or infinite."""


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    watch = add_parser(
        commands,
        "watch",
        "show a run live in the terminal while it goes on",
        "Show a run live in the terminal: losses, gradient norms before and after clipping, spikes, and the layers that stand out. "
        "The run directory is only read, and never held up.",
        EXAMPLES,
        _NOTES,
    )
    watch.add_argument("run", metavar="RUN", help="a run directory")
    watch.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between looks (default: %(default)s)")
    watch.add_argument("--steps", type=positive, default=600, metavar="N", help="only the last N steps (default: %(default)s)")
    watch.add_argument("--wait", action="store_true", help="wait for a run that has not begun yet")
    watch.add_argument("--once", action="store_true", help="print one picture and end")


def run(options: argparse.Namespace) -> int:
    """Show the run until somebody ends it.

    Raises:
        WrongRequest: there is no such run, there is no terminal to show it on, or rich is missing.
    """
    with needing("watching", "cli", "rich"):
        from ..terminal import live_loop as watching
        from ..terminal.console import QuietConsole
    console = QuietConsole()
    if not options.once and (not console.is_terminal or console.is_dumb_terminal):
        raise WrongRequest("watch needs a terminal that it can draw on; --once prints one picture anywhere")
    if not options.wait:
        with opened(options.run):  # else what is misspelled would be waited for
            pass
    with contextlib.closing(Follower(options.run, options.steps)) as follower:
        follower.look()
        if not options.once:
            watching.watch(console, follower, options.interval)
            return 0
        if options.wait:
            watching.wait(follower, options.interval)
        watching.once(console, follower)
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to 3600")
    return seconds
