"""``gradmon coordcheck``: the width sweep from the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ...analysis.width_sweep import plots as drawing
from ...analysis.width_sweep.arguments import FEWEST
from ...analysis.width_sweep.result import WidthSweep
from ...analysis.width_sweep.sweep import width_sweep
from ...analysis.width_sweep.text import HEADINGS, rows
from .common import WrongRequest, add_output, add_parser, needing, output, say_written, with_directory

EXAMPLES = (
    (
        "gradmon coordcheck train.py:make_model --data train.py:batch",
        "does each layer move alike at all widths?",
    ),
    ("gradmon coordcheck my_package.model:make --data my_package.data:batch", "of modules that can be imported"),
    (
        "gradmon coordcheck train.py:make_model --data train.py:batches --optimizer adam --lr 1e-3 --lr-exponent -1",
        "with a learning rate that goes with 1 / width",
    ),
    (
        "gradmon coordcheck train.py:make_model --data train.py:batches --expect standard --steps 1",
        "against the theory of one step",
    ),
    (
        'gradmon coordcheck train.py:make_model --data train.py:batches --expect "head=1,0.5" --expect "norm=none"',
        "against exponents of your own",
    ),
)
_NOTES = """\
make(width) gives a model, or a pair of a model and its optimizer. batch is a pair (inputs, targets), a list of such, or a
function of the seed that gives either. The exit code is 0 if all layers are shown to be as expected, 1 if one is not or it is
undecided, and 2 if the sweep cannot be made."""


def add_to(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = add_parser(
        commands,
        "coordcheck",
        "check over several widths whether every layer moves as much as it should",
        "Train a model at several widths for a few steps, and fit for each layer how its update grows with the width.",
        EXAMPLES,
        _NOTES,
    )
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="makes a model of a width; MODULE may be a file")
    parser.add_argument("--data", required=True, metavar="MODULE:NAME", help="a batch, a list of them, or a function of the seed")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512, 1024],
        metavar="N",
        help=f"{FEWEST} or more (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of training in each run (default: %(default)s)")
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="sgd, adam, adamw or MODULE:FUNCTION of model and width (default: %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help="at the smallest width (default: %(default)s)")
    parser.add_argument(
        "--lr-exponent", type=float, default=0.0, metavar="C", help="the learning rate goes with width^C (default: 0)"
    )
    parser.add_argument("--loss", metavar="MODULE:FUNCTION", help="of model and batch (default: by the kind of the targets)")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="WHAT",
        help="stable (the default), standard, or REGEX=EXPONENT or REGEX=UPDATE,FROM_BELOW, none for what is not judged; repeatable",
    )
    parser.add_argument("--tolerance", type=float, default=0.25, metavar="X", help="of exponents (default: %(default)s)")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of intervals (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")
    add_output(parser, "a picture, such as .png")


def run(options: argparse.Namespace) -> int:
    """Make the sweep, print table and verdict; returns the exit code, 0 or 1.

    Raises:
        WrongRequest: the sweep cannot be made, or what it found not be written, with the remedy.
    """
    try:
        return _swept(options)
    except ValueError as error:  # what cannot be swept is no failed check
        raise WrongRequest(str(error)) from error


def _swept(options: argparse.Namespace) -> int:
    to = None if options.to is None else _picture(options.to)
    try:
        sweep = width_sweep(
            _named(options.factory),
            _named(options.data),
            widths=options.widths,
            seeds=options.seeds,
            steps=options.steps,
            optimizer=_named(options.optimizer) if ":" in options.optimizer else options.optimizer,
            lr=options.lr,
            lr_exponent=options.lr_exponent,
            loss=_named(options.loss) if options.loss else None,
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
    if to is not None:  # last: the file may be on a disk that is full by now
        try:
            sweep.plot(with_directory(to))
        except OSError as error:
            raise ValueError(f"{to} cannot be written: {error}") from error
        say_written(to, aside=options.json)
    return 0 if sweep.passed else 1


def _picture(path: str) -> Path:
    with needing("--to", "plot", "matplotlib"):
        endings = [f".{kind}" for kind in drawing.kinds()]
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


def _named(text: str) -> Any:
    """What ``module:name`` or ``file.py:name`` says.

    Raises:
        ValueError: there is no such module or name in it, or the module fails.
    """
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
            f"{text!r} cannot be had: {where} exits when it is imported; put what it does as a program under "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise ValueError(f"{text!r} cannot be had: {type(error).__name__}: {error}") from error
    return found


def _module(where: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, for a module beside which the command is given
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {where}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python FILE` does, for what lies beside it
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses in it look it up; the second name from the same file finds it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _expected(given: list[str]) -> Any:
    """A word, or a dict from patterns to exponents.

    Raises:
        ValueError: it is neither.
    """
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
