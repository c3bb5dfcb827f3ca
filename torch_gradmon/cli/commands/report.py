"""``gradmon report``: one page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...analysis.diff import diff
from .common import PAGES, RUN, Command, UsageError, argument, output, print_written, requires_extra, to_file, value

COMMAND = Command(
    "report",
    "write one page about a run: findings, layers over steps, norms, updates",
    "Write one self-contained HTML file about a run: what is wrong, all layers over the steps, the gradient norm before and after "
    "clipping, one step over the depth, updates, the layers that deviate most, and a table to search.",
    (
        ("gradmon report runs/first", "one HTML page that needs no network"),
        ("gradmon report runs/first --to first.html --title 'first try'", "with another place and title"),
        ("gradmon report runs/first runs/second", "both runs, and where they diverge"),
    ),
    (
        RUN,
        argument("other", metavar="OTHER", nargs="?", help="another run to compare with; see also gradmon diff --to"),
        to_file("the page, .html (default: report.html in the run directory, or against-RUN.html in that of OTHER)"),
        value("--title", "TEXT", "of the page (default: the name of the run directory)"),
    ),
)


def run(options: argparse.Namespace) -> int:
    with requires_extra("the report", "report", "plotly", "jinja2", "markupsafe"):
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
        raise UsageError(str(error)) from error
    print_written(page)
    return 0
