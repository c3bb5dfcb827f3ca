"""``gradmon export``: a run as files for other programs."""

from __future__ import annotations

import argparse
from typing import Any

from ...runs.export.files import FORMATS
from .common import WrongRequest, add_output, add_parser, opened, output, say_written

EXAMPLES = (
    ("gradmon export runs/first --to out.parquet", "all layers; the loss in out.steps.parquet"),
    ("gradmon export runs/first --to steps.csv --table steps", "a row for each step, for a spreadsheet"),
    ("gradmon export runs/first --to gradients.jsonl --source gradient_before_clip --last 99", "a part of it"),
)
_NOTES = """\
The table "tensors" has a row for each tensor in each step, with a column for each metric; "steps" has one for each step, with the values
of the whole model, what was logged, learning rates, tags and spikes. CSV and JSON lines need nothing, Parquet needs pyarrow:
pip install "torch_gradmon[export]". In Python there are run.export(), run.to_arrow() and run.to_pandas()."""


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = add_parser(
        commands,
        "export",
        "write a run as Parquet, CSV or JSON lines",
        "Write a run into files for other programs.",
        EXAMPLES,
        _NOTES,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory; the run may still go on")
    add_output(parser, "the file, which ends in .parquet, .csv or .jsonl", required=True)
    parser.add_argument("--table", choices=("tensors", "steps"), help="one of them only, into that file (default: both)")
    parser.add_argument(
        "--source", action="append", metavar="NAME", help="of tensors, such as gradient; repeatable (default: all)"
    )
    parser.add_argument("--first", type=int, metavar="STEP", help="from this step on")
    parser.add_argument("--last", type=int, metavar="STEP", help="up to this step")


def run(options: argparse.Namespace) -> int:
    """Write the files, and say which.

    Raises:
        WrongRequest: there is no such run, it cannot be written so, or a package is missing.
        OSError: the disk is full, or the like.
    """
    target = output(options.to, tuple(FORMATS))
    with opened(options.run) as source:
        try:
            paths = source.export(target, options.table, sources=options.source, first=options.first, last=options.last)
        except (ValueError, ImportError) as error:
            raise WrongRequest(str(error)) from error
    for path in paths:
        say_written(path)
    return 0
