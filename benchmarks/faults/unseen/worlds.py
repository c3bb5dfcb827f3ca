"""Small models with made-up data, other than those of the zoo: images, series, graphs, tables, sets and pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Watch, last

Act = Callable[[], nn.Module]


@dataclass
class World:
    """A model and its loss at a step, whose batch depends on the seed and the steps so far."""

    model: nn.Module
    loss: Callable[[int], Tensor]


def loop(
    watch: Watch,
    world: World,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 150,
    name: str = "loss",
    clip: float | None = None,
    schedule: Any = None,
    before: Callable[[int], None] | None = None,
    after: Callable[[int], None] | None = None,
) -> float:
    """The loop as it should be; ``before`` and ``after`` are called with the number of each step."""
    monitor = watch(world.model, optimizer)
    losses = []
    for step in range(steps):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(world.model.parameters(), clip)
        monitor.log_scalar(name, loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if after is not None:
            after(step)
    return last(losses)


def begin(seed: int) -> torch.Generator:
    """Seed torch for the weights; what comes back is for the data."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed + 1000)


def adam(model: nn.Module, rate: float = 3e-3, **options: Any) -> torch.optim.Adam:
    """Adam over all parameters."""
    return torch.optim.Adam(model.parameters(), lr=rate, **options)


