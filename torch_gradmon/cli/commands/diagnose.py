"""``gradmon diagnose``: what is wrong with a run."""

from __future__ import annotations

import argparse
import shutil
import sys

from ...analysis.diagnosis.diagnose import diagnose_history
from ...analysis.diagnosis.history import History
from .common import JSON, RUN, Command, open_run

COMMAND = Command(
    "diagnose",
    "find what is wrong with a run, where, and what to do",
    "Find what is wrong with a run, where, and what to do. The run may have ended, still go on, or have been killed.",
    (
        ("gradmon diagnose runs/first", "what is wrong, where, and what to do"),
        ("gradmon diagnose runs/first --json", "the same for a program"),
    ),
    (RUN, JSON),
    "The exit code, for CI, is 0 if nothing graver than information was found, 1 if something was, and 2 if there is no such run.",
)
#: Severities by the start of a line, in colours of the terminal.
_COLOURS = {"ERROR": "bold red", "WARNING": "bold yellow", "INFO": "bold cyan"}
_WIDEST = 100


def run(options: argparse.Namespace) -> int:
    with open_run(options.run) as source:
        diagnosis = diagnose_history(History.of_run(source))
    if options.json:
        print(diagnosis.to_json())
    elif sys.stdout.isatty():
        _print_coloured(diagnosis.text(min(_WIDEST, shutil.get_terminal_size().columns)))
    else:
        print(diagnosis.text())
    return diagnosis.exit_code


def _print_coloured(plain: str) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(plain)
        return
    text = Text(plain)
    for severity, style in _COLOURS.items():
        text.highlight_regex(rf"(?m)^{severity} +\S+", style)
    Console(highlight=False).print(text, soft_wrap=True)
