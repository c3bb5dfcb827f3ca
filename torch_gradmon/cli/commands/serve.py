"""``gradmon serve``: a page that follows runs."""

from __future__ import annotations

import argparse
import contextlib

from ...server import PORT
from .common import Command, UsageError, alarms, argument, check_alert, requires_extra, value


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
        ("gradmon serve runs --host 0.0.0.0", "for other machines, with a token in the address"),
        ("gradmon serve runs --alert https://example.org/hook", "call a webhook about stalled runs, spikes and findings"),
    ),
    (
        argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),
        value("--port", "PORT", "of the page, 0 for any free one", type=_port, default=PORT),
        value("--host", "ADDRESS", "to listen at", default="127.0.0.1"),
        value("--alert", "URL", "a webhook that is called about runs that stall, new spikes and findings"),
        value("--token", "TEXT", "that the address has to contain (default: none on this machine, a new one elsewhere)"),
    ),
    "Only this machine can read by default. At another address everybody with the token can, and nothing is encrypted: a tunnel such as "
    "ssh -L 8642:localhost:8642 HOST is better.",
)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if options.alert is not None:
        check_alert(options.alert)
    with requires_extra("serving", "report", "plotly", "jinja2"):
        from ...server.serve import Server
    import torch

    torch.set_num_threads(1)  # the training next to it has use for the others
    try:
        server = Server(options.root, options.host, options.port, options.token)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror or error}; --port 0 takes a free port"
        ) from error
    with server, contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if options.alert is not None:
            stack.enter_context(alarms(server.board, options.alert))
        print(f"open in a browser: {server.address}\nCtrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    return 0
