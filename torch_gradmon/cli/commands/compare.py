"""``gradmon compare``: many runs in one table."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...analysis.diagnosis.diagnose import diagnose
from ...analysis.many_runs.card import RunCard, differing, run_card
from ...analysis.many_runs.find import find_runs
from .common import JSON, Command, UsageError, argument, flag, requires_extra, value

_DIRECTORIES = argument(
    "runs", metavar="DIRECTORY", nargs="+", help="runs, or directories with runs in them; they may still go on"
)
#: What runs can be sorted by; the best is first, and what has no value is last.
_SORTS: dict[str, Callable[[RunCard], Any]] = {
    "name": lambda card: card.name,
    "loss": lambda card: None if card.is_of_network else card.loss,
    "step": lambda card: None if card.step is None else -card.step,
    "spikes": lambda card: card.spikes,
    "cost": lambda card: card.cost,
    "started": lambda card: card.began,
}

COMMAND = Command(
    "compare",
    "show many runs in one table",
    "Show many runs in one table: whether they are alive, their losses, findings, spikes and cost, and the settings in which they differ. "
    "For two runs step by step see gradmon diff, and for the same in a browser gradmon serve.",
    (
        ("gradmon compare runs", "all below a directory, the smallest loss first"),
        ("gradmon compare runs/a runs/b --sort started", "some runs, in the order of their beginnings"),
        ("gradmon compare runs --diagnose", "with all rules, a third of a second for each run"),
        ("gradmon compare runs --json", "the same for a program"),
    ),
    (
        _DIRECTORIES,
        value("--sort", "COLUMN", f"one of {', '.join(_SORTS)}", choices=list(_SORTS), default="loss"),
        flag("--diagnose", "apply all rules to each run, not only those that the training itself applies"),
        JSON,
    ),
)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    if not options.json:
        with requires_extra("the table, without --json,", "cli", "rich"):
            from ..terminal.console import QuietConsole
            from ..terminal.runs_table import show
    cards = sorted(_cards(options.runs, options.diagnose), key=_order(_SORTS[options.sort]))
    if options.json:
        print(json.dumps({"differ": differing(cards), "runs": [card.to_dict() for card in cards]}, indent=1, allow_nan=False))
    else:
        show(QuietConsole(), cards)
    return 0


def _cards(places: Sequence[str], diagnosed: bool) -> Iterator[RunCard]:
    paths = dict(_paths(places))
    if not paths:
        raise UsageError(f"there is no run in {' or '.join(map(repr, places))}")
    for name, path in paths.items():
        try:
            yield run_card(path, name, diagnose(path) if diagnosed else None)
        except (OSError, ValueError) as error:  # it is being made or removed, or belongs to another user
            print(f"gradmon: {name} is left out: {' '.join(str(error).split())}", file=sys.stderr)


def _paths(places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for place in places:
        try:
            found = find_runs(place)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
        is_run = len(found) == 1 and next(iter(found.values())) == Path(place)
        for name, path in found.items():
            yield place if is_run else name if len(places) == 1 else str(Path(place) / name), path


def _order(key: Callable[[RunCard], Any]) -> Callable[[RunCard], tuple[bool, Any, str]]:
    def order(card: RunCard) -> tuple[bool, Any, str]:
        found = key(card)
        is_missing = found is None or (isinstance(found, float) and not math.isfinite(found))
        return is_missing, 0 if is_missing else found, card.name

    return order
