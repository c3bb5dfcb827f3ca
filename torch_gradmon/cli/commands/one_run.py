"""The commands that look at one run: report, summary, status, diagnose, why, export."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ...analysis.diff import diff_runs
from ...analysis.many_runs import RunCard, status_dict, status_text
from ...analysis.run import diagnose
from ...analysis.spike_report import SpikeReport, no_report
from ...core.keys import compile_pattern
from ...runs.export import FORMATS
from ..terminal.layer_table import summarize
from .common import PAGES, open_run, output, print_coloured, print_json, print_written, requires_extra, wrong_request


def report(options: argparse.Namespace) -> int:
    with requires_extra("the report", "report", "plotly", "jinja2", "markupsafe"):
        from ...analysis.report.page import write, write_both
    to = None if options.output is None else output(options.output, PAGES)
    with wrong_request(FileNotFoundError, ValueError):
        if options.other is None:
            page = write(options.run, to, options.title)
        else:
            found = diff_runs(options.run, options.other)
            to = to or Path(options.other) / f"against-{Path(options.run).resolve().name}.html"
            page = write_both(options.run, options.other, found, to, options.title)
    print_written(page)
    return 0


def summary(options: argparse.Namespace) -> int:
    if not options.json:
        with requires_extra("the summary, without --json,", "cli", "rich"):
            from ..terminal.tables import QuietConsole, show_summary
    with open_run(options.run) as run, wrong_request(ValueError):
        pattern = None if options.keys is None else compile_pattern(options.keys, "--keys")
        found = summarize(
            run._reader,
            options.run,
            last=options.tail,
            pattern=pattern,
            depth=options.depth,
            everything=options.all,
            sort=options.sort,
        )
    if options.json:
        print_json(found.to_dict())
    else:
        show_summary(QuietConsole(), found)
    return 0


def status(options: argparse.Namespace) -> int:
    with wrong_request(FileNotFoundError, ValueError):
        diagnosis = diagnose(options.run)
        card = RunCard(options.run, options.run, diagnosis)
    found = status_dict(card, diagnosis)
    if options.json:
        print_json(found)
    else:
        print("\n".join(status_text(card, diagnosis)))
    return 0 if found["healthy"] else 1


#: Severities with rules, at the start of a line, in colours of the terminal.
_COLOURS = {r"(?m)^ERROR +\S+": "bold red", r"(?m)^WARNING +\S+": "bold yellow", r"(?m)^INFO +\S+": "bold cyan"}
_WIDEST = 100


def diagnose_run(options: argparse.Namespace) -> int:
    with open_run(options.run) as run:
        diagnosis = run.diagnose()
    if options.json:
        print(diagnosis.to_json())
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDEST
        print_coloured(diagnosis.text(min(_WIDEST, width)), _COLOURS)
    return diagnosis.exit_code


def why(options: argparse.Namespace) -> int:
    with open_run(options.run) as run, wrong_request(ValueError):
        if options.json:
            is_calm = options.step is None and not run.spikes
            print_json(no_report() if is_calm else SpikeReport.of(run._reader, options.step).to_dict())
        else:
            print(run.why(options.step))
    return 0


def export(options: argparse.Namespace) -> int:
    target = output(options.output, tuple(FORMATS))
    with open_run(options.run) as run, wrong_request(ValueError, ImportError):
        paths = run.export(target, options.table, sources=options.source, first=options.first, last=options.last)
    for path in paths:
        print_written(path)
    return 0
