"""More small models with made-up data: pairs, tables, sets, translation, look-up by attention and plain regression."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .worlds import Act, World, begin, dense


class Towers(nn.Module):
    """Two encoders to the unit sphere and the logarithm of a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = dense(16, 32, 12), dense(16, 32, 12)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """From two of ``[batch, 16]`` to ``[batch, batch]``."""
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.log_scale.exp() * left @ right.T


def contrast(seed: int, batch: int = 48) -> World:
    """InfoNCE: two views of one thing are to find each other among the batch."""
    g = begin(seed)
    model, maps = Towers(), torch.randn(2, 8, 16, generator=g) / 8**0.5

    def loss(step: int) -> Tensor:
        thing = torch.randn(batch, 8, generator=g)
        a, b = (thing @ view + 0.1 * torch.randn(batch, 16, generator=g) for view in maps)
        return F.cross_entropy(model(a, b), torch.arange(batch))

    return World(model, loss)


class Factors(nn.Module):
    """A rating is the product of a user's vector and an item's."""

    def __init__(self, width: int = 8, std: float = 0.3, **options: Any) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, width, **options), nn.Embedding(40, width, **options)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=std)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """From two of ``[batch]`` to ``[batch]``."""
        return (self.users(user) * self.items(item)).sum(-1)


def factors(seed: int, batch: int = 256, **options: Any) -> World:
    """A table of ratings of rank three."""
    g = begin(seed)
    table = torch.randn(50, 3, generator=g) @ torch.randn(3, 40, generator=g)
    model = Factors(**options)

    def loss(step: int) -> Tensor:
        user, item = torch.randint(50, (batch,), generator=g), torch.randint(40, (batch,), generator=g)
        return F.mse_loss(model(user, item), table[user, item] + 0.1 * torch.randn(batch, generator=g))

    return World(model, loss)


class Heads(nn.Module):
    """A trunk, a number and a class."""

    def __init__(self, act: Act = nn.ReLU) -> None:
        super().__init__()
        self.trunk = nn.Sequential(dense(12, 40, 40, act=act), act())
        self.number, self.kind = nn.Linear(40, 1), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From ``[batch, 12]`` to ``[batch]`` and ``[batch, 3]``."""
        hidden = self.trunk(x)
        return self.number(hidden).squeeze(-1), self.kind(hidden)


def two_tasks(seed: int, batch: int = 48) -> tuple[Heads, Any]:
    """The model, and a function that draws inputs, numbers and classes."""
    g = begin(seed)
    slopes, centres = torch.randn(12, generator=g) / 12**0.5, torch.randn(12, 3, generator=g)

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(batch, 12, generator=g)
        return x, (x @ slopes).tanh() + 0.1 * torch.randn(batch, generator=g), (x @ centres).argmax(-1)

    return Heads(), draw


def heads(seed: int, batch: int = 48) -> World:
    """The sum of both losses."""
    model, draw = two_tasks(seed, batch)

    def loss(step: int) -> Tensor:
        x, number, kind = draw()
        a, b = model(x)
        return F.mse_loss(a, number) + F.cross_entropy(b, kind)

    return World(model, loss)


class Sets(nn.Module):
    """A network for each element, a sum or a mean, a network for the whole."""

    def __init__(self, pool: str = "mean", act: Act = nn.ReLU) -> None:
        super().__init__()
        self.pool = pool
        self.each, self.whole = dense(3, 32, 32, act=act), nn.Sequential(nn.Linear(32, 32), act(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        """From ``[batch, elements, 3]`` to ``[batch]``."""
        each = self.each(x)
        return self.whole(each.sum(1) if self.pool == "sum" else each.mean(1)).squeeze(-1)


def sets(seed: int, elements: int = 20, batch: int = 32, **options: Any) -> World:
    """How widely a cloud of points is spread."""
    g = begin(seed)
    model = Sets(**options)

    def loss(step: int) -> Tensor:
        spread = 0.3 + 1.5 * torch.rand(batch, generator=g)
        x = spread[:, None, None] * torch.randn(batch, elements, 3, generator=g)
        return F.mse_loss(model(x), spread)

    return World(model, loss)


class Translator(nn.Module):
    """nn.Transformer with one layer on either side; the output's weight may be the embedding's."""

    def __init__(self, width: int = 32, std: float = 0.2, tied: bool = False, length: int = 7) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(13, width), nn.Parameter(0.2 * torch.randn(length, width))
        nn.init.normal_(self.embed.weight, std=std)
        self.transformer = nn.Transformer(width, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def encode(self, source: Tensor) -> Tensor:
        """From ``[batch, length]`` to ``[batch, length, width]``."""
        return self.transformer.encoder(self.embed(source) + self.places[: source.shape[1]])

    def decode(self, memory: Tensor, before: Tensor) -> Tensor:
        """From what was read and the symbols before to ``[batch, length, 13]``."""
        mask = torch.full((before.shape[1], before.shape[1]), -torch.inf).triu(1)
        x = self.embed(before) + self.places[: before.shape[1]]
        return self.head(self.transformer.decoder(x, memory, tgt_mask=mask))

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        """Both in one."""
        return self.decode(self.encode(source), before)


def sentences(g: torch.Generator, batch: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Six symbols, the same backwards with a mark in front, and the same backwards."""
    source = torch.randint(12, (batch, 6), generator=g)
    target = source.flip(1)
    return source, torch.cat([torch.full((batch, 1), 12), target[:, :-1]], 1), target


