"""Losses and last layers that do not belong together once more: sequences, several labels, distances and pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import DEEPFD, HUMBATOVA, NEURALINT, TAXONOMY, UMLAUT, batches, descend, digits, sentences, shapes, waves
from .localisers_held_gradients import Forecaster


def broadcast_targets(watch: Watch, seed: int, healed: bool) -> float:
    """A column less a row is a square: each forecast was compared with the targets of all examples, and became their mean."""
    torch.manual_seed(seed)
    series = waves(2000, 21)
    net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 1))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def squared_error(past: Tensor, following: Tensor) -> Tensor:
        error: Tensor = net(past) - (following[:, None] if healed else following)
        return error.square().mean()

    return descend(watch(net, adam), adam, squared_error, batches(series[:, :-1], series[:, -1], 32, 250))


class Writer(nn.Module):
    """A recurrent model of a language of 24 words, which may end in a softmax."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.normalised = normalised
        self.words = nn.Embedding(24, 32)
        self.gru = nn.GRU(32, 48, batch_first=True)
        self.scores = nn.Linear(48, 24)

    def forward(self, text: Tensor) -> Tensor:
        """A score for each word that may follow, at each place."""
        states, _ = self.gru(self.words(text))
        scores: Tensor = self.scores(states)
        return functional.softmax(scores, dim=-1) if self.normalised else scores


def probabilities_of_words(watch: Watch, seed: int, healed: bool) -> float:
    """A language model gave probabilities to a loss that makes probabilities itself."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = Writer(normalised=not healed)
    adamw = torch.optim.AdamW(net.parameters(), lr=5e-3)

    def surprise(past: Tensor, following: Tensor) -> Tensor:
        return functional.cross_entropy(net(past).flatten(0, 1), following.flatten())

    return descend(watch(net, adamw), adamw, surprise, batches(text[:, :-1], text[:, 1:], 32, 200))


def sigmoid_of_several(watch: Watch, seed: int, healed: bool) -> float:
    """Several labels of an image: the net returned probabilities, and binary_cross_entropy_with_logits got them as logits."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    means = images.mean((2, 3))
    labels = torch.cat([means > means.median(0).values, (kinds == 1)[:, None] | (kinds == 2)[:, None]], 1).float()
    net = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(600, 48), nn.ReLU(), nn.Linear(48, 4))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        answers = net(x) if healed else torch.sigmoid(net(x))
        return functional.binary_cross_entropy_with_logits(answers, y)

    return descend(watch(net, adam), adam, loss_of, batches(images, labels, 32, 250))


def relu_ends_forecast(watch: Watch, seed: int, healed: bool) -> float:
    """A series about zero was forecast through a ReLU: nothing below zero could be said."""
    torch.manual_seed(seed)
    series = waves(2000, 21)
    net = nn.Sequential(Forecaster(nn.GRU(1, 32, batch_first=True)), nn.Identity() if healed else nn.ReLU())
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    monitor = watch(net, adam)
    return descend(monitor, adam, lambda x, y: functional.mse_loss(net(x), y), batches(series[:, :-1], series[:, 1:], 32, 250))


def relu_in_every_round(watch: Watch, seed: int, healed: bool) -> float:
    """Layers were built in a loop, each with a ReLU, also the last one, whose outputs are the logits."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = nn.Sequential(nn.Flatten())
    for inputs, outputs in ((432, 96), (96, 48), (48, 6)):
        net.append(nn.Linear(inputs, outputs))
        if outputs != 6 or not healed:
            net.append(nn.ReLU())
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return descend(watch(net, sgd), sgd, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 300))


def linear_throughout(watch: Watch, seed: int, healed: bool) -> float:
    """The product of two numbers by a deep net without one nonlinear function: the best plane is flat."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 8)
    y = x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(3000, 1)
    layers = [nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)]
    net = nn.Sequential(*(layers if healed else layers[::2]))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return descend(
        watch(net, adam), adam, lambda inputs, product: functional.mse_loss(net(inputs), product), batches(x, y, 32, 400)
    )


