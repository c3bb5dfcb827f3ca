"""``gradmon why``: the report on a spike."""

from __future__ import annotations

import argparse
import json

from ...analysis.spike_report import SpikeReport, explain, no_report
from .common import JSON, RUN, Command, UsageError, open_run, value

COMMAND = Command(
    "why",
    "explain a spike",
    "Explain a spike: the signals around it, which parameters moved first, and the steps after it; or say that there is none.",
    (
        ("gradmon why runs/first", "explain the largest spike"),
        ("gradmon why runs/first --step 300", "explain that step"),
        ("gradmon why runs/first --json", "the same for a program"),
    ),
    (RUN, value("--step", "STEP", "the step to explain (default: the worst step of the largest spike)", type=int), JSON),
)


def run(options: argparse.Namespace) -> int:
    with open_run(options.run) as source:
        try:
            if options.json:
                is_calm = options.step is None and not source.events
                found = no_report() if is_calm else SpikeReport.of(source, options.step).to_dict()
                print(json.dumps(found, indent=1, allow_nan=False))
            else:
                print(explain(source, options.step))
        except ValueError as error:
            raise UsageError(str(error)) from error
    return 0
