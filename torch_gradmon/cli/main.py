"""The command ``gradmon``: its commands, its help, and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__
from ..core.errors import nearest
from ..core.formatting import printable
from .commands.common import Command, UsageError, example_lines

#: The modules with ``COMMANDS``, which import optional packages only within the function that runs one.
_MODULES = ("demo", "doctor", "one_run", "live", "compare", "diff", "mcp", "detail", "width_sweep")
#: The commands, as ``gradmon --help`` groups them.
_GROUPS = {
    "see what it is, and whether all of it is there": ("demo", "doctor"),
    "look at a run, which may still go on": ("report", "summary", "status", "live", "diagnose", "why", "export"),
    "look at several": ("serve", "compare", "diff"),
    "give runs to agents": ("mcp",),
    "change what a running training measures": ("detail",),
    "check a model before it is trained": ("width-sweep",),
}
#: What argparse reports about a word that is none of those that it knows.
_CHOICE = re.compile(r"(invalid choice: '([^']*)') \(choose from (.*)\)$")
#: Examples of each command in the help of all commands.
_EXAMPLES = 2


class _Parser(argparse.ArgumentParser):
    """Prints an error on one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        if choice := _CHOICE.search(message):
            near = nearest(choice[2], [word.strip("' ") for word in choice[3].split(",")])
            message = f"{message[: choice.end(1)]}{near}"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        near = nearest(unknown[0].partition("=")[0], options) if unknown[0].startswith("--") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for a wrong or impossible request."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may lack some characters
    try:
        try:
            return _run_command(arguments)
        finally:
            sys.stdout.flush()  # otherwise a closed pipe would raise only when Python ends
    except BrokenPipeError:  # the reader, such as head, has stopped reading
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as in a shell


def _run_command(arguments: Sequence[str] | None) -> int:
    commands = _commands()
    parser = command_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        is_early = options.command is None or unknown[0] in given[: given.index(options.command)]
        _of_command(parser, None if is_early else options.command).refuse(unknown)
    if options.command is None:
        parser.error("name a command, such as demo")
    try:
        return commands[options.command].run(options)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except UsageError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return _fail(str(error), 1)


def _commands() -> dict[str, Command]:
    found = {each.name: each for name in _MODULES for each in import_module(f".commands.{name}", __package__).COMMANDS}
    return {name: found[name] for group in _GROUPS.values() for name in group}


def command_parser(commands: dict[str, Command] | None = None) -> _Parser:
    """The parser of the command line; ``commands``: if they are imported already."""
    commands = commands or _commands()
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


def _of_command(parser: _Parser, command: str | None) -> _Parser:
    """The parser of a command; that of all commands without one."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found: _Parser = parser if command is None else groups[0].choices[command]
    return found


def _examples(commands: dict[str, Command]) -> Iterator[str]:
    for title, names in _GROUPS.items():
        yield f" {title}"
        for name in names:
            yield from example_lines(commands[name].examples[:_EXAMPLES])
    yield ""
    yield "gradmon COMMAND --help has more of each."


def _fail(message: str, code: int) -> int:
    print(f"gradmon: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
