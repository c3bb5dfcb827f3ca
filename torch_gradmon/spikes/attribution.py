"""What caused a spike, as text: one layer, all layers together, or all layers up to the one where it began."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.formatting import factor_text, listed, percent, times
from ..core.keys import ACTIVATION, ACTIVATION_GRADIENT, PARAMETER, ROOT
from ..core.moments import Column
from ..core.records import StatsTable, StepRecord
from .hampel import EARLY, EARLY_SPREAD, FEWEST_RESIDUALS, FIRST, LEAST, LOG_OF_ZERO, MAD_TO_STD, NEAR, REMEMBERED, THRESHOLD

# --- usual norms ---


@dataclass(frozen=True)
class Baseline:
    """The usual norms of some layers. All tensors are ``[layers]``, NaN where too few steps are known."""

    positions: Tensor  # logarithms of the usual norms
    # robust standard deviations of the logarithms, with a floor that keeps rises below a factor of 1.5 from being spikes
    spreads: Tensor

    @classmethod
    def of(cls, norms: Tensor) -> Baseline:
        """From the ``norms`` of some steps, float64 ``[steps, layers]``, NaN where a layer has none. Infinite norms are ignored."""
        if not len(norms):
            unknown = norms.new_full(norms.shape[1:], torch.nan)
            return cls(unknown, unknown)
        logs = _logs(norms)
        # move NaN to the front of each layer: a step without a gradient, as for a rarely used expert, must not take a place in the window
        logs = logs.gather(0, logs.isnan().to(torch.uint8).argsort(dim=0, stable=True))
        count = (~logs.isnan()).sum(dim=0)
        before = torch.cat([logs.new_full((NEAR, logs.shape[1]), torch.nan), logs]).unfold(0, NEAR, 1)[: len(logs)]
        is_known = (~before.isnan()).sum(dim=-1) >= FIRST
        residuals = torch.where(is_known, logs - _median(before, -1), torch.nan)
        deviations = _median((residuals - _median(residuals, 0)).abs(), 0)
        deviations = torch.where((~residuals.isnan()).sum(dim=0) >= FEWEST_RESIDUALS, deviations, 0.0)
        least = (math.log(LEAST) + EARLY / count) / THRESHOLD
        spreads = torch.maximum(MAD_TO_STD * deviations * (1 + EARLY_SPREAD / count), least)
        calm = torch.where(residuals > THRESHOLD * spreads, torch.nan, logs)
        places = (~calm.isnan()).flip(0).cumsum(0).flip(0)  # counted from the last step, which is 1
        last = torch.where(places <= NEAR, calm, torch.nan)
        enough = count >= FIRST
        return cls(torch.where(enough, _median(last, 0), torch.nan), torch.where(enough, spreads, torch.nan))

    @property
    def norms(self) -> Tensor:
        return torch.where(self.positions <= LOG_OF_ZERO + 1, 0.0, self.positions.exp())

    def scores(self, norms: Tensor) -> Tensor:
        """Robust standard deviations of ``norms``, ``[..., layers]``, above the baseline; NaN where it is unknown."""
        return (_logs(norms) - self.positions) / self.spreads


def _logs(norms: Tensor) -> Tensor:
    logs = torch.where(norms > 0, norms.log(), torch.where(norms == 0, LOG_OF_ZERO, torch.nan))
    return torch.where(norms.isinf(), torch.nan, logs)


def _median(values: Tensor, dim: int) -> Tensor:
    """The median without NaN; for an even count, the mean of the two middle values, as in the rule."""
    ordered, count = values.sort(dim=dim).values, (~values.isnan()).sum(dim=dim, keepdim=True)  # NaN comes last
    middle = ordered.gather(dim, (count - 1).clamp(min=0) // 2) + ordered.gather(dim, count // 2)
    return (middle / 2).squeeze(dim)


# --- parameters in order of suspicion ---

#: A parameter with less of the squared norm has not made the spike.
_SHARE = 0.05
#: Parameters rose alike if the factors of half of them differ from the median factor by at most this. It is 1.1 to 1.8 for a loss times 100
#: and for noisy batches, on the model of ``gradmon demo``, in steps 12 to 110.
_ALIKE = 3.0


@dataclass(frozen=True, slots=True)
class ParameterAttribution:
    name: str
    norm: float  # of its gradient
    usual: float | None  # its usual norm, see :class:`torch_gradmon.spikes.attribution.Baseline`; None if too few steps are known
    # robust standard deviations of the log norm above usual; infinite for NaN and Inf, None if too few steps are known
    score: float | None
    share: float | None  # of the squared norm of the whole gradient; None if unknown, zero or not finite
    # first step of the unbroken run of scores above the threshold. Also this step if the whole norm would be below 1.5 times
    # usual without this parameter. Else None.
    since: int | None
    nonfinite: int  # number of NaN and infinite elements
    place: int  # in the order of the model's parameters
    # its gradient was finite when the backward pass ended, and NaN or infinite when the optimizer used it
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

    ``norms`` are those of their gradients, float64 ``[steps, parameters]``, NaN if there is none; ``spoiled`` the numbers of NaN and
    infinite elements; the last :data:`REMEMBERED` steps count. ``is_part``: there are further parameters, so shares are unknown.
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
    if began is None:
        return sorted(found, key=_suspicion)
    return sorted(found, key=lambda suspect: (*_suspicion(suspect)[:2], -suspect.place))  # nearest to the loss first


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
    """The last parameter of the model for which ``holds`` is true, if it is for all before it and for none behind it, of which there is."""
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


# --- where NaN or Inf began ---


def nonfinite_origin(record: StepRecord, forward_only: bool = False) -> str:
    """Describe where NaN or Inf began in this step; empty if no measured tensor holds any.

    The search follows the computation: parameters, then outputs in forward order, then gradients of outputs in backward order. A module
    that contains others is skipped if one of these holds NaN or Inf, since their outputs are part of its own. ``forward_only`` ignores
    gradients, as while a gradient scaler searches for its scale.
    """
    if parameters := _spoiled(record.tables.get(PARAMETER)):
        return f"parameters hold NaN or Inf, as a step leaves them that is applied with such gradients: {listed(parameters, 3)}"
    if outputs := _spoiled(record.tables.get(ACTIVATION)):
        return f"the forward pass has its first NaN or Inf in the output of {_first(outputs)}"
    if not forward_only and (gradients := _spoiled(record.tables.get(ACTIVATION_GRADIENT))):
        where = f"in the gradient of the output of {_first(gradients)}"
        return f"the forward pass is finite, and the backward pass has its first NaN or Inf {where}"
    return ""


def _spoiled(table: StatsTable | None) -> dict[str, str]:
    """How many elements are not finite, by the names of the tensors that have such."""
    if table is None:
        return {}
    counts = zip(table.names, table.rows[:, Column.NONFINITE].tolist(), table.rows[:, Column.COUNT].tolist(), strict=True)
    return {name: f"{int(bad):,} of {int(count):,} elements" for name, bad, count in counts if bad}


def _first(spoiled: Mapping[str, str]) -> str:
    name = innermost(list(spoiled))[0]
    return f"{name} ({spoiled[name]})"


def innermost(names: Sequence[str]) -> list[str]:
    """Drop modules that contain another one of ``names``; the root contains all."""
    return [
        name for name in names if not any(other != name and (name == ROOT or other.startswith(f"{name}.")) for other in names)
    ]


# --- the cause as text ---

#: Layers rose together if the median layer rose by at least this part of the rise of the whole norm, both as logarithms. The part is above
#: 0.8 for a loss times 100 and for noisy batches, and below 0.2 if one layer is disturbed. Measured on the model of ``gradmon demo`` with
#: SGD and AdamW, with and without a clip, in steps 12 to 110.
_PART = 0.5
#: Share of layers that must have risen by at least half of the median rise, as logarithms; some layers are too noisy for all of them.
_MOST = 0.75
#: A parameter with more than this share of the squared norm has most of it.
_MAJORITY = 0.5
#: Number of layers, and of rows of a batch, that are named individually.
_NAMED = 3
#: A row stands out if it has more than the mean loss, and this many times the mean of the rows with smaller ones.
_ROW_STANDS_OUT = 5.0
#: Factor above the median of the others from which on a micro-batch stands out.
_BATCH_STANDS_OUT = 3.0


@dataclass(frozen=True)
class SpikeCause:
    layer: str = ""  # the most suspicious parameter; empty if no single one stands out
    did: str = ""  # what it did, or what all layers did together, in a few words; empty if nothing is known
    words: str = ""  # the full text, as part of a sentence about a spike
    is_common: bool = False  # layers rose together, so no single one is the cause


def spike_cause(
    suspects: Sequence[ParameterAttribution],
    step: int,
    loss: float | None = None,
    is_open: bool = False,
    by_turns: bool = False,
) -> SpikeCause:
    """The cause of the spike in ``step``, from the parameters of that step in order of suspicion, and its loss if that is known.

    ``is_open``: it may still be logged. ``by_turns``: optimizers take turns in the step, so that several losses went backward.
    """
    if any(suspect.is_spoiled_after for suspect in suspects):
        return _spoiled_after_cause(suspects)
    if any(suspect.nonfinite for suspect in suspects):
        return _nonfinite_cause(suspects, loss, is_open, by_turns)
    moved = [suspect for suspect in suspects if suspect.since is not None]
    factors = [suspect.factor for suspect in moved if suspect.factor is not None]
    if factors and begins_at(suspects) is not None:
        did = _together(factors, len(suspects), "parameters")
        words = f"{moved[0].name}, where it began: {did}, and none of the others is nearer to the loss"
        return SpikeCause(moved[0].name, f"is where it began ({_times(moved[0])})", words)
    risen, count = _risen(suspects)
    if risen:
        early = [suspect for suspect in moved if suspect.since != step]
        did = _together(risen, count, "layers")
        words = f"{did}, which points to the batch, the loss or the update before"
        if 0 < len(early) <= len(suspects) / 2:
            return SpikeCause(
                "", did, f"{listed(map(_described, early), _NAMED)} {_when(early[0], step)}; {words}", is_common=True
            )
        return SpikeCause("", did, f"{words}{_loudest(suspects)}", is_common=True)
    if moved:
        when = _when(moved[0], step)
        rest = f", then {listed(map(_described, moved[1:]), _NAMED - 1)}" if len(moved) > 1 else ""
        return SpikeCause(moved[0].name, f"{when} ({_times(moved[0])})", f"{_described(moved[0])} {when}{rest}")
    return SpikeCause(words=_shares(suspects))


def _risen(suspects: Sequence[ParameterAttribution]) -> tuple[list[float], int]:
    """Factors above usual of the layers that rose together, ascending, and the number of layers.

    The list is empty unless nearly all layers rose alike. The parameters of a module count as one layer: the gradient of a bias follows the
    loss, that of a weight also the size of the inputs.
    """
    layers: dict[str, list[ParameterAttribution]] = {}
    for suspect in suspects:
        if suspect.factor and math.isfinite(suspect.factor):
            layers.setdefault(module_of(suspect.name), []).append(suspect)
    if len(layers) < 2:
        return [], len(layers)
    rises = sorted(map(_rise, layers.values()))
    typical, whole = rises[(len(rises) - 1) // 2], _rise([suspect for own in layers.values() for suspect in own])
    risen = [math.exp(rise) for rise in rises if rise >= typical / 2]
    is_shared = typical >= max(math.log(LEAST), _PART * whole) and are_alike(rises)
    return risen if is_shared and len(risen) >= _MOST * len(layers) else [], len(layers)


def _loudest(suspects: Sequence[ParameterAttribution]) -> str:
    """The end of the sentence: among layers that rose together one stands out if it has most of the squared norm, and usually has not."""
    loudest, usual = max(suspects, key=lambda each: each.share or 0.0), math.hypot(*(each.usual or 0.0 for each in suspects))
    if not (loudest.share or 0.0) > _MAJORITY:
        return ", and to no single layer"
    share = f"{loudest.name} has {loudest.share:.0%} of the squared norm, and usually"
    was = ((loudest.usual or 0.0) / usual) ** 2
    if was > _MAJORITY:
        return f", and to no single layer: {share} {was:.0%}"
    return f"; {share} {was:.0%}"


def _rise(suspects: Sequence[ParameterAttribution]) -> float:
    """The rise of the joint norm above usual, as a logarithm."""
    return math.log(math.hypot(*(each.norm for each in suspects)) / math.hypot(*(each.usual or 0.0 for each in suspects)))


def _where_all(suspects: Sequence[ParameterAttribution], loss: float | None, is_open: bool, by_turns: bool) -> str:
    """Where NaN or Inf arose that all gradients have."""
    if by_turns:
        return "and optimizers take turns: it came with the one that stepped first, and reached the others through what that one wrote"
    if loss is None:
        told = "the loss, which is not logged yet in this step, tells which" if is_open else "log the loss to distinguish them"
        return f"so it came out of the forward pass, the loss, or the first layers of the backward pass: {told}"
    if not math.isfinite(loss):
        return f"and the loss is {loss}, so it came out of the forward pass or the loss"
    nearest = max(suspects, key=lambda suspect: suspect.place).name
    return f"but the loss is finite, so it arose in the backward pass, in a derivative between the loss and {nearest}"


def _together(factors: Sequence[float], count: int, what: str) -> str:
    those = f"{len(factors)} of {count}" if len(factors) < count else "both" if count == 2 else f"all {count}"
    low, high = factor_text(min(factors)), factor_text(max(factors))
    return f"{those} {what} rose together, by {low if low == high else f'{low} to {high}'} times their usual norms"


def _when(suspect: ParameterAttribution, step: int) -> str:
    return "moved most" if suspect.since is None or suspect.since >= step else f"moved first, in step {suspect.since}"


def _described(suspect: ParameterAttribution) -> str:
    share = "" if suspect.share is None else f", {suspect.share:.0%} of the square"
    return f"{suspect.name} ({_times(suspect)}{share})"


def _times(suspect: ParameterAttribution) -> str:
    if suspect.usual is None:
        return "usual norm unknown"
    return "usually zero" if suspect.factor is None else f"{times(suspect.factor)} its usual norm"


def _shares(suspects: Sequence[ParameterAttribution]) -> str:
    """Fallback if nothing stands out: the largest shares of the gradient."""
    largest = sorted((suspect for suspect in suspects if suspect.share), key=lambda suspect: -(suspect.share or 0))[:_NAMED]
    top = ", ".join(f"{suspect.name} {suspect.share:.0%}" for suspect in largest)
    noise = "too few steps are known to determine which parameter moved"
    if any(suspect.score is not None for suspect in suspects):
        noise = "no parameter moved by more than its own noise"
    return f"{noise}; the largest shares of the squared norm: {top}" if top else ""


def _spoiled_after_cause(suspects: Sequence[ParameterAttribution]) -> SpikeCause:
    """NaN or Inf that no backward pass brought."""
    spoiled = [suspect.name for suspect in suspects if suspect.is_spoiled_after]
    is_all = len(spoiled) == len(suspects)
    those = "those of all parameters" if is_all else f"that of {listed(spoiled, _NAMED)}"
    words = (
        f"all gradients were finite when backward() ended, and the loop made {those} NaN or infinite before the optimizer's step"
    )
    did = "got NaN or Inf between backward() and the optimizer's step"
    return SpikeCause("" if is_all else spoiled[0], f"{'all parameters ' if is_all else ''}{did}", words, is_common=is_all)


def _nonfinite_cause(suspects: Sequence[ParameterAttribution], loss: float | None, is_open: bool, by_turns: bool) -> SpikeCause:
    """What gradients alone show about the origin of NaN or Inf: backward() goes from the last parameter to the first."""
    spoiled = [suspect for suspect in suspects if suspect.nonfinite]
    names = listed((suspect.name for suspect in spoiled), _NAMED)
    words = f"NaN or Inf in the gradient of {names}"
    if len(spoiled) == len(suspects):
        out_of = f"; no parameter's is spared, {_where_all(suspects, loss, is_open, by_turns)}"
        if len(suspects) > 1:
            return SpikeCause("", f"all {len(suspects)} parameters have NaN or Inf", words + out_of, is_common=True)
        return SpikeCause(names, "has NaN or Inf", words + out_of)
    last = last_of_all(suspects, lambda suspect: suspect.nonfinite > 0)
    if last is not None and not by_turns:  # else the next network is no nearer to the loss
        finite = min((suspect for suspect in suspects if not suspect.nonfinite), key=lambda suspect: suspect.place)
        words += f"; nearer to the loss, from {finite.name} on, all are finite, so it arose at {last.name}"
    return SpikeCause(spoiled[0].name, "has NaN or Inf", words)


# --- rows of a batch, and micro-batches, that stand out ---


def rows_text(rows: Mapping[str, Any]) -> str:
    """Which rows stand out, as part of a sentence about a spike; empty without any."""
    if not rows or rows["count"] < 2:
        return ""
    ids, losses, count, total = list(map(str, rows["ids"])), rows["losses"], rows["count"], rows["sum"]
    if rows["nonfinite"]:
        odd = [name for name, loss in zip(ids, losses, strict=True) if not math.isfinite(loss)][:_NAMED]
        more = rows["nonfinite"] - len(odd)
        names = ", ".join(odd) + (f" and {more} more" if more > 0 else "")
        return f"of {count} rows {rows['nonfinite']} have a loss that is NaN or infinite: {names}"
    if not total > 0 or rows.get("negative"):
        return ""
    far = 0
    for place, loss in enumerate(losses[: count - 1], 1):
        others = max(total - sum(losses[:place]), 0.0) / (count - place)
        far = place if loss > max(_ROW_STANDS_OUT * others, total / count) else far
    shares = [loss / total for loss in losses]
    if not far:
        return f"no row of {count} stands out: the largest share of the loss, of row {ids[0]}, is {percent(shares[0])}"
    named = listed([f"{name} ({percent(share)})" for name, share in zip(ids[:far], shares, strict=False)], _NAMED)
    return f"of {count} rows the largest shares of the loss are those of {named}"


def rank_norms_text(norms: Mapping[str, Sequence[float]]) -> str:
    """Which micro-batch stands out, as part of a sentence about a spike; empty with fewer than two."""
    every = [(number, int(rank), norm) for rank, each in norms.items() for number, norm in enumerate(each)]
    if len(every) < 2:
        return ""
    spoiled = sorted((number, rank) for number, rank, norm in every if not math.isfinite(norm))
    if spoiled:
        number, rank = spoiled[0]
        return f"of {len(every)} micro-batches {len(spoiled)} brought NaN or Inf, first number {number} of rank {rank}"
    number, rank, worst = max(every, key=lambda each: each[2])
    usual = statistics.median(norm for *where, norm in every if where != [number, rank])
    if worst < _BATCH_STANDS_OUT * usual or not usual:
        return f"all {len(every)} micro-batches are alike"
    return f"micro-batch {number} of rank {rank} has {times(worst / usual)} the norm of the {len(every) - 1} others"
