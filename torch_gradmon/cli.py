"""The command ``gradmon``."""

from __future__ import annotations

import argparse
import contextlib
import io
import sqlite3
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .run import load_run
from .story import tell
from .widths import command as coordcheck

_EXAMPLES = """\
examples:
  gradmon demo                             train a small GPT under watch: about a minute on a CPU, no network
  gradmon demo --steps 101 --run-dir runs/short
  gradmon demo --svg table.svg             keep the printed tables as a picture
  gradmon why runs/first                   tell the story of the last spike in a run directory
  gradmon why runs/first --step 300        tell the story of that step
  gradmon coordcheck train.py:make_model --data train.py:batch   does each layer move alike at all widths?
"""
#: What optional packages the demo needs.
_EXTRAS = ("rich", "tqdm")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for a wrong or impossible request."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error("name a command, such as demo")
    try:
        return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except (OSError, ValueError, sqlite3.Error) as error:
        return _fail(str(error), 1)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradmon",
        description="See what gradients, parameters and updates do while a PyTorch model trains.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch_gradmon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small character GPT under watch and show a table of its layers",
        description="Train a small character GPT under watch and show a table of its layers.",
    )
    demo.add_argument("--steps", type=_positive, default=601, metavar="N", help="steps to train (default: %(default)s)")
    demo.add_argument("--run-dir", default="runs/demo", metavar="DIR", help="where to keep the run (default: %(default)s)")
    demo.add_argument("--svg", metavar="FILE", help="also write the printed tables as a picture")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")
    why = commands.add_parser(
        "why",
        help="tell the story of a spike",
        description="Tell the story of a spike: the signals around it, which parameters moved first, and what came after.",
    )
    why.add_argument("run", metavar="RUN", help="a run directory; the run may still go on")
    why.add_argument("--step", type=int, metavar="S", help="the step to tell of (default: that of the last spike)")
    coordcheck.add_to(commands)
    return parser


def _why(options: argparse.Namespace) -> int:
    with contextlib.closing(load_run(options.run)) as run:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that has no such letter
        print(tell(run, options.step))
    return 0


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _demo(options: argparse.Namespace) -> int:
    try:
        from .demo import demo
    except ModuleNotFoundError as error:
        lacking = (error.name or "").partition(".")[0]
        if lacking in _EXTRAS:
            return _fail(f'the demo needs {lacking}: pip install "torch_gradmon[cli]"', 2)
        if lacking == "pydoc_data":
            return _fail("the demo trains on pydoc_data.topics, which this Python comes without", 2)
        raise
    demo(options.steps, options.run_dir, options.svg, options.seed)
    return 0


def _coordcheck(options: argparse.Namespace) -> int:
    try:
        return coordcheck.run(options)
    except ValueError as error:  # what cannot be swept is no failed check
        return _fail(str(error), 2)


_COMMANDS = {"demo": _demo, "why": _why, "coordcheck": _coordcheck}


def _fail(message: str, code: int) -> int:
    print(f"gradmon: error: {' '.join(message.split())}", file=sys.stderr)
    return code
