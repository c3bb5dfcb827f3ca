"""Layers that begin as copies, lack a bias or units, never move, or stay in eval mode, once more."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import (
    DEEPCRIME,
    HUMBATOVA,
    NEURALINT,
    TAXONOMY,
    batches,
    descend,
    digits,
    houses,
    last,
    shapes,
    waves,
)


def image_net(classes: int) -> nn.Sequential:
    """Three convolutions with pooling and two linear layers, for colour images of twelve pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(288, 48),
        nn.ReLU(),
        nn.Linear(48, classes),
    )


def zero_kernels(watch: Watch, seed: int, healed: bool) -> float:
    """The kernels of the first convolution began at zero, as its bias did: black on black, and no slope for a ReLU at zero."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = image_net(6)
    (nn.init.kaiming_uniform_ if healed else nn.init.zeros_)(net.get_parameter("0.weight"))
    nn.init.zeros_(net.get_parameter("0.bias"))
    adadelta = torch.optim.Adadelta(net.parameters(), lr=1.0)
    monitor = watch(net, adadelta)
    return descend(monitor, adadelta, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 200))


def ones_in_the_middle(watch: Watch, seed: int, healed: bool) -> float:
    """All weights of the second convolution began at one, so its channels were the same sum, and very large."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = image_net(6)
    (nn.init.xavier_uniform_ if healed else nn.init.ones_)(net.get_parameter("3.weight"))
    nn.init.zeros_(net.get_parameter("3.bias"))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 200))


def prices_through_the_origin(watch: Watch, seed: int, healed: bool) -> float:
    """No layer of a regression had a bias, though a house of mean features has a price."""
    torch.manual_seed(seed)
    table, prices = houses(2000)
    table, prices = (table - table.mean(0)) / table.std(0), 2 + prices
    net = nn.Sequential(
        nn.Linear(5, 48, bias=healed), nn.ReLU(), nn.Linear(48, 48, bias=healed), nn.ReLU(), nn.Linear(48, 1, bias=healed)
    )
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.mse_loss(net(x), y), batches(table, prices, 32, 300))


def all_of_the_past(watch: Watch, seed: int, healed: bool) -> float:
    """The decay of a paper, one minus what PyTorch calls momentum, was taken as one: batch norm kept what it began with."""
    torch.manual_seed(seed)
    series = 3 + 2 * waves(2300, 33)
    past, following = series[:, None, :-1], series[:, -1:]
    decay = 0.9 if healed else 1.0
    net = nn.Sequential(nn.Conv1d(1, 16, 5, stride=2), nn.BatchNorm1d(16, momentum=1 - decay), nn.ReLU())
    net.extend(
        [nn.Conv1d(16, 16, 5, stride=2), nn.BatchNorm1d(16, momentum=1 - decay), nn.ReLU(), nn.Flatten(), nn.Linear(80, 1)]
    )
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    losses, monitor = [], watch(net, adam)
    for x, y in batches(past[300:], following[300:], 32, 250):
        net.train()
        loss = functional.mse_loss(net(x), y)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
        if len(losses) % 50 == 0:
            net.eval()
            with monitor.no_monitor(), torch.no_grad():
                error = functional.mse_loss(net(past[:300]), following[:300])
            monitor.log_scalar("held-out loss", error)
    return last(losses)


def narrow_waist(watch: Watch, seed: int, healed: bool) -> float:
    """An autoencoder of digits with one number in the middle."""
    torch.manual_seed(seed)
    images = (digits(3000, size=8)[0].flatten(1) > 0.4).float()
    waist = 16 if healed else 1
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, waist), nn.Linear(waist, 48), nn.ReLU(), nn.Linear(48, 64))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    reconstruction = functional.binary_cross_entropy_with_logits
    return descend(watch(net, adam), adam, lambda x, y: reconstruction(net(x), y), batches(images, images, 32, 300))


def evaluated_and_left(watch: Watch, seed: int, healed: bool) -> float:
    """A function that reports the accuracy calls eval, and the loop that calls it does not call train."""
    torch.manual_seed(seed)
    images, labels = shapes(2300)
    net = image_net(6)
    net.insert(1, nn.BatchNorm2d(16))
    net.insert(8, nn.Dropout(0.3))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    monitor = watch(net, adam)
    losses: list[Tensor] = []

    def accuracy() -> float:
        net.eval()
        with monitor.no_monitor(), torch.no_grad():
            return float((net(images[:300]).argmax(1) == labels[:300]).float().mean())

    for x, y in batches(images[300:], labels[300:], 32, 200):
        if len(losses) % 20 == 0:
            monitor.log_scalar("held-out accuracy", accuracy())
            if healed:
                net.train()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        adam.step()
        adam.zero_grad()
    return last(losses)


CASES = [
    Case(
        "zero-initialisation/first-kernels",
        "localisers",
        f"{HUMBATOVA}, mutant M1 (weights initialisation, WCI) of the MNIST model; {NEURALINT}, TF_lenet_zeros_init",
        ("equal-units", "dead-units", "initialisation-scale", "no-gradient"),
        zero_kernels,
        "nn.init.zeros_",
        "nn.init.kaiming_uniform_",
    ),
    Case(
        "constant-initialisation/kernels-of-ones",
        "localisers",
        f"{HUMBATOVA}, mutant C3 (weights initialisation, WCI: ones) of the CIFAR model",
        ("equal-units", "initialisation-scale"),
        ones_in_the_middle,
        "nn.init.ones_",
        "nn.init.xavier_uniform_",
    ),
    Case(
        "bias-missing/prices",
        "localisers",
        f"{DEEPCRIME}, operator WRB (bias removed); {TAXONOMY}, layer properties: missing bias",
        (),
        prices_through_the_origin,
        "bias=False",
        "bias=True",
        out_of_sight="A layer without a bias is a choice; the loss falls, only more slowly and less far.",
    ),
    Case(
        "batch-norm-momentum-zero/series",
        "localisers",
        f"{TAXONOMY}, layer properties; https://brainreview.org/blog/batchnormalization-mismatch-between-pytorch-and-2",
        ("batch-norm-frozen",),
        all_of_the_past,
        "momentum=1 - 1.0",
        "momentum=1 - 0.9",
    ),
    Case(
        "too-few-units/narrow-waist",
        "localisers",
        f"{TAXONOMY}, layer properties: wrong number of neurons in layer",
        (),
        narrow_waist,
        "1 unit in the middle",
        "16 units",
        out_of_sight="A small model learns what it can; nothing tells its floor from that of a hard task.",
    ),
    Case(
        "left-in-eval-mode/reported-accuracy",
        "localisers",
        "https://karpathy.github.io/2019/04/25/recipe/ and the common mistakes it begins with",
        ("eval-mode", "batch-norm-frozen"),
        evaluated_and_left,
        "no net.train() after net.eval()",
        "net.train()",
    ),
]
