"""Losses and targets that give nothing to learn, from the start or later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .data import Batch
from .families import adamw, task
from .training import Training, Watch, over, train


def _shuffled(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Inputs were shuffled and targets were not, so they are unrelated."""
    job = task(family, seed)
    order = torch.Generator().manual_seed(seed)
    stream = job.batches

    def pairs(x: Tensor, y: Tensor) -> Batch:
        permutation = torch.randperm(len(x), generator=order)
        return x[permutation], y[permutation] if healed else y

    job.batches = (pairs(x, y) for x, y in stream)
    return train(job, watch, adamw(job.model))


def _clamped(floor: float):
    def body(family: str, watch: Watch, seed: int, healed: bool) -> float:
        """A loss not meant to fall below a floor ("flooding") is clamped: below it there is no gradient at all."""
        job = task(family, seed)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            value = job.loss(model, batch)
            return (value - floor).abs() + floor if healed else value.clamp(min=floor)

        return train(job, watch, adamw(job.model), loss_of=loss)

    return body


def _weight_runs_out(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The weight of the only loss is annealed, and reaches 0 in the middle of the training."""
    job = task(family, seed)
    at = iter(range(10**6))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return job.loss(model, batch) * max(0.1 if healed else 0.0, 1 - next(at) / 75)

    return train(job, watch, adamw(job.model), loss_of=loss)


TRAININGS: list[Training] = [
    *over(
        ["cnn", "mlp", "embedding"],
        "targets-not-shuffled-along",
        "loss-at-chance",
        _shuffled,
        "the same permutation for inputs and targets",
        held_back="embedding",
    ),
    *over(["mlp"], "flooding-by-clamp", "gradient-dropped-to-zero", _clamped(0.7), "(loss - floor).abs() + floor"),
    *over(["rnn"], "flooding-by-clamp", "gradient-dropped-to-zero", _clamped(1.2), "(loss - floor).abs() + floor", "rnn"),
    *over(["cnn", "autoencoder"], "weight-runs-out", "gradient-dropped-to-zero", _weight_runs_out, "a weight of 0.1 at least"),
]
