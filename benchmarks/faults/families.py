"""Families of small models, each with its data and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_gradmon.cli.demo_model import CharacterGPT

from . import data
from .data import Batch


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Both are of one shape."""
        return x + self.inner(x)


class Attention(nn.Module):
    """Attention of several heads; ``scale`` is 1 / sqrt(width of a head) where None."""

    def __init__(
        self, width: int, heads: int = 2, causal: bool = False, scale: float | None = None, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.scale = heads, causal, scale
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.norm_q = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()
        self.norm_k = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, length, width]``."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=self.causal, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


def block(width: int, *, norm: bool = True, activation: Callable[[], nn.Module] = nn.GELU, **attention: Any) -> nn.Module:
    """A transformer's block: attention and two linear layers, each behind a norm and beside a residual connection."""
    norms = [nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2)]
    widened = nn.Sequential(norms[1], nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))
    return nn.Sequential(Residual(nn.Sequential(norms[0], Attention(width, **attention))), Residual(widened))


class GPT(CharacterGPT):
    """The demo's CharacterGPT with blocks that can be varied; it gives logits, not the loss."""

    def __init__(self, blocks: int = 2, std: float = 0.02, tied: bool = True, **options: Any) -> None:
        super().__init__(data.characters(), data.SIZES)
        self.blocks = nn.Sequential(*(block(data.SIZES.width, causal=True, **options) for _ in range(blocks)))
        if not tied:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)

    def forward(self, characters: Tensor) -> Tensor:  # type: ignore[override]
        """From ``[batch, length]`` to ``[batch, length, characters]``."""
        x = self.tokens(characters) + self.positions.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """Sixteen patches of two by two pixels, blocks of attention, the mean of the patches."""

    def __init__(self, width: int = 32, blocks: int = 2, **options: Any) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, width, 2, stride=2), nn.Parameter(0.1 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(block(width, **options) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, data.SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        """From ``[batch, 1, 8, 8]`` to ``[batch, 4]``."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of ``kind`` and an output for each place."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, width: int = 32, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.SYMBOLS, width)
        self.cell = kind(width, width, batch_first=True, **options)
        self.head = nn.Linear(width, data.SYMBOLS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``[batch, length]`` to ``[batch, length, 8]``."""
        return self.head(self.cell(self.embed(tokens))[0])


class Bags(nn.Module):
    """The mean of the words' embeddings, then a perceptron."""

    def __init__(self, width: int = 32, **options: Any) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(data.VOCABULARY, width, mode="mean", **options)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, data.TOPICS)

    def forward(self, words: Tensor) -> Tensor:
        """From ``[batch, 12]`` to ``[batch, 5]``."""
        return self.head(F.relu(self.hidden(self.embed(words))))


def layers(sizes: list[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes, with an activation between them."""
    modules: list[nn.Module] = []
    for a, b in pairwise(sizes):
        modules += [nn.Linear(a, b), activation()]
    return nn.Sequential(*modules[:-1])


def mlp(depth: int = 2, width: int = 32, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """``depth`` hidden layers."""
    return layers([data.FEATURES, *[width] * depth, data.CLASSES], activation)


def cnn(depth: int = 2, width: int = 8, activation: Callable[[], nn.Module] = nn.ReLU, norm: bool = False) -> nn.Sequential:
    """Convolutions of three by three, then the mean over four quarters of the image."""
    modules: list[nn.Module] = []
    for index in range(depth):
        modules += [
            nn.Conv2d(width if index else 1, width, 3, padding=1),
            *([nn.BatchNorm2d(width)] if norm else []),
            activation(),
        ]
    return nn.Sequential(*modules, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * width, data.SHAPES))


def resnet(depth: int = 6, width: int = 32, norm: bool = True) -> nn.Sequential:
    """Residual blocks of two linear layers."""
    inner = [
        nn.Sequential(nn.LayerNorm(width) if norm else nn.Identity(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Linear(data.FEATURES, width), *map(Residual, inner), nn.Linear(width, data.CLASSES))


def autoencoder(activation: Callable[[], nn.Module] = nn.ReLU, extra: int = 0, code: int = 8) -> nn.Sequential:
    """Down to ``code`` numbers and up again, with ``extra`` more layers on both sides."""
    return layers([64, *[32] * (1 + extra), code, *[32] * (1 + extra), 64], activation)


def he(model: nn.Module, gain: float = 2**0.5) -> None:
    """Draw matrices so that ReLU keeps the scale (He et al. 2015); ``gain`` / sqrt(fan in) is the standard deviation."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=gain * parameter[0].numel() ** -0.5)


@dataclass
class Task:
    """A model, its endless stream of batches and its loss."""

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, at each place where there are several."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


def reproduce(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(model(batch[0]).float(), batch[1])


FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[[torch.Generator], Iterator[Batch]]]] = {
    "mlp": (mlp, data.clusters),
    "resnet": (resnet, data.clusters),
    "cnn": (cnn, data.shapes),
    "vit": (ViT, data.shapes),
    "gpt": (GPT, data.text),
    "rnn": (Recurrent, data.progressions),
    "autoencoder": (autoencoder, data.pictures),
    "embedding": (Bags, data.bags),
}
# with AdamW, for all of them
RATE = 3e-3


def task(family: str, seed: int, **options: Any) -> Task:
    """The family's model, with ``options`` of its own, and data that depends on ``seed`` alone."""
    make, stream = FAMILIES[family]
    torch.manual_seed(seed)
    loss = reproduce if family == "autoencoder" else classify
    return Task(make(**options), stream(torch.Generator().manual_seed(seed + 1)), loss)


def adamw(model: nn.Module, rate: float = RATE, **options: Any) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=rate, **options)


def head_of(model: nn.Module) -> nn.Module:
    """The last layer."""
    return getattr(model, "head", None) or list(model.children())[-1]
