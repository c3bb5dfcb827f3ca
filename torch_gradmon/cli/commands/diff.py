"""``gradmon diff``: where two runs part, for people and for CI."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from typing import Any

from ...analysis.comparison.diff import diff
from .common import PAGES, WrongRequest, add_output, add_parser, needing, output, say_written

EXAMPLES = (
    ("gradmon diff runs/a runs/b", "the first step and value in which they part"),
    ("gradmon diff runs/before runs/after --rtol 1e-4 --last 99", "a refactoring, by its first hundred steps"),
    ("gradmon diff runs/a runs/b --rtol 0", "to the bit: is the training deterministic?"),
    ("gradmon diff runs/a runs/b --rename '^h\\.=layers.' --strict", "modules that were renamed, and no other change"),
    ("gradmon diff runs/a runs/b --tol '^update/=1e-3' --ignore 'k_proj\\.bias'", "wider for some, and nothing of others"),
    ("gradmon diff runs/a runs/b --to diff.html", "besides one page with both runs over each other"),
    ("gradmon diff runs/a runs/b --json", "all of it, for programs"),
)
_NOTES = """\
Patterns are searched in keys such as gradient_before_clip/h.0.attn.weight/norm, as with re.search; options that take one may be given
several times. The exit code is 0 if the runs are the same within the tolerance in all that both have, 1 if they part, and 2 if they
cannot be compared."""


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = add_parser(
        commands,
        "diff",
        "find the first step and value in which two runs part",
        "Compare two runs, such as of one seed before and after a change of the code, and find where they part.",
        EXAMPLES,
        _NOTES,
    )
    parser.add_argument("a", metavar="A", help="a run directory")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--rtol", type=float, default=1e-5, metavar="X", help="relative to the larger value (default: %(default)s)"
    )
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="allowed besides (default: %(default)s)")
    parser.add_argument("--tol", action="append", default=[], metavar="REGEX=X", help="a relative tolerance for some keys")
    parser.add_argument("--only", action="append", metavar="REGEX", help="compare these keys only")
    parser.add_argument("--ignore", action="append", metavar="REGEX", help="do not compare these keys")
    parser.add_argument(
        "--rename", action="append", default=[], metavar="REGEX=NEW", help="in names of modules of A, as they are in B"
    )
    parser.add_argument("--first", type=int, metavar="STEP", help="from this step on")
    parser.add_argument("--last", type=int, metavar="STEP", help="up to this step")
    parser.add_argument("--strict", action="store_true", help="steps, tensors and values that only one run has count too")
    add_output(parser, "one page, .html, with both runs over each other")
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")


def run(options: argparse.Namespace) -> int:
    """Compare, and print what was found; returns the exit code, 0 or 1.

    Raises:
        WrongRequest: the runs cannot be compared, or not so, or the page cannot be written.
    """
    to = None if options.to is None else output(options.to, PAGES)
    if to is not None:
        with needing("the page", "report", "plotly", "jinja2", "markupsafe"):
            from ...analysis.report.page import write_both
    try:
        rename = dict(_pairs("--rename", options.rename, "'^h\\.=layers.'"))
        found = diff(
            options.a,
            options.b,
            options.rtol,
            options.atol,
            tolerances=_tolerances(options.tol),
            only=options.only,
            ignore=options.ignore,
            rename=rename,
            first=options.first,
            last=options.last,
            strict=options.strict,
        )
    except (OSError, ValueError, sqlite3.Error) as error:  # what cannot be compared has not parted
        raise WrongRequest(str(error)) from error
    print(found.to_json() if options.json else found)
    if to is not None:
        try:
            page = write_both(options.a, options.b, found, to, rename=rename)
        except (OSError, ValueError) as error:  # 1 would say that they part
            raise WrongRequest(f"the page could not be written: {error}") from error
        say_written(page, aside=options.json)
    return found.exit_code


def _pairs(option: str, given: Sequence[str], example: str) -> list[tuple[str, str]]:
    """What stands before the last equals sign, and what behind it."""
    pairs = [text.rpartition("=") for text in given]
    for text, (pattern, _, _) in zip(given, pairs, strict=True):
        if not pattern:
            raise ValueError(f"{option} {text}: give two parts with an equals sign between them, such as {option} {example}")
    return [(pattern, value) for pattern, _, value in pairs]


def _tolerances(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for pattern, value in _pairs("--tol", given, "'^update/=1e-3'"):
        try:
            found[pattern] = float(value)
        except ValueError:
            raise ValueError(f"--tol {pattern}={value}: {value!r} is not a number, such as 1e-3") from None
    return found
