"""``gradmon diagnose``: what is wrong with a run."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from ...analysis.diagnosis.diagnose import diagnose_history
from ...analysis.diagnosis.history import History
from ..terminal.formatting import printable
from .common import add_parser, opened

EXAMPLES = (
    ("gradmon diagnose runs/first", "what is wrong, where, and what to do"),
    ("gradmon diagnose runs/first --json", "the same for a program"),
)
_NOTES = """\
The exit code is 0 if nothing graver than information was found, 1 if
something was, and 2 if there is no such run: a CI job needs nothing else."""
#: Severities by how they begin a line, in colours of the terminal.
_COLOURS = {"ERROR": "bold red", "WARNING": "bold yellow", "INFO": "bold cyan"}
_WIDEST = 100


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    diagnose = add_parser(
        commands,
        "diagnose",
        "say what is wrong with a run, where, and what to do",
        "Look for what is wrong with a run, which may have ended, go on, or have been killed, and say where, and what to do.",
        EXAMPLES,
        _NOTES,
    )
    diagnose.add_argument("run", metavar="RUN", help="a run directory")
    diagnose.add_argument("--json", action="store_true", help="print JSON, for a program")


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis; returns its exit code.

    Raises:
        WrongRequest: there is no such run.
    """
    with opened(options.run) as source:
        diagnosis = diagnose_history(History.of_run(source))
    if options.json:
        print(diagnosis.to_json())
    elif sys.stdout.isatty():
        _show(diagnosis.text(min(_WIDEST, shutil.get_terminal_size().columns)))
    else:
        print(_plain(diagnosis.text()))
    return diagnosis.exit_code


def _plain(words: str) -> str:
    return "\n".join(map(printable, words.splitlines()))


def _show(words: str) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(_plain(words))
        return
    text = Text(_plain(words))
    for severity, style in _COLOURS.items():
        text.highlight_regex(rf"(?m)^{severity} +\S+", style)
    Console(highlight=False).print(text, soft_wrap=True)
