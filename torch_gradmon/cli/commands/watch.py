"""``gradmon watch``: a live view of a run."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

from ...core.formatting import printable
from ..terminal.live import RunFollower
from .common import RUN, Command, UsageError, alarms, check_alert, flag, open_run, positive, requires_extra, value


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
        ("gradmon watch runs/first --alert https://example.org/hook", "call a webhook about it, also without a terminal"),
    ),
    (
        RUN,
        value("--interval", "SECONDS", "between updates", type=_seconds, default=1.0),
        value("--steps", "N", "only the last N steps", type=positive, default=600),
        flag("--wait", "wait for a run that has not begun yet"),
        flag("--once", "print one picture and end"),
        value("--alert", "URL", "a webhook that is called when the run stalls, and about new spikes and findings"),
    ),
    "Sparklines show the largest value of the steps in a column, on a logarithmic scale; ! is NaN or infinite.",
)


def run(options: argparse.Namespace) -> int:
    with requires_extra("watching", "cli", "rich"):
        from ..terminal import live_loop
        from ..terminal.summary_view import QuietConsole
    console = QuietConsole()
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if options.alert is not None:
        check_alert(options.alert)
        if options.once:
            raise UsageError("--once ends before there can be anything to call --alert about; leave one of them out")
    if not (can_draw or options.once or options.alert is not None):
        raise UsageError("watch needs a terminal that it can draw on; --once prints one picture anywhere")
    if not options.wait:
        with open_run(options.run):  # otherwise it would wait for a misspelled path
            pass
    with contextlib.ExitStack() as stack:
        if options.alert is not None:
            try:
                stack.enter_context(_alarms(options))
                while not can_draw:
                    time.sleep(1.0)
            except KeyboardInterrupt:
                return 0
        follower = stack.enter_context(contextlib.closing(RunFollower(options.run, options.steps)))
        follower.refresh()
        if not options.once:
            live_loop.watch(console, follower, options.interval)
            return 0
        if options.wait:
            live_loop.wait(follower, options.interval)
        live_loop.print_frame(console, follower)
    return 0


@contextlib.contextmanager
def _alarms(options: argparse.Namespace) -> Iterator[None]:
    from ...server.board import RunBoard

    shown = printable(options.run)
    if not Path(options.run).is_dir():
        print(f"waiting for {shown}; Ctrl-C ends it", flush=True)
        while not Path(options.run).is_dir():
            time.sleep(options.interval)
    with contextlib.closing(RunBoard(options.run)) as board, alarms(board, options.alert):
        print(f"watching {shown}; Ctrl-C ends it", flush=True)
        yield
