"""``gradmon why``: the story of a spike."""

from __future__ import annotations

import argparse
from typing import Any

from ...analysis.spike_report import tell
from .common import WrongRequest, add_parser, opened

EXAMPLES = (
    ("gradmon why runs/first", "tell the story of the largest spike"),
    ("gradmon why runs/first --step 300", "tell the story of that step"),
)


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    why = add_parser(
        commands,
        "why",
        "tell the story of a spike",
        "Tell the story of a spike: the signals around it, which parameters moved first, and what came after.",
        EXAMPLES,
    )
    why.add_argument("run", metavar="RUN", help="a run directory; the run may still go on")
    why.add_argument(
        "--step", type=int, metavar="STEP", help="the step to tell of (default: the worst step of the largest spike)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the story.

    Raises:
        WrongRequest: there is no such run, no such step in it, or no spike to tell of.
    """
    with opened(options.run) as source:
        try:
            print(tell(source, options.step))
        except ValueError as error:
            raise WrongRequest(str(error)) from error
    return 0
