"""``gradmon mcp``: tools for agents."""

from __future__ import annotations

import argparse

from .common import Command, UsageError, argument, requires_extra


def run(options: argparse.Namespace) -> int:
    with requires_extra("tools for agents", "mcp", "mcp"):
        from ...server.agents import agent_server
    try:
        server = agent_server(options.root)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    server.run("stdio")
    return 0


COMMANDS = (
    Command(
        "mcp",
        "tools for agents that read runs",
        "Serve tools by the Model Context Protocol on stdin and stdout: list runs, their status and diagnosis, explain a spike, series of "
        "values, and the difference of two runs. They read the runs below a directory and change nothing.",
        (("gradmon mcp runs", "the command that an agent's configuration names"),),
        (argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),),
        run,
    ),
)
