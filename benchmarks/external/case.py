"""A training that somebody else broke, written anew from its public description, and its twin with the one line mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..faults.training import Watch as Watch


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: such as ``"softmax-before-cross-entropy"``, once in all files.
        judge: who described it: ``"traincheck"``, ``"questions"``, ``"localisers"`` or ``"examples"``.
        source: address of the description, or the paper and its section.
        rules: findings any of which names the fault; chosen before a run. ``()`` for a healthy training.
        run: from a watch, a seed and whether the fault is mended to the mean loss of the last steps.
        bug: the wrong line, in a few words; ``""`` for a healthy one.
        fix: the line in its place.
        held_back: no rule was tuned on it.
        out_of_sight: why a monitor cannot see it, ``""`` if it can.
    """

    name: str
    judge: str
    source: str
    rules: tuple[str, ...]
    run: Callable[[Watch, int, bool], float]
    bug: str = ""
    fix: str = ""
    held_back: bool = False
    out_of_sight: str = ""
