"""The commands that look at several runs: compare, diff, and mcp, which gives them to agents."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...analysis.diff import diff_runs
from ...analysis.many_runs import RunCard, differing
from ...analysis.run import diagnose, find_runs
from ...core.errors import nearest
from ...core.formatting import printable
from ...runs.log import reading_within
from .common import PAGES, UsageError, output, print_json, print_written, requires_extra, wrong_request

#: Seconds that reading a run may take: one of a stranger must not keep the others from being compared.
_SECONDS = 60.0
#: What runs can be sorted by besides their metrics; the smallest is first, and what has no value is last.
_SORTS: dict[str, Callable[[RunCard], Any]] = {
    "name": lambda card: card.name,
    "loss": lambda card: None if card.is_of_network else card.loss,
    "step": lambda card: None if card.step is None else -card.step,
    "spikes": lambda card: card.spikes,
    "cost": lambda card: card.cost,
    "started": lambda card: card.began,
}


def compare(options: argparse.Namespace) -> int:
    if not options.json:
        with requires_extra("the table, without --json,", "cli", "rich"):
            from ..terminal.tables import QuietConsole, show_runs
    metrics = [] if options.sort in _SORTS else [options.sort]
    cards = list(_cards(options.runs, options.diagnose, metrics))
    key = _SORTS.get(options.sort, partial(_value, options.sort))
    if metrics and all(key(card) is None for card in cards):
        known = {*_SORTS, *differing(cards), *(name for card in cards for name in card.logged)}
        raise UsageError(f"no run has values for {options.sort!r}{nearest(options.sort, known)}")
    cards = _ordered(cards, key, options.largest)
    if options.json:
        print_json({"differ": differing(cards), "runs": [card.to_dict() for card in cards]})
    else:
        show_runs(QuietConsole(), cards)
    return 0


def _cards(places: Sequence[str], diagnosed: bool, metrics: Sequence[str]) -> Iterator[RunCard]:
    paths = dict(_paths(places))
    if not paths:
        raise UsageError(f"there is no run in {' or '.join(map(repr, places))}")
    for name, path in paths.items():
        try:
            with reading_within(_SECONDS):
                card = RunCard(path, name, diagnose(path) if diagnosed else None, metrics=metrics)
            yield card
        except Exception as error:  # it is being made or removed, or belongs to another user, who may have written anything
            print(f"gradmon: {printable(name)} is left out: {' '.join(str(error).split())}", file=sys.stderr)


def _paths(places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for place in places:
        with wrong_request(FileNotFoundError):
            found = find_runs(place)
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
    named = sorted(cards, key=lambda card: card.name)
    values = {
        card: value for card in named if isinstance(value := key(card), str) or (value is not None and math.isfinite(value))
    }
    return sorted(values, key=values.__getitem__, reverse=largest) + [card for card in named if card not in values]


# --- two of them ---


def diff(options: argparse.Namespace) -> int:
    to = None if options.output is None else output(options.output, PAGES)
    if to is not None:
        with requires_extra("the page", "report", "plotly", "jinja2", "markupsafe"):
            from ...analysis.report.page import write_both
    with wrong_request(OSError, ValueError):  # runs that cannot be compared do not diverge
        rename = dict(_pairs("--rename", options.rename, "'^h\\.=layers.'"))
        found = diff_runs(
            options.a,
            options.b,
            options.rtol,
            options.atol,
            tolerances=_tolerances(options.tol),
            keys=options.keys,
            ignore=options.ignore,
            rename=rename,
            first=options.first,
            last=options.last,
            strict=options.strict,
        )
    print(found.to_json() if options.json else found)
    if to is not None:
        try:
            page = write_both(options.a, options.b, found, to, rename=rename)
        except (OSError, ValueError) as error:  # exit code 1 would mean that the runs diverge
            raise UsageError(f"the page could not be written: {error}") from error
        print_written(page, to_stderr=options.json)
    return found.exit_code


def _pairs(option: str, given: Sequence[str], example: str) -> list[tuple[str, str]]:
    """The parts before and after the last equals sign."""
    pairs = [text.rpartition("=") for text in given]
    for text, (pattern, _, _) in zip(given, pairs, strict=True):
        if not pattern:
            raise ValueError(f"{option} {text}: give two parts with an equals sign between them, such as {option} {example}")
    return [(pattern, right) for pattern, _, right in pairs]


def _tolerances(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for pattern, text in _pairs("--tol", given, "'^update/=1e-3'"):
        try:
            found[pattern] = float(text)
        except ValueError:
            raise ValueError(f"--tol {pattern}={text}: {text!r} is not a number, such as 1e-3") from None
    return found


def mcp(options: argparse.Namespace) -> int:
    with requires_extra("tools for agents", "mcp", "mcp"):
        from ...server.agents import agent_server
    with wrong_request(FileNotFoundError):
        server = agent_server(options.root)
    server.run("stdio")
    return 0
