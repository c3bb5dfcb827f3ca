"""``gradmon demo``: a small monitored training."""

from __future__ import annotations

import argparse

from .common import Command, UsageError, output, output_file, positive, print_written, requires_extra, value


def run(options: argparse.Namespace) -> int:
    try:
        with requires_extra("the demo", "cli", "rich", "tqdm"):
            from ..demo import demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pydoc_data":
            raise UsageError("the demo trains on pydoc_data.topics, which this Python lacks") from error
        raise
    to = None if options.output is None else output(options.output, (".svg",))
    demo(options.steps, options.run_dir, to, options.seed)
    if to is not None:
        print_written(to)
    return 0


COMMANDS = (
    Command(
        "demo",
        "train a small character GPT under watch and show a table of its layers",
        "Train a small character GPT under watch and show a table of its layers.",
        (
            ("gradmon demo", "train a small GPT: a minute, no network"),
            ("gradmon demo --steps 101 --run-dir runs/short", "fewer steps, in another directory"),
            ("gradmon demo -o table.svg", "write the tables as a picture"),
        ),
        (
            value("--steps", "N", "steps to train", type=positive, default=601),
            value("--run-dir", "DIR", "where to write the run", default="runs/demo"),
            output_file("the printed tables as a picture, .svg"),
            value("--seed", "N", "of parameters and batches", type=int, default=0),
        ),
        run,
    ),
)
