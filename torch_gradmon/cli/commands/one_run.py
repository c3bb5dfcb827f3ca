"""The commands that look at one run: report, summary, status, diagnose, why, export."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from ...analysis.diagnosis.diagnose import diagnose_history
from ...analysis.diagnosis.history import History
from ...analysis.diff import diff_runs
from ...analysis.many_runs import run_card, status_dict, status_text
from ...analysis.run import diagnose, no_run
from ...analysis.spike_report import SpikeReport, explain, no_report
from ...core.keys import compile_pattern
from ...runs.export import FORMATS
from ..terminal.layer_table import MOST, SORTS, summarize
from .common import (
    FIRST,
    JSON,
    LAST,
    PAGES,
    RUN,
    Command,
    UsageError,
    argument,
    flag,
    open_run,
    output,
    output_file,
    positive,
    print_written,
    requires_extra,
    value,
)


def _report(options: argparse.Namespace) -> int:
    with requires_extra("the report", "report", "plotly", "jinja2", "markupsafe"):
        from ...analysis.report.page import write, write_both
    to = None if options.output is None else output(options.output, PAGES)
    try:
        if options.other is None:
            page = write(options.run, to, options.title)
        else:
            found = diff_runs(options.run, options.other)
            to = to or Path(options.other) / f"against-{Path(options.run).resolve().name}.html"
            page = write_both(options.run, options.other, found, to, options.title)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    print_written(page)
    return 0


def _summary(options: argparse.Namespace) -> int:
    if not options.json:
        with requires_extra("the summary, without --json,", "cli", "rich"):
            from ..terminal.summary_view import QuietConsole, show
    with open_run(options.run) as source:
        try:
            summary = summarize(
                source,
                options.run,
                last=options.tail,
                pattern=None if options.keys is None else compile_pattern(options.keys, "--keys"),
                depth=options.depth,
                everything=options.all,
                sort=options.sort,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(summary.to_dict(), indent=1, allow_nan=False))
    else:
        show(QuietConsole(), summary)
    return 0


def _status(options: argparse.Namespace) -> int:
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


#: Severities by the start of a line, in colours of the terminal.
_COLOURS = {"ERROR": "bold red", "WARNING": "bold yellow", "INFO": "bold cyan"}
_WIDEST = 100


def _diagnose(options: argparse.Namespace) -> int:
    with open_run(options.run) as source:
        diagnosis = diagnose_history(History.of_run(source))
    if options.json:
        print(diagnosis.to_json())
    elif sys.stdout.isatty():
        _print_coloured(diagnosis.text(min(_WIDEST, shutil.get_terminal_size().columns)))
    else:
        print(diagnosis.text())
    return diagnosis.exit_code


def _print_coloured(plain: str) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(plain)
        return
    text = Text(plain)
    for severity, style in _COLOURS.items():
        text.highlight_regex(rf"(?m)^{severity} +\S+", style)
    Console(highlight=False).print(text, soft_wrap=True)


def _why(options: argparse.Namespace) -> int:
    with open_run(options.run) as source:
        try:
            if options.json:
                is_calm = options.step is None and not source.events
                found = no_report() if is_calm else SpikeReport.of(source, options.step).to_dict()
                print(json.dumps(found, indent=1, allow_nan=False))
            else:
                print(explain(source, options.step))
        except ValueError as error:
            raise UsageError(str(error)) from error
    return 0


def _export(options: argparse.Namespace) -> int:
    target = output(options.output, tuple(FORMATS))
    with open_run(options.run) as source:
        try:
            paths = source.export(target, options.table, sources=options.source, first=options.first, last=options.last)
        except (ValueError, ImportError) as error:
            raise UsageError(str(error)) from error
    for path in paths:
        print_written(path)
    return 0


COMMANDS = (
    Command(
        "report",
        "write one page about a run: findings, layers over steps, norms, updates",
        "Write one self-contained HTML file about a run: what is wrong, all layers over the steps, the gradient norm before and after "
        "clipping, one step over the depth, updates, the layers that deviate most, and a table to search.",
        (
            ("gradmon report runs/first", "one HTML page that needs no network"),
            ("gradmon report runs/first -o first.html --title 'first try'", "with another place and title"),
            ("gradmon report runs/first runs/second", "both runs, and where they diverge"),
        ),
        (
            RUN,
            argument("other", metavar="OTHER", nargs="?", help="another run to compare with; see also gradmon diff -o"),
            output_file("the page, .html (default: report.html in the run directory, or against-RUN.html in that of OTHER)"),
            value("--title", "TEXT", "of the page (default: the name of the run directory)"),
        ),
        _report,
    ),
    Command(
        "summary",
        "show what a run and its layers did",
        "Show what a run, its whole-model values and its layers did; the run may still go on.",
        (
            ("gradmon summary runs/first", "what the run and its layers did"),
            ("gradmon summary runs/first --sort share --tail 100", "which layers hold the gradient now"),
            ("gradmon summary runs/first --keys attn --all", "each parameter with attn in its name"),
            ("gradmon summary runs/first --depth 1", "by the first part of their names"),
            ("gradmon summary runs/first --json", "the same for a program"),
        ),
        (
            RUN,
            (
                flag("--all", f"every parameter and logged value (default: blocks, if more than {MOST} parameters)"),
                value("--depth", "N", "group parameters by the first N parts of their names", type=positive),
            ),
            value("--keys", "REGEX", "only parameters whose names match"),
            value("--sort", "COLUMN", f"one of name, {', '.join(SORTS)} (default: as in the model)", choices=["name", *SORTS]),
            value("--tail", "N", "only the last N steps", type=positive),
            JSON,
        ),
        _summary,
    ),
    Command(
        "status",
        "how a run is, and what to do next",
        "Show in a few lines whether a run is alive, where its loss is, what is wrong, and what to do next. The run may still go on.",
        (
            ("gradmon status runs/first", "alive? learning? what to do next?"),
            ("gradmon status runs/first --json", "the same for a program"),
        ),
        (RUN, JSON),
        _status,
        "The exit code is 0 if the run is alive or has ended and nothing graver than information was found, 1 otherwise, as for a run that "
        "an exception ended or whose steps are lost on a full disk, and 2 if there is no such run.",
    ),
    Command(
        "diagnose",
        "find what is wrong with a run, where, and what to do",
        "Find what is wrong with a run, where, and what to do. The run may have ended, still go on, or have been killed.",
        (
            ("gradmon diagnose runs/first", "what is wrong, where, and what to do"),
            ("gradmon diagnose runs/first --json", "the same for a program"),
        ),
        (RUN, JSON),
        _diagnose,
        "The exit code, for CI, is 0 if nothing graver than information was found, 1 if something was, and 2 if there is no such run.",
    ),
    Command(
        "why",
        "explain a spike",
        "Explain a spike: the signals around it, which parameters moved first, and the steps after it; or say that there is none.",
        (
            ("gradmon why runs/first", "explain the largest spike"),
            ("gradmon why runs/first --step 300", "explain that step"),
            ("gradmon why runs/first --json", "the same for a program"),
        ),
        (RUN, value("--step", "STEP", "the step to explain (default: the worst step of the largest spike)", type=int), JSON),
        _why,
    ),
    Command(
        "export",
        "write a run as Parquet, CSV or JSON lines",
        "Write a run into files for other programs.",
        (
            ("gradmon export runs/first -o out.parquet", "all layers; the loss in out.steps.parquet"),
            ("gradmon export runs/first -o steps.csv --table steps", "a row for each step, for a spreadsheet"),
            ("gradmon export runs/first -o gradients.jsonl --source gradient_before_clip --last 99", "a part of it"),
        ),
        (
            RUN,
            output_file("the file, which ends in .parquet, .csv or .jsonl", required=True),
            argument("--table", choices=("tensors", "steps"), help="only one of them, into that file (default: both)"),
            value("--source", "NAME", "of tensors, such as gradient; repeatable (default: all)", action="append"),
            FIRST,
            LAST,
        ),
        _export,
        """The table "tensors" has a row for each tensor in each step, with a column for each metric. The table "steps" has a row for each
    step, with the values of the whole model, logged values, learning rates, tags and spikes. CSV and JSON lines need no package, Parquet
    needs pyarrow: pip install "torch_gradmon[export]". In Python use run.export(), run.to_arrow() and run.to_pandas().""",
    ),
)
