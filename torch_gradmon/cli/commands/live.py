"""The commands that follow runs while they go on: ``gradmon live`` and ``gradmon serve``."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.formatting import printable
from ...server import PORT
from ..terminal.live import RunFollower
from .common import RUN, Command, UsageError, argument, flag, open_run, positive, requires_extra, value

if TYPE_CHECKING:
    from ...server.board import RunBoard


def _check_alert(url: str) -> None:
    """Look at the address of a webhook.

    Raises:
        UsageError: it is none.
    """
    from ...sinks.alerts import Messenger

    try:
        Messenger(url)
    except ValueError as error:
        raise UsageError(f"--alert {url}: {error}") from error


@contextlib.contextmanager
def _calling(board: RunBoard, url: str) -> Iterator[None]:
    """Call the webhook at ``url``, which :func:`_check_alert` has seen, about the runs of ``board`` within the block."""
    from ...server.board import Alarms

    found = Alarms(board, url)
    found.start()
    try:
        yield
    finally:
        found.close()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds


def _live(options: argparse.Namespace) -> int:
    with requires_extra("the live view", "cli", "rich"):
        from ..terminal import live_loop
        from ..terminal.summary_view import QuietConsole
    console = QuietConsole()
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if options.alert is not None:
        _check_alert(options.alert)
        if options.once:
            raise UsageError("--once ends before there can be anything to call --alert about; leave one of them out")
    if not (can_draw or options.once or options.alert is not None):
        raise UsageError("live needs a terminal that it can draw on; --once prints one picture anywhere")
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
        follower = stack.enter_context(contextlib.closing(RunFollower(options.run, options.tail)))
        follower.refresh()
        if not options.once:
            live_loop.follow(console, follower, options.interval)
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
    with contextlib.closing(RunBoard(options.run)) as board, _calling(board, options.alert):
        print(f"following {shown}; Ctrl-C ends it", flush=True)
        yield


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() and len(text) < 6 else -1
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return number


#: Seconds that pages which are being made have to end.
_LAST = 2.0


def _serve(options: argparse.Namespace) -> int:
    if options.alert is not None:
        _check_alert(options.alert)
    if options.no_token and options.token is not None:
        raise UsageError("--no-token leaves out the token, and --token gives one; choose one of them")
    with requires_extra("serving", "report", "plotly", "jinja2"):
        from ...server.serve import Server
    import torch

    torch.set_num_threads(1)  # the training next to it has use for the others
    try:
        server = Server(options.root, options.host, options.port, "" if options.no_token else options.token)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror or error}; --port 0 takes a free port"
        ) from error
    with server, contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if options.alert is not None:
            stack.enter_context(_calling(server.board, options.alert))
        print(f"the runs in {printable(options.root)} are at {server.address.partition('?')[0]}")
        print(f"open in a browser: {server.address}\nCtrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    if not server.has_ended(_LAST):  # Python would end with an abort while torch works in other threads
        sys.stdout.flush()
        os._exit(0)
    return 0


COMMANDS = (
    Command(
        "live",
        "show a run live in the terminal",
        "Show a run live in the terminal: losses, gradient norms before and after clipping, spikes, and the layers that deviate most. The "
        "run directory is only read; the training never waits.",
        (
            ("gradmon live runs/first", "live, until Ctrl-C"),
            ("gradmon live runs/next --wait", "also before the run has begun"),
            ("gradmon live runs/first --tail 5000 --interval 5", "more steps, and less often"),
            ("gradmon live runs/first --once", "one picture of its current state"),
            ("gradmon live runs/first --alert https://example.org/hook", "call a webhook about it, also without a terminal"),
        ),
        (
            RUN,
            value("--interval", "SECONDS", "between updates", type=_seconds, default=1.0),
            value("--tail", "N", "only the last N steps", type=positive, default=600),
            flag("--wait", "wait for a run that has not begun yet"),
            flag("--once", "print one picture and end"),
            value("--alert", "URL", "a webhook that is called when the run stalls, and about new spikes and findings"),
        ),
        _live,
        "Sparklines show the largest value of the steps in a column, on a logarithmic scale; ! is NaN or infinite.",
    ),
    Command(
        "serve",
        "show runs in a browser, live",
        "Show the runs below a directory in a browser while they train: a list of all, the report of each with every new step, and two "
        "over each other. Run directories are only read; no training waits.",
        (
            ("gradmon serve runs", "all runs, on this machine"),
            ("gradmon serve runs/first --port 0", "one run, at any free port"),
            ("gradmon serve runs --host 0.0.0.0", "for other machines"),
            ("gradmon serve runs --alert https://example.org/hook", "call a webhook about stalled runs, spikes and findings"),
        ),
        (
            argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),
            value("--port", "PORT", "of the page, 0 for any free one", type=_port, default=PORT),
            value("--host", "ADDRESS", "to listen at", default="127.0.0.1"),
            value("--alert", "URL", "a webhook that is called about runs that stall, new spikes and findings"),
            value("--token", "TEXT", "that the address has to contain (default: a new one)"),
            flag("--no-token", "let every account of this machine read"),
        ),
        _serve,
        "Whoever has the printed address can read: it contains a token, new for each server. Only this machine is served by "
        "default; at another address nothing is encrypted, and a tunnel such as ssh -L 8642:localhost:8642 HOST is better.",
    ),
)
