"""``gradmon report``: one page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...analysis.comparison.diff import diff
from .common import PAGES, WrongRequest, add_output, add_parser, needing, output, say_written

EXAMPLES = (
    ("gradmon report runs/first", "one HTML page that needs no network"),
    ("gradmon report runs/first --to first.html --title 'first try'", "give it another place and title"),
    ("gradmon report runs/first runs/second", "both over each other, and where they part"),
)


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    report = add_parser(
        commands,
        "report",
        "write one page about a run: findings, layers over steps, norms, updates",
        "Write one HTML file about a run, with everything that it shows inside: what is wrong, all layers over the steps, the gradient "
        "norm before and after clipping, one step over the depth, updates, layers that stand out, and a table to search.",
        EXAMPLES,
    )
    report.add_argument("run", metavar="RUN", help="a run directory; the run may still go on")
    report.add_argument("other", metavar="OTHER", nargs="?", help="another run, to be laid over it; see also gradmon diff --to")
    add_output(report, "the page, .html (default: report.html in the run directory, or against-RUN.html in that of OTHER)")
    report.add_argument("--title", metavar="TEXT", help="of the page (default: the name of the run directory)")


def run(options: argparse.Namespace) -> int:
    """Write the page and print where it is.

    Raises:
        WrongRequest: there is no such run, it has no step yet, or a package is missing.
    """
    with needing("the report", "report", "plotly", "jinja2", "markupsafe"):
        from ...analysis.report.page import write, write_both
    to = None if options.to is None else output(options.to, PAGES)
    try:
        if options.other is None:
            page = write(options.run, to, options.title)
        else:
            found = diff(options.run, options.other)
            to = to or Path(options.other) / f"against-{Path(options.run).resolve().name}.html"
            page = write_both(options.run, options.other, found, to, options.title)
    except (FileNotFoundError, ValueError) as error:
        raise WrongRequest(str(error)) from error
    say_written(page)
    return 0