def translate(seed: int, batch: int = 32, **options: Any) -> World:
    """Six symbols backwards, one at a time."""
    g = begin(seed)
    model = Translator(**options)

    def loss(step: int) -> Tensor:
        source, before, target = sentences(g, batch)
        return F.cross_entropy(model(source, before).flatten(0, 1).float(), target.flatten())

    return World(model, loss)


class Lookup(nn.Module):
    """One query looks among eight pairs of a key and a value; ``cosine`` brings queries and keys to length 1."""

    def __init__(self, width: int = 16, cosine: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(10, width), nn.Embedding(6, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head, self.cosine, self.scale = nn.Linear(width, 6), cosine, scale

    def forward(self, wanted: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """From ``[batch, 1]`` and two of ``[batch, 8]`` to ``[batch, 6]``."""
        at = self.keys(keys)
        q, k, v = self.q(self.keys(wanted)), self.k(at + 0.5 * self.values(values)), self.v(self.values(values))
        if self.cosine:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], scale=self.scale)
        return self.head(y[:, 0, 0])


def pairs(g: torch.Generator, batch: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is wanted, eight different keys, their values, and the value that is right."""
    keys = torch.rand(batch, 10, generator=g).argsort(1)[:, :8]
    values = torch.randint(6, (batch, 8), generator=g)
    at = torch.randint(8, (batch, 1), generator=g)
    return keys.gather(1, at), keys, values, values.gather(1, at).squeeze(1)


def lookup(seed: int, model: nn.Module | None = None, batch: int = 32, **options: Any) -> World:
    """The value that belongs to a key."""
    g = begin(seed)
    made = Lookup(**options) if model is None else model

    def loss(step: int) -> Tensor:
        wanted, keys, values, y = pairs(g, batch)
        return F.cross_entropy(made(wanted, keys, values), y)

    return World(made, loss)


def curve(g: torch.Generator, batch: int = 64, features: int = 4) -> tuple[Tensor, Tensor]:
    """A smooth function of a few numbers, with some noise: ``[batch, features]`` and ``[batch]``."""
    x = torch.randn(batch, features, generator=g)
    return x, (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2].tanh() + 0.1 * torch.randn(batch, generator=g)


def regress(
    seed: int, scale: float = 1.0, sizes: tuple[int, ...] = (48, 48), act: Act = nn.ReLU, reduction: str = "mean"
) -> World:
    """The function times ``scale``, by a perceptron."""
    g = begin(seed)
    model = dense(4, *sizes, 1, act=act)

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        return F.mse_loss(model(x).squeeze(-1).float(), scale * y, reduction=reduction)

    return World(model, loss)
