"""What a diagnosis says, and how it says it."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.records import Severity
from .causes import CONSEQUENCES

#: From the gravest.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_WIDTH = 100
#: Findings of one rule that are told one by one; the rest is counted.
_TOLD = 3


class Unseen(Exception):
    """A rule had nothing to judge by; the message says what would have to be measured."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        rule: the slug of the rule that found it, such as ``vanishing-gradients``.
        severity: ``error`` where the training cannot work so, ``warning`` where it works badly, ``info`` else.
        where: the module or parameter; empty for the whole model.
        steps: the first and the last step in which it was seen.
        evidence: the numbers that it rests on, by what they are.
        cause: what it is, in a sentence.
        advice: what to change, in a sentence.
        weight: orders findings of one severity; larger comes first.
    """

    rule: str
    severity: Severity
    where: str
    steps: tuple[int, int]
    evidence: Mapping[str, float]
    cause: str
    advice: str
    weight: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return self.words()

    def words(self, width: int = _WIDTH) -> str:
        """A line with what and where, then why and what to do, wrapped at ``width``."""
        first, last = self.steps
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        place = f" in {self.where}" if self.where else ""
        numbers = ", ".join(f"{name} {_number(value)}" for name, value in self.evidence.items())
        head = f"{self.severity.upper():8}{self.rule}{place} ({when})"
        lines = [self.cause + (f" [{numbers}]" if numbers else ""), f"-> {self.advice}"]
        body = "\n".join(
            textwrap.fill(line, width, initial_indent=" " * 8, subsequent_indent=" " * (11 if line.startswith("->") else 8))
            for line in lines
        )
        return f"{head}\n{body}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are not finite are strings, as in the sinks."""
        found = asdict(self)
        del found["weight"]
        found["steps"] = list(self.steps)
        found["evidence"] = {name: value if math.isfinite(value) else str(value) for name, value in self.evidence.items()}
        return found


def also(names: Sequence[str]) -> str:
    """The others in words, behind the first of ``names``, which the finding names itself."""
    others = list(names[1:])
    if not others:
        return ""
    told, more = others[:_TOLD], len(others) - _TOLD
    return f" Also in {', '.join(told)}" + (f" and {more} more." if more > 0 else ".")


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the gravest first, and what could not be looked at.

    Attributes:
        findings: ranked.
        steps: the first and the last step that were looked at; None where there was none.
        unseen: for each rule that had nothing to judge by, why.
    """

    findings: tuple[Finding, ...]
    steps: tuple[int, int] | None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Sequence[Finding], steps: tuple[int, int] | None, unseen: Mapping[str, str]) -> Diagnosis:
        """Rank ``findings``: by severity, then by weight, then by the step in which they were first seen."""
        ranked = sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.weight, finding.steps))
        return cls(tuple(ranked), steps, dict(unseen))

    @property
    def healthy(self) -> bool:
        """Whether nothing graver than information was found."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """For CI: 0 if healthy, 1 otherwise."""
        return 0 if self.healthy else 1

    def __str__(self) -> str:
        return self.words()

    def words(self, width: int = _WIDTH) -> str:
        """All of it on about one screen, wrapped at ``width``."""
        if self.steps is None and not self.findings:
            return "\n".join(["Nothing to diagnose: no monitored step yet.", *self._not_judged(width)])
        span = "a run without a monitored step" if self.steps is None else f"steps {self.steps[0]} to {self.steps[1]}"
        if not self.findings:
            return "\n".join([f"Nothing found in {span}.", *self._not_judged(width)])
        counts = [(sum(f.severity == each for f in self.findings), each) for each in SEVERITIES]
        head = ", ".join(f"{count} {_plural(each, count)}" for count, each in counts if count)
        return "\n".join([f"{head} in {span}", "", *self._told(width), *self._not_judged(width)])

    def _not_judged(self, width: int) -> list[str]:
        if not self.unseen:
            return []
        words = "; ".join(f"{rule} ({why})" for rule, why in self.unseen.items())
        return ["", textwrap.fill(f"Not judged: {words}", width, subsequent_indent=" " * 8)]

    def _told(self, width: int) -> list[str]:
        lines: list[str] = []
        of_rule: dict[str, int] = {}
        left = list(self.findings)
        while left:
            finding = left.pop(0)
            of_rule[finding.rule] = of_rule.get(finding.rule, 0) + 1
            if of_rule[finding.rule] > _TOLD:
                continue
            lines.append(finding.words(width))
            signs = CONSEQUENCES.get(finding.rule, frozenset())
            followers = [other for other in left if other.rule in signs and other.severity != "error"]
            left = [other for other in left if other not in followers]
            if followers:
                lines.append(_following(followers, width))
        rest = [f"{count - _TOLD} more of {rule}" for rule, count in of_rule.items() if count > _TOLD]
        return [*lines, *([f"{'':8}and {', '.join(rest)}"] if rest else [])]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "healthy": self.healthy,
            "steps": None if self.steps is None else list(self.steps),
            "findings": [finding.to_dict() for finding in self.findings],
            "unseen": dict(self.unseen),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def _following(findings: Sequence[Finding], width: int) -> str:
    """In a few lines, what may be a sign of the finding before."""
    told = [f"{finding.rule}{f' in {finding.where}' if finding.where else ''}" for finding in findings[: 2 * _TOLD]]
    more = len(findings) - len(told)
    words = f"May come of it: {', '.join(told)}{f' and {more} more' if more else ''}."
    return textwrap.fill(words, width, initial_indent=" " * 8, subsequent_indent=" " * 11)


def _plural(severity: str, count: int) -> str:
    return severity if severity == "info" or count == 1 else f"{severity}s"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e5 else f"{value:.3g}"
