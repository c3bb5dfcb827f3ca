"""``gradmon summary``: a run on a screen or two."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...core.keys import compile_pattern
from ..terminal.layer_table import MOST, SORTS
from ..terminal.run_facts import summarised
from .common import WrongRequest, add_parser, needing, opened, positive

EXAMPLES = (
    ("gradmon summary runs/first", "what the run and its layers did"),
    ("gradmon summary runs/first --sort share --steps 100", "who holds the gradient now"),
    ("gradmon summary runs/first --filter attn --all", "each parameter with attn in its name"),
    ("gradmon summary runs/first --depth 1", "by the first part of their names"),
    ("gradmon summary runs/first --json", "the same for a program"),
)


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    summary = add_parser(
        commands,
        "summary",
        "show what a run and its layers did",
        "Show what a run, its whole-model values and its layers did; the run may still go on.",
        EXAMPLES,
    )
    summary.add_argument("run", metavar="RUN", help="a run directory")
    rows = summary.add_mutually_exclusive_group()
    rows.add_argument(
        "--all",
        action="store_true",
        help=f"every parameter and all that was logged (default: blocks, if more than {MOST} parameters)",
    )
    rows.add_argument("--depth", type=positive, metavar="N", help="group parameters by the first N parts of their names")
    summary.add_argument("--filter", metavar="REGEX", help="only parameters whose names match")
    summary.add_argument(
        "--sort", choices=["name", *SORTS], metavar="COLUMN", help=f"one of name, {', '.join(SORTS)} (default: as in the model)"
    )
    summary.add_argument("--steps", type=positive, metavar="N", help="only the last N steps")
    summary.add_argument("--json", action="store_true", help="print JSON, for a program")


def run(options: argparse.Namespace) -> int:
    """Print the summary.

    Raises:
        WrongRequest: there is no such run, the pattern matches nothing, or rich is missing.
    """
    if not options.json:
        with needing("the summary, without --json,", "cli", "rich"):
            from ..terminal.console import QuietConsole
            from ..terminal.summary_view import show
    with opened(options.run) as source:
        try:
            summary = summarised(
                source,
                options.run,
                last=options.steps,
                pattern=None if options.filter is None else compile_pattern(options.filter, "--filter"),
                depth=options.depth,
                everything=options.all,
                sort=options.sort,
            )
        except ValueError as error:
            raise WrongRequest(str(error)) from error
    if options.json:
        print(json.dumps(summary.to_dict(), indent=1, allow_nan=False))
    else:
        show(QuietConsole(), summary)
    return 0
