"""Gradients that vanish or explode over the depth, and parameters drawn on a wrong scale."""

from __future__ import annotations

import torch
from torch import nn

from .families import adamw, he, task
from .training import Training, Watch, over, train


def _initialisation(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Normal numbers as torch.randn gives them. Gradients and activations explode over the depth too, but from step 0 on."""
    options = {"mlp": {"depth": 4}, "gpt": {}, "cnn": {"depth": 3}, "autoencoder": {"extra": 1}}[family]
    job = task(family, seed, **options)
    if healed and family == "gpt":
        pass  # what the model does by itself: a standard deviation of 0.02
    elif healed:
        he(job.model)
    else:
        for parameter in job.model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.0)
    return train(job, watch, adamw(job.model))


def _too_small(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The output of a layer is a thousandth of its input. Gradients below vanish too, for the same reason."""
    job = task(family, seed, **{"mlp": {"depth": 3}, "autoencoder": {}}[family])
    he(job.model, gain=2**0.5 if healed else 1e-3)
    return train(job, watch, torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9))


def _vanishing(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Ten sigmoids on top of one another, whose slope is a quarter at most; the first layers never learn."""
    activation = nn.ReLU if healed else nn.Sigmoid
    options = {"mlp": {"depth": 10}, "autoencoder": {"extra": 4}, "cnn": {"depth": 9}}[family]
    job = task(family, seed, activation=activation, **options)
    he(job.model)
    optimizer = torch.optim.SGD(job.model.parameters(), lr={"autoencoder": 0.1}.get(family, 0.02), momentum=0.9)
    return train(job, watch, optimizer, steps=300)


def _exploding_depth(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """Residual branches without a norm: each block doubles the variance or more, and the gradient on its way back too.

    That the scale of initialisation is wrong for such a stack would be right as well.
    """
    job = task(family, seed, depth=14, norm=healed)
    he(job.model)
    return train(job, watch, adamw(job.model, 1e-3))


def _exploding_time(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A recurrence of ReLUs whose matrix more than doubles the state at each of sixteen places, and the gradient on its way back.

    That the scale of this one matrix is wrong would be right as well.
    """
    job = task(family, seed, kind=nn.RNN, nonlinearity="relu")
    nn.init.orthogonal_(job.model.cell.weight_hh_l0, gain=1.0 if healed else 2.3)
    return train(job, watch, adamw(job.model))


TRAININGS: list[Training] = [
    *over(
        ["mlp", "gpt", "cnn", "autoencoder"],
        "initialised-with-randn",
        "initialisation-scale",
        _initialisation,
        "initialise with a standard deviation of gain / sqrt(fan in)",
        held_back="cnn",
    ),
    *over(
        ["mlp", "autoencoder"], "initialised-too-small", "initialisation-scale", _too_small, "initialise with sqrt(2 / fan in)"
    ),
    *over(
        ["mlp", "autoencoder", "cnn"],
        "deep-sigmoids",
        "vanishing-gradients",
        _vanishing,
        "ReLU in place of sigmoid",
        held_back="cnn",
    ),
    *over(["resnet"], "residual-without-norm", "exploding-gradients", _exploding_depth, "a norm at the start of each branch"),
    *over(
        ["rnn"], "recurrence-that-doubles", "exploding-gradients", _exploding_time, "an orthogonal recurrence", held_back="rnn"
    ),
]
