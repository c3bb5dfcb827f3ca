"""``gradmon compare``: many runs in one table."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...analysis.many_runs import RunCard, differing, run_card
from ...analysis.run import diagnose, find_runs
from ...core.errors import nearest
from ...core.formatting import printable
from ...runs.log import reading_within
from .common import JSON, Command, UsageError, argument, flag, requires_extra, value

#: Seconds that reading a run may take: one of a stranger must not keep the others from being compared.
_SECONDS = 60.0
_DIRECTORIES = argument(
    "runs", metavar="DIRECTORY", nargs="+", help="runs, or directories with runs in them; they may still go on"
)
#: What runs can be sorted by besides their metrics; the smallest is first, and what has no value is last.
_SORTS: dict[str, Callable[[RunCard], Any]] = {
    "name": lambda card: card.name,
    "loss": lambda card: None if card.is_of_network else card.loss,
    "step": lambda card: None if card.step is None else -card.step,
    "spikes": lambda card: card.spikes,
    "cost": lambda card: card.cost,
    "started": lambda card: card.began,
}


def run(options: argparse.Namespace) -> int:
    if not options.json:
        with requires_extra("the table, without --json,", "cli", "rich"):
            from ..terminal.runs_table import show
            from ..terminal.summary_view import QuietConsole
    metrics = [] if options.sort in _SORTS else [options.sort]
    cards = list(_cards(options.runs, options.diagnose, metrics))
    key = _SORTS.get(options.sort, partial(_value, options.sort))
    if metrics and all(key(card) is None for card in cards):
        known = {*_SORTS, *differing(cards), *(name for card in cards for name in card.logged)}
        raise UsageError(f"no run has values for {options.sort!r}{nearest(options.sort, known)}")
    cards = _ordered(cards, key, options.largest)
    if options.json:
        print(json.dumps({"differ": differing(cards), "runs": [card.to_dict() for card in cards]}, indent=1, allow_nan=False))
    else:
        show(QuietConsole(), cards)
    return 0


def _cards(places: Sequence[str], diagnosed: bool, metrics: Sequence[str]) -> Iterator[RunCard]:
    paths = dict(_paths(places))
    if not paths:
        raise UsageError(f"there is no run in {' or '.join(map(repr, places))}")
    for name, path in paths.items():
        try:
            with reading_within(_SECONDS):
                card = run_card(path, name, diagnose(path) if diagnosed else None, metrics=metrics)
            yield card
        except Exception as error:  # it is being made or removed, or belongs to another user, who may have written anything
            print(f"gradmon: {printable(name)} is left out: {' '.join(str(error).split())}", file=sys.stderr)


def _paths(places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for place in places:
        try:
            found = find_runs(place)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
        is_run = len(found) == 1 and next(iter(found.values())) == Path(place)
        for name, path in found.items():
            yield place if is_run else name if len(places) == 1 else str(Path(place) / name), path


def _value(name: str, card: RunCard) -> float | None:
    if name in card.metrics:
        return card.metrics[name]
    try:
        return float(card.settings.get(name, ""))
    except ValueError:
        return None


def _ordered(cards: Sequence[RunCard], key: Callable[[RunCard], Any], largest: bool) -> list[RunCard]:
    """By ``key``, and then by name; those without a finite value are last."""
    values = [(key(card), card) for card in sorted(cards, key=lambda card: card.name)]
    there = [(found, card) for found, card in values if found is not None and (isinstance(found, str) or math.isfinite(found))]
    ordered = [card for _, card in sorted(there, key=lambda each: each[0], reverse=largest)]
    return ordered + [card for _, card in values if not any(card is other for other in ordered)]


COMMANDS = (
    Command(
        "compare",
        "show many runs in one table",
        "Show many runs in one table: whether they are alive, their losses, findings, spikes and cost, and the settings in which they "
        "differ. For two runs step by step see gradmon diff, and for the same in a browser gradmon serve.",
        (
            ("gradmon compare runs", "all below a directory, the smallest loss first"),
            ("gradmon compare runs --sort val/loss", "the smallest last value of a metric first"),
            ("gradmon compare runs --sort val/acc --largest", "the largest one first"),
            ("gradmon compare runs/a runs/b --sort started", "some runs, in the order of their beginnings"),
            ("gradmon compare runs --diagnose", "with all rules, a third of a second for each run"),
            ("gradmon compare runs --json", "the same for a program"),
        ),
        (
            _DIRECTORIES,
            value(
                "--sort",
                "COLUMN",
                f"one of {', '.join(_SORTS)}, a setting, or a logged value, which is shown, too",
                default="loss",
            ),
            flag("--largest", "the largest value first"),
            flag("--diagnose", "apply all rules to each run, not only those that the training itself applies"),
            JSON,
        ),
        run,
    ),
)
