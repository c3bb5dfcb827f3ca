"""``gradmon export``: a run as files for other programs."""

from __future__ import annotations

import argparse

from ...runs.export.files import FORMATS
from .common import FIRST, LAST, RUN, Command, UsageError, argument, open_run, output, print_written, to_file, value

COMMAND = Command(
    "export",
    "write a run as Parquet, CSV or JSON lines",
    "Write a run into files for other programs.",
    (
        ("gradmon export runs/first --to out.parquet", "all layers; the loss in out.steps.parquet"),
        ("gradmon export runs/first --to steps.csv --table steps", "a row for each step, for a spreadsheet"),
        ("gradmon export runs/first --to gradients.jsonl --source gradient_before_clip --last 99", "a part of it"),
    ),
    (
        RUN,
        to_file("the file, which ends in .parquet, .csv or .jsonl", required=True),
        argument("--table", choices=("tensors", "steps"), help="only one of them, into that file (default: both)"),
        value("--source", "NAME", "of tensors, such as gradient; repeatable (default: all)", action="append"),
        FIRST,
        LAST,
    ),
    """The table "tensors" has a row for each tensor in each step, with a column for each metric. The table "steps" has a row for each
    step, with the values of the whole model, logged values, learning rates, tags and spikes. CSV and JSON lines need no package, Parquet
    needs pyarrow: pip install "torch_gradmon[export]". In Python use run.export(), run.to_arrow() and run.to_pandas().""",
)


def run(options: argparse.Namespace) -> int:
    target = output(options.to, tuple(FORMATS))
    with open_run(options.run) as source:
        try:
            paths = source.export(target, options.table, sources=options.source, first=options.first, last=options.last)
        except (ValueError, ImportError) as error:
            raise UsageError(str(error)) from error
    for path in paths:
        print_written(path)
    return 0
