"""The commands that follow runs while they go on: ``gradmon live`` and ``gradmon serve``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch

from ...core.formatting import printable
from ...server.board import Alarms, RunBoard
from ...sinks.alerts import Messenger
from ..terminal.live import RunFollower
from .common import UsageError, open_run, requires_extra


def _check_alert(url: str) -> None:
    try:
        Messenger(url)
    except ValueError as error:
        raise UsageError(f"--alert {url}: {error}") from error


def live(options: argparse.Namespace) -> int:
    with requires_extra("the live view", "cli", "rich"):
        from ..terminal import live_loop
        from ..terminal.tables import QuietConsole
    console = QuietConsole()
    can_draw = console.is_terminal and not console.is_dumb_terminal
    if options.alert is not None:
        _check_alert(options.alert)
        if options.once:
            raise UsageError("--once ends before there can be anything to call --alert about; leave one of them out")
    elif not (can_draw or options.once):
        raise UsageError("live needs a terminal that it can draw on; --once prints one picture anywhere")
    if not options.wait:
        with open_run(options.run):  # otherwise it would wait for a misspelled path
            pass
    with contextlib.ExitStack() as stack:
        if options.alert is not None:
            try:
                _follow_with_alarms(stack, options)
                while not can_draw:
                    time.sleep(1.0)
            except KeyboardInterrupt:
                return 0
        follower = stack.enter_context(contextlib.closing(RunFollower(options.run, options.tail)))
        follower.refresh()
        if not options.once:
            live_loop.follow(console, follower, options.interval)
            return 0
        while options.wait and (follower.live is None or follower.live.last is None):
            time.sleep(options.interval)
            follower.refresh()
        live_loop.print_frame(console, follower)
    return 0


def _follow_with_alarms(stack: contextlib.ExitStack, options: argparse.Namespace) -> None:
    shown = printable(options.run)
    if not Path(options.run).is_dir():
        print(f"waiting for {shown}; Ctrl-C ends it", flush=True)
        while not Path(options.run).is_dir():
            time.sleep(options.interval)
    board = stack.enter_context(contextlib.closing(RunBoard(options.run)))
    stack.enter_context(contextlib.closing(Alarms(board, options.alert)))
    print(f"following {shown}; Ctrl-C ends it", flush=True)


#: Seconds that pages which are being made have to end.
_LAST = 2.0


def serve(options: argparse.Namespace) -> int:
    if options.alert is not None:
        _check_alert(options.alert)
    if options.no_token and options.token is not None:
        raise UsageError("--no-token leaves out the token, and --token gives one; choose one of them")
    with requires_extra("serving", "report", "plotly", "jinja2"):
        from ...server.serve import Server
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
            stack.enter_context(contextlib.closing(Alarms(server.board, options.alert)))
        print(f"the runs in {printable(options.root)} are at {server.address.partition('?')[0]}")
        print(f"open in a browser: {server.address}\nCtrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    if not server.has_ended(_LAST):  # Python would end with an abort while torch works in other threads
        sys.stdout.flush()
        os._exit(0)
    return 0
