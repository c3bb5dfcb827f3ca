"""The report as one HTML file that contains its script, style and data."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from ...core.files import replacing
from ...core.formatting import ProgressBar
from ..comparison import renamer
from ..diff import RunDiff
from ..run import load_run
from .content import PARTS, comparison_content, content

#: The name of the report in a run directory.
NAME = "report.html"


def write(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    title: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Write the report of the run in the directory ``path``, by default into ``report.html`` there, and return its file. Raises as
    :func:`load_run`, ValueError also if the run has no step yet or ``to`` is a directory, and OSError if the file cannot be written.
    """
    target = _checked(Path(path) / NAME if to is None else Path(to))
    with closing(load_run(path)) as run:
        if not run.steps:
            raise ValueError(f"the run in {str(path)!r} has no recorded step yet")
        with ProgressBar(PARTS, "report", "part", progress) as bar:
            found = content(run, title or _name(path), bar.advance)
    return _written(found, target)


def write_both(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    difference: RunDiff,
    to: str | os.PathLike[str],
    title: str | None = None,
    rename: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> Path:
    """Write one report of two runs on top of each other; ``difference`` and ``rename`` are those of :func:`torch_gradmon.diff_runs`.
    Returns and raises as :func:`write`.
    """
    target = _checked(Path(to))
    names = _name(first), _name(second)
    if names[0] == names[1]:
        names = str(first), str(second)
    if names[0] == names[1]:
        names = f"{names[0]} (first)", f"{names[1]} (second)"
    with (
        closing(load_run(first)) as left,
        closing(load_run(second)) as right,
        ProgressBar(PARTS, "report", "part", progress) as bar,
    ):
        both = f"{names[0]} and {names[1]}"
        found = comparison_content((left, right), names, difference, renamer(rename), title or both, bar.advance)
    return _written(found, target)


def _name(path: str | os.PathLike[str]) -> str:
    return Path(path).resolve().name


def _checked(target: Path) -> Path:
    """Refuse a directory as the target before the work begins."""
    if target.is_dir():
        raise ValueError(f"{str(target)!r} is a directory; name a file in it")
    return target


def _written(data: dict[str, Any], target: Path) -> Path:
    text = html(data)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:  # a browser may show the old one
        file.write(text.encode())
    return target


def html(data: dict[str, Any], live: LivePage | None = None) -> str:
    """The whole page; ``live`` if a server shows it."""
    here = files(__package__)
    return template("analysis/report", "page.html.j2").render(
        title=data["title"],
        facts=data["facts"],
        against=data["against"],
        sides=data["sides"],
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=_plotly()[0],
        plotly_source=_plotly()[1],
        data=embedded(data),
        live=live,
    )


@dataclass(frozen=True)
class LivePage:
    """What the page of a server has in addition; ``run`` is its name on the server, empty if the page follows none."""

    run: str
    script: str
    version: str = ""


def template(folder: str, name: str) -> Template:
    """A page in a folder of the package; names in it are escaped."""
    loader = PackageLoader("torch_gradmon", folder)
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, **options)
    environment.filters["hashed"] = _hashed
    return environment.get_template(name)


def _hashed(script: str) -> str:
    """The source of a Content-Security-Policy that allows this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _plotly() -> tuple[str, str]:
    """Plotly's script, gzipped to four tenths of its size, as base64; and its source as :func:`_hashed` gives it."""
    script = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _hashed(script)


def embedded(data: Any) -> str:
    """JSON that cannot end its script element, whatever names it contains."""
    return as_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def as_json(data: Any) -> str:
    return json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"), allow_nan=False)
