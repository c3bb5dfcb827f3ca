"""``gradmon schema``: what JSON a command prints."""

from __future__ import annotations

import argparse
from importlib.resources import files

from .common import Command, argument

_SCHEMAS = files("torch_gradmon.cli").joinpath("schemas")
#: The commands with ``--json``.
NAMES = ("compare", "coordcheck", "diagnose", "diff", "doctor", "status", "summary", "why")

COMMAND = Command(
    "schema",
    "the JSON schema of a command",
    "Print the JSON schema (draft 2020-12) of the output of a command with --json. Fields may be added in later versions.",
    (("gradmon schema status", "of gradmon status --json"),),
    (argument("name", metavar="COMMAND", choices=NAMES, help=f"one of {', '.join(NAMES)}"),),
)


def run(options: argparse.Namespace) -> int:
    print(_SCHEMAS.joinpath(f"{options.name}.json").read_text(encoding="utf-8"), end="")
    return 0
