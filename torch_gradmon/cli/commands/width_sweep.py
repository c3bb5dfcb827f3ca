"""``gradmon width-sweep``: the width sweep from the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ...analysis.width_sweep import result
from ...analysis.width_sweep.result import HEADINGS, WidthSweep, rows
from ...analysis.width_sweep.sweep import FEWEST, width_sweep
from .common import JSON, Command, UsageError, argument, output, output_file, print_written, requires_extra, value


def run(options: argparse.Namespace) -> int:
    """Make the sweep, and print its table and verdict; returns the exit code, 0 or 1."""
    try:
        return _swept(options)
    except ValueError as error:  # an impossible sweep is not a failed check
        raise UsageError(str(error)) from error


def _swept(options: argparse.Namespace) -> int:
    to = None if options.output is None else _picture(options.output)
    try:
        sweep = width_sweep(
            _load(options.factory),
            _load(options.data),
            widths=options.widths,
            seeds=options.seeds,
            steps=options.steps,
            optimizer=_load(options.optimizer) if ":" in options.optimizer else options.optimizer,
            lr=options.lr,
            lr_exponent=options.lr_exponent,
            loss=_load(options.loss) if options.loss else None,
            expected=_expected(options.expect),
            tolerance=options.tolerance,
            confidence=options.confidence,
        )
    except TypeError as error:
        raise ValueError(str(error)) from error
    if options.json:
        print(sweep.to_json())
    else:
        _print(sweep)
    if to is not None:  # last, because the disk may be full by now
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            sweep.plot(to)
        except OSError as error:
            raise ValueError(f"{to} cannot be written: {error}") from error
        print_written(to, to_stderr=options.json)
    return 0 if sweep.passed else 1


def _picture(path: str) -> Path:
    with requires_extra("--output", "plot", "matplotlib"):
        endings = [f".{kind}" for kind in result.kinds()]
    return output(path, endings)


def _print(sweep: WidthSweep) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(sweep.table(), sweep.words(), sep="\n\n")
        return
    if not sys.stdout.isatty():
        print(sweep.table(), sweep.words(), sep="\n\n")
        return
    colours = {True: "green", False: "red", None: "yellow"}
    table = Table(*HEADINGS, title=f"exponents over the widths {', '.join(map(str, sweep.widths))}")
    for verdict, row in zip(sweep.verdicts, rows(sweep.verdicts), strict=True):
        table.add_row(*map(Text, row), style=colours[verdict.as_expected] if verdict.judged else "dim")
    console = Console()
    console.print(table)
    console.print(Text(sweep.words()))


def _load(text: str) -> Any:
    """The object at ``module:name`` or ``file.py:name``."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ValueError(f"{text!r} must be MODULE:NAME or FILE.py:NAME, such as train.py:make_model")
    try:
        module = _module(where)
        found = module
        for part in name.split("."):
            found = getattr(found, part)
    except SystemExit as error:
        raise ValueError(
            f'{text!r} cannot be loaded: {where} exits when it is imported; move its program under if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise ValueError(f"{text!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return found


def _module(where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, for modules in the current directory
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {where}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python FILE` does, for modules beside it
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for dataclasses in it, and for a second name from the same file
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _expected(given: list[str]) -> Any:
    """A keyword, or a dict from patterns to exponents."""
    if len(given) <= 1 and not any("=" in text for text in given):
        return given[0] if given else None
    found: dict[str, Any] = {}
    for text in given:
        pattern, equals, values = text.rpartition("=")
        try:
            numbers = [None if value.strip() == "none" else float(value) for value in values.split(",")]
        except ValueError:
            numbers = []
        if not equals or len(numbers) not in (1, 2):
            raise ValueError(
                f"--expect {text}: give REGEX=EXPONENT or REGEX=UPDATE,FROM_BELOW, such as head=1,0.5; or one word alone"
            )
        found[pattern] = numbers[0] if len(numbers) == 1 else tuple(numbers)
    return found


COMMANDS = (
    Command(
        "width-sweep",
        "check over several widths whether every layer moves as much as it should",
        "Train a model at several widths for a few steps, and fit for each layer how its update grows with the width.",
        (
            ("gradmon width-sweep train.py:make_model --data train.py:batch", "does each layer move alike at all widths?"),
            ("gradmon width-sweep my_package.model:make --data my_package.data:batch", "from modules that can be imported"),
            (
                "gradmon width-sweep train.py:make_model --data train.py:batches --optimizer adam --lr 1e-3 --lr-exponent -1",
                "with a learning rate proportional to 1 / width",
            ),
            (
                "gradmon width-sweep train.py:make_model --data train.py:batches --expect standard --steps 1",
                "against the theory of one step",
            ),
            (
                'gradmon width-sweep train.py:make_model --data train.py:batches --expect "head=1,0.5" --expect "norm=none"',
                "against your own exponents",
            ),
        ),
        (
            argument("factory", metavar="MODULE:FUNCTION", help="makes a model of a width; MODULE may be a file"),
            value("--data", "MODULE:NAME", "a batch, a list of them, or a function of the seed", required=True),
            value("--widths", "N", f"{FEWEST} or more", type=int, nargs="+", default=[64, 128, 256, 512, 1024]),
            value("--seeds", "N", "how many", type=int, default=5),
            value("--steps", "N", "of training in each run", type=int, default=3),
            value("--optimizer", "NAME", "sgd, adam, adamw or MODULE:FUNCTION of model and width", default="adamw"),
            value("--lr", "X", "at the smallest width", type=float, default=1e-3),
            argument(
                "--lr-exponent",
                type=float,
                default=0.0,
                metavar="C",
                help="the learning rate is proportional to width^C (default: 0)",
            ),
            value("--loss", "MODULE:FUNCTION", "of model and batch (default: by the kind of the targets)"),
            value(
                "--expect",
                "WHAT",
                "stable (the default), standard, or REGEX=EXPONENT or REGEX=UPDATE,FROM_BELOW, none for what is not judged; repeatable",
                action="append",
                default=[],
            ),
            value("--tolerance", "X", "of exponents", type=float, default=0.25),
            value("--confidence", "P", "of intervals", type=float, default=0.95),
            JSON,
            output_file("a picture, such as .png"),
        ),
        run,
        """make(width) returns a model, or a pair of a model and its optimizer. batch is a pair (inputs, targets), a list of such pairs, or
    a function of the seed that returns either. The exit code is 0 if all layers are shown to be as expected, 1 if one is not or the
    result is undecided, and 2 if the sweep fails.""",
    ),
)
