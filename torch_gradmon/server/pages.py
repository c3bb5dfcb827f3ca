"""The pages of the server."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..analysis.comparison.diff import diff
from ..analysis.comparison.rules import renamer
from ..analysis.report import comparison_content
from ..analysis.report.content import content
from ..analysis.report.page import LivePage, html, template
from ..analysis.run import load_run
from ..runs.format import version


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    return _text("common.js") + _text(name)


def _style() -> str:
    return files("torch_gradmon.analysis.report").joinpath("page.css").read_text(encoding="utf-8") + _text("runs.css")


def all_runs(root: str | os.PathLike[str]) -> str:
    """The list of all runs."""
    return template("server", "runs.html.j2").render(root=os.fspath(root), style=_style(), script=_script("runs.js"))


def content_of(path: Path, name: str) -> dict[str, Any] | None:
    """The data of a run's page; None before its first step."""
    with closing(load_run(path)) as run:
        return content(run, name, lambda: None) if run.steps else None


def one_run(path: Path, name: str) -> str:
    """The report of a run, which goes along with it."""
    shown = version(path)  # before it is read: what is written in between comes with the next version
    found = content_of(path, name)
    if found is None:
        return template("server", "waiting.html.j2").render(name=name, style=_style(), script=_script("page.js"))
    return html(found, LivePage(name, _script("page.js"), shown))


def two_runs(paths: tuple[Path, Path], names: tuple[str, str]) -> str:
    """The report of two runs on top of each other, as they are now."""
    difference = diff(*paths)
    with closing(load_run(paths[0])) as first, closing(load_run(paths[1])) as second:
        title = f"{names[0]} and {names[1]}"
        found = comparison_content.content((first, second), names, difference, renamer(None), title, lambda: None)
    return html(found, LivePage("", _script("page.js")))
