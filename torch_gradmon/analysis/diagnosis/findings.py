"""The findings of a diagnosis, as data and as text."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.formatting import ShownAsText, listed, placed, step_range
from ...core.records import Severity

# --- The possible consequences of each finding, so that the text can show the cause first ---

_STANDSTILL = frozenset({"loss-plateau", "loss-at-chance"})
_DISORDER = frozenset({"loss-plateau", "loss-at-chance", "loss-divergence", "weight-growth"})
_UNITS = frozenset({"dead-units", "saturated-units"})
_ATTENTION = frozenset({"attention-entropy-collapse", "attention-logit-growth"})
_DEPTH = frozenset({"vanishing-gradients", "exploding-gradients"})
_RATES = frozenset({"learning-rate-high", "update-ratio-high"})

#: By rule, the rules whose findings may be its consequences. Only findings that rank below their cause are shown as such.
CONSEQUENCES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("another-model-trained", "never-stepped", "not-in-optimizer", "optimizer-never-steps", "frozen"), _STANDSTILL
    ),
    **dict.fromkeys(("constant-input", "dropout-high", "gradient-dropped-to-zero", "update-ratio-low"), _STANDSTILL),
    "attention-entropy-collapse": _STANDSTILL,
    **dict.fromkeys(("labels-not-mixed", "parameter-in-two-optimizers"), _DISORDER | {"spike"}),
    **dict.fromkeys(("epsilon-dominates", "always-clipped", "no-gradient"), _STANDSTILL | {"learning-rate-low"}),
    **dict.fromkeys(("backward-twice", "stepped-twice"), _DISORDER | _UNITS | _ATTENTION | _RATES),
    "softmax-before-loss": _STANDSTILL | _UNITS | _DEPTH | {"learning-rate-low", "always-clipped"},
    "relu-before-loss": _STANDSTILL | _UNITS | {"gradient-dropped-to-zero", "no-gradient"},
    "attention-mask": _STANDSTILL | _DEPTH | {"no-gradient"},
    "labels-ignored": _STANDSTILL | {"no-gradient", "non-finite-activation", "non-finite-loss", "non-finite-gradient"},
    "non-finite-input": _DISORDER | {"spike", "steps-skipped"},
    "labels-constant": frozenset({"loss-at-chance"}),
    "betas-swapped": _DISORDER | _RATES | {"spike"},
    "unregistered-parameters": _STANDSTILL | {"not-in-optimizer"},
    "players-agree": _STANDSTILL | _DISORDER | {"weight-growth", "spike"},
    "weight-decay-high": _STANDSTILL | _UNITS | _DEPTH,
    "equal-units": _STANDSTILL | _DEPTH | {"no-gradient", "initialisation-scale"},
    "gradients-cleared": _STANDSTILL | {"zero-update", "gradient-dropped-to-zero"},
    "zero-update": _STANDSTILL | {"learning-rate-low", "update-ratio-low"},
    "inputs-not-normalised": _DISORDER | _UNITS | _DEPTH | _RATES | {"always-clipped", "spike"},
    "targets-not-normalised": _DISORDER | {"learning-rate-low", "always-clipped"},
    "missing-zero-grad": _DISORDER | _UNITS | _ATTENTION | _RATES | {"always-clipped"},
    "unattached-optimizer": frozenset({"not-in-optimizer"}),
    "step-without-gradients": _STANDSTILL | {"no-gradient"},
    "optimizer-before-sharding": _STANDSTILL | {"not-in-optimizer"},
    "clipped-while-scaled": _STANDSTILL | {"always-clipped", "learning-rate-low", "update-ratio-low"},
    "initialisation-scale": _DISORDER | _UNITS | _ATTENTION | _DEPTH | _RATES | {"always-clipped", "learning-rate-low"},
    "learning-rate-high": _DISORDER
    | _UNITS
    | _ATTENTION
    | _DEPTH
    | {"update-ratio-high", "gradient-dropped-to-zero", "always-clipped", "spike"},
    "exploding-gradients": _DISORDER | _ATTENTION | _RATES | {"always-clipped", "spike"},
    "spike": _DISORDER,
    "weights-at-bound": _STANDSTILL | _DEPTH | {"no-gradient", "spike", "learning-rate-low"},
    "weight-growth": _STANDSTILL | _UNITS | _ATTENTION | {"loss-divergence"},
    "never-clipped": _DISORDER | _UNITS,
    "dead-units": _STANDSTILL | {"gradient-dropped-to-zero", "no-gradient", "vanishing-gradients", "learning-rate-low"},
    "saturated-units": _STANDSTILL | {"vanishing-gradients"},
    "vanishing-gradients": _STANDSTILL | {"learning-rate-low", "update-ratio-low"},
    "low-precision-underflow": _STANDSTILL
    | {"zero-update", "gradient-dropped-to-zero", "learning-rate-low", "update-ratio-low", "vanishing-gradients"},
    "learning-rate-low": _STANDSTILL | {"update-ratio-low"},
    "update-ratio-high": _DISORDER | _ATTENTION,
    "attention-logit-growth": _STANDSTILL | {"attention-entropy-collapse"},
}


#: The gravest first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
#: In the evidence of a spike that undid what was learnt.
UNDONE = "loss after it"
_WIDTH = 100
#: Findings of one rule that the text shows; it counts the rest.
_MOST_OF_RULE = 3


class NotMeasured(Exception):
    """A rule cannot judge; the message names what would have to be measured."""


@dataclass(frozen=True)
class Finding(ShownAsText):
    """A problem, or something worth knowing.

    Attributes:
        rule: slug of the rule, such as ``vanishing-gradients``.
        severity: ``error`` if the training cannot work, ``warning`` if it works badly, otherwise ``info``.
        where: module or parameter; empty for the whole model.
        steps: the first and the last step with the problem.
        evidence: named numbers.
        cause: a sentence.
        advice: a sentence on what to change.
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
        return self.text()

    def text(self, width: int = _WIDTH) -> str:
        """A line with the rule and the place, then the cause and the advice, wrapped at ``width``."""
        place = f" in {self.where}" if self.where else ""
        numbers = ", ".join(f"{name} {_number(value)}" for name, value in self.evidence.items())
        head = f"{self.severity.upper():8}{self.rule}{place} ({step_range(*self.steps)})"
        cause = _indented(self.cause + (f" [{numbers}]" if numbers else ""), width, 8)
        return "\n".join([head, cause, _indented(f"-> {self.advice}", width, 11)])

    def to_dict(self) -> dict[str, Any]:
        """The finding for JSON; numbers that are not finite are strings, as in the sinks."""
        found = asdict(self)
        del found["weight"]
        found["steps"] = list(self.steps)
        found["evidence"] = {name: value if math.isfinite(value) else str(value) for name, value in self.evidence.items()}
        return found


