"""Which layers moved when a signal of the whole model spiked, and which of them first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..names import GRADIENT, GRADIENT_BEFORE_CLIP
from ..record import Table
from ..statistics.moments import Column
from .arguments import times
from .hampel import LEAST, LOG_OF_ZERO, MAD_TO_STD, THRESHOLD

#: Steps whose gradients are remembered: 13 kB each for 200 parameters.
REMEMBERED = 64
#: A layer may have moved up to so many steps before the spike; what is normal is told from the steps before these.
BEFORE = 5
#: Fewest steps that tell what is normal.
_FEWEST = 8
#: Of the logarithm, as the default rule has it for gradient norms; a layer moved where its score is above that rule's threshold.
_SMALLEST_SPREAD = math.log(LEAST) / THRESHOLD


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
    """The statistics of the gradients of the last steps, as the records of the steps bring them.

    Those before clipping, where there are any: from then on a step without them does not count, so that clipped norms are never
    compared with unclipped ones.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Table]] = deque(maxlen=REMEMBERED)
        self._unclipped = False

    def see(self, step: int, tables: Mapping[str, Table]) -> None:
        """Remember the gradients among ``tables``. A step that comes again, as after a rollback, takes the place of the later ones."""
        before = tables.get(GRADIENT_BEFORE_CLIP)
        if before is not None and not self._unclipped:
            self._unclipped = True
            self._steps.clear()
        table = before if self._unclipped else tables.get(GRADIENT)
        self.forget(step)
        if table is not None and Column.SQUARE_SUM in table.columns:
            self._steps.append((step, table))

    def forget(self, step: int) -> None:
        """This step comes again: forget it, and all that came after it."""
        while self._steps and self._steps[-1][0] >= step:
            self._steps.pop()

    def fill(self, step: int, tables: Mapping[str, Table]) -> None:
        """Remember an earlier step that nobody has seen yet."""
        table = tables.get(self.source)
        if table is None or Column.SQUARE_SUM not in table.columns or self.table(step) is not None:
            return
        steps = sorted([*self._steps, (step, table)], key=lambda known: known[0])
        self._steps = deque(steps[-REMEMBERED:], maxlen=REMEMBERED)

    def table(self, step: int) -> Table | None:
        """The statistics of one step, if it is remembered."""
        return next((table for known, table in self._steps if known == step), None)

    @property
    def source(self) -> str:
        """Of which gradients they are."""
        return GRADIENT_BEFORE_CLIP if self._unclipped else GRADIENT

    def suspects(self, step: int) -> list[Suspect]:
        """The parameters in the order of suspicion: those with NaN or Inf, then those that moved, the earliest first, then the
        others. Then the highest score comes first, of scores that differ by less than a fourth the larger share, and last of all
        what backward() reaches first, which is nearest to the loss.

        Empty where nothing is known of ``step``.
        """
        known = [(number, table) for number, table in self._steps if number <= step]
        if not known or known[-1][0] != step:
            return []
        table, numbers = known[-1][1], [number for number, _ in known]
        norms, spoiled = (torch.stack(rows) for rows in zip(*(_aligned(other, table) for _, other in known), strict=True))
        scores, usual = robust_scores(norms)
        squares = table.rows[:, Column.SQUARE_SUM]
        total = float(squares.sum())
        found = []
        for place in reversed(range(len(table.names))):
            bad = int(table.rows[place, Column.NONFINITE])
            score, normal = float(scores[-1, place]), float(usual[place])
            share = float(squares[place]) / total if 0 < total < math.inf else None
            found.append(
                Suspect(
                    table.names[place],
                    float(norms[-1, place]),
                    None if math.isnan(normal) else normal,
                    math.inf if bad else None if math.isnan(score) else score,
                    share,
                    _since(numbers, scores[:, place].tolist(), spoiled[:, place].tolist()),
                    bad,
                    place,
                )
            )
        return sorted(found, key=_suspicion)


def _aligned(other: Table, table: Table) -> tuple[Tensor, Tensor]:
    """Norms in ``other`` of the parameters in ``table``, NaN where it has none; and whether they hold NaN or Inf."""
    rows = other.rows
    if other.names != table.names:
        place = {name: row for row, name in enumerate(other.names)}
        absent = torch.full((1, rows.shape[1]), torch.nan, dtype=torch.float64, device="cpu")
        rows = torch.cat([rows, absent])[[place.get(name, -1) for name in table.names]]
    return rows[:, Column.SQUARE_SUM].sqrt(), rows[:, Column.NONFINITE] > 0


def robust_scores(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Robust z-scores of the log norms ``[steps, parameters]`` of the last steps, and the usual norms ``[parameters]``; NaN where
    too little is known.
    """
    before = len(norms) - 1 - BEFORE if len(norms) > BEFORE + _FEWEST else len(norms) - 1
    logs = torch.where(norms > 0, norms.log(), torch.where(norms == 0, LOG_OF_ZERO, torch.nan))
    logs = torch.where(norms.isinf(), torch.nan, logs)
    enough = (~logs[:before].isnan()).sum(dim=0) >= _FEWEST
    if not bool(enough.any()):
        return torch.full_like(norms, torch.nan), torch.full_like(norms[0], torch.nan)
    median = torch.where(enough, logs[:before].nanmedian(dim=0).values, torch.nan)
    spread = MAD_TO_STD * (logs[:before] - median).abs().nanmedian(dim=0).values
    usual = torch.where(median <= LOG_OF_ZERO + 1, 0.0, median.exp())
    return (logs - median) / spread.clamp(min=_SMALLEST_SPREAD), usual


def _since(steps: Sequence[int], scores: Sequence[float], spoiled: Sequence[bool]) -> int | None:
    """The first of the last steps in a row whose scores are above the threshold, or whose gradients hold NaN or Inf. Steps in which
    the parameter had no gradient do not count. None where too little is known to say that it moved in the last one.
    """
    found = None
    if not spoiled[-1] and math.isnan(scores[-1]):
        return found
    for step, score, bad in zip(reversed(steps), reversed(scores), reversed(spoiled), strict=True):
        if bad or score > THRESHOLD:
            found = step
        elif not math.isnan(score):
            break
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
    known = any(suspect.score is not None for suspect in suspects)
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
