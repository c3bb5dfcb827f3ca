"""The page itself: one file with its script, its style and its data."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from ..run import Run, load_run
from .content import content

#: What a run directory's report is called.
NAME = "report.html"


def write(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None, title: str | None = None) -> Path:
    """Write the report of the run in the directory ``path``.

    Args:
        path: the run directory.
        to: the file; by default ``report.html`` in the run directory.
        title: of the page; by default the directory's name.

    Returns:
        The file.

    Raises:
        FileNotFoundError: there is no run in it.
        ValueError: its file is not one of ours, or it has no step yet.
        OSError: the file cannot be written.
    """
    run = load_run(path)
    try:
        if not run.steps:
            raise ValueError(f"the run in {str(path)!r} has no recorded step yet")
        target = Path(to) if to is not None else Path(path) / NAME
        text = html(run, title or Path(path).resolve().name)
    finally:
        run.close()
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f"{target.name}.part")  # somebody may be looking at the old one
    half.write_text(text, encoding="utf-8")
    half.replace(target)
    return target


def html(run: Run, title: str) -> str:
    """The whole page."""
    here = files(__package__)
    environment = Environment(
        loader=PackageLoader("torch_gradmon", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    data = content(run, title)
    return environment.get_template("page.html.j2").render(
        title=title,
        facts=data["facts"],
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        data=_embedded(data),
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element that it stands in, whatever names are in it."""
    text = json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
