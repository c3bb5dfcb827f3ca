"""What the commands of ``gradmon`` share."""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...analysis.run import Run, load_run

#: Command lines, each with what it is for.
Examples = Sequence[tuple[str, str]]
#: How the page of a report may end.
PAGES = (".html", ".htm")
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


def add_output(parser: Any, what: str, required: bool = False) -> None:
    """Add ``--to FILE``, where a command writes ``what``; see :func:`output`."""
    parser.add_argument("--to", metavar="FILE", required=required, help=what)


def output(path: str, endings: Sequence[str]) -> Path:
    """Where a command writes a file, looked at before the work begins. Of all commands alike: its ending says that it is such a file, so
    nothing else can be overwritten by mistake; a file that is there is replaced; directories that are missing are made.

    Raises:
        WrongRequest: nothing can be written there.
    """
    target = Path(path)
    if target.is_dir():
        raise WrongRequest(f"--to {path} is a directory; name a file in it")
    if target.suffix.lower() not in endings:
        *most, last = endings
        raise WrongRequest(f"--to {path} must end in {', '.join(most)}{' or ' * bool(most)}{last}")
    there = next(each for each in target.absolute().parents if each.exists())
    if not there.is_dir():
        raise WrongRequest(f"--to {path} cannot be written: {there} is no directory")
    return target


def with_directory(target: Path) -> Path:
    """``target``, whose directory is there by now.

    Raises:
        OSError: it cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def say_written(path: Path, aside: bool = False) -> None:
    """Say which file was written; ``aside`` where what is printed is for a program."""
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", file=sys.stderr if aside else sys.stdout)


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
