"""PyTorch trainings that people asked about: what a model is made of, and what its loss weighs."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_questions import spirals
from .data_traincheck import digits, generator, last

BITS = 16
PIXELS = 100
LATENT = 8


class Listed(nn.Module):
    """As many hidden layers as one likes."""

    def __init__(self, healed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(2, 24)
        layers = [nn.Linear(24, 24) for _ in range(3)]
        self.layers = nn.ModuleList(layers) if healed else layers
        self.last = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of two classes."""
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.last(x)
        return logits


def _plain_list(watch: Watch, seed: int, healed: bool) -> float:
    """Layers in a Python list are no part of the module: ``parameters()`` does not have them, and they stay as they began."""
    torch.manual_seed(seed)
    source = generator(seed)
    model = Listed(healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        points, arms = spirals(64, source)
        loss = functional.cross_entropy(model(points), arms)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _four_sigmoids(watch: Watch, seed: int, healed: bool) -> float:
    """Four hidden layers of sigmoids between bits and numbers: the error of the last is a thousandth of it at the first.

    The question was about TensorFlow; the network is the same.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    widths = [BITS, 64, 64, 64, 64]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU() if healed else nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
    weights = torch.randn(BITS, generator=source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        bits = torch.randint(2, (64, BITS), generator=source).float()
        numbers = bits @ weights + bits[:, 0] * bits[:, 1] - bits[:, 2] * bits[:, 3]
        loss = functional.mse_loss(model(bits), numbers[:, None] / 2)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _each_with_each(watch: Watch, seed: int, healed: bool) -> float:
    """Predictions ``(n, 1)`` minus targets ``(n,)`` are differences of each with each, whose squares are least at the mean.

    PyTorch's own loss warns of it since then; here the difference is taken by hand.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    x = torch.randn(100, 2, generator=source)
    y = 10 + 9 * x[:, 0] - 2 * x[:, 1] + torch.randn(100, generator=source)
    if healed:
        y = y[:, None]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Vae(nn.Module):
    """A variational autoencoder of small images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(PIXELS, 64)
        self.mean = nn.Linear(64, LATENT)
        self.log_variance = nn.Linear(64, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, PIXELS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of the pixels, and mean and logarithm of the variance of the code."""
        hidden = functional.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def _mean_over_pixels(watch: Watch, seed: int, healed: bool) -> float:
    """The reconstruction was averaged over the pixels, and so small beside the divergence that the code says nothing.

    All images were decoded to the same one. The question was about Keras's example; the loss is the same.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        images = (digits(64, source, noise=0.1, side=10)[0].flatten(1) * 0.44 + 0.12).clamp(0, 1)
        logits, mean, log_variance = model(images)
        reconstruction = functional.binary_cross_entropy_with_logits(logits, images) * (PIXELS if healed else 1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        loss = reconstruction + divergence
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        monitor.log_scalar("divergence", divergence.detach())
    return last(losses)


CASES: list[Case] = [
    Case(
        "layers-in-a-list",
        "questions",
        "https://discuss.pytorch.org/t/list-of-nn-module-in-a-nn-module/219",
        ("unregistered-parameters", "not-in-optimizer"),
        _plain_list,
        bug="hidden layers in a Python list",
        fix="in a ModuleList",
    ),
    Case(
        "four-layers-of-sigmoids",
        "questions",
        "https://ai.stackexchange.com/questions/16557",
        ("vanishing-gradients", "loss-at-chance", "loss-plateau"),
        _four_sigmoids,
        bug="sigmoids in four hidden layers",
        fix="ReLU",
    ),
    Case(
        "difference-of-each-with-each",
        "questions",
        "https://github.com/pytorch/pytorch/issues/16045",
        ("loss-at-chance", "loss-plateau"),
        _each_with_each,
        bug="targets (n,) beside predictions (n, 1)",
        fix="targets (n, 1)",
    ),
    Case(
        "reconstruction-mean-over-pixels",
        "questions",
        "https://stats.stackexchange.com/questions/485488",
        ("posterior-collapse", "loss-scale"),
        _mean_over_pixels,
        bug="the mean over pixels as the reconstruction",
        fix="the sum over pixels",
    ),
]
