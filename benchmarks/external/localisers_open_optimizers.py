"""Optimizers with a number too large, too small or in another's place, and one that has what is another's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import (
    DEEPCRIME,
    DEEPFD,
    HUMBATOVA,
    TAXONOMY,
    UMLAUT,
    batches,
    blobs,
    dense,
    digits,
    fit,
    houses,
    last,
    shapes,
    topics,
)


def small_cnn(channels: int, classes: int) -> nn.Sequential:
    """Two convolutions of stride two and a linear layer, for images of ten or twelve pixels."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, classes),
    )


def rate_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """Adam was given the learning rate that its neighbour in the documentation has as a default."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = small_cnn(1, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 if healed else 1.0)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


def tiny_rate(watch: Watch, seed: int, healed: bool) -> float:
    """A topic model of short texts with a learning rate four zeros too small."""
    torch.manual_seed(seed)
    x, y = topics(3000)
    model = nn.Sequential(nn.Linear(300, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if healed else 1e-7)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 300))


def swapped_betas(watch: Watch, seed: int, healed: bool) -> float:
    """The decay of the squares stood where that of the mean belongs: a thousand steps of inertia, ten of scale."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 64, 10], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999) if healed else (0.999, 0.9))
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def epsilon_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """An epsilon of one, advised for another net, was larger than the root of any second moment, so steps were tiny."""
    torch.manual_seed(seed)
    x, y = shapes(2500)
    model = small_cnn(3, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if healed else 1.0)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


def decay_of_ten(watch: Watch, seed: int, healed: bool) -> float:
    """A weight decay of ten took a tenth of every weight in each step, and the net could hold nothing."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 8, 32)
    model = dense([32, 64, 8], nn.ReLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-2 if healed else 10.0)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


def rate_rounded_away(watch: Watch, seed: int, healed: bool) -> float:
    """The rates of both groups were rounded to two places for the log, and the smaller one became nought."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = small_cnn(1, 10)
    places = 4 if healed else 2
    groups = [
        {"params": model[:-1].parameters(), "lr": round(0.004, places)},
        {"params": model[-1].parameters(), "lr": round(0.01, places)},
    ]
    optimizer = torch.optim.Adam(groups)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


class Appraiser(nn.Module):
    """A trunk with two heads: what a house costs, and whether that is more than the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = dense([5, 64, 64], nn.Tanh)
        self.price = nn.Linear(64, 1)
        self.dear = nn.Linear(64, 1)

    def forward(self, houses: Tensor) -> tuple[Tensor, Tensor]:
        """The price and the logit of being dear."""
        hidden = self.trunk(houses)
        return self.price(hidden), self.dear(hidden)


def shared_parameters(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer of the second head had the trunk as well, which then stepped twice, with two memories."""
    torch.manual_seed(seed)
    x, y = houses(2000)
    x = (x - x.mean(0)) / x.std(0)
    model = Appraiser()
    first = torch.optim.SGD([*model.trunk.parameters(), *model.price.parameters()], lr=0.04, momentum=0.9)
    second = torch.optim.SGD(model.dear.parameters() if healed else model.parameters(), lr=0.04, momentum=0.9)
    monitor, losses = watch(model, first, second), []
    for inputs, price in batches(x, y, 32, 300):
        priced, dear = model(inputs)
        loss = functional.mse_loss(priced, price)
        loss = loss + functional.binary_cross_entropy_with_logits(dear, (price > 0).float())
        model.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        first.step()
        second.step()
        losses.append(loss.detach())
    return last(losses)


def clipped_away(watch: Watch, seed: int, healed: bool) -> float:
    """Gradients were clipped to a norm of a thousandth in every step, which left plain descent next to no step."""
    torch.manual_seed(seed)
    x, y = shapes(2500)
    model = small_cnn(3, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for images, labels in batches(x, y, 32, 250):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0 if healed else 0.001)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


CASES = [
    Case(
        "learning-rate-high/adam-of-one",
        "localisers",
        f"{HUMBATOVA}, mutant M3 (learning rate, HLR) of the MNIST model; {UMLAUT}, heuristic 'learning rate is high'",
        ("learning-rate-high", "update-ratio-high"),
        rate_of_one,
        "Adam(lr=1.0)",
        "lr=3e-3",
    ),
    Case(
        "learning-rate-low/topics",
        "localisers",
        f"{HUMBATOVA}, mutant R3 (learning rate, HLR) of the Reuters model; {UMLAUT}, heuristic 'learning rate is low'",
        ("learning-rate-low",),
        tiny_rate,
        "Adam(lr=1e-7)",
        "lr=1e-3",
    ),
    Case(
        "betas-swapped/digits-mlp",
        "localisers",
        f"{DEEPFD}, fault type 'inappropriate optimizer': its settings; {TAXONOMY}, hyperparameters",
        ("betas-swapped",),
        swapped_betas,
        "betas=(0.999, 0.9)",
        "betas=(0.9, 0.999)",
    ),
    Case(
        "epsilon-of-one/shapes-cnn",
        "localisers",
        "https://stackoverflow.com/questions/43221065 (epsilon of TensorFlow's AdamOptimizer)",
        ("epsilon-dominates", "learning-rate-low"),
        epsilon_of_one,
        "Adam(eps=1.0)",
        "eps=1e-8",
    ),
    Case(
        "weight-decay-of-ten/blobs",
        "localisers",
        f"{DEEPCRIME}, operators of weights regularisation (RAW, RCW)",
        ("weight-decay-high",),
        decay_of_ten,
        "AdamW(weight_decay=10)",
        "weight_decay=1e-2",
    ),
    Case(
        "rate-rounds-to-zero/convolutions",
        "localisers",
        f"{TAXONOMY}, hyperparameters: suboptimal learning rate, here of one group",
        ("zero-update", "update-ratio-low"),
        rate_rounded_away,
        "round(0.004, 2)",
        "round(0.004, 4)",
    ),
    Case(
        "optimizers-share-parameters/two-heads",
        "localisers",
        "https://github.com/Improbable-AI/walk-these-ways/issues/68",
        ("parameter-in-two-optimizers",),
        shared_parameters,
        "second optimizer of model.parameters()",
        "of the second head",
    ),
    Case(
        "clipped-to-a-thousandth/shapes-cnn",
        "localisers",
        f"{DEEPCRIME}, operator OCG (gradient clip changed)",
        ("always-clipped", "learning-rate-low"),
        clipped_away,
        "clip_grad_norm_(0.001)",
        "clip_grad_norm_(5.0)",
    ),
]
