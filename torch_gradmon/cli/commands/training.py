"""The commands that train: the demo, and the sweep over widths."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from ...analysis.width_sweep import result
from ...analysis.width_sweep.sweep import width_sweep
from .common import UsageError, output, print_coloured, print_written, requires_extra, wrong_request


def demo_command(options: argparse.Namespace) -> int:
    try:
        with requires_extra("the demo", "cli", "rich", "tqdm"):
            from ..demo import demo
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pydoc_data":
            raise UsageError("the demo trains on pydoc_data.topics, which this Python lacks") from error
        raise
    to = None if options.output is None else output(options.output, (".svg",))
    demo(options.steps, options.run_dir, to, options.seed)
    if to is not None:
        print_written(to)
    return 0


# --- the width sweep ---


@wrong_request(ValueError)  # an impossible sweep is not a failed check
def width_sweep_command(options: argparse.Namespace) -> int:
    to = None
    if options.output is not None:
        with requires_extra("--output", "plot", "matplotlib"):
            to = output(options.output, [f".{kind}" for kind in result.kinds()])
    with wrong_request(TypeError):
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
    if options.json:
        print(sweep.to_json())
    else:
        colours = {True: "green", False: "red", None: "yellow"}
        styles = [colours[verdict.as_expected] if verdict.judged else "dim" for verdict in sweep.verdicts]
        lines = [rf"(?m)^{re.escape(line)}$" for line in sweep.table().splitlines()[1:]]
        print_coloured(f"{sweep.table()}\n\n{sweep.words()}", dict(zip(lines, styles, strict=False)))
    if to is not None:  # last, because the disk may be full by now
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            sweep.plot(to)
        except OSError as error:
            raise ValueError(f"{to} cannot be written: {error}") from error
        print_written(to, to_stderr=options.json)
    return 0 if sweep.passed else 1


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
