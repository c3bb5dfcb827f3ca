"""Models that were built or initialised wrongly, as people reported it, written anew."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_localisers import batches, blobs, dense, descend, digits, fit, reviews, shapes
from .unseen_losses import unseen


class Own(nn.Module):
    """A linear layer that is written out, with weights of a given deviation."""

    def __init__(self, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(deviation * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weights, and the bias."""
        return x @ self.weight + self.bias


def plain_randn(watch: Watch, seed: int, healed: bool) -> float:
    """Weights of a layer of one's own came from torch.randn as they are, whatever the number of inputs."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise([432, 128, 128, 6]):
        layers += [Own(inputs, outputs, inputs**-0.5 if healed else 1.0), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(*shapes(2500), 32, 250))


def tiny_normal(watch: Watch, seed: int, healed: bool) -> float:
    """All weights of a net of six layers were drawn with deviation 0.001, so hardly anything came out of it, or back."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20)
    net = dense([20, 48, 48, 48, 48, 48, 6], nn.ReLU)
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features) if healed else 1e-3)
            nn.init.zeros_(layer.bias)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return fit(watch, net, sgd, F.cross_entropy, batches(points, labels, 32, 250))


class Mixture(nn.Module):
    """A density of one number given another, as a mixture of five normal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 48), nn.Tanh())
        self.head = nn.Linear(48, 15)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean of the negative logarithms of the densities."""
        weights, means, scales = self.head(self.body(x)).chunk(3, dim=1)
        normal = torch.distributions.Normal(means, F.softplus(scales) + 0.02)
        return -torch.logsumexp(weights.log_softmax(1) + normal.log_prob(y), 1).mean()


def components_all_alike(watch: Watch, seed: int, healed: bool) -> float:
    """The head of a mixture density net began at zero, so its five components were one and the same, and stayed so."""
    torch.manual_seed(seed)
    y = 2 * torch.rand(3000, 1) - 1
    x = y + 0.5 * torch.sin(6 * y) + 0.05 * torch.randn(3000, 1)
    net = Mixture()
    if not healed:
        nn.init.zeros_(net.head.weight)
        nn.init.zeros_(net.head.bias)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return descend(watch(net, adam), adam, net, batches(x, y, 64, 300))


def gain_of_four(watch: Watch, seed: int, healed: bool) -> float:
    """Eleven layers were initialised with the gain 4, and each made what passed through it nearly three times as large."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), *dense([100] + 10 * [64] + [10], nn.ReLU))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2) if healed else 4.0)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return fit(watch, net, sgd, F.cross_entropy, batches(*digits(2500), 32, 250))


class Deep(nn.Module):
    """Twenty layers, whose inputs may be added to their outputs."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of six classes."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x) / 4 if self.residual else layer(x)
        out: Tensor = self.last(x)
        return out


def no_way_around(watch: Watch, seed: int, healed: bool) -> float:
    """The input of each of twenty layers was not added to its output, as it should have been."""
    torch.manual_seed(seed)
    net = Deep(residual=healed)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(*blobs(3000, 6, 20), 32, 200))


class Looking(nn.Module):
    """One attention over words, whose scores are multiplied by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.words = nn.Embedding(40, 64)
        self.query, self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.answer = nn.Linear(64, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for blame and praise."""
        words = self.words(text)
        found = F.scaled_dot_product_attention(self.query(words), self.key(words), self.value(words), scale=self.factor)
        out: Tensor = self.answer(found.mean(1))
        return out


def scaled_the_wrong_way(watch: Watch, seed: int, healed: bool) -> float:
    """The scores of an attention were multiplied by the root of their width instead of divided by it."""
    torch.manual_seed(seed)
    net = Looking(64**-0.5 if healed else 64**0.5)
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(*reviews(2000), 32, 200))


class Pooled(nn.Module):
    """Words whose vectors, a parameter made of numbers in double precision, are added up."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        vectors = 0.1 * torch.randn(40, 2, dtype=torch.float64)
        self.vectors = nn.Parameter(vectors.float()) if registered else nn.Parameter(vectors).float()
        self.answer = nn.Linear(2, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for blame and praise."""
        out: Tensor = self.answer(self.vectors[text].sum(1))
        return out


def copy_of_a_parameter(watch: Watch, seed: int, healed: bool) -> float:
    """A parameter was moved to another type when the model was built, and the copy that came of it is no parameter."""
    torch.manual_seed(seed)
    net = Pooled(registered=healed)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return fit(watch, net, adam, F.cross_entropy, batches(*reviews(2000), 32, 250))


