"""What the commands of ``gradmon`` share."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ..run import Run, load_run

#: Command lines, each with what it is for.
Examples = Sequence[tuple[str, str]]
#: Of the first column of examples; a longer command has what it is for on the next line.
_COLUMN = 46
#: Of help that argparse leaves as it is.
_WIDTH = 79


class WrongRequest(ValueError):
    """What was asked for cannot be done, whatever the run is like: exit code 2, with the message in one line."""


def add_parser(commands: Any, name: str, summary: str, description: str, examples: Examples, notes: str = "") -> Any:
    """Add a parser to ``commands`` whose help ends with ``examples`` and the paragraphs of ``notes``."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog="\n".join(["examples:", *shown(examples), *(["", *_wrapped(notes)] if notes else [])]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _wrapped(notes: str) -> Iterator[str]:
    for number, paragraph in enumerate(notes.split("\n\n")):
        yield from [""] * bool(number)
        yield from textwrap.wrap(" ".join(paragraph.split()), _WIDTH, break_on_hyphens=False)


def shown(examples: Examples) -> Iterator[str]:
    """The lines of ``examples``, in two columns."""
    for command, what in examples:
        if len(command) <= _COLUMN:
            yield f"  {command:<{_COLUMN}}  {what}".rstrip()
        else:
            yield f"  {command}"
            yield f"      {what}"


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    number = int(text) if text.isdecimal() and len(text) < 100 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a positive whole number")
    return number


@contextlib.contextmanager
def opened(path: str) -> Iterator[Run]:
    """The run in a directory, closed in the end.

    Raises:
        WrongRequest: there is none.
    """
    try:
        run = load_run(path)
    except (FileNotFoundError, ValueError) as error:
        raise WrongRequest(str(error)) from error
    with contextlib.closing(run):
        yield run


@contextlib.contextmanager
def needing(what: str, extra: str, *packages: str) -> Iterator[None]:
    """Around imports: where one of ``packages`` is missing, say which ``extra`` brings it.

    Raises:
        WrongRequest: one is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking not in packages:
            raise
        raise WrongRequest(f'{what} needs {lacking}: pip install "torch_gradmon[{extra}]"') from error
