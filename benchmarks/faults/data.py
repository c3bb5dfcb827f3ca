"""Synthetic data, as endless streams of batches; only the text comes from Python's own help."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from torch_gradmon.cli.demo_model import Sizes, corpus, draw

Batch = tuple[Tensor, Tensor]
CLASSES, FEATURES = 10, 20
SHAPES, SIDE = 4, 8
SYMBOLS, LENGTH = 8, 16
VOCABULARY, TOPICS = 100, 5
SIZES = Sizes(blocks=2, width=32, heads=2, context=32, batch=8)


def clusters(generator: torch.Generator, batch: int = 64) -> Iterator[Batch]:
    """Ten clusters in twenty dimensions: ``[64, 20]`` and ``[64]``."""
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    while True:
        y = torch.randint(CLASSES, (batch,), generator=generator)
        yield centres[y] + 0.8 * torch.randn(batch, FEATURES, generator=generator), y


def shapes(generator: torch.Generator, batch: int = 32) -> Iterator[Batch]:
    """Noisy images of a bar that lies, a bar that stands, a diagonal or a ring: ``[32, 1, 8, 8]`` and ``[32]``."""
    kinds = torch.zeros(SHAPES, 4, 4)
    kinds[0, 1], kinds[1, :, 1], kinds[2], kinds[3] = 1, 1, torch.eye(4), 1
    kinds[3, 1:3, 1:3] = 0
    places = torch.stack([torch.stack([_placed(kind, i // 5, i % 5) for i in range(25)]) for kind in kinds])
    while True:
        y = torch.randint(SHAPES, (batch,), generator=generator)
        images = places[y, torch.randint(25, (batch,), generator=generator)]
        yield images[:, None] + 0.2 * torch.randn(batch, 1, SIDE, SIDE, generator=generator), y


def _placed(kind: Tensor, row: int, column: int) -> Tensor:
    image = torch.zeros(SIDE, SIDE)
    image[row : row + 4, column : column + 4] = kind
    return image


def pictures(generator: torch.Generator, batch: int = 32) -> Iterator[Batch]:
    """Mixtures of six pictures with some noise, to be reproduced: ``[32, 64]`` twice."""
    parts = torch.randn(6, SIDE * SIDE, generator=generator)
    while True:
        mixed = torch.randn(batch, 6, generator=generator) @ parts / 6**0.5
        images = mixed + 0.1 * torch.randn(batch, SIDE * SIDE, generator=generator)
        yield images, images


def progressions(generator: torch.Generator, batch: int = 32) -> Iterator[Batch]:
    """Symbols that go round by a stride, some of them wrong, and the symbols that follow: ``[32, 16]`` twice."""
    while True:
        start = torch.randint(SYMBOLS, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % SYMBOLS
        wrong = torch.rand(tokens.shape, generator=generator) < 0.05
        tokens = torch.where(wrong, torch.randint(SYMBOLS, tokens.shape, generator=generator), tokens)
        yield tokens[:, :-1], tokens[:, 1:]


def bags(generator: torch.Generator, batch: int = 32) -> Iterator[Batch]:
    """Bags of twelve words, each topic with words of its own, some words rare: ``[32, 12]`` and ``[32]``."""
    shares = 0.2 + torch.rand(TOPICS, VOCABULARY, generator=generator) ** 6 * 5
    shares[:, -10:] = 1e-3  # words that hardly ever come
    while True:
        y = torch.randint(TOPICS, (batch,), generator=generator)
        yield torch.multinomial(shares[y], 12, replacement=True, generator=generator), y


@lru_cache(maxsize=1)
def _characters() -> tuple[Tensor, int]:
    _, data, count = corpus()
    return data, count


def characters() -> int:
    """How many different characters the text has."""
    return _characters()[1]


def text(generator: torch.Generator) -> Iterator[Batch]:
    """Excerpts of the text, and the same one character further on: ``[8, 32]`` twice."""
    while True:
        yield draw(_characters()[0], SIZES, generator)
