"""Fingerprints of batches, 8 bytes a step, and what the first batches look like."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from ...capture.modules.structure import tensors_of
from ...core.loop_mistakes import EXPECTATION, NON_FINITE_INPUT
from ..tallies import Tallies

#: Elements of a batch that are looked at.
_MOST = 1 << 16
#: Batches before anything is reported, and how far back a batch is looked for.
FEWEST, BACK = 16, 8
#: Share of batches that came before, if workers draw the same random numbers.
_COPIES = 0.3
#: An input whose root mean square is larger, or whose mean is this many standard deviations, is not normalised.
#: Small numbers are left alone, whatever their mean, since a bias takes it up; unless hardly anything else is in them.
_LARGE, _OFF, _SMALL, _FAR_OFF = 10.0, 5.0, 1.0, 50.0
#: Numbers this small drown in the biases.
_TINY = 0.02
#: The names of arguments that are no input: what the loss compares with, and what selects.
_NO_INPUT = re.compile(r"label|target|mask(?!ed)", re.IGNORECASE)


def batch_tensors(args: Sequence[object], kwargs: dict[str, object], inputs_alone: bool = False) -> list[Tensor]:
    """The plain tensors among the arguments of a model, of more than one element; ``inputs_alone``: without labels and masks, by name."""
    found = [*tensors_of(args, ""), *tensors_of(kwargs, "")]
    return [
        each
        for path, each in found
        if not (inputs_alone and _NO_INPUT.search(path))
        and type(each) is Tensor
        and each.layout is torch.strided
        and not each.is_nested
        and each.device.type != "meta"
        and each.numel() > 1
    ]


@torch.no_grad()
def sampled(tensor: Tensor) -> Tensor:
    """Some elements of a large one, in one distance, for a fingerprint: two batches that differ hardly agree in all of them."""
    step = tensor.numel() // _MOST
    return tensor if step < 2 else tensor.detach().reshape(-1)[:: step | 1]


@torch.no_grad()
def look_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Mean, root mean square, and largest difference between rows, of the first input of floating point: float64 ``[3]``."""
    first = next((each for each in tensors if torch.is_floating_point(each) and each.ndim >= 1), None)
    if first is None or first.device.type == "mps":
        return None
    rows = first.detach()[: max(1, _MOST * len(first) // max(first.numel(), 1))].double() if len(first) else None
    if rows is None or not rows.numel():
        return None
    apart = (rows - rows[:1]).abs().amax() if len(rows) > 1 else torch.full((), math.nan, dtype=torch.float64, device=rows.device)
    return torch.stack([rows.mean(), rows.square().mean().sqrt(), apart])


@torch.no_grad()
def sums_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The sum of each input of floating point, which is finite if all its elements are: float64 ``[inputs]``; None without any."""
    floats = [each for each in tensors if torch.is_floating_point(each) and each.device.type != "mps"]
    return torch.stack([each.detach().sum(dtype=torch.float64) for each in floats]) if floats else None


class Batches:
    """The fingerprints of the last batches, and what follows from them.

    Args:
        tallies: receive what is odd.
        part: the name of the part of the model that gets them; empty for all of it.
    """

    def __init__(self, tallies: Tallies, part: str = "") -> None:
        self._tallies, self._part = tallies, part
        self._seen: list[int] = []

    def add(self, fingerprint: int) -> None:
        """One more batch."""
        self._seen.append(fingerprint)

    @property
    def is_repeated(self) -> bool:
        """Whether all batches so far, and enough of them, were the same."""
        return len(self._seen) >= FEWEST and len(set(self._seen)) == 1

    @property
    def copies(self) -> float:
        """The share of batches that one of the last ones was too, where there are more different ones than these."""
        again = sum(each in self._seen[max(place - BACK + 1, 0) : place] for place, each in enumerate(self._seen))
        return again / len(self._seen) if len(set(self._seen)) > BACK else 0.0

    def judge(self, varies: bool | None) -> None:
        """Report what is odd; ``varies``: what the user has declared."""
        if len(self._seen) < FEWEST or varies is False:
            return
        if not self.is_repeated and self.copies < _COPIES:
            return
        evidence = {"batches": float(len(self._seen)), "different ones": float(len(set(self._seen)))}
        self._count("repeated-batch", True, **evidence)
        if varies:
            self._tallies.seen(EXPECTATION, "batch", ("batches that vary",), {"different ones": float(len(set(self._seen)))})

    def looked(self, mean: float, rms: float, apart: float) -> None:
        """Report what the first input of one batch looks like."""
        self._count("constant-input", apart == 0, **{"largest difference between rows": 0.0})
        deviation = math.sqrt(max(rms**2 - mean**2, 0.0))
        off = abs(mean) / deviation if deviation else 0.0
        is_far = rms > _LARGE or 0 < rms < _TINY or off > (_OFF if rms > _SMALL else _FAR_OFF)
        self._count("inputs-not-normalised", is_far, **{"mean": mean, "standard deviation": deviation})

    def spoiled(self, step: int) -> None:
        """Report NaN or Inf in the batch of a step."""
        self._tallies.seen(NON_FINITE_INPUT, self._part or None, self._where, step=step)

    def _count(self, rule: str, is_so: bool, **evidence: float) -> None:
        if is_so:
            self._tallies.seen(rule, self._part or None, self._where, evidence)
        elif not self._tallies.is_empty:
            self._tallies.missed(rule, self._part or None)

    @property
    def _where(self) -> tuple[str, ...]:
        return (self._part,) if self._part else ()
