"""The outputs that documentation shows, read from it and compared with what its code prints.

A comment behind a ``print(...)`` is what that prints, and nothing else; what is to be explained stands in a line above. It is compared
to the letter, but for runs of blanks, unless it begins with a mark:

* ``# about 0.12 of 3 layers``: every number may be off by a tenth; the words are the same.
* ``# e.g. step 31: 0.12``: every number may be another one; the words are the same.

``...`` stands for anything. Of a ``print`` that is called several times the last output counts. A block of ``text`` right behind a block
of Python is all that its prints without a comment give, with any numbers.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.I)
#: How far a number behind the mark "about" may be off, relative to the one that is shown.
_OFF = 0.1


class Shown(NamedTuple):
    """A ``print`` and the comment behind it; its first and last lines, from 1."""

    first: int
    last: int
    comment: str | None


def shown(code: str) -> list[Shown]:
    """Every call of ``print`` that is a statement, with the comment behind it."""
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    }
    lines = sorted((node.lineno, node.end_lineno or node.lineno) for node in _prints(code))
    return [Shown(first, last, comments.get(last)) for first, last in lines]


def _prints(code: str) -> Iterator[ast.Expr]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print":
            yield node


class Printer:
    """Stands in for ``print`` and keeps what each line has printed last, and all of it in order."""

    def __init__(self) -> None:
        self.last: dict[int, str] = {}
        self.all: list[tuple[int, str]] = []

    def __call__(self, *values: Any, **options: Any) -> None:
        """Print into a string."""
        text = io.StringIO()
        print(*values, **{**options, "file": text})
        line = sys._getframe(1).f_lineno
        self.last[line] = text.getvalue()
        self.all.append((line, text.getvalue()))


def differences(code: str, printer: Printer, above: int = 0) -> list[str]:
    """What the comments of ``code``, which ran with ``above`` lines over it, show and it did not print."""
    found = []
    for each in shown(code):
        if each.comment is not None:
            printed = printer.last.get(above + each.first)
            if printed is None or not agrees(each.comment, printed):
                found.append(f"line {above + each.last}: shows {each.comment!r} and prints {printed!r}")
    return found


def uncommented(code: str, printer: Printer, above: int = 0) -> str:
    """All that the prints of ``code`` without a comment gave."""
    lines = {above + each.first for each in shown(code) if each.comment is None}
    return "".join(text for line, text in printer.all if line in lines)


def agrees(comment: str, printed: str) -> bool:
    """Whether ``printed`` is what ``comment`` shows."""
    for mark, off in (("about ", _OFF), ("e.g. ", float("inf"))):
        if comment.startswith(mark):
            return about(comment.removeprefix(mark), printed, off)
    return re.fullmatch(_pattern(" ".join(comment.split())), " ".join(printed.split())) is not None


def about(wanted: str, printed: str, off: float = _OFF) -> bool:
    """Whether both are the same but for numbers, and these differ by no more than ``off``, relative to the wanted ones."""
    wanted, printed = " ".join(wanted.split()), " ".join(printed.split())
    pieces = list(_parts(wanted))
    pattern = "".join(f"({_NUMBER.pattern})" if is_number else _pattern(piece) for piece, is_number in pieces)
    match = re.fullmatch(pattern, printed, re.I)
    if match is None:
        return False
    numbers = [_value(piece) for piece, is_number in pieces if is_number]
    return all(abs(a - b) <= off * max(abs(a), 1e-12) for a, b in zip(numbers, map(_value, match.groups()), strict=True))


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, and whether each is a number."""
    end = 0
    for match in _NUMBER.finditer(text):
        yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    yield text[end:], False


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _pattern(words: str) -> str:
    return re.escape(words).replace(r"\.\.\.", ".*?")


def unchecked(known: Mapping[str, str]) -> list[str]:
    """Of code by place: prints with a comment that nobody checks, since the code does not run here."""
    return [
        f"{place}:{each.last}: {each.comment}"
        for place, code in known.items()
        for each in shown(code)
        if each.comment is not None and not each.comment.startswith("e.g. ")
    ]
