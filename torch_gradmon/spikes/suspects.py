"""Which layers moved when a signal of the whole model spiked, and which of them first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..record import Table
from ..statistics.moments import Column
from .arguments import times
from .hampel import LOG_OF_ZERO, MAD_TO_STD

#: Steps whose gradients are remembered: 13 kB each for 200 parameters.
REMEMBERED = 64
#: A layer may have moved up to so many steps before the spike; what is normal is told from the steps before these.
BEFORE = 5
#: Fewest steps that tell what is normal.
_FEWEST = 8
#: Score above which a layer moved, and the smallest spread of the logarithm: those of the default rule for gradient norms.
THRESHOLD = 5.5
_SMALLEST_SPREAD = math.log(1.5) / THRESHOLD


@dataclass(frozen=True)
class Suspect:
    """A parameter at the time of a spike.

    Attributes:
        name: of the parameter.
        norm: of its gradient.
        usual: the median norm of the steps before; None where too few are known.
        score: robust standard deviations of the log norm above that; infinite for NaN and Inf, None where too few steps are known.
        share: of the squared norm of the whole gradient; None where that is zero or not finite.
        since: step from which on its score is above the threshold without a break, None where it is not above.
        nonfinite: elements that are NaN or infinite.
        place: in the order of the model's parameters.
    """

    name: str
    norm: float
    usual: float | None
    score: float | None
    share: float | None
    since: int | None
    nonfinite: int
    place: int


class Gradients:
    """The statistics of the gradients of the last steps, as a step's record brings them."""

    def __init__(self, steps: Iterable[tuple[int, Table]] = ()) -> None:
        self._steps: deque[tuple[int, Table]] = deque(steps, maxlen=REMEMBERED)

    def see(self, step: int, table: Table | None) -> None:
        """Remember ``table``; without one the step does not count."""
        if table is not None:
            if self._steps and self._steps[-1][0] >= step:  # a rollback, or the same step once more
                self._steps = deque(((s, t) for s, t in self._steps if s < step), maxlen=REMEMBERED)
            self._steps.append((step, table))

    def suspects(self, step: int) -> list[Suspect]:
        """The parameters in the order of suspicion: those with NaN or Inf, then those that moved, the earliest first, then the
        others. Then the highest score comes first, of scores that differ by less than a fourth the larger share, and last of all
        what backward() reaches first, which is nearest to the loss.

        Empty where nothing is known of ``step``.
        """
        known = [(number, table) for number, table in self._steps if number <= step]
        if not known or known[-1][0] != step:
            return []
        table = known[-1][1]
        norms = torch.stack([_norms(other, table) for _, other in known])  # [steps, parameters]
        scores, usual = _scores(norms)
        squares = table.rows[:, Column.SQUARE_SUM]
        total = float(squares.sum())
        found = []
        for place in reversed(range(len(table.names))):
            spoiled = int(table.rows[place, Column.NONFINITE])
            since = _since([number for number, _ in known], None if scores is None else scores[:, place])
            score = math.inf if spoiled else None if scores is None else float(scores[-1, place])
            share = float(squares[place]) / total if 0 < total < math.inf else None
            norm, before = float(norms[-1, place]), None if usual is None else float(usual[place])
            found.append(Suspect(table.names[place], norm, before, score, share, since, spoiled, place))
        return sorted(found, key=_suspicion)


def _norms(other: Table, table: Table) -> Tensor:
    """Norms in ``other`` of the parameters in ``table``; NaN where it has none."""
    if other.names == table.names:
        return other.rows[:, Column.SQUARE_SUM].sqrt()
    place = {name: row for row, name in enumerate(other.names)}
    squares = [other.rows[place[name], Column.SQUARE_SUM].item() if name in place else math.nan for name in table.names]
    return torch.tensor(squares, dtype=torch.float64, device="cpu").sqrt()


