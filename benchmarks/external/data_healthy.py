"""Small data sets that are made and not loaded, a cart-pole, and what healthy trainings share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last as last
from .case import Case, Watch

EXAMPLES = "https://github.com/pytorch/examples/tree/main"
TUTORIALS = "https://docs.pytorch.org/tutorials"

# rows of 5 x 7 pixels from the top, two hexadecimal digits for each row
GLYPHS = (
    *("0E11131519110E", "040C040404040E", "0E11010204081F", "1F02040201110E", "02060A121F0202"),
    *("1F101E0101110E", "0608101E11110E", "1F010204080808", "0E11110E11110E", "0E11110F01020C"),
)
# words of the language below: a full stop, two articles and four prepositions, then 17 words for each of four topics
WORDS = 7 + 4 * 17
STOP = 0


def healthy(*rows: tuple[str, str, Callable[[Watch, int, bool], float]]) -> list[Case]:
    """Cases from rows of name, source and training; every second one is held back."""
    return [
        Case(f"healthy-{name}", "examples", source, (), run, held_back=bool(index % 2))
        for index, (name, source, run) in enumerate(rows)
    ]


def batches(steps: int, size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """As many batches as there are steps, from epochs that are shuffled anew; incomplete batches are left out."""
    count = 0
    while True:
        order = torch.randperm(len(tensors[0]))
        for rows in order[: len(order) // size * size].split(size):
            if count == steps:
                return
            count += 1
            yield tuple(tensor[rows] for tensor in tensors)


def digits(count: int, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Grey images of 16 x 16 pixels from 0 to 1: a printed digit, turned, scaled, moved and with noise."""
    rows = torch.tensor([list(bytes.fromhex(glyph)) for glyph in GLYPHS])
    glyphs = ((rows.unsqueeze(2) >> torch.tensor([4, 3, 2, 1, 0])) & 1).float()
    big = F.pad(glyphs.repeat_interleave(2, 1).repeat_interleave(2, 2), (3, 3, 1, 1))
    labels = torch.randint(10, (count,))
    angle, size = 0.2 * torch.randn(count), 1 + 0.1 * torch.randn(count)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = size * angle.cos()
    theta[:, 0, 1], theta[:, 1, 0] = -size * angle.sin(), size * angle.sin()
    theta[:, :, 2] = 0.3 * (torch.rand(count, 2) - 0.5)
    grid = F.affine_grid(theta, [count, 1, 16, 16], align_corners=False)
    images = F.grid_sample(big[labels].unsqueeze(1), grid, align_corners=False)
    return (images + noise * torch.randn_like(images)).clamp(0, 1), labels


def normalised(images: Tensor) -> Tensor:
    """Images with mean zero and deviation one in each channel."""
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def shapes(count: int, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Colour images from 0 to 1 of a disc, a square, a cross or a ring; which of the four it is; and its mask."""
    labels = torch.randint(4, (count,))
    axis = torch.linspace(-1, 1, size)
    centre, radius = 0.8 * (torch.rand(count, 2, 1, 1) - 0.5), 0.3 + 0.25 * torch.rand(count, 1, 1)
    y, x = axis.view(1, -1, 1) - centre[:, 0], axis.view(1, 1, -1) - centre[:, 1]
    distance, largest = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    disc, square = distance < radius, largest < 0.8 * radius
    cross = (torch.minimum(x.abs(), y.abs()) < 0.3 * radius) & (largest < radius)
    ring = disc & (distance > 0.6 * radius)
    kinds = torch.stack([disc, square, cross, ring])
    masks = kinds[labels, torch.arange(count)].float().unsqueeze(1)
    ink, ground = 0.4 + 0.6 * torch.rand(count, 3, 1, 1), 0.3 * torch.rand(count, 3, 1, 1)
    images = masks * ink + (1 - masks) * ground + 0.05 * torch.randn(count, 3, size, size)
    return images.clamp(0, 1), labels, masks


def clusters(count: int, dims: int, classes: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Points around the centre of their class."""
    centres = torch.randn(classes, dims)
    labels = torch.randint(classes, (count,))
    return centres[labels] + spread * torch.randn(count, dims), labels


def moons(count: int, noise: float = 0.08) -> Tensor:
    """Points on two half circles that interlock."""
    angle, lower = math.pi * torch.rand(count), torch.randint(2, (count,)).float()
    x = torch.where(lower > 0, 1 - angle.cos(), angle.cos())
    y = torch.where(lower > 0, 0.5 - angle.sin(), angle.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + noise * torch.randn(count, 2)


def sentences(count: int) -> tuple[list[list[int]], list[int]]:
    """Sentences of word numbers, each about one of four topics: frequencies as in Zipf's law, and verbs that agree."""
    draw = random.Random(int(torch.randint(2**31, (1,))))
    zipf = (1.0, 1 / 2, 1 / 3, 1 / 4)
    texts, topics = [], []
    for _ in range(count):
        topic = draw.choices(range(4), zipf)[0]
        first = 7 + 17 * topic
        text: list[int] = []
        for part in range(3 if draw.random() < 0.3 else 2):
            plural = draw.random() < 0.4
            if part == 2:
                text.append(3 + draw.choices(range(4), zipf)[0])
            text.append(1 if plural or draw.random() < 0.5 else 2)
            if draw.random() < 0.4:
                text.append(first + 8 + draw.choices(range(3), zipf[:3])[0])
            text.append(first + 4 * plural + draw.choices(range(4), zipf)[0])
            if part == 0:
                text.append(first + 11 + 3 * plural + draw.choices(range(3), zipf[:3])[0])
        texts.append([*text, STOP])
        topics.append(topic)
    return texts, topics


def corpus(length: int) -> Tensor:
    """So many words of text."""
    words = [word for text in sentences(length // 5)[0] for word in text]
    return torch.tensor(words[:length])


def padded(texts: list[list[int]], length: int) -> Tensor:
    """One row for each text, filled up with full stops."""
    return torch.tensor([(text + [STOP] * length)[:length] for text in texts])


def citations(nodes: int = 240, classes: int = 4, words: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Documents as bags of words, their subjects, and who cites whom, with ones on the diagonal; mostly within a subject."""
    labels = torch.randint(classes, (nodes,))
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    links = torch.rand(nodes, nodes) < torch.where(same, 0.05, 0.008)
    adjacency = (links | links.T | torch.eye(nodes, dtype=torch.bool)).float()
    rates = 0.05 + 0.15 * (torch.arange(words) % classes == labels.unsqueeze(1)).float()
    bags = torch.bernoulli(rates)
    return bags / bags.sum(1, keepdim=True).clamp(min=1), labels, adjacency


class CartPole:
    """A pole on a cart that is pushed to the left or to the right: 1 for each step until it falls, at most ``limit``."""

    def __init__(self, seed: int, limit: int = 100) -> None:
        self.draw = random.Random(seed)
        self.limit = limit
        self.state = self.reset()

    def reset(self) -> list[float]:
        """A pole that stands nearly upright."""
        self.steps = 0
        self.state = [self.draw.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        """The state after a push, the reward, and whether the episode is over."""
        x, speed, angle, turn = self.state
        push = (10.0 if action else -10.0) + 0.05 * turn * turn * math.sin(angle)
        push /= 1.1
        bend = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        pull = push - 0.05 * bend * math.cos(angle) / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend]
        self.steps += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095
        return self.state, 1.0, fallen or self.steps >= self.limit


class Block(nn.Module):
    """Attention and two layers, each behind a layer norm and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The stream after this block; ``mask`` is true where a position must not look."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def causal(length: int) -> Tensor:
    """True where a position would look ahead."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)
