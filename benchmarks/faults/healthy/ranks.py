"""Replicated and sharded models as they should be trained, on one rank."""

from __future__ import annotations

from ..families import adamw, task
from ..ranks import one_rank, replicated, sharded
from ..training import Training, Watch, train


def _accumulated(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients are exchanged once in a step."""
    with one_rank():
        return replicated(task("mlp", seed), watch, waits=True, steps=150)


def _made_after(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer is made when the model is sharded."""
    with one_rank():
        job = task("mlp", seed)
        sharded(job.model)
        return train(job, watch, adamw(job.model))


TRAININGS: list[Training] = [
    Training("replicated-and-accumulated/mlp", "", "mlp", _accumulated),
    Training("sharded/mlp", "", "mlp", _made_after),
]