class Towers(nn.Module):
    """Two encoders, for an image and for its digit seen through other noise, that should agree."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 16))
        self.right = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The cosine of each with each."""
        left, right = functional.normalize(self.left(one), dim=1), functional.normalize(self.right(other), dim=1)
        return left @ right.T


def warm_pairs(watch: Watch, seed: int, healed: bool) -> float:
    """Cosines were multiplied by the temperature instead of divided: from -0.01 to 0.01 all pairs are as likely."""
    torch.manual_seed(seed)
    images = digits(3000)[0].flatten(1)
    others = (images + 0.1 * torch.randn(images.shape)).clamp(0, 1)
    net = Towers()
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)

    def loss_of(one: Tensor, other: Tensor) -> Tensor:
        logits = net(one, other) / 0.1 if healed else net(one, other) * 0.01
        return functional.cross_entropy(logits, torch.arange(len(one)))

    return descend(watch(net, adam), adam, loss_of, batches(images, others, 32, 250))


class Prototypes(nn.Module):
    """Images on a plane, and as logits how near they are to a learned point for each class."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(432, 64), nn.ReLU(), nn.Linear(64, 8))
        self.points = nn.Parameter(torch.randn(6, 8))

    def forward(self, images: Tensor) -> Tensor:
        """Minus the squared distances to the points."""
        away: Tensor = self.embed(images)[:, None] - self.points
        return -self.sharpness * away.square().sum(2)


def sharp_distances(watch: Watch, seed: int, healed: bool) -> float:
    """Squared distances were multiplied by a hundred before the softmax, which turned every step into a leap."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = Prototypes(1.0 if healed else 100.0)
    sgd = torch.optim.SGD(net.parameters(), lr=0.02)
    return descend(watch(net, sgd), sgd, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 250))


CASES = [
    Case(
        "wrong-loss/broadcast-targets",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation from tensors of the wrong shape",
        ("loss-at-chance",),
        broadcast_targets,
        "net(past) - following",
        "net(past) - following[:, None]",
    ),
    Case(
        "softmax-before-cross-entropy/words",
        "localisers",
        f"{NEURALINT}, rule checkWrongLossInputs; {HUMBATOVA}, last activation (ACH), fault D1",
        ("softmax-before-loss",),
        probabilities_of_words,
        "functional.softmax(scores)",
        "scores",
    ),
    Case(
        "sigmoid-before-bce-with-logits/several-labels",
        "localisers",
        f"{NEURALINT}, rule checkWrongLossInputs",
        ("softmax-before-loss",),
        sigmoid_of_several,
        "torch.sigmoid(net(x))",
        "net(x)",
    ),
    Case(
        "relu-ends-regression/forecast",
        "localisers",
        f"{HUMBATOVA}, activation changed (ACH), mutants C1 and R2; 'inappropriate activation' in {DEEPFD}",
        ("dead-units", "loss-plateau", "relu-before-loss"),
        relu_ends_forecast,
        "nn.ReLU behind the output",
        "nn.Identity",
    ),
    Case(
        "relu-before-cross-entropy/built-in-a-loop",
        "localisers",
        f"{UMLAUT}, heuristic 'last model layer has nonlinear activation'",
        ("dead-units", "relu-before-loss"),
        relu_in_every_round,
        "nn.ReLU behind the last layer too",
        "none behind the last layer",
    ),
    Case(
        "missing-activations/product",
        "localisers",
        f"{HUMBATOVA}, mutants M2 and R7 (activation removed, ARM); {NEURALINT}, rule checkMissingRelus",
        ("loss-at-chance", "loss-plateau"),
        linear_throughout,
        "layers[::2]",
        "layers with nn.Tanh between them",
    ),
    Case(
        "logits-divided/contrastive-pairs",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: multiplied by the temperature",
        ("loss-scale", "loss-at-chance"),
        warm_pairs,
        "cosine * 0.01",
        "cosine / 0.1",
    ),
    Case(
        "logits-multiplied/distances",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: a temperature far too low",
        ("loss-scale", "learning-rate-high", "exploding-gradients"),
        sharp_distances,
        "-100 * distance",
        "-distance",
    ),
]