def nesterov(model: nn.Module, rate: float = 0.05, **options: Any) -> torch.optim.SGD:
    """SGD with Nesterov's momentum over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, **options)


def dense(*sizes: int, act: Act = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    modules: list[nn.Module] = []
    for a, b in pairwise(sizes):
        modules += [nn.Linear(a, b), act()]
    return nn.Sequential(*modules[:-1])


class Mix(nn.Module):
    """A block of an MLP-mixer: along the patches, then along the channels."""

    def __init__(self, patches: int, width: int, norm: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))
        self.along, self.across = dense(patches, 32, patches, act=nn.GELU), dense(width, 2 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, patches, width]``."""
        x = x + self.along(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across(self.second(x))


class Mixer(nn.Module):
    """Sixteen patches of four pixels."""

    def __init__(self, depth: int = 2, width: int = 24, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(Mix(16, width, norm) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        """From ``[batch, 8, 8]`` to ``[batch, 4]``."""
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.blocks(self.stem(patches))).mean(1))


def gratings(g: torch.Generator, batch: int = 32) -> tuple[Tensor, Tensor]:
    """Gratings in four directions with any phase, and which it is."""
    y = torch.randint(4, (batch,), generator=g)
    angle, phase = y * math.pi / 4, 2 * math.pi * torch.rand(batch, generator=g)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = rows * angle.sin()[:, None, None] + columns * angle.cos()[:, None, None]
    return (1.5 * wave + phase[:, None, None]).sin() + 0.3 * torch.randn(batch, 8, 8, generator=g), y


def mixer(seed: int, batch: int = 32, **options: Any) -> World:
    """Directions of gratings by an MLP-mixer."""
    g = begin(seed)
    model = Mixer(**options)

    def loss(step: int) -> Tensor:
        x, y = gratings(g, batch)
        return F.cross_entropy(model(x).float(), y)

    return World(model, loss)


class UNet(nn.Module):
    """Down by two, up by two, and a connection past both."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.SiLU())
        self.head = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, 1, 16, 16]``."""
        inner = self.inner(x)
        return self.head(torch.cat([inner, self.up(self.down(inner))], 1))


def blobs(g: torch.Generator, batch: int = 16) -> Tensor:
    """A round spot somewhere, ``[batch, 1, 16, 16]``."""
    place = 3 + 10 * torch.rand(batch, 2, generator=g)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = (rows - place[:, :1, None]).square() + (columns - place[:, 1:, None]).square()
    return (-distance / 8).exp()[:, None]


def unet(seed: int, batch: int = 16) -> World:
    """Noise is taken away from images of spots."""
    g = begin(seed)
    model = UNet()

    def loss(step: int) -> Tensor:
        clean = blobs(g, batch)
        return F.mse_loss(model(clean + 0.3 * torch.randn(clean.shape, generator=g)).float(), clean)

    return World(model, loss)


def waves(g: torch.Generator, batch: int = 32) -> tuple[Tensor, Tensor]:
    """Sines of one of five frequencies with any phase, ``[batch, 1, 48]``, and which it is."""
    y = torch.randint(5, (batch,), generator=g)
    phase = 6.28 * torch.rand(batch, 1, generator=g)
    x = ((0.2 + 0.2 * y[:, None]) * torch.arange(48) + phase).sin()
    return (x + 0.3 * torch.randn(batch, 48, generator=g))[:, None], y


def convolutions(depth: int = 3, width: int = 12, act: Act = nn.ReLU, norm: str = "", kernel: int = 5) -> nn.Sequential:
    """Convolutions along time, then the mean and a linear layer."""
    modules: list[nn.Module] = []
    for index in range(depth):
        modules.append(nn.Conv1d(width if index else 1, width, kernel, padding=kernel // 2))
        modules += {"": [], "batch": [nn.BatchNorm1d(width)], "group": [nn.GroupNorm(3, width)]}[norm]
        modules.append(act())
    return nn.Sequential(*modules, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 5))


def series(seed: int, model: nn.Module | None = None, batch: int = 32, **options: Any) -> World:
    """Frequencies of noisy sines."""
    g = begin(seed)
    made = convolutions(**options) if model is None else model

    def loss(step: int) -> Tensor:
        x, y = waves(g, batch)
        return F.cross_entropy(made(x).float(), y)

    return World(made, loss)


class LSTM(nn.Module):
    """An embedding, an LSTM and an output for its last state."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(10, width), nn.LSTM(width, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``[batch, length]`` to ``[batch, 4]``."""
        return self.head(self.lstm(self.embed(tokens))[0][:, -1])


def words(g: torch.Generator, batch: int = 32, length: int = 12) -> tuple[Tensor, Tensor]:
    """Symbols, one of the first four exactly once, and which."""
    x = torch.randint(4, 10, (batch, length), generator=g)
    y = torch.randint(4, (batch,), generator=g)
    x[torch.arange(batch), torch.randint(length, (batch,), generator=g)] = y
    return x, y


def lstm(seed: int, batch: int = 32) -> World:
    """Which of four symbols came."""
    g = begin(seed)
    model = LSTM()

    def loss(step: int) -> Tensor:
        x, y = words(g, batch)
        return F.cross_entropy(model(x), y)

    return World(model, loss)


class Graph(nn.Module):
    """Each layer takes the mean of the neighbours, then a linear map."""

    def __init__(self, depth: int = 2, width: int = 16, act: Act = nn.ReLU) -> None:
        super().__init__()
        sizes = [6, *[width] * depth, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.acts = nn.ModuleList(act() for _ in range(depth))

    def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
        """From ``[nodes, 6]`` and ``[nodes, nodes]`` to ``[nodes, 3]``."""
        for layer, act in zip(self.layers[:-1], self.acts, strict=True):
            x = act(layer(mixing @ x))
        return self.layers[-1](x)


def communities(g: torch.Generator, nodes: int = 60) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Edges with a loop at each node, the community of each node, and features that are drawn anew at each call."""
    y = torch.arange(nodes) % 3
    edges = torch.rand(nodes, nodes, generator=g) < torch.where(y[:, None] == y, 0.2, 0.03)
    centres = torch.randn(3, 6, generator=g)
    return (
        (edges | edges.T | torch.eye(nodes, dtype=torch.bool)).float(),
        y,
        lambda: centres[y] + torch.randn(nodes, 6, generator=g),
    )


def graph(seed: int, **options: Any) -> World:
    """Communities of a random graph by message passing."""
    g = begin(seed)
    edges, y, draw = communities(g)
    model = Graph(**options)
    mixing = edges / edges.sum(1, keepdim=True)
    return World(model, lambda step: F.cross_entropy(model(draw(), mixing), y))