@dataclass(frozen=True, repr=False)
class Diagnosis(ShownAsText):
    """Ranked findings, and the rules that could not judge.

    Attributes:
        findings: the gravest first.
        steps: the first and the last step that were looked at; None without any.
        unseen: the reason of each rule that could not judge.
    """

    findings: tuple[Finding, ...]
    steps: tuple[int, int] | None
    unseen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, findings: Sequence[Finding], steps: tuple[int, int] | None, unseen: Mapping[str, str]) -> Diagnosis:
        """Rank ``findings`` by severity, then causes before their possible consequences, then by weight, then by their first step."""
        left = sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.weight, finding.steps))
        ranked: list[Finding] = []
        while left:
            equals = [finding for finding in left if finding.severity == left[0].severity]
            # where each may cause the other, the weight decides
            first = next(
                (each for each in equals if all(_may_cause(each, o) or not _may_cause(o, each) for o in equals)), equals[0]
            )
            left.remove(first)
            ranked.append(first)
        return cls(tuple(ranked), steps, dict(unseen))

    @property
    def healthy(self) -> bool:
        """Whether all findings are of severity ``info``."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """For CI: 0 if healthy, 1 otherwise."""
        return 0 if self.healthy else 1

    def grouped(self, most_of_rule: int | None = None) -> Iterator[tuple[Finding, list[Finding]]]:
        """Each finding with its possible consequences, which are not repeated; at most ``most_of_rule`` findings of a rule."""
        seen: Counter[str] = Counter()
        left = list(self.findings)
        while left:
            finding = left.pop(0)
            seen[finding.rule] += 1
            if most_of_rule is None or seen[finding.rule] <= most_of_rule:
                consequences = [other for other in left if other.severity != "error" and _may_cause(finding, other)]
                left = [other for other in left if other not in consequences]
                yield finding, consequences

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH) -> str:
        """The diagnosis on about one screen, wrapped at ``width``."""
        span = "a run without a monitored step" if self.steps is None else f"steps {self.steps[0]} to {self.steps[1]}"
        lines = [f"Nothing found in {span}." if self.steps else "Nothing to diagnose: no monitored step yet."]
        if self.findings:
            counts = Counter(finding.severity for finding in self.findings)
            head = ", ".join(f"{counts[each]} {_plural(each, counts[each])}" for each in SEVERITIES if counts[each])
            causes = sum(1 for _ in self.grouped())
            rest = len(self.findings) - causes  # consequences, which are only named below a cause
            told = f": {causes} {_plural('cause', causes)}, {rest} {_plural('consequence', rest)}" if rest else ""
            lines = [f"{head} in {span}{told}", ""]
        hidden = Counter(finding.rule for finding in self.findings)
        for finding, consequences in self.grouped(_MOST_OF_RULE):
            hidden.subtract(each.rule for each in (finding, *consequences))
            lines.append(finding.text(width))
            if consequences:
                names = [placed(each.rule, each.where) for each in consequences]
                lines.append(_indented(f"Possible consequences: {listed(names, 2 * _MOST_OF_RULE)}.", width, 11))
        if more := [f"{count} more of {rule}" for rule, count in hidden.items() if count]:
            lines.append(f"{'':8}and {', '.join(more)}")
        if self.unseen:
            reasons = "; ".join(f"{rule} ({why})" for rule, why in self.unseen.items())
            lines += ["", textwrap.fill(f"Not judged: {reasons}", width, subsequent_indent=" " * 8)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis for JSON."""
        return {
            "healthy": self.healthy,
            "steps": None if self.steps is None else list(self.steps),
            "findings": [finding.to_dict() for finding in self.findings],
            "unseen": dict(self.unseen),
        }

    def to_json(self) -> str:
        """The diagnosis as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def _may_cause(cause: Finding, effect: Finding) -> bool:
    """Whether one may be a consequence of the other.

    What was over by the time that the cause began has another one, where no step was one for a clip to stop, its absence does nothing, and
    a spike holds up a training if it undid what was learnt.
    """
    if cause.rule == "spike" and UNDONE not in cause.evidence:
        return False
    if cause.rule == "never-clipped" and not cause.evidence.get("outliers", 1.0):
        return False
    return effect.rule in CONSEQUENCES.get(cause.rule, ()) and effect.steps[1] >= cause.steps[0]


def _indented(text: str, width: int, hanging: int) -> str:
    return textwrap.fill(text, width, initial_indent=" " * 8, subsequent_indent=" " * hanging)


def _plural(word: str, count: int) -> str:
    return word if word == "info" or count == 1 else f"{word}s"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e5 else f"{value:.3g}"
