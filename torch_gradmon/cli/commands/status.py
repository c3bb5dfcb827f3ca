"""``gradmon status``: how a run is, for a person in a hurry or a program."""

from __future__ import annotations

import argparse
import json

from ...analysis.diagnosis.diagnose import diagnose
from ...analysis.many_runs import run_card, status_dict, status_text
from ...analysis.run import no_run
from .common import JSON, RUN, Command, UsageError

COMMAND = Command(
    "status",
    "how a run is, and what to do next",
    "Show in a few lines whether a run is alive, where its loss is, what is wrong, and what to do next. The run may still go on.",
    (
        ("gradmon status runs/first", "alive? learning? what to do next?"),
        ("gradmon status runs/first --json", "the same for a program"),
    ),
    (RUN, JSON),
    "The exit code is 0 if the run is alive or has ended and nothing graver than information was found, 1 otherwise, as for a run that an "
    "exception ended or whose steps are lost on a full disk, and 2 if there is no such run.",
)


def run(options: argparse.Namespace) -> int:
    try:
        diagnosis = diagnose(options.run)
        card = run_card(options.run, options.run, diagnosis)
    except FileNotFoundError as error:
        raise UsageError(no_run(options.run, error)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    found = status_dict(card, diagnosis)
    if options.json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print("\n".join(status_text(card, diagnosis)))
    return 0 if found["healthy"] else 1
