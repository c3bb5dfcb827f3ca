"""``gradmon summary``: a run on a screen or two."""

from __future__ import annotations

import argparse
import json

from ...core.keys import compile_pattern
from ..terminal.layer_table import MOST, SORTS, summarize
from .common import JSON, RUN, Command, UsageError, flag, open_run, positive, requires_extra, value

COMMAND = Command(
    "summary",
    "show what a run and its layers did",
    "Show what a run, its whole-model values and its layers did; the run may still go on.",
    (
        ("gradmon summary runs/first", "what the run and its layers did"),
        ("gradmon summary runs/first --sort share --steps 100", "which layers hold the gradient now"),
        ("gradmon summary runs/first --filter attn --all", "each parameter with attn in its name"),
        ("gradmon summary runs/first --depth 1", "by the first part of their names"),
        ("gradmon summary runs/first --json", "the same for a program"),
    ),
    (
        RUN,
        (
            flag("--all", f"every parameter and logged value (default: blocks, if more than {MOST} parameters)"),
            value("--depth", "N", "group parameters by the first N parts of their names", type=positive),
        ),
        value("--filter", "REGEX", "only parameters whose names match"),
        value("--sort", "COLUMN", f"one of name, {', '.join(SORTS)} (default: as in the model)", choices=["name", *SORTS]),
        value("--steps", "N", "only the last N steps", type=positive),
        JSON,
    ),
)


def run(options: argparse.Namespace) -> int:
    if not options.json:
        with requires_extra("the summary, without --json,", "cli", "rich"):
            from ..terminal.summary_view import QuietConsole, show
    with open_run(options.run) as source:
        try:
            summary = summarize(
                source,
                options.run,
                last=options.steps,
                pattern=None if options.filter is None else compile_pattern(options.filter, "--filter"),
                depth=options.depth,
                everything=options.all,
                sort=options.sort,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(summary.to_dict(), indent=1, allow_nan=False))
    else:
        show(QuietConsole(), summary)
    return 0
