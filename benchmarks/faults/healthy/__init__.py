"""Healthy trainings: of none of them should anything be said, however odd some look."""

from __future__ import annotations

from ..training import Training
from . import loops, losses, models, optimizers, ranks, several

TRAININGS: list[Training] = [
    training for module in (optimizers, models, losses, loops, several, ranks) for training in module.TRAININGS
]
