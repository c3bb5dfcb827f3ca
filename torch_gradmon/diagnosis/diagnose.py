"""All rules over one history."""

from __future__ import annotations

from collections.abc import Callable

from .findings import Diagnosis, Finding
from .history import History
from .nonfinite import nonfinite

Rule = Callable[[History], list[Finding]]


class Unseen(Exception):
    """A rule had nothing to judge by; the message says what would have to be measured."""


#: By theme; a theme may have several slugs.
RULES: dict[str, Rule] = {"non-finite": nonfinite}


def diagnosed(history: History) -> Diagnosis:
    """What all rules find. A rule that fails is named among those that saw nothing: a diagnosis never fails for one."""
    findings: list[Finding] = []
    unseen: dict[str, str] = {}
    for name, rule in RULES.items():
        try:
            findings += rule(history)
        except Unseen as reason:
            unseen[name] = str(reason)
        except Exception as error:  # a defect of ours
            unseen[name] = f"the rule failed: {type(error).__name__}: {error}"
    return Diagnosis.of(findings, history.span, unseen)
