"""Settings of the documentation: ``make docs``."""

from __future__ import annotations

import os
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torch_gradmon
from torch_gradmon.cli.main import command_parser

project = "torch_gradmon"
author = "the authors of torch_gradmon"
release = version = torch_gradmon.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "torch_gradmon"
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # fields of a named tuple would be described twice
os.environ["COLUMNS"] = "100"  # width of the commands' help


class CommandHelp(SphinxDirective):
    """A section for each command with its ``--help``."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        parser = command_parser()
        commands = next(action.choices for action in parser._actions if action.dest == "command")
        found: list[nodes.Node] = []
        for name, command in {"gradmon": parser, **{f"gradmon {name}": each for name, each in commands.items()}}.items():
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=command.format_help(), language="text")
            found.append(section)
        return found


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write ``llms.txt``, the pages with their first paragraphs, and ``llms-full.txt``, all of their text."""
    if exception is None:
        texts = {name: Path(app.env.doc2path(name)).read_text(encoding="utf-8") for name in _in_order(app, "index")}
        lines = [f"- [{app.env.titles[name].astext()}]({name}.html): {_summary(text)}" for name, text in texts.items()]
        about = _summary(texts["index"])
        Path(app.outdir, "llms.txt").write_text(f"# {project}\n\n> {about}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
        Path(app.outdir, "llms-full.txt").write_text("\n\n".join(texts.values()), encoding="utf-8")


def _in_order(app: Sphinx, name: str) -> list[str]:
    below = [each for child in app.env.toctree_includes.get(name, ()) for each in _in_order(app, child)]
    return [name, *below]


def _summary(text: str) -> str:
    return " ".join(text.split("\n\n")[1].split())


def setup(app: Sphinx) -> None:
    """Show diagrams as text: a picture would need a script from elsewhere, or a browser."""
    app.add_lexer("mermaid", TextLexer)
    app.add_directive("command-help", CommandHelp)
    app.connect("build-finished", write_llms)
