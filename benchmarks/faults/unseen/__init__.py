"""A second zoo, written without a look at the rules: other models, data, optimizers and mistakes than those of the first."""

from __future__ import annotations

from ..training import Training
from . import depth, order, owners, pace, spoiled, units, well_games, well_losses, well_models, well_rates

TRAININGS: list[Training] = [training for module in (depth, units, spoiled, pace, order, owners) for training in module.TRAININGS]
HEALTHY: list[Training] = [
    training for module in (well_models, well_rates, well_losses, well_games) for training in module.TRAININGS
]

__all__ = ["HEALTHY", "TRAININGS"]
