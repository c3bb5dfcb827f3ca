"""``gradmon serve``: a page that follows runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from ...core.formatting import printable
from ...server import PORT
from .common import Command, UsageError, alarms, argument, check_alert, flag, requires_extra, value


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() and len(text) < 6 else -1
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return number


COMMAND = Command(
    "serve",
    "show runs in a browser, live",
    "Show the runs below a directory in a browser while they train: a list of all, the report of each with every new step, and two over "
    "each other. Run directories are only read; no training waits.",
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
    "Whoever has the printed address can read: it contains a token, new for each server. Only this machine is served by "
    "default; at another address nothing is encrypted, and a tunnel such as ssh -L 8642:localhost:8642 HOST is better.",
)
#: Seconds that pages which are being made have to end.
_LAST = 2.0


def run(options: argparse.Namespace) -> int:
    if options.alert is not None:
        check_alert(options.alert)
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
            stack.enter_context(alarms(server.board, options.alert))
        print(f"the runs in {printable(options.root)} are at {server.address.partition('?')[0]}")
        print(f"open in a browser: {server.address}\nCtrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    if not server.has_ended(_LAST):  # Python would end with an abort while torch works in other threads
        sys.stdout.flush()
        os._exit(0)
    return 0
