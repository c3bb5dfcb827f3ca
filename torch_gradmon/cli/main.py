"""The command ``gradmon``: which commands there are, what its help says, and what becomes of errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from .. import __version__
from .commands.common import Examples, WrongRequest, shown

#: Where each command lives, by name, as ``gradmon --help`` groups them. A new one is a file and a line here; what the file
#: has to have says :class:`Command`.
_GROUPS = {
    "see what it is": {
        "demo": ".commands.demo",
    },
    "look at a run, which may still go on": {
        "report": ".commands.report",
        "summary": ".commands.summary",
        "watch": ".commands.watch",
        "diagnose": ".commands.diagnose",
        "why": ".commands.why",
        "diff": ".commands.diff",
        "export": ".commands.export",
    },
    "change what a running training measures": {
        "detail": ".commands.detail",
    },
    "check a model before it is trained": {
        "coordcheck": ".commands.coordcheck",
    },
}
#: Examples of each command in the help of all; its own has the rest.
_SHOWN = 2


class Command(Protocol):
    """A module with a command. It imports optional packages in :func:`run` only, or in what that imports."""

    #: Command lines, each with what it is for, the most useful first.
    EXAMPLES: Examples

    def add_to(self, commands: Any) -> None:
        """Add a parser of the command's name to those of ``gradmon``."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code: 0, or 1 where what was looked for is not well.

        A :class:`WrongRequest` is told in one line with the exit code 2, an OSError, ValueError or sqlite3.Error with 1.
        """


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for a wrong or impossible request."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no such letter
    try:
        try:
            return _obey(arguments)
        finally:
            sys.stdout.flush()  # else a closed pipe would show only when Python ends
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell says of what a closed pipe ended


def _obey(arguments: Sequence[str] | None) -> int:
    commands = _commands()
    parser = _parser(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error("name a command, such as demo")
    try:
        return commands[options.command].run(options)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except WrongRequest as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, sqlite3.Error) as error:
        return _fail(str(error), 1)


def _commands() -> dict[str, Command]:
    paths = {name: path for group in _GROUPS.values() for name, path in group.items()}
    return {name: cast(Command, import_module(path, __package__)) for name, path in paths.items()}


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradmon",
        description="See what gradients, parameters and updates do while a PyTorch model trains.",
        epilog="\n".join(["examples:", *_examples(commands)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_gradmon {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="command")
    for command in commands.values():
        command.add_to(subparsers)
    return parser


def _examples(commands: dict[str, Command]) -> Iterator[str]:
    for title, group in _GROUPS.items():
        yield f" {title}"
        for name in group:
            yield from shown(commands[name].EXAMPLES[:_SHOWN])
    yield ""
    yield "gradmon COMMAND --help has more of each."


def _fail(message: str, code: int) -> int:
    print(f"gradmon: error: {' '.join(message.split())}", file=sys.stderr)
    return code
