"""A zoo of small trainings: each with one fault and its fixed twin, and healthy ones without a finding."""

from __future__ import annotations

from . import activations, attention, healthy, initialisation, loops, losses, nonfinite, optimisation, ownership, precision, ranks
from .training import Training, Watch

_FAULTY = (initialisation, activations, attention, nonfinite, optimisation, losses, precision, loops, ownership, ranks)
FAULTS: list[Training] = [training for module in _FAULTY for training in module.TRAININGS]
HEALTHY: list[Training] = healthy.TRAININGS

__all__ = ["FAULTS", "HEALTHY", "Training", "Watch"]
