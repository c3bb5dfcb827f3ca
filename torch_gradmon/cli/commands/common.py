"""What the commands of ``gradmon`` share."""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ...analysis.run import Run, load_run
from ...core.formatting import printable

#: Command lines, each with its purpose, the most useful first.
Examples = Sequence[tuple[str, str]]
#: File name endings of a report page.
PAGES = (".html", ".htm")
#: Width of the first column of examples; the purpose of a longer command is on the next line.
_COLUMN = 46
#: Width of the help texts that argparse does not wrap.
_WIDTH = 79


class UsageError(ValueError):
    """The request is wrong or impossible, whatever the run is like: exit code 2, with the message on one line."""


class Argument(NamedTuple):
    names: tuple[str, ...]
    options: dict[str, Any]


class Command(NamedTuple):
    """A command as ``gradmon --help`` shows it."""

    name: str  # as on the command line
    summary: str  # one line for the list of commands
    description: str  # for its own help
    examples: Examples  # at the end of its help
    arguments: Sequence[Argument | tuple[Argument, ...]]  # of the command; a tuple of arguments excludes each other
    # runs it, and returns its exit code: 0, or 1 for a bad result. A :class:`UsageError` is printed on one line with the exit
    # code 2, an OSError or ValueError with 1.
    run: Callable[[argparse.Namespace], int]
    notes: str = ""  # paragraphs after the examples

    def add_to(self, commands: Any) -> None:
        lines = ["examples:", *example_lines(self.examples)]
        for paragraph in self.notes.split("\n\n") if self.notes else ():
            lines += ["", *textwrap.wrap(" ".join(paragraph.split()), _WIDTH, break_on_hyphens=False)]
        parser = commands.add_parser(
            self.name,
            help=self.summary,
            description=textwrap.fill(self.description, _WIDTH),
            epilog="\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for each in self.arguments:
            if isinstance(each, Argument):
                parser.add_argument(*each.names, **each.options)
            else:
                group = parser.add_mutually_exclusive_group()
                for one in each:
                    group.add_argument(*one.names, **one.options)


def argument(*names: str, **options: Any) -> Argument:
    return Argument(names, options)


def value(name: str, metavar: str, help: str, **options: Any) -> Argument:
    """An option that takes a value; a default that is shown is appended to ``help``."""
    if options.get("default") not in (None, []):
        help += " (default: %(default)s)"
    return Argument((name,), {"metavar": metavar, "help": help, **options})


def flag(name: str, help: str) -> Argument:
    return Argument((name,), {"action": "store_true", "help": help})


def output_file(help: str, required: bool = False) -> Argument:
    """The option ``--output FILE``; see :func:`output`."""
    return Argument(("-o", "--output"), {"metavar": "FILE", "required": required, "help": help})


class _PrintSchema(argparse.Action):
    """Prints the JSON schema of its command, and ends, as ``--help`` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        schema = files("torch_gradmon.cli").joinpath("schemas").joinpath(f"{parser.prog.rpartition(' ')[2]}.json")
        print(schema.read_text(encoding="utf-8"), end="")
        parser.exit()


RUN = argument("run", metavar="RUN", help="a run directory; the run may still go on")
JSON = (
    flag("--json", "print JSON, for a program"),
    argument("--json-schema", action=_PrintSchema, nargs=0, help="print the JSON schema of that (draft 2020-12) and end"),
)
FIRST = value("--first", "STEP", "from this step on", type=int)
LAST = value("--last", "STEP", "up to this step", type=int)


def example_lines(examples: Examples) -> Iterator[str]:
    for command, purpose in examples:
        if len(command) <= _COLUMN:
            yield f"  {command:<{_COLUMN}}  {purpose}".rstrip()
        else:
            yield f"  {command}"
            yield f"      {purpose}"


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() and len(text) < 100 else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a positive whole number")
    return number


def output(path: str, endings: Sequence[str]) -> Path:
    """The file that a command writes, checked before the work begins; an existing file is replaced.

    The ending has to be one of ``endings``, so that no other file can be overwritten by mistake. Missing directories are made later.

    Raises:
        UsageError: nothing can be written there.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"--output {path} is a directory; name a file in it")
    if target.suffix.lower() not in endings:
        *most, last = endings
        raise UsageError(f"--output {path} must end in {', '.join(most)}{' or ' * bool(most)}{last}")
    there = next(each for each in target.absolute().parents if each.exists())
    if not there.is_dir():
        raise UsageError(f"--output {path} cannot be written: {there} is not a directory")
    return target


def print_written(path: Path, to_stderr: bool = False) -> None:
    """Print the path and size of a written file; ``to_stderr`` if the standard output is for a program."""
    print(f"{printable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)", file=sys.stderr if to_stderr else sys.stdout)


@contextlib.contextmanager
def open_run(path: str) -> Iterator[Run]:
    """The run in a directory, closed at the end.

    Raises:
        UsageError: there is none.
    """
    try:
        run = load_run(path)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    with contextlib.closing(run):
        yield run


@contextlib.contextmanager
def requires_extra(what: str, extra: str, *packages: str) -> Iterator[None]:
    """For imports: if one of ``packages`` is missing, name the ``extra`` that installs it.

    Raises:
        UsageError: one is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise UsageError(f'{what} needs {missing}: pip install "torch_gradmon[{extra}]"') from error
