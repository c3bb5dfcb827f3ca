"""The verdict in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from .verdicts import Verdict, outcome

HEADINGS = ("module", "kind", "term", "exponent", "interval", "expected", "")
_NAMES = {"update": "(W_t-W_0)x_t", "propagated": "W_0(x_t-x_0)"}
_MOST = 4


def rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """A row for every verdict, under ``HEADINGS``."""
    return [
        (
            verdict.module or "[model]",
            verdict.kind,
            _NAMES[verdict.term],
            f"{verdict.slope.exponent:+.2f}" if verdict.slope else "-",
            f"{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}" if verdict.slope else "-",
            "any" if verdict.expected is None else f"{verdict.expected:+.2f}",
            _judgement(verdict),
        )
        for verdict in verdicts
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """The rows in columns, as plain text."""
    lines = [HEADINGS, *rows(verdicts)]
    sizes = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)).rstrip() for line in lines)


def _judgement(verdict: Verdict) -> str:
    state = f"{verdict.state}: {verdict.reason}" if verdict.reason else verdict.state
    if not verdict.judged or verdict.state in ("undecided", "zero"):
        return state
    if verdict.as_expected is None:
        return f"{state}, undecided whether as expected"
    if verdict.as_expected:
        return state if not verdict.expected else f"{state}, as expected"
    return f"{state}, FAILS"


def words(verdicts: Sequence[Verdict], smallest: int, largest: int, unmeasured: Sequence[str] = ()) -> str:
    """The verdict on all layers in a few sentences, with what to do about each that fails and the parameters that are in none."""
    judged = [verdict for verdict in verdicts if verdict.judged]
    bad = [verdict for verdict in judged if verdict.as_expected is False]
    still = [verdict for verdict in judged if verdict.state == "zero"]
    unclear = [verdict for verdict in judged if verdict.as_expected is None and verdict not in still]
    if len(still) == len(judged):
        return "\n".join(
            ["Undecided: nothing that is judged has moved. Is the learning rate zero, or everything frozen?", *_aside(unmeasured)]
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
            f"Not moved: {_listed(still)}; of an update that is zero nothing can be said. Give more steps, or see whether a gradient "
            "comes there."
        )
    if _only_logits_grow(verdicts):
        lines.append(
            "Hidden layers move as much in wide models as in narrow ones while the outputs grow: with cross-entropy this can still train "
            "(controlled divergence, arXiv 2505.22491), with squared error it does not."
        )
    return "\n".join([*lines, *_aside(unmeasured)])


def _aside(unmeasured: Sequence[str]) -> list[str]:
    if not unmeasured:
        return []
    rest = len(unmeasured) - _MOST
    return [
        f"Not measured: {', '.join(unmeasured[:_MOST])}{f' and {rest} more' if rest > 0 else ''}, since no module that has "
        "them is called and gives a tensor; nothing is said of these."
    ]


def _failures(bad: Sequence[Verdict]) -> list[str]:
    groups: dict[tuple[str, str, bool], list[Verdict]] = {}
    for verdict in bad:
        side = "not finite" if verdict.slope is None else "high" if verdict.slope.exponent > (verdict.expected or 0.0) else "low"
        adding = verdict.term == "propagated" and verdict.kind == "output"
        groups.setdefault((verdict.term, side, adding), []).append(verdict)
    return [_failure(term, side, adding, group) for (term, side, adding), group in groups.items()]


def _failure(term: str, side: str, adding: bool, group: Sequence[Verdict]) -> str:
    where = _listed(group)
    if side == "not finite":
        return f"Training diverged in {where}."
    if term == "update":
        if side == "high":
            return f"The own update is too large in wide models in {where}: divide the learning rate there by that power of the width."
        return f"The own update gets lost in wide models in {where}: multiply the learning rate there by the missing power of the width."
    if side == "high" and adding:
        return (
            f"What the layers below have learned adds up in {where}: where their updates are stable, start with smaller output weights "
            "(muP: of size 1/width)."
        )
    more = "too much" if side == "high" else "too little"
    return f"From the layers below comes {more} in wide models in {where}: see to their updates first."


def _listed(verdicts: Sequence[Verdict]) -> str:
    shown = [f"{verdict.module or '[model]'}{_power(verdict)}" for verdict in verdicts[:_MOST]]
    rest = len(verdicts) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _power(verdict: Verdict) -> str:
    if verdict.slope is None:
        return f" ({verdict.reason})"
    instead = f" instead of {verdict.expected:+.2f}" if verdict.expected else ""
    if verdict.as_expected is None:
        return f" ({_NAMES[verdict.term]}: width^{verdict.slope.low:+.2f} to {verdict.slope.high:+.2f}{instead})"
    return f" (width^{verdict.slope.exponent:+.2f}{instead})"


def _only_logits_grow(verdicts: Sequence[Verdict]) -> bool:
    updates = [verdict for verdict in verdicts if verdict.term == "update"]
    hidden = [verdict.state for verdict in updates if verdict.kind == "hidden"]
    return bool(hidden) and set(hidden) == {"stable"} and any(v.state == "grows" for v in verdicts if v.kind == "output")
