"""Data that is made on the spot for the trainings that people asked about: flowers, figures, books, spirals, graphs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIDE = 16
VOCABULARY = 200
AUTHORS = 3
TYPES = 4
NODES = TYPES + 1
# means and deviations of sepal and petal length and width of three kinds of iris, about those of Fisher's flowers
FLOWERS = [
    ([5.0, 3.4, 1.5, 0.25], [0.35, 0.38, 0.17, 0.11]),
    ([5.9, 2.8, 4.3, 1.3], [0.52, 0.31, 0.47, 0.20]),
    ([6.6, 3.0, 5.6, 2.0], [0.64, 0.32, 0.55, 0.27]),
]


def flowers(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four lengths in cm, which go together in a flower as size does, and the kind of iris."""
    kinds = torch.randint(len(FLOWERS), (count,), generator=source)
    means, deviations = (torch.tensor(values) for values in zip(*FLOWERS, strict=True))
    size = torch.randn(count, 1, generator=source)
    own = torch.randn(count, 4, generator=source)
    return means[kinds] + deviations[kinds] * (0.7 * size + 0.7 * own), kinds


def table(count: int, columns: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Columns of numbers and a yes or no for each row, which depends on some of them, not only by their sum."""
    x = torch.randn(count, columns, generator=source)
    score = 1.5 * x[:, 0] - x[:, 1] + x[:, 2].abs() * x[:, 3] + 0.3 * torch.randn(count, generator=source)
    return x, (score > 0).float()


def figures(count: int, source: torch.Generator, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Images ``(count, 1, 16, 16)`` of a disc, a ring or a cross of any place and size, the kind, and which pixels are its."""
    kinds = torch.randint(3, (count,), generator=source)
    centre = 5 + 6 * torch.rand(count, 2, 1, 1, generator=source)
    radius = 3 + 2 * torch.rand(count, 1, 1, generator=source)
    places = torch.arange(SIDE).float()
    down, right = (places[:, None] - centre[:, 0]).abs(), (places[None, :] - centre[:, 1]).abs()
    distance = (down.square() + right.square()).sqrt()
    disc = distance < radius
    ring = disc & (distance > radius - 1.5)
    cross = ((down < 1) | (right < 1)) & (torch.maximum(down, right) < radius)
    pixels = torch.stack([disc, ring, cross], dim=1)[torch.arange(count), kinds]
    images = pixels.float() + noise * torch.randn(count, SIDE, SIDE, generator=source)
    return ((images - 0.12) / 0.45)[:, None], kinds, pixels


def books(count: int, length: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Passages of three authors, who draw from one vocabulary by Zipf's law, with favourite words of their own."""
    authors = torch.randint(AUTHORS, (count,), generator=source)
    common = 1 / torch.arange(1, VOCABULARY + 1).float()
    favourite = torch.stack([common.roll(60 * (author + 1)) for author in range(AUTHORS)])
    chances = (common + 0.4 * favourite)[authors]
    return torch.multinomial(chances, length, replacement=True, generator=source), authors


def spirals(count: int, source: torch.Generator, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Points of two spirals around one centre, and which one they are of."""
    arm = torch.randint(2, (count,), generator=source)
    turn = torch.rand(count, generator=source).sqrt()
    angle = 1.5 * math.tau * turn + math.pi * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return 2 * (points + noise * torch.randn(count, 2, generator=source)), arm


def graphs(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Nodes with a type and a value. The label is the value of the one node that has the type of the first node."""
    types = torch.stack([torch.randperm(TYPES, generator=source) for _ in range(count)])
    values = torch.randint(TYPES, types.shape, generator=source)
    asked = torch.randint(TYPES, (count,), generator=source)
    rows = torch.arange(count)
    nodes = torch.cat([torch.eye(TYPES)[types], torch.eye(TYPES)[values], torch.zeros(*types.shape, 1)], dim=2)
    first = torch.cat([torch.eye(TYPES)[types[rows, asked]], torch.zeros(count, TYPES), torch.ones(count, 1)], dim=1)
    return torch.cat([first[:, None], nodes], dim=1), values[rows, asked]
