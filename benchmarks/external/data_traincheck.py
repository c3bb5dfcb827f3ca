"""For the trainings of TrainCheck: digits of a font and sentences of a grammar, made on the spot, and models of its ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..faults.training import last as last

DIGITS = 10
SIDE = 12
# seven rows of five dots for each digit
FONT = [
    "01110 10001 10001 10001 10001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 00100 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
]
ADJECTIVES = ["old", "small", "red", "quick", "quiet", "heavy"]
NOUNS = ["cat", "dog", "horse", "bird", "farmer", "sailor", "stone", "river", "tower", "wheel"]
VERBS = ["sees", "follows", "carries", "paints", "finds", "leaves"]
WORDS = ["<start>", "the", "and", ".", *ADJECTIVES, *NOUNS, *VERBS]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
SENTENCE = 7
WIDTH = 32


def generator(seed: int, part: int = 0) -> torch.Generator:
    """A source of random numbers for one part of a training, such as a rank or a loader's worker."""
    return torch.Generator().manual_seed(1000 * seed + part)


def digits(count: int, source: torch.Generator, noise: float = 0.3, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Images ``(count, 1, side, side)`` of digits that lie anywhere in them, under noise, about of mean 0 and deviation 1."""
    glyphs = torch.tensor([[[float(dot) for dot in row] for row in digit.split()] for digit in FONT])
    labels = torch.randint(DIGITS, (count,), generator=source)
    top = torch.randint(side - 6, (count,), generator=source)
    left = torch.randint(side - 4, (count,), generator=source)
    images = torch.zeros(count, side, side)
    rows = (top[:, None] + torch.arange(7))[:, :, None]
    columns = (left[:, None] + torch.arange(5))[:, None, :]
    images[torch.arange(count)[:, None, None], rows, columns] = glyphs[labels]
    images += noise * torch.randn(images.shape, generator=source)
    return ((images - 0.12) / 0.44)[:, None], labels


def shuffled(images: Tensor, labels: Tensor, batch: int, source: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end, in a new order in each epoch."""
    while True:
        order = torch.randperm(len(images), generator=source)
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield images[chosen], labels[chosen]


def _frequent(words: list[str], source: random.Random) -> str:
    """A word; the second of the list half as often as the first, the third a third as often."""
    return source.choices(words, weights=[1 / rank for rank in range(1, len(words) + 1)])[0]


def sentences(seed: int, part: int = 0) -> Iterator[list[str]]:
    """Sentences of seven words; some verbs follow some nouns more often, so that there is something to learn."""
    source = random.Random(1000 * seed + part)
    while True:
        first, second = _frequent(NOUNS, source), _frequent(NOUNS, source)
        verb = VERBS[NOUNS.index(first) % len(VERBS)] if source.random() < 0.8 else source.choice(VERBS)
        yield ["the", _frequent(ADJECTIVES, source), first, verb, "the", second, "."]


def numbers(words: list[str]) -> list[int]:
    """The words' places in the vocabulary."""
    return [NUMBERS[word] for word in words]


def text(batch: int, length: int, seed: int, part: int = 0) -> Iterator[Tensor]:
    """Batches ``(batch, length + 1)`` of running text."""
    words = itertools.chain.from_iterable(sentences(seed, part))
    while True:
        yield torch.tensor([numbers(list(itertools.islice(words, length + 1))) for _ in range(batch)])


def translated(words: list[str]) -> list[str]:
    """Another language with the same words: the adjective stands behind its noun, and the verb at the end."""
    the, adjective, first, verb, article, second, stop = words
    return [the, first, adjective, article, second, verb, stop]


def translations(batch: int, seed: int, part: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of sentences ``(batch, 7)`` and their translations ``(batch, 8)``, which begin with the start mark."""
    source = sentences(seed, part)
    while True:
        batch_of = list(itertools.islice(source, batch))
        targets = [numbers(["<start>", *translated(words)]) for words in batch_of]
        yield torch.tensor([numbers(words) for words in batch_of]), torch.tensor(targets)


class Residual(nn.Module):
    """A small ResNet: a stem, two residual blocks with batch norms, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16 * 4, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        """Digits' logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = functional.relu(x + block(x))
        logits: Tensor = self.head(functional.max_pool2d(x, 2).flatten(1))
        return logits


class SentenceEncoder(nn.Module):
    """An encoder of sentences: the mean of its words' outputs of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """A vector of length one for each sentence."""
        return functional.normalize(self.project(self.recurrent(self.words(tokens))[0].mean(dim=1)), dim=1)


class Translator(nn.Module):
    """A transformer with one layer to read and one to write."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Parameter(torch.randn(SENTENCE, WIDTH) / 10)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, len(WORDS))

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        """Logits of the words of the translation, from those before them."""
        mask = torch.ones(SENTENCE, SENTENCE, dtype=torch.bool).triu(1)
        memory = self.encoder(self.words(source) + self.places)
        logits: Tensor = self.head(self.decoder(self.words(before) + self.places, memory, tgt_mask=mask))
        return logits
