"""``gradmon report``: one page about a run."""

from __future__ import annotations

import argparse
from typing import Any

from .common import WrongRequest, add_parser, needing

EXAMPLES = (
    ("gradmon report runs/first", "one HTML page that needs no network"),
    ("gradmon report runs/first --to first.html --title 'first try'", "give it another place and title"),
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
    report.add_argument("--to", metavar="FILE", help="the page (default: report.html in the run directory)")
    report.add_argument("--title", metavar="TEXT", help="of the page (default: the name of the run directory)")


def run(options: argparse.Namespace) -> int:
    """Write the page and print where it is.

    Raises:
        WrongRequest: there is no such run, it has no step yet, or a package is missing.
    """
    with needing("the report", "report", "plotly", "jinja2", "markupsafe"):
        from ..report.page import write
    try:
        page = write(options.run, options.to, options.title)
    except (FileNotFoundError, ValueError) as error:
        raise WrongRequest(str(error)) from error
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0
