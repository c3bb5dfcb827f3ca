"""Units that are dead or saturated, and parameters that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .data import Batch
from .families import FAMILIES, adamw, task
from .training import Training, Watch, over, train


def _dead(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Biases in front of ReLUs so far below zero that most of them never fire."""
    job = task(family, seed, **({"norm": True} if family == "cnn" else {}))
    kind = nn.BatchNorm2d if family == "cnn" else nn.Linear
    for module in list(job.model.children())[:-1]:
        if isinstance(module, kind):
            nn.init.constant_(module.bias, 0.0 if healed else -6.0)
    return train(job, watch, torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9))


def _scaled(batches: Iterator[Batch], factor: float) -> Iterator[Batch]:
    for x, y in batches:
        yield factor * x, y


def _saturated_inputs(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Inputs that are not normalised drive each tanh to its ends."""
    job = task(family, seed, activation=nn.Tanh)
    job.batches = _scaled(job.batches, 1.0 if healed else 200.0)
    return train(job, watch, torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9))


def _saturated_recurrence(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Embeddings so large that the state of a tanh recurrence is -1 or 1 at all times."""
    job = task(family, seed, kind=nn.RNN)
    nn.init.normal_(job.model.embed.weight, std=1.0 if healed else 200.0)
    return train(job, watch, torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9))


class _Cut(nn.Module):
    """The inner module, whose output is cut from the graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach()


def _detached(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A ``detach()`` left in the forward: no layer below it is trained."""
    job = task(family, seed)
    if not healed:
        if isinstance(job.model, nn.Sequential):
            job.model[2] = _Cut(job.model[2])
        else:
            job.model.blocks = _Cut(job.model.blocks)
    return train(job, watch, adamw(job.model))


class _Branches(nn.Module):
    """Two models for one task; the forward may omit the second."""

    def __init__(self, first: nn.Module, second: nn.Module, both: bool) -> None:
        super().__init__()
        self.first, self.second, self.both = first, second, both

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) if self.both else self.first(x)


def _unused(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A branch that is made, given to the optimizer and never called."""
    job = task(family, seed)
    job.model = _Branches(job.model, FAMILIES[family][0](), both=healed)
    return train(job, watch, adamw(job.model))


TRAININGS: list[Training] = [
    *over(
        ["mlp", "cnn", "autoencoder"], "bias-far-below-zero", "dead-units", _dead, "start biases at 0", held_back="autoencoder"
    ),
    *over(
        ["mlp", "autoencoder"],
        "inputs-not-normalised",
        "saturated-units",
        _saturated_inputs,
        "normalise the inputs",
        "autoencoder",
    ),
    *over(["rnn"], "embeddings-too-large", "saturated-units", _saturated_recurrence, "embeddings with a standard deviation of 1"),
    *over(["mlp", "gpt", "vit"], "detached-in-forward", "no-gradient", _detached, "no detach() in the forward", held_back="vit"),
    *over(["cnn", "embedding"], "branch-never-called", "no-gradient", _unused, "call the branch in the forward"),
]
