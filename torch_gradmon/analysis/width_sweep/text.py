"""The verdicts as sentences and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.formatting import listed
from .verdicts import LayerVerdict, outcome

HEADINGS = ("module", "kind", "term", "exponent", "interval", "expected", "")
_NAMES = {"update": "(W_t-W_0)x_t", "propagated": "W_0(x_t-x_0)"}
_MOST = 4


def rows(verdicts: Sequence[LayerVerdict]) -> list[tuple[str, ...]]:
    """A row for every verdict, under ``HEADINGS``."""
    return [
        (
            verdict.module or "[model]",
            verdict.kind,
            _NAMES[verdict.term],
            f"{verdict.slope.exponent:+.2f}" if verdict.slope else "-",
            f"{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}" if verdict.slope else "-",
            "any" if verdict.expected is None else f"{verdict.expected:+.2f}",
            _verdict_text(verdict),
        )
        for verdict in verdicts
    ]


def table(verdicts: Sequence[LayerVerdict]) -> str:
    """The rows in columns, as plain text."""
    lines = [HEADINGS, *rows(verdicts)]
    sizes = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)).rstrip() for line in lines)


def _verdict_text(verdict: LayerVerdict) -> str:
    state = f"{verdict.state}: {verdict.reason}" if verdict.reason else verdict.state
    if not verdict.judged or verdict.state in ("undecided", "zero"):
        return state
    if verdict.as_expected is None:
        return f"{state}, undecided whether as expected"
    if verdict.as_expected:
        return state if not verdict.expected else f"{state}, as expected"
    return f"{state}, FAILS"


def words(verdicts: Sequence[LayerVerdict], smallest: int, largest: int, unmeasured: Sequence[str] = ()) -> str:
    """The verdict on all layers in a few sentences, with a remedy for each failure, and the unmeasured parameters."""
    judged = [verdict for verdict in verdicts if verdict.judged]
    bad = [verdict for verdict in judged if verdict.as_expected is False]
    still = [verdict for verdict in judged if verdict.state == "zero"]
    unclear = [verdict for verdict in judged if verdict.as_expected is None and verdict not in still]
    if len(still) == len(judged):
        return "\n".join(
            [
                "Undecided: no judged term has moved. Is the learning rate zero, or everything frozen?",
                *_unmeasured_note(unmeasured),
            ]
        )
    head = {
        "passes": f"Passes: all {len(judged)} terms have the expected exponent from width {smallest} to {largest}.",
        "fails": f"Fails: {len(bad)} of {len(judged)} terms do not have the expected exponent from width {smallest} to {largest}.",
        "undecided": f"Undecided: {len(unclear) + len(still)} of {len(judged)} terms could still be either way.",
    }[outcome(verdicts)]
    lines = [head, *_failures(bad)]
    if unclear:
        lines.append(f"Undecided in {_listed(unclear)}: give more seeds, or larger widths.")
    if still:
        lines.append(
            f"Not moved: {_listed(still)}; an update of zero cannot be judged. Give more steps, or check whether a gradient arrives "
            "there."
        )
    if _only_logits_grow(verdicts):
        lines.append(
            "Hidden layers move as much in wide models as in narrow ones while the outputs grow: with cross-entropy this can still train "
            "(controlled divergence, arXiv 2505.22491), with squared error it does not."
        )
    return "\n".join([*lines, *_unmeasured_note(unmeasured)])


def _unmeasured_note(unmeasured: Sequence[str]) -> list[str]:
    if not unmeasured:
        return []
    return [
        f"Not measured, and not judged: {listed(unmeasured, _MOST)}; no module with these parameters is called and returns a tensor."
    ]


def _failures(bad: Sequence[LayerVerdict]) -> list[str]:
    groups: dict[tuple[str, str, bool], list[LayerVerdict]] = {}
    for verdict in bad:
        side = "not finite" if verdict.slope is None else "high" if verdict.slope.exponent > (verdict.expected or 0.0) else "low"
        adding = verdict.term == "propagated" and verdict.kind == "output"
        groups.setdefault((verdict.term, side, adding), []).append(verdict)
    return [_failure(term, side, adding, group) for (term, side, adding), group in groups.items()]


def _failure(term: str, side: str, adding: bool, group: Sequence[LayerVerdict]) -> str:
    where = _listed(group)
    if side == "not finite":
        return f"Training diverged in {where}."
    if term == "update":
        if side == "high":
            return f"The own update is too large in wide models in {where}: divide the learning rate there by that power of the width."
        return f"The own update vanishes in wide models in {where}: multiply the learning rate there by the missing power of the width."
    if side == "high" and adding:
        return (
            f"The changes of the layers below add up in {where}: if their updates are stable, start with smaller output weights (muP: of "
            "size 1/width)."
        )
    more = "too much" if side == "high" else "too little"
    return f"The layers below contribute {more} in wide models in {where}: check their updates first."


def _listed(verdicts: Sequence[LayerVerdict]) -> str:
    return listed([f"{verdict.module or '[model]'}{_power(verdict)}" for verdict in verdicts], _MOST)


def _power(verdict: LayerVerdict) -> str:
    if verdict.slope is None:
        return f" ({verdict.reason})"
    instead = f" instead of {verdict.expected:+.2f}" if verdict.expected else ""
    if verdict.as_expected is None:
        return f" ({_NAMES[verdict.term]}: width^{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}{instead})"
    return f" (width^{verdict.slope.exponent:+.2f}{instead})"


def _only_logits_grow(verdicts: Sequence[LayerVerdict]) -> bool:
    updates = [verdict for verdict in verdicts if verdict.term == "update"]
    hidden = [verdict.state for verdict in updates if verdict.kind == "hidden"]
    return bool(hidden) and set(hidden) == {"stable"} and any(v.state == "grows" for v in verdicts if v.kind == "output")
