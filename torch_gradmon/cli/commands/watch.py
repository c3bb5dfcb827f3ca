"""``gradmon watch``: a live view of a run."""

from __future__ import annotations

import argparse
import contextlib
import math

from ..terminal.run_follower import RunFollower
from .common import RUN, Command, UsageError, flag, open_run, positive, requires_extra, value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds


COMMAND = Command(
    "watch",
    "show a run live in the terminal",
    "Show a run live in the terminal: losses, gradient norms before and after clipping, spikes, and the layers that deviate most. The "
    "run directory is only read; the training never waits.",
    (
        ("gradmon watch runs/first", "live, until Ctrl-C"),
        ("gradmon watch runs/next --wait", "also before the run has begun"),
        ("gradmon watch runs/first --steps 5000 --interval 5", "more steps, and less often"),
        ("gradmon watch runs/first --once", "one picture of its current state"),
    ),
    (
        RUN,
        value("--interval", "SECONDS", "between updates", type=_seconds, default=1.0),
        value("--steps", "N", "only the last N steps", type=positive, default=600),
        flag("--wait", "wait for a run that has not begun yet"),
        flag("--once", "print one picture and end"),
    ),
    "Sparklines show the largest value of the steps in a column, on a logarithmic scale; ! is NaN or infinite.",
)


def run(options: argparse.Namespace) -> int:
    """Show the run until Ctrl-C."""
    with requires_extra("watching", "cli", "rich"):
        from ..terminal import live_loop
        from ..terminal.console import QuietConsole
    console = QuietConsole()
    if not options.once and (not console.is_terminal or console.is_dumb_terminal):
        raise UsageError("watch needs a terminal that it can draw on; --once prints one picture anywhere")
    if not options.wait:
        with open_run(options.run):  # otherwise it would wait for a misspelled path
            pass
    with contextlib.closing(RunFollower(options.run, options.steps)) as follower:
        follower.refresh()
        if not options.once:
            live_loop.watch(console, follower, options.interval)
            return 0
        if options.wait:
            live_loop.wait(follower, options.interval)
        live_loop.print_frame(console, follower)
    return 0
