"""What made a spike, in words: one layer, all layers together, or all of them up to one where it began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.formatting import factor_text, times
from .hampel import LEAST
from .suspects import Suspect, are_alike, begins_at, last_of_all, module_of

#: Layers rose together where the median one rose by that part or more of what all of them rose by, both as logarithms. That part is above
#: 0.8 for a loss times 100 and for batches of noise, and below 0.2 where one layer is spoiled: on the model of ``gradmon demo``, with SGD
#: and AdamW, with and without a clip, in steps from 12 to 110.
_PART = 0.5
#: and where they rose alike, and that many rose by half of what the median one did, as a logarithm, or more; some are too noisy for it.
_MOST = 0.75
#: Layers that are named one by one.
_NAMED = 3


@dataclass(frozen=True)
class Attribution:
    """What made a spike.

    Attributes:
        layer: the parameter that is named, the first in the order of suspicion; empty where no single one is.
        did: what it did, or what all did together, in a few words; empty where nothing is known.
        words: all of it, as part of a sentence about a spike.
        is_common: whether layers rose together, so that none of them is to blame.
    """

    layer: str = ""
    did: str = ""
    words: str = ""
    is_common: bool = False


def attribution(suspects: Sequence[Suspect], step: int) -> Attribution:
    """What made the spike of ``step``, by the layers of that step in the order of suspicion."""
    if any(suspect.nonfinite for suspect in suspects):
        return _spoiled(suspects)
    moved = [suspect for suspect in suspects if suspect.since is not None]
    factors = [suspect.factor for suspect in moved if suspect.factor is not None]
    if factors and begins_at(suspects) is not None:
        words = f"{_together(factors, len(suspects), 'parameters')}, and none nearer to the loss than {moved[0].name}, so it began there"
        return Attribution(moved[0].name, f"is where it began ({_times(moved[0])})", words)
    risen, count = _risen(suspects)
    if risen:
        early = [suspect for suspect in moved if suspect.since != step]
        did = _together(risen, count, "layers")
        words = f"{did}, which points to the batch, the loss or the update before"
        if 0 < len(early) <= len(suspects) / 2:
            return Attribution("", did, f"{_listed(early)} {_when(early[0], step)}; {words}", is_common=True)
        return Attribution("", did, f"{words}, and to no single layer", is_common=True)
    if moved:
        when = _when(moved[0], step)
        rest = f", then {_listed(moved[1:], _NAMED - 1)}" if len(moved) > 1 else ""
        return Attribution(moved[0].name, f"{when} ({_times(moved[0])})", f"{_described(moved[0])} {when}{rest}")
    return Attribution(words=_shares(suspects))


def _risen(suspects: Sequence[Suspect]) -> tuple[list[float], int]:
    """By how many times the usual the layers rose that rose together, ascending, and how many layers there are; without any where it was
    not nearly all of them, and alike.

    The parameters of a module are one layer: the gradient of a bias follows the loss, and that of a weight the size of the inputs too.
    """
    layers: dict[str, list[Suspect]] = {}
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


def _rise(suspects: Sequence[Suspect]) -> float:
    """Of the norm of several together, as a logarithm."""
    return math.log(math.hypot(*(each.norm for each in suspects)) / math.hypot(*(each.usual or 0.0 for each in suspects)))


def _together(factors: Sequence[float], count: int, what: str) -> str:
    """How many rose, and by how much."""
    those = f"all {count}" if len(factors) == count else f"{len(factors)} of {count}"
    low, high = factor_text(min(factors)), factor_text(max(factors))
    return f"{those} {what} rose together, by {low if low == high else f'{low} to {high}'} times their usual norms"


def _when(suspect: Suspect, step: int) -> str:
    return "moved most" if suspect.since is None or suspect.since >= step else f"moved first, in step {suspect.since}"


def _listed(suspects: Sequence[Suspect], most: int = _NAMED) -> str:
    named = suspects[:most]
    more = f" and {len(suspects) - len(named)} more" if len(suspects) > len(named) else ""
    return f"{', '.join(map(_described, named))}{more}"


def _described(suspect: Suspect) -> str:
    share = "" if suspect.share is None else f", {suspect.share:.0%} of the square"
    return f"{suspect.name} ({_times(suspect)}{share})"


def _times(suspect: Suspect) -> str:
    if suspect.usual is None:
        return "usual norm unknown"
    return "usually zero" if suspect.factor is None else f"{times(suspect.factor)} its usual norm"


def _shares(suspects: Sequence[Suspect]) -> str:
    """Where nothing stands out: what the gradient is made of."""
    largest = sorted((suspect for suspect in suspects if suspect.share), key=lambda suspect: -(suspect.share or 0))[:_NAMED]
    top = ", ".join(f"{suspect.name} {suspect.share:.0%}" for suspect in largest)
    known = any(suspect.score is not None for suspect in suspects)
    noise = "no parameter moved by more than its own noise" if known else "too few steps are known to say which parameter moved"
    return f"{noise}; of the squared norm hold {top}" if top else ""


def _spoiled(suspects: Sequence[Suspect]) -> Attribution:
    """What the gradients alone tell of where NaN or Inf began: backward() goes from the last parameter to the first."""
    spoiled = [suspect for suspect in suspects if suspect.nonfinite]
    names = ", ".join(suspect.name for suspect in spoiled[:_NAMED])
    more = f" and {len(spoiled) - _NAMED} more" if len(spoiled) > _NAMED else ""
    words = f"NaN or Inf in the gradient of {names}{more}"
    if len(spoiled) == len(suspects):
        out_of = "; no parameter's is spared, so it came out of the forward pass or the loss"
        if len(suspects) > 1:
            return Attribution("", f"all {len(suspects)} parameters have NaN or Inf", words + out_of, is_common=True)
        return Attribution(names, "has NaN or Inf", words + out_of)
    last = last_of_all(suspects, lambda suspect: suspect.nonfinite > 0)
    if last is not None:
        finite = min((suspect for suspect in suspects if not suspect.nonfinite), key=lambda suspect: suspect.place)
        words += f"; nearer to the loss, from {finite.name} on, all are finite, so it arose at {last.name}"
    return Attribution(spoiled[0].name, "has NaN or Inf", words)
