"""What caused a spike, as text: one layer, all layers together, or all layers up to the one where it began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.formatting import factor_text, times
from .level import LEAST
from .suspects import ParameterAttribution, are_alike, begins_at, last_of_all, module_of

#: Layers rose together if the median layer rose by at least this part of the rise of the whole norm, both as logarithms. The part is above
#: 0.8 for a loss times 100 and for noisy batches, and below 0.2 if one layer is disturbed. Measured on the model of ``gradmon demo`` with
#: SGD and AdamW, with and without a clip, in steps 12 to 110.
_PART = 0.5
#: Share of layers that must have risen by at least half of the median rise, as logarithms; some layers are too noisy for all of them.
_MOST = 0.75
#: A parameter with more than this share of the squared norm has most of it.
_MAJORITY = 0.5
#: Number of layers named individually.
_NAMED = 3


@dataclass(frozen=True)
class SpikeCause:
    """The cause of a spike.

    Attributes:
        layer: the most suspicious parameter; empty if no single one stands out.
        did: what it did, or what all layers did together, in a few words; empty if nothing is known.
        words: the full text, as part of a sentence about a spike.
        is_common: layers rose together, so no single one is the cause.
    """

    layer: str = ""
    did: str = ""
    words: str = ""
    is_common: bool = False


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
        return _spoiled_after(suspects)
    if any(suspect.nonfinite for suspect in suspects):
        return _spoiled(suspects, loss, is_open, by_turns)
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
            return SpikeCause("", did, f"{_listed(early)} {_when(early[0], step)}; {words}", is_common=True)
        return SpikeCause("", did, f"{words}{_loudest(suspects)}", is_common=True)
    if moved:
        when = _when(moved[0], step)
        rest = f", then {_listed(moved[1:], _NAMED - 1)}" if len(moved) > 1 else ""
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
    """How many rose, and by which factor."""
    those = f"{len(factors)} of {count}" if len(factors) < count else "both" if count == 2 else f"all {count}"
    low, high = factor_text(min(factors)), factor_text(max(factors))
    return f"{those} {what} rose together, by {low if low == high else f'{low} to {high}'} times their usual norms"


def _when(suspect: ParameterAttribution, step: int) -> str:
    return "moved most" if suspect.since is None or suspect.since >= step else f"moved first, in step {suspect.since}"


def _listed(suspects: Sequence[ParameterAttribution], most: int = _NAMED) -> str:
    named = suspects[:most]
    more = f" and {len(suspects) - len(named)} more" if len(suspects) > len(named) else ""
    return f"{', '.join(map(_described, named))}{more}"


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
    known = any(suspect.score is not None for suspect in suspects)
    noise = (
        "no parameter moved by more than its own noise" if known else "too few steps are known to determine which parameter moved"
    )
    return f"{noise}; the largest shares of the squared norm: {top}" if top else ""


def _spoiled_after(suspects: Sequence[ParameterAttribution]) -> SpikeCause:
    """NaN or Inf that no backward pass brought."""
    spoiled = [suspect.name for suspect in suspects if suspect.is_spoiled_after]
    is_all = len(spoiled) == len(suspects)
    those = "those of all parameters" if is_all else f"that of {_few(spoiled)}"
    words = (
        f"all gradients were finite when backward() ended, and the loop made {those} NaN or infinite before the optimizer's step"
    )
    did = "got NaN or Inf between backward() and the optimizer's step"
    return SpikeCause("" if is_all else spoiled[0], f"{'all parameters ' if is_all else ''}{did}", words, is_common=is_all)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _spoiled(suspects: Sequence[ParameterAttribution], loss: float | None, is_open: bool, by_turns: bool) -> SpikeCause:
    """What gradients alone show about the origin of NaN or Inf: backward() goes from the last parameter to the first."""
    spoiled = [suspect for suspect in suspects if suspect.nonfinite]
    names = _few([suspect.name for suspect in spoiled])
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
