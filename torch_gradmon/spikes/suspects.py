"""The parameters at the time of a spike, in order of suspicion: which moved, and which of them first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .level import LEAST, THRESHOLD
from .usual import Baseline

#: Steps whose gradients are kept: 13 kB each for 200 parameters.
REMEMBERED = 64
#: A parameter with less of the squared norm has not made the spike.
_SHARE = 0.05
#: Parameters rose alike if the factors of half of them differ from the median factor by at most this. It is 1.1 to 1.8 for a loss times 100
#: and for noisy batches, on the model of ``gradmon demo``, in steps 12 to 110.
_ALIKE = 3.0


@dataclass(frozen=True, slots=True)
class ParameterAttribution:
    """A parameter at the time of a spike.

    Attributes:
        name: of the parameter.
        norm: of its gradient.
        usual: its usual norm, see :class:`torch_gradmon.spikes.usual.Baseline`; None if too few steps are known.
        score: robust standard deviations of the log norm above usual; infinite for NaN and Inf, None if too few steps are known.
        share: of the squared norm of the whole gradient; None if unknown, zero or not finite.
        since: first step of the unbroken run of scores above the threshold. Also this step if the whole norm would be below 1.5 times
            usual without this parameter. Else None.
        nonfinite: number of NaN and infinite elements.
        place: in the order of the model's parameters.
        is_spoiled_after: its gradient was finite when the backward pass ended, and NaN or infinite when the optimizer used it.
    """

    name: str
    norm: float
    usual: float | None
    score: float | None
    share: float | None
    since: int | None
    nonfinite: int
    place: int
    is_spoiled_after: bool = False

    @property
    def factor(self) -> float | None:
        """The ratio to its usual norm; None if that is unknown or zero."""
        return self.norm / self.usual if self.usual else None


def ranked(
    steps: Sequence[int], names: Sequence[str], norms: Tensor, spoiled: Tensor, *, is_part: bool = False
) -> list[ParameterAttribution]:
    """The parameters in the last of ``steps``, in order of suspicion.

    Parameters with NaN or Inf come first, then those that moved, earliest first, then the others. Among those that moved in the same
    step, parameters with less than a twentieth of the squared norm come last, since they have not made the spike. Then the higher score
    counts; among scores within a fourth of each other, the larger share; and finally the order of backward(), nearest to the loss first.
    That order comes before scores if :func:`begins_at` finds one common origin.

    Args:
        steps: ascending; the last :data:`REMEMBERED` of them count.
        names: of the parameters.
        norms: of their gradients, float64 ``[steps, parameters]``, NaN if there is none.
        spoiled: numbers of NaN and infinite elements, of the same shape.
        is_part: there are further parameters, so shares of the whole are unknown.
    """
    steps, norms, spoiled = steps[-REMEMBERED:], norms[-REMEMBERED:], spoiled[-REMEMBERED:]
    before = Baseline.of(norms[:-1])
    scores, usual, squares = before.scores(norms), before.norms.tolist(), norms[-1].square()
    total = math.nan if is_part else float(squares.sum())
    alone = [False] * len(names) if is_part else _alone(squares, before.norms.square())
    found = []
    for place in reversed(range(len(names))):
        bad, score = int(spoiled[-1, place]), float(scores[-1, place])
        since = _since(steps, scores[:, place].tolist(), (spoiled[:, place] > 0).tolist())
        found.append(
            ParameterAttribution(
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
    """For each parameter: whether the whole norm rose to 1.5 times usual or more, and would not have without it. Takes squared norms."""
    known = torch.where(usual.isnan(), squares, usual)
    least = LEAST**2 * known.sum()
    found: list[bool] = ((squares.sum() >= least) & (squares.sum() - squares + known < least) & (squares > usual)).tolist()
    return found


def begins_at(suspects: Sequence[ParameterAttribution]) -> ParameterAttribution | None:
    """The parameter where the movement began: the moved one nearest to the loss.

    All parameters before it in the model must have moved alike. Those behind it, which backward() reaches first, must not have moved or
    risen by half. None otherwise, and if only one layer moved.
    """
    known = [suspect for suspect in suspects if suspect.score is not None]
    last = last_of_all(known, lambda suspect: suspect.since is not None)
    if last is None or last.place == min(suspect.place for suspect in known):
        return None
    if not are_alike([math.log(suspect.factor) for suspect in known if suspect.place <= last.place and suspect.factor]):
        return None
    behind = [suspect for suspect in known if suspect.place > last.place]
    is_calm = all(suspect.factor is None or suspect.factor < LEAST for suspect in behind)
    # a bias has the same gradient of the output as the weight of its module
    return last if is_calm and any(module_of(suspect.name) != module_of(last.name) for suspect in behind) else None


def are_alike(rises: Sequence[float]) -> bool:
    """Whether half of ``rises``, which are logarithms, are within a factor of :data:`_ALIKE` of the median."""
    ordered = sorted(rises)
    off = sorted(abs(rise - ordered[(len(ordered) - 1) // 2]) for rise in ordered)
    return bool(off) and off[len(off) // 2] <= math.log(_ALIKE)


def last_of_all(
    suspects: Sequence[ParameterAttribution], holds: Callable[[ParameterAttribution], bool]
) -> ParameterAttribution | None:
    """The last parameter of the model for which ``holds`` is true, if it is true for all before it and false for all behind it.

    None otherwise, and if it is true for all parameters.
    """
    in_order = sorted(suspects, key=lambda suspect: suspect.place)
    those = list(itertools.takewhile(holds, in_order))
    return those[-1] if those and len(those) < len(in_order) and not any(map(holds, in_order[len(those) :])) else None


def module_of(name: str) -> str:
    """The module of a parameter; the parameter itself if it is the whole model."""
    return name.rpartition(".")[0] or name


def _since(steps: Sequence[int], scores: Sequence[float], spoiled: Sequence[bool]) -> int | None:
    """The first step of the last unbroken run of scores above the threshold, or of NaN and Inf.

    Steps without a gradient are skipped. None if the parameter did not move in the last step, or too little is known.
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


def _suspicion(suspect: ParameterAttribution) -> tuple[bool, float, bool, float, float]:
    since = math.inf if suspect.since is None else suspect.since
    score, share = suspect.score or 0.0, suspect.share
    rank = score if math.isinf(score) else math.floor(math.log(max(score, 1.0), 1.25))
    return not suspect.nonfinite, since, share is not None and share < _SHARE, -rank, -(share or 0.0)


def _nearest_first(suspect: ParameterAttribution) -> tuple[bool, float, int]:
    return not suspect.nonfinite, math.inf if suspect.since is None else suspect.since, -suspect.place
