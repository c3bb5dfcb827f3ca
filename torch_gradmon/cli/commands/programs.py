"""What gives runs to programs: ``gradmon schema`` and ``gradmon mcp``."""

from __future__ import annotations

import argparse
from importlib.resources import files

from .common import Command, UsageError, argument, requires_extra

_SCHEMAS = files("torch_gradmon.cli").joinpath("schemas")
#: The commands with ``--json``.
NAMES = ("compare", "diagnose", "diff", "doctor", "status", "summary", "why", "width-sweep")


def _schema(options: argparse.Namespace) -> int:
    print(_SCHEMAS.joinpath(f"{options.name}.json").read_text(encoding="utf-8"), end="")
    return 0


def _mcp(options: argparse.Namespace) -> int:
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
        "schema",
        "the JSON schema of a command",
        "Print the JSON schema (draft 2020-12) of the output of a command with --json. Fields may be added in later versions.",
        (("gradmon schema status", "of gradmon status --json"),),
        (argument("name", metavar="COMMAND", choices=NAMES, help=f"one of {', '.join(NAMES)}"),),
        _schema,
    ),
    Command(
        "mcp",
        "tools for agents that read runs",
        "Serve tools by the Model Context Protocol on stdin and stdout: list runs, their status and diagnosis, explain a spike, series of "
        "values, and the difference of two runs. They read the runs below a directory and change nothing.",
        (("gradmon mcp runs", "the command that an agent's configuration names"),),
        (argument("root", metavar="DIRECTORY", help="a directory with runs in it, or a run"),),
        _mcp,
    ),
)