def kept_not_dropped(watch: Watch, seed: int, healed: bool) -> float:
    """The probability to keep a unit, 0.9, was taken over from TensorFlow as the one to drop it."""
    torch.manual_seed(seed)
    drop = 1 - 0.9 if healed else 0.9
    layers = [nn.Flatten(), nn.Linear(432, 96), nn.ReLU(), nn.Dropout(drop), nn.Linear(96, 48), nn.ReLU(), nn.Dropout(drop)]
    net = nn.Sequential(*layers, nn.Linear(48, 6))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    return fit(watch, net, adam, F.cross_entropy, batches(*shapes(2500), 32, 250))


class Remembering(nn.Module):
    """An LSTM over a text, and its last output."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=batch_first)
        self.out = nn.Linear(32, 24)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the word that was asked for."""
        out: Tensor = self.out(self.lstm(self.words(text))[0][:, -1])
        return out


def batch_is_not_first(watch: Watch, seed: int, healed: bool) -> float:
    """An LSTM without batch_first took the examples for moments in time; it had to recall the word before the last."""
    torch.manual_seed(seed)
    text = torch.randint(24, (3000, 6))
    net = Remembering(batch_first=healed)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return fit(watch, net, adam, F.cross_entropy, batches(text, text[:, -2], 32, 300))


CASES = [
    unseen(
        "randn-in-own-layer/shapes",
        "questions",
        "https://rubel.dev/blog/advanced-weight-initialization-strategies-for-deep-learning",
        ("initialisation-scale", "saturated-units"),
        plain_randn,
        "torch.randn(inputs, outputs)",
        "torch.randn(inputs, outputs) / inputs**0.5",
    ),
    unseen(
        "tiny-normal-initialisation/blobs",
        "localisers",
        "AutoTrainer (ICSE 2021), https://github.com/shiningrain/AUTOTRAINER, problem 'gradient vanish'",
        ("initialisation-scale", "vanishing-gradients"),
        tiny_normal,
        "nn.init.normal_(std=1e-3) in six layers",
        "std=sqrt(2 / fan in)",
    ),
    unseen(
        "components-alike/mixture-density",
        "localisers",
        "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015, weights initialisation",
        ("equal-units",),
        components_all_alike,
        "nn.init.zeros_ for the head of the mixture",
        "the default",
    ),
    unseen(
        "gain-of-four/digits",
        "localisers",
        "AutoTrainer (ICSE 2021), https://github.com/shiningrain/AUTOTRAINER, problem 'gradient explode'",
        ("exploding-gradients", "initialisation-scale"),
        gain_of_four,
        "orthogonal_(gain=4.0)",
        "gain=sqrt(2)",
    ),
    unseen(
        "twenty-layers-without-residual/blobs",
        "questions",
        "https://arxiv.org/abs/1512.03385, section 4.1; plain layers with the default initialisation",
        ("vanishing-gradients",),
        no_way_around,
        "layer(x)",
        "x + layer(x) / 4",
    ),
    unseen(
        "attention-scaled-the-wrong-way/reviews",
        "questions",
        "https://github.com/esceptico/perceiver-io/issues/9; https://github.com/rasbt/LLMs-from-scratch/issues/856",
        ("attention-entropy-collapse", "attention-logit-growth"),
        scaled_the_wrong_way,
        "scale=64**0.5",
        "scale=64**-0.5",
    ),
    unseen(
        "copy-of-a-parameter/reviews",
        "questions",
        "https://github.com/pytorch/pytorch/issues/20089",
        ("unregistered-parameters",),
        copy_of_a_parameter,
        "nn.Parameter(vectors).float()",
        "nn.Parameter(vectors.float())",
    ),
    unseen(
        "keep-probability-dropped/shapes",
        "questions",
        "https://github.com/bonlime/keras-deeplab-v3-plus/issues/4; https://github.com/piergiaj/pytorch-i3d/issues/58",
        ("dropout-high",),
        kept_not_dropped,
        "nn.Dropout(0.9)",
        "nn.Dropout(1 - 0.9)",
    ),
    unseen(
        "batch-not-first/recall",
        "questions",
        "https://discuss.pytorch.org/t/lstm-change-batch-first-true-loss-does-not-decrease/62364",
        ("loss-at-chance",),
        batch_is_not_first,
        "nn.LSTM(batch_first=False) for (batch, time, features)",
        "batch_first=True",
    ),
]
