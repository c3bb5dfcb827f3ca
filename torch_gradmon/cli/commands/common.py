"""What the commands of ``gradmon`` share."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.formatting import printable

if TYPE_CHECKING:
    from ...analysis.run import Run

#: File name endings of a report page.
PAGES = (".html", ".htm")


class UsageError(ValueError):
    """The request is wrong or impossible, whatever the run is like: exit code 2, with the message on one line."""


@contextlib.contextmanager
def wrong_request(*errors: type[Exception]) -> Iterator[None]:
    """Turn ``errors`` into a :class:`UsageError`."""
    try:
        yield
    except errors as error:
        raise UsageError(str(error)) from error


def output(path: str, endings: Sequence[str]) -> Path:
    """The file that a command writes, checked before the work begins; an existing file is replaced.

    The ending has to be one of ``endings``, so that no other file can be overwritten by mistake. Missing directories are made later.
    Raises UsageError if nothing can be written there.
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


def print_json(found: object) -> None:
    print(json.dumps(found, indent=1, allow_nan=False))


def print_coloured(text: str, styles: Mapping[str, str]) -> None:
    """Print a text, for a terminal with what matches these patterns in these styles, if rich is installed."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    coloured = Text(text)
    for pattern, style in styles.items():
        coloured.highlight_regex(pattern, style)
    Console(highlight=False).print(coloured, soft_wrap=True)


@contextlib.contextmanager
def open_run(path: str) -> Iterator[Run]:
    """The run in a directory, closed at the end. Raises UsageError if there is none."""
    from ...analysis.run import load_run  # and with it torch, which --help does without

    with wrong_request(FileNotFoundError, ValueError):
        run = load_run(path)
    with run:
        yield run


@contextlib.contextmanager
def requires_extra(what: str, extra: str, *packages: str) -> Iterator[None]:
    """For imports: if one of ``packages`` is missing, raise a UsageError that names the ``extra`` that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise UsageError(f'{what} needs {missing}: pip install "torch_gradmon[{extra}]"') from error
