"""Small data sets that are made and not loaded, two plain loops, and the papers that the localisers' cases are taken from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..faults.training import last as last
from .case import Watch

AUTOTRAINER = "AutoTrainer (ICSE 2021), https://github.com/shiningrain/AUTOTRAINER"
DEEPLOCALIZE = "DeepLocalize (ICSE 2021), https://arxiv.org/abs/2103.03376"
UMLAUT = "UMLAUT (CHI 2021), https://github.com/BerkeleyHCI/umlaut, umserver/errors.py"
DEEPFD = "DeepFD (ICSE 2022), https://arxiv.org/abs/2205.01938"
NEURALINT = "NeuraLint (TOSEM 2021), https://github.com/neuralint/neuralint, DNN-metamodel.gps"
HUMBATOVA = (
    "Humbatova et al. (EMSE 2025), https://pmc.ncbi.nlm.nih.gov/articles/PMC12152046, "
    "programs in https://github.com/testingautomated-usi/dl-fl-repair"
)
DEEPCRIME = "DeepCrime, whose mutants Humbatova et al. use, https://github.com/dlfaults/deepcrime, utils/constants.py"
TAXONOMY = "Humbatova et al. (ICSE 2020), https://arxiv.org/abs/1910.11015"

PAD = 0
FONT = (  # rows of five pixels, from the top
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


def digits(count: int, size: int = 10) -> tuple[Tensor, Tensor]:
    """Grey images of printed digits, moved about, of varying ink and noise; pixels from 0 to 1, and which digit."""
    glyphs = torch.tensor([[[(row >> bit) & 1 for bit in (4, 3, 2, 1, 0)] for row in glyph] for glyph in FONT]).float()
    labels = torch.randint(10, (count,))
    down, right = torch.randint(size - 6, (count,)), torch.randint(size - 4, (count,))
    rows, columns = down[:, None, None] + torch.arange(7)[:, None], right[:, None, None] + torch.arange(5)
    images = torch.zeros(count, size, size)
    images[torch.arange(count)[:, None, None], rows, columns] = glyphs[labels] * (0.6 + 0.4 * torch.rand(count, 1, 1))
    return (images + 0.15 * torch.randn(images.shape)).clamp(0, 1)[:, None], labels


def shapes(count: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Colour images of a square, disc, ring, cross, diagonal or triangle on noise; pixels from 0 to 1, and which of the six."""
    labels = torch.randint(6, (count,))
    centre, radius = size / 2 + 2 * torch.rand(count, 2, 1, 1) - 1.5, 2.5 + 1.5 * torch.rand(count, 1, 1)
    grid = torch.arange(size).float()
    y, x = grid[:, None] - centre[:, 0], grid - centre[:, 1]
    box, far = torch.maximum(x.abs(), y.abs()), (x.square() + y.square()).sqrt()
    inside = box <= radius
    drawn = (
        inside,
        far <= radius,
        (far <= radius) & (far > radius - 1.3),
        inside & (torch.minimum(x.abs(), y.abs()) < 1),
        inside & ((x - y).abs() < 1.2),
        inside & (2 * x.abs() < y + radius),
    )
    mask = torch.stack(drawn)[labels, torch.arange(count)].float()[:, None]
    images = mask * (0.4 + 0.6 * torch.rand(count, 3, 1, 1)) + 0.2 * torch.rand(count, 3, size, size)
    return images.clamp(0, 1), labels


def rings(count: int) -> tuple[Tensor, Tensor]:
    """Points of the plane on one of two rings, the smaller one inside the other."""
    labels = torch.randint(2, (count,))
    angle, radius = 2 * torch.pi * torch.rand(count), 1 - 0.55 * labels + 0.07 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def spirals(count: int, arms: int = 3) -> tuple[Tensor, Tensor]:
    """Points of the plane on arms that wind about one centre."""
    labels, radius = torch.randint(arms, (count,)), torch.rand(count)
    angle = 2 * torch.pi * labels / arms + 4.5 * radius + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def blobs(count: int, classes: int, dims: int, apart: float = 2.0) -> tuple[Tensor, Tensor]:
    """Gaussian classes of many dimensions whose centres are about ``apart`` from the origin."""
    centres, labels = apart * torch.randn(classes, dims) / dims**0.5, torch.randint(classes, (count,))
    return centres[labels] + 0.5 * torch.randn(count, dims), labels