def _scores(norms: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Robust z-scores of the log norms ``[steps, parameters]`` of the last steps, and the usual norms ``[parameters]``."""
    before = norms[: -1 - BEFORE] if len(norms) > BEFORE + _FEWEST else norms[:-1]
    if len(before) < _FEWEST:
        return None, None
    logs = torch.where(norms > 0, norms.log(), torch.where(norms == 0, LOG_OF_ZERO, torch.nan))
    logs = torch.where(norms.isinf(), torch.nan, logs)
    median = logs[: len(before)].nanmedian(dim=0).values
    spread = MAD_TO_STD * (logs[: len(before)] - median).abs().nanmedian(dim=0).values
    return (logs - median) / spread.clamp(min=_SMALLEST_SPREAD), median.exp()


def _since(steps: Sequence[int], scores: Tensor | None) -> int | None:
    """The first of the last steps in a row whose scores are above the threshold; a NaN or infinite gradient is."""
    found = None
    if scores is not None:
        for step, score in zip(reversed(steps), reversed(scores.tolist()), strict=True):
            if score <= THRESHOLD:
                break
            found = step
    return found


def _suspicion(suspect: Suspect) -> tuple[bool, float, float, float]:
    since = math.inf if suspect.since is None else suspect.since
    score = suspect.score or 0.0
    rank = score if math.isinf(score) else math.floor(math.log(max(score, 1.0), 1.25))
    return not suspect.nonfinite, since, -rank, -(suspect.share or 0.0)


def in_words(suspects: Sequence[Suspect], step: int, count: int = 3) -> str:
    """The first of ``suspects`` of ``step`` as the end of a sentence about a spike; empty where there is nothing to say."""
    spoiled = [suspect.name for suspect in suspects if suspect.nonfinite]
    if spoiled:
        more = f" and {len(spoiled) - count} more" if len(spoiled) > count else ""
        return f"NaN or Inf in the gradient of {', '.join(spoiled[:count])}{more}{_came_from(suspects)}"
    moved = [suspect for suspect in suspects if suspect.since is not None]
    if moved:
        first, *others = [f"{suspect.name} ({_times(suspect)}{_share(suspect)})" for suspect in moved[:count]]
        since = moved[0].since
        how = "moved most" if since is None or since >= step else f"moved first, in step {since}"
        rest = f", then {', '.join(others)}" if others else ""
        more = f" and {len(moved) - count} more" if len(moved) > count else ""
        return f"{first} {how}{rest}{more}"
    largest = sorted((suspect for suspect in suspects if suspect.share), key=lambda suspect: -(suspect.share or 0))[:count]
    top = ", ".join(f"{suspect.name} {suspect.share:.0%}" for suspect in largest)
    known = suspects and suspects[0].score is not None
    alone = "no parameter moved by itself; " if known else ""
    return f"{alone}of the squared norm hold {top}" if top else ""


def _came_from(suspects: Sequence[Suspect]) -> str:
    """What the gradients alone tell of where NaN or Inf began: backward() goes from the last parameter to the first."""
    in_order = sorted(suspects, key=lambda suspect: suspect.place)
    spoiled = [suspect.nonfinite > 0 for suspect in in_order]
    if all(spoiled):
        return "; no parameter's is spared, so it came out of the forward pass or the loss"
    last = len(spoiled) - 1 - spoiled[::-1].index(True)
    if last < len(spoiled) - 1 and all(spoiled[: last + 1]):
        finite = in_order[last + 1].name
        return f"; nearer to the loss, from {finite} on, all are finite, so it arose at {in_order[last].name}"
    return ""


def _times(suspect: Suspect) -> str:
    assert suspect.usual is not None
    return f"{times(suspect.norm / suspect.usual)} its usual norm" if suspect.usual > 0 else "usually zero"


def _share(suspect: Suspect) -> str:
    return "" if suspect.share is None else f", {suspect.share:.0%} of the square"
