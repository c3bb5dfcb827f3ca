"""How a run is, and what to do next."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from ...core.formatting import placed, significant
from ...runs.liveness import PAUSES
from ..diagnosis.findings import Diagnosis, Finding
from .card import RunCard

#: States in which nothing is wrong with the process.
_FINE = ("running", "ended", "unknown")
_NUMBERS = ("step", "steps", "age", "seconds", "loss", "first_loss", "spikes", "not_applied", "headroom", "cost")
#: A run has stalled after this number of usual intervals, and of seconds, and after :data:`.liveness.PAUSES` of the pauses that it makes;
#: and after these seconds if it has one step only.
_TIMES, _LEAST, _LONELY = 10.0, 60.0, 600.0
_WIDTH, _INDENT, _MOST = 100, 10, 3


def has_stalled(card: RunCard) -> bool:
    """Whether no step has come for ten times the usual, a minute and twice the pauses that the run makes, or for ten minutes after the only
    one, of a run that has not ended.
    """
    if card.state in ("ended", "empty"):
        return False
    return card.age > (_LONELY if card.usual is None else max(_TIMES * card.usual, _LEAST, PAUSES * card.pause))


def _is_fine(card: RunCard) -> bool:
    """Whether nothing is wrong with the process and with what it records."""
    is_recorded = card.state == "ended" or not card.unwritten
    return card.state in _FINE and is_recorded and not card.raised and not has_stalled(card)


def next_action(card: RunCard, diagnosis: Diagnosis) -> str:
    """What to do next, as a sentence."""
    if card.unwritten and card.state != "ended":
        return "Make room on the disk of the run directory: no step is recorded before."
    if card.state == "silent" or has_stalled(card):
        return "Look at the process: no step comes any more, and its monitor was not detached."
    if card.state == "empty":
        return "Wait for the first step."
    first = _first(diagnosis)
    if first is not None and first.severity != "info":
        return first.advice
    if card.raised:
        name = card.raised.partition(":")[0]
        return f"Look at the traceback of {name}, unless it was raised to end the run, as for a trial that is pruned."
    rest = "Let it train." if card.state != "ended" else "Nothing."
    if first is None:
        return rest
    told = f"Of interest, {placed(first.rule, first.where)}: {first.advice}"
    return told if card.state == "ended" else f"{rest} {told}"


def status_dict(card: RunCard, diagnosis: Diagnosis) -> dict[str, Any]:
    """For JSON.

    ``next`` has the action, and the finding that it is for, if any, with the command that shows more of it.
    """
    first, rest = _first(diagnosis), card.to_dict()
    worst = {"step": card.spike_step, "where": card.spike_where, "text": card.worst_spike}
    return {
        "run": card.name,
        "state": card.state,
        "status": card.status,
        "raised": card.raised,
        "unwritten": card.unwritten,
        "healthy": _is_fine(card) and diagnosis.healthy,
        **{name: rest[name] for name in _NUMBERS},
        "loss_key": card.loss_key,
        "worst_spike": worst if card.spikes else None,
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "next": {
            "action": next_action(card, diagnosis),
            "rule": None if first is None else first.rule,
            "where": None if first is None else first.where,
            "command": f"gradmon diagnose {card.name}"
            if card.spike_step is None
            else f"gradmon why {card.name} --step {card.spike_step}",
        },
        "settings": dict(card.settings),
    }


def status_text(card: RunCard, diagnosis: Diagnosis) -> Iterator[str]:
    """The same in a few lines."""
    yield f"{card.name}: {card.status}"
    lines = []
    if card.loss is not None:
        what = " (median of the last twentieth of the steps)" if math.isfinite(card.loss) else ""
        of_one = ""
        if card.is_of_network:
            of_one = f"; {card.loss_key} is that of one network, and low where the others lose"
        elif card.loss_key != "loss":
            what = f" of {card.loss_key}{what}"
        lines.append(("loss", f"{significant(card.loss)}{what}, at first {significant(card.first_loss)}{of_one}"))
    if card.headroom is not None:
        lines.append(("head-room", f"{card.headroom:.0%} of the critical learning rate is used"))
    if card.spikes:
        lines.append(("spikes", f"{card.spikes}, the largest: {card.worst_spike}"))
    for finding in diagnosis.findings[:_MOST]:
        lines.append((finding.severity, f"{placed(finding.rule, finding.where)}: {finding.cause}"))
    if (rest := len(diagnosis.findings) - _MOST) > 0:
        lines.append(("", f"and {rest} more: gradmon diagnose {card.name}"))
    lines.append(("next", next_action(card, diagnosis)))
    for title, text in lines:
        yield from textwrap.wrap(f"{title:<{_INDENT}}{text}", _WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False)


def _first(diagnosis: Diagnosis) -> Finding | None:
    return next(iter(diagnosis.findings), None)