def houses(count: int) -> tuple[Tensor, Tensor]:
    """A table as it comes: rooms, square metres, year, metres to the centre, income; and a price, standardised."""
    rooms, year = torch.randint(1, 9, (count,)).float(), torch.randint(1900, 2024, (count,)).float()
    area, away = 18 * rooms + 15 * torch.rand(count), 15000 * torch.rand(count)
    income = 20000 + 60000 * torch.rand(count)
    near = torch.exp(-away / 4000)
    price = area / 60 + 1.5 * near * income / 40000 + ((year - 1960) / 50).square() + 0.1 * torch.randn(count)
    return torch.stack([rooms, area, year, away, income], 1), ((price - price.mean()) / price.std())[:, None]


def waves(count: int, length: int) -> Tensor:
    """Sums of two sines of random phase and pace with a little noise, one in each row."""
    time, phase, pace = torch.arange(length), 2 * torch.pi * torch.rand(2, count, 1), 0.15 + 0.35 * torch.rand(2, count, 1)
    return torch.sin(pace * time + phase).sum(0) / 2 + 0.02 * torch.randn(count, length)


def topics(count: int, words: int = 300, classes: int = 8) -> tuple[Tensor, Tensor]:
    """Which of the words, rare ones as in language, occur in a short text; and the topic, which favours some words."""
    labels, common = torch.randint(classes, (count,)), 6 / torch.arange(2.0, words + 2)
    favours = 1 + 5 * (torch.rand(classes, words) < 0.15).float()
    return (torch.rand(count, words) < (common * favours[labels]).clamp(max=0.9)).float(), labels


def reviews(count: int, length: int = 16) -> tuple[Tensor, Tensor]:
    """Texts that end in padding, with words that praise (1 to 4) or blame (5 to 8) among 31 that do not; which are more."""
    labels, rare = torch.randint(2, (count,)), (1 / torch.arange(1.0, 32)).expand(count, 31)
    words = 9 + torch.multinomial(rare, length, replacement=True)
    opinion = torch.where(torch.rand(count, length) < 0.85, labels[:, None], 1 - labels[:, None])
    words = torch.where(torch.rand(count, length) < 0.45, 1 + 4 * opinion + torch.randint(4, (count, length)), words)
    lengths = torch.randint(length // 2, length, (count, 1))
    return words.masked_fill(torch.arange(length) >= lengths, PAD), labels


def sentences(count: int, length: int = 17) -> Tensor:
    """Words of 24, four kinds that follow each other by a grammar, and in each kind ones that agree with the last."""
    after = torch.tensor([[0, 4, 5, 0], [0, 1, 8, 0], [0, 0, 1, 8], [7, 0, 1, 1]]).float()
    kind, word = torch.randint(4, (count,)), torch.randint(6, (count,))
    rows = [6 * kind + word]
    for _ in range(length - 1):
        kind = torch.multinomial(after[kind], 1)[:, 0]
        word = (word + torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]), count, replacement=True)) % 6
        rows.append(6 * kind + word)
    return torch.stack(rows, 1)


def batches(x: Tensor, y: Tensor, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many batches, shuffled anew in each epoch."""
    order = torch.randperm(len(x))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(x))
        taken, order = order[:size], order[size:]
        yield x[taken], y[taken]


def dense(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def fit(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor],
    data: Iterator[tuple[Tensor, Tensor]],
) -> float:
    """The loop of the tutorials, for a model of one input and a loss of its output and the target."""
    monitor, losses = watch(model, optimizer), []
    for x, y in data:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def descend(
    monitor: Any, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor], data: Iterator[tuple[Tensor, Tensor]]
) -> float:
    """The same for any loss of a batch, and with gradients that are cleared behind the step."""
    losses = []
    for batch in data:
        loss = loss_of(*batch)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return last(losses)


def step_and_log(monitor: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """The rest of a step that logs its loss last, as many loops do; returns the loss without its graph."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found = loss.detach()
    monitor.log_scalar("loss", found)
    return found
