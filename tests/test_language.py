"""Prose is plain present-tense English: words and phrases that it does without, in every file that is named here."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_gradmon as gradmon
from torch_gradmon import plugins, sinks, spikes

ROOT = Path(__file__).parent.parent
#: Verbs of speech for data flow, archaic chains, and metaphors; each alternative is matched as whole words.
AVOIDED = (
    *("tell", "tells", "telling", "told", "say", "says", "saying", "said", "hear", "hears", "heard", "news", "in words"),
    *("somebody", "nobody", "whoever", "whomever", "so many", "but for", "for it is", "for they are", "of which", "of what"),
    *("comes? of", "came of", "that which", "(?:is|are|was|were) to be", "goes on", "went on", "besides", "wants?", "by turns"),
    *("hang", "hangs", "hung", "lend", "lends", "lent", "stands? in", "a hand", "put aside", "puts? back", "take(?:s|n)? back"),
    *("closer look", "story", "stories", "shelf", "mailbox", "so-manyth", "as ever", "is no news", "in the manner of"),
)
_AVOIDED = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b", re.IGNORECASE)
#: Files whose prose follows the rules: the package and what is written around it.
CLEAN = (
    "torch_gradmon/**/*.py",
    *("README.md", "docs/**/*.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/*.py", "Makefile", "pyproject.toml"),
    # all but reports.py, which names marks of the report's script, and contenders.py, whose text is part of a stored result
    *(
        "benchmarks/[!r]*.py",
        "benchmarks/report.py",
        "benchmarks/r[iu]*.py",
        "benchmarks/faults/**/*.py",
        "benchmarks/spikes/[!c]*.py",
    ),
)
#: Output of programs and generated tables, which are not this file's prose.
_QUOTED = re.compile(r"^ *```.*?^ *```|^<!-- (\w+) -->$.*?^<!-- /\1 -->$|`[^`\n]+`", re.MULTILINE | re.DOTALL)

#: Names of functions and classes within a docstring.
_ROLES = re.compile(r":\w+:`[^`]+`")


def _prose(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield _QUOTED.sub("", text)
    elif path.suffix == ".py":
        yield from (
            token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
        )
        constants = [str(node.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        yield from (_ROLES.sub("", constant) for constant in constants if not constant.isidentifier())
    else:
        yield from re.findall(r"#.*|echo.*", text)


@pytest.mark.parametrize("path", sorted({path for pattern in CLEAN for path in ROOT.glob(pattern)}), ids=lambda p: p.name)
def test_the_prose_is_plain(path: Path) -> None:
    lines = [" ".join(prose.split()) for prose in _prose(path)]
    found = [
        f"{match[0]}: ...{line[max(match.start() - 40, 0) : match.end() + 40]}..."
        for line in lines
        for match in _AVOIDED.finditer(line)
    ]
    assert not found, "write these in plain present-tense English"


def test_every_pattern_names_a_file() -> None:
    assert all(any(ROOT.glob(pattern)) for pattern in CLEAN)


#: What users know by name: it may stand in messages.
_PUBLIC = {name for module in (gradmon, plugins, sinks, spikes) for name in module.__all__} | {
    "GradMonCallback",
    "GradMonHandler",
}
_CODE = re.compile(r"``[^`]*``|>>>.*")


def test_no_sentence_has_the_name_of_an_inner_class() -> None:
    """Such as one that a rename by script has put in the place of an ordinary word."""
    files = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in (ROOT / "torch_gradmon").rglob("*.py")]
    classes = [node for _, tree in files for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    raised = {node.name for node in classes if node.name.endswith(("Error", "Warning", "Measurable"))}
    inner = {node.name for node in classes if re.search("[a-z][A-Z]", node.name)} - _PUBLIC - raised
    assert len(inner) > 100
    pattern = re.compile(rf"\b(?:{'|'.join(sorted(inner))})\b")
    prose = ((path, _CODE.sub("", _ROLES.sub("", text))) for path, _ in files for text in _prose(path) if " " in text)
    found = [f"{path.name}: {match[0]}" for path, text in prose for match in pattern.finditer(text)]
    assert not found
