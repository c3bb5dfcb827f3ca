"""The command ``gradmon``: its help and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .. import __version__
from ..core.errors import nearest
from ..core.formatting import printable
from .catalogue import COMMANDS, GROUPS, example_lines
from .commands.common import UsageError

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
            return _run_command([*(sys.argv[1:] if arguments is None else arguments)])
        finally:
            sys.stdout.flush()  # otherwise a closed pipe would raise only when Python ends
    except BrokenPipeError:  # the reader, such as head, has stopped reading
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as in a shell


def _run_command(given: list[str]) -> int:
    parser = command_parser()
    options, unknown = parser.parse_known_args(given)
    if unknown:
        is_early = options.command is None or unknown[0] in given[: given.index(options.command)]
        commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        (parser if is_early else commands.choices[options.command]).refuse(unknown)
    if options.command is None:
        parser.error("name a command, such as demo")
    try:
        return COMMANDS[options.command].run(options)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except UsageError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        return _fail(str(error), 1)


def command_parser() -> _Parser:
    parser = _Parser(
        prog="gradmon",
        description="See what gradients, parameters and updates do while a PyTorch model trains.",
        epilog="\n".join(["examples:", *_examples()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_gradmon {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="command")
    for command in COMMANDS.values():
        command.add_to(subparsers)
    return parser


def _examples() -> Iterator[str]:
    for title, names in GROUPS.items():
        yield f" {title}"
        for name in names:
            yield from example_lines(COMMANDS[name].examples[:_EXAMPLES])
    yield ""
    yield "gradmon COMMAND --help has more of each."


def _fail(message: str, code: int) -> int:
    print(f"gradmon: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
