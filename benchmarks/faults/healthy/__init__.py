"""Healthy trainings: none of them should have a finding, even if some look odd."""

from __future__ import annotations

from ..training import Training
from . import loops, losses, models, optimizers, ranks, several

TRAININGS: list[Training] = [
    training for module in (optimizers, models, losses, loops, several, ranks) for training in module.TRAININGS
]
