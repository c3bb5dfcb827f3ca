"""The layers at the time of a spike in the order of suspicion: which moved, and which of them first."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.keys import GRADIENT, GRADIENT_BEFORE_CLIP
from ..core.moments import Column
from ..core.records import Table
from .hampel import LEAST, THRESHOLD
from .usual import Usual

#: Steps whose gradients are remembered: 13 kB each for 200 parameters.
REMEMBERED = 64
#: A layer that holds less of the squared norm has not made the spike.
_SHARE = 0.05
#: Layers rose alike where half of them rose by that factor more or less than the median one at most. It is 1.1 to 1.8 for a loss times
#: 100 and for batches of noise, on the model of ``gradmon demo``, in steps from 12 to 110.
_ALIKE = 3.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A parameter at the time of a spike.

    Attributes:
        name: of the parameter.
        norm: of its gradient.
        usual: its usual norm, see :class:`torch_gradmon.spikes.usual.Usual`; None where too few steps are known.
        score: robust standard deviations of the log norm above that; infinite for NaN and Inf, None where too few steps are known.
        share: of the squared norm of the whole gradient; None where that is not known, zero or not finite.
        since: step from which on its score is above the threshold without a break; this step also where without this layer the norm of all
            would be less than 1.5 times the usual; None where it is neither.
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

    @property
    def factor(self) -> float | None:
        """How many times its usual norm it has; None where that is not known, or zero."""
        return self.norm / self.usual if self.usual else None


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
        """The parameters in the order of suspicion, see :func:`ranked`. Empty where nothing is known of ``step``."""
        known = [(number, table) for number, table in self._steps if number <= step]
        if not known or known[-1][0] != step:
            return []
        table, numbers = known[-1][1], [number for number, _ in known]
        norms, spoiled = (torch.stack(rows) for rows in zip(*(_aligned(other, table) for _, other in known), strict=True))
        return ranked(numbers, table.names, norms, spoiled, is_part=table.is_part)


def ranked(steps: Sequence[int], names: Sequence[str], norms: Tensor, spoiled: Tensor, *, is_part: bool = False) -> list[Suspect]:
    """The parameters in the last of ``steps`` in the order of suspicion.

    Those with NaN or Inf come first, then those that moved, the earliest first, then the others. Of those that moved in the same step,
    the ones that hold a twentieth of the squared norm or more come first, for the others have not made the spike. Then the highest score
    counts, of scores that differ by less than a fourth the larger share, and last of all what backward() reaches first, which is
    nearest to the loss. That counts before scores where :func:`begins_at` finds that all began there.

    Args:
        steps: ascending; the last :data:`REMEMBERED` of them count.
        names: of the parameters.
        norms: of their gradients, float64 ``[steps, parameters]``; NaN where there is none.
        spoiled: how many elements are NaN or infinite, likewise.
        is_part: other parameters have gradients too, so that no share of the whole is known.
    """
    steps, norms, spoiled = steps[-REMEMBERED:], norms[-REMEMBERED:], spoiled[-REMEMBERED:]
    before = Usual.of(norms[:-1])
    scores, usual, squares = before.scores(norms), before.norms.tolist(), norms[-1].square()
    total = math.nan if is_part else float(squares.sum())
    alone = [False] * len(names) if is_part else _alone(squares, before.norms.square())
    found = []
    for place in reversed(range(len(names))):
        bad, score = int(spoiled[-1, place]), float(scores[-1, place])
        since = _since(steps, scores[:, place].tolist(), (spoiled[:, place] > 0).tolist())
        found.append(
            Suspect(
                names[place],
                float(norms[-1, place]),
                None if math.isnan(usual[place]) else usual[place],
                math.inf if bad else None if math.isnan(score) else score,
                float(squares[place]) / total if 0 < total < math.inf else None,
                steps[-1] if since is None and alone[place] else since,
                bad,
                place,
            )
        )
    began = begins_at(found)
    return sorted(found, key=_suspicion if began is None else _nearest_first)


def _alone(squares: Tensor, usual: Tensor) -> list[bool]:
    """By layer whether all together rose to 1.5 times the usual or more, and had not without it; from squared norms."""
    known = torch.where(usual.isnan(), squares, usual)
    least = LEAST**2 * known.sum()
    found: list[bool] = ((squares.sum() >= least) & (squares.sum() - squares + known < least) & (squares > usual)).tolist()
    return found


def begins_at(suspects: Sequence[Suspect]) -> Suspect | None:
    """Where what moved began: of the layers that did, the one nearest to the loss, if all before it in the model moved alike, and of those
    behind it, which backward() reaches first, none did, nor rose by half. None where it is not so, or one layer alone moved.
    """
    known = [suspect for suspect in suspects if suspect.score is not None]
    last = last_of_all(known, lambda suspect: suspect.since is not None)
    if last is None or last.place == min(suspect.place for suspect in known):
        return None
    if not are_alike([math.log(suspect.factor) for suspect in known if suspect.place <= last.place and suspect.factor]):
        return None
    behind = [suspect for suspect in known if suspect.place > last.place]
    is_calm = all(suspect.factor is None or suspect.factor < LEAST for suspect in behind)
    # weight and bias of one module have the same gradient of its output
    return last if is_calm and any(module_of(suspect.name) != module_of(last.name) for suspect in behind) else None


def are_alike(rises: Sequence[float]) -> bool:
    """Whether half of some rises, as logarithms, are no farther than a factor of :data:`_ALIKE` from the median one."""
    ordered = sorted(rises)
    off = sorted(abs(rise - ordered[(len(ordered) - 1) // 2]) for rise in ordered)
    return bool(off) and off[len(off) // 2] <= math.log(_ALIKE)


def last_of_all(suspects: Sequence[Suspect], holds: Callable[[Suspect], bool]) -> Suspect | None:
    """The last one in the order of the model for which something holds, if it holds for all before it and for none behind it, and there
    are some.
    """
    in_order = sorted(suspects, key=lambda suspect: suspect.place)
    those = list(itertools.takewhile(holds, in_order))
    return those[-1] if those and len(those) < len(in_order) and not any(map(holds, in_order[len(those) :])) else None


def module_of(name: str) -> str:
    """The module that a parameter belongs to; the parameter itself where that is the whole model."""
    return name.rpartition(".")[0] or name


def _aligned(other: Table, table: Table) -> tuple[Tensor, Tensor]:
    """Norms in ``other`` of the parameters in ``table``, NaN where it has none; and how many elements are NaN or infinite."""
    rows = other.rows
    if other.names != table.names:
        place = {name: row for row, name in enumerate(other.names)}
        absent = torch.full((1, rows.shape[1]), torch.nan, dtype=torch.float64, device="cpu")
        rows = torch.cat([rows, absent])[[place.get(name, -1) for name in table.names]]
    return rows[:, Column.SQUARE_SUM].sqrt(), rows[:, Column.NONFINITE].nan_to_num(0.0)


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


def _suspicion(suspect: Suspect) -> tuple[bool, float, bool, float, float]:
    since = math.inf if suspect.since is None else suspect.since
    score, share = suspect.score or 0.0, suspect.share
    rank = score if math.isinf(score) else math.floor(math.log(max(score, 1.0), 1.25))
    return not suspect.nonfinite, since, share is not None and share < _SHARE, -rank, -(share or 0.0)


def _nearest_first(suspect: Suspect) -> tuple[bool, float, int]:
    return not suspect.nonfinite, math.inf if suspect.since is None else suspect.since, -suspect.place
