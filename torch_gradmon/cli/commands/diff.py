"""``gradmon diff``: where two runs diverge, for people and for CI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...analysis.diff import diff_runs
from .common import (
    FIRST,
    JSON,
    LAST,
    PAGES,
    Command,
    UsageError,
    argument,
    flag,
    output,
    output_file,
    print_written,
    requires_extra,
    value,
)


def run(options: argparse.Namespace) -> int:
    to = None if options.output is None else output(options.output, PAGES)
    if to is not None:
        with requires_extra("the page", "report", "plotly", "jinja2", "markupsafe"):
            from ...analysis.report.page import write_both
    try:
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
    except (OSError, ValueError) as error:  # runs that cannot be compared do not diverge
        raise UsageError(str(error)) from error
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


COMMANDS = (
    Command(
        "diff",
        "find the first step and value in which two runs diverge",
        "Compare two runs, such as of one seed before and after a change of the code, and find where they diverge.",
        (
            ("gradmon diff runs/a runs/b", "the first step and value in which they diverge"),
            ("gradmon diff runs/before runs/after --rtol 1e-4 --last 99", "a refactoring, by its first hundred steps"),
            ("gradmon diff runs/a runs/b --rtol 0", "bit for bit: is the training deterministic?"),
            ("gradmon diff runs/a runs/b --rename '^h\\.=layers.' --strict", "renamed modules, and no other change"),
            (
                "gradmon diff runs/a runs/b --tol '^update/=1e-3' --ignore 'k_proj\\.bias'",
                "wider for some keys, and without others",
            ),
            ("gradmon diff runs/a runs/b -o diff.html", "also a page with both runs on top of each other"),
            ("gradmon diff runs/a runs/b --json", "everything, for programs"),
        ),
        (
            argument("a", metavar="A", help="a run directory"),
            argument("b", metavar="B", help="another run directory"),
            value("--rtol", "X", "tolerance relative to the larger value", type=float, default=1e-5),
            value("--atol", "X", "absolute tolerance, added to that", type=float, default=0.0),
            value("--tol", "REGEX=X", "a relative tolerance for some keys", action="append", default=[]),
            value("--keys", "REGEX", "compare only these keys", action="append"),
            value("--ignore", "REGEX", "do not compare these keys", action="append"),
            value("--rename", "REGEX=NEW", "in names of modules of A, as they are in B", action="append", default=[]),
            FIRST,
            LAST,
            flag("--strict", "steps, tensors and values that only one run has count too"),
            output_file("one page, .html, with both runs on top of each other"),
            JSON,
        ),
        run,
        "Patterns are searched in keys such as gradient_before_clip/h.0.attn.weight/norm, as with re.search; options that take one may be "
        "repeated. The exit code is 0 if the runs are equal within the tolerance in all that both have, 1 if they diverge, and 2 if they "
        "cannot be compared.",
    ),
)
