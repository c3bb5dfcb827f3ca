"""``gradmon demo``: a small training under watch."""

from __future__ import annotations

import argparse
from typing import Any

from .common import WrongRequest, add_output, add_parser, needing, output, positive, say_written

EXAMPLES = (
    ("gradmon demo", "train a small GPT: a minute, no network"),
    ("gradmon demo --steps 101 --run-dir runs/short", "fewer steps, kept elsewhere"),
    ("gradmon demo --to table.svg", "keep the tables as a picture"),
)


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    demo = add_parser(
        commands,
        "demo",
        "train a small character GPT under watch and show a table of its layers",
        "Train a small character GPT under watch and show a table of its layers.",
        EXAMPLES,
    )
    demo.add_argument("--steps", type=positive, default=601, metavar="N", help="steps to train (default: %(default)s)")
    demo.add_argument("--run-dir", default="runs/demo", metavar="DIR", help="where to keep the run (default: %(default)s)")
    add_output(demo, "the printed tables as a picture, .svg")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Train, and print the tables.

    Raises:
        WrongRequest: a package that it needs is missing.
        OSError, ValueError: see :func:`torch_gradmon.cli.demo.demo`.
    """
    try:
        with needing("the demo", "cli", "rich", "tqdm"):
            from ..demo import demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pydoc_data":
            raise WrongRequest("the demo trains on pydoc_data.topics, which this Python comes without") from error
        raise
    to = None if options.to is None else output(options.to, (".svg",))
    demo(options.steps, options.run_dir, to, options.seed)
    if to is not None:
        say_written(to)
    return 0
