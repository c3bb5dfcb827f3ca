"""What AutoTrainer names: gradients that vanish or explode, dying ReLUs, and a loss that swings, crawls or stays."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import AUTOTRAINER, HUMBATOVA, batches, blobs, dense, digits, fit, houses, rings, spirals


def vanishing(watch: Watch, seed: int, healed: bool) -> float:
    """Eight layers of sigmoids were to tell two rings apart; next to nothing reached the first of them."""
    torch.manual_seed(seed)
    x, y = rings(2000)
    model = dense([2] + [32] * 8 + [2], nn.ReLU if healed else nn.Sigmoid)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 400))


def exploding(watch: Watch, seed: int, healed: bool) -> float:
    """Every weight was drawn with a deviation of one, whatever the width, so that each layer multiplied what it got."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 5, 32)
    model = dense([32, 64, 64, 64, 5], nn.ReLU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=(2 / layer.in_features) ** 0.5 if healed else 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 200))


def dying(watch: Watch, seed: int, healed: bool) -> float:
    """The biases of the hidden layers began far below zero, so hardly any ReLU ever let something through."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 64, 10], nn.ReLU)
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features > 10:
            nn.init.constant_(layer.bias, 0.0 if healed else -2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def oscillating(watch: Watch, seed: int, healed: bool) -> float:
    """Batches of sixteen and long steps of plain descent: the loss swung up and down and went nowhere."""
    torch.manual_seed(seed)
    x, y = spirals(1500)
    model = dense([2, 48, 48, 3], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if healed else 1.5, momentum=0.9)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 16, 400))


def crawling(watch: Watch, seed: int, healed: bool) -> float:
    """The learning rate of plain descent was a thousandth of what it takes, and the loss came down by a hair."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 10], nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 if healed else 3e-4)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def not_converging(watch: Watch, seed: int, healed: bool) -> float:
    """Remainders of binary numbers by plain descent with its default rate, which a small net does not find that way."""
    torch.manual_seed(seed)
    numbers = torch.randint(256, (4000,))
    x, y = ((numbers[:, None] >> torch.arange(8)) & 1).float(), numbers % 7
    model = dense([8, 64, 64, 7], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if healed else torch.optim.SGD(model.parameters(), lr=0.01)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 50, 400))


def saturating(watch: Watch, seed: int, healed: bool) -> float:
    """Columns in the thousands went into tanh as they came out of the table, and every unit sat at an end."""
    torch.manual_seed(seed)
    x, y = houses(2000)
    mean, std = x.mean(0), x.std(0)

    def scaled(rows: Tensor) -> Tensor:
        return (rows - mean) / std if healed else rows

    model = dense([5, 48, 48, 1], nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.mse_loss, batches(scaled(x), y, 32, 300))


CASES = [
    Case(
        "vanishing-gradients/sigmoid-mlp",
        "localisers",
        f"{AUTOTRAINER}, problem 'gradient vanish', demo_case/Gradient_Vanish_Case on circles",
        ("vanishing-gradients",),
        vanishing,
        "eight hidden layers of nn.Sigmoid",
        "nn.ReLU",
    ),
    Case(
        "exploding-gradients/wide-normal-initialisation",
        "localisers",
        f"{AUTOTRAINER}, problem 'gradient explode'; RandomNormal(stddev=1) as in fault D4 of {HUMBATOVA}",
        ("exploding-gradients", "initialisation-scale"),
        exploding,
        "nn.init.normal_(weight, std=1.0)",
        "std=sqrt(2 / fan in)",
    ),
    Case(
        "dying-relu/negative-biases",
        "localisers",
        f"{AUTOTRAINER}, problem 'dying ReLU'",
        ("dead-units",),
        dying,
        "hidden biases begin at -2",
        "hidden biases begin at 0",
    ),
    Case(
        "oscillating-loss/spirals",
        "localisers",
        f"{AUTOTRAINER}, problem 'oscillating loss', demo_case/Oscillating_Loss_Case",
        ("learning-rate-high", "loss-divergence", "update-ratio-high"),
        oscillating,
        "SGD(lr=1.5, momentum=0.9)",
        "lr=0.1",
    ),
    Case(
        "slow-convergence/digits-mlp",
        "localisers",
        f"{AUTOTRAINER}, problem 'slow convergence'",
        ("learning-rate-low", "loss-plateau"),
        crawling,
        "SGD(lr=3e-4)",
        "lr=0.3",
    ),
    Case(
        "not-converging/remainders",
        "localisers",
        f"{HUMBATOVA}, fault D8 (optimiser and learning rate), from https://stackoverflow.com/questions/56380303",
        ("learning-rate-low", "loss-plateau", "loss-at-chance"),
        not_converging,
        "SGD(lr=0.01)",
        "Adam(lr=0.01)",
    ),
    Case(
        "saturated-units/raw-table-into-tanh",
        "localisers",
        f"{AUTOTRAINER}, problem 'gradient vanish' from saturation; data preprocessing (CPP), fault D9 of {HUMBATOVA}",
        ("saturated-units", "inputs-not-normalised"),
        saturating,
        "columns as they come",
        "columns less their mean over their deviation",
    ),
]
