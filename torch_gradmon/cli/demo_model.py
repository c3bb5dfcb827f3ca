"""The model and the data of ``gradmon demo``: a small character GPT, and the help texts of Python."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    blocks: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 16


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, length, width]``."""
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(F.relu(self.up(self.norm_2(x))))
        return x + widened


class CharacterGPT(nn.Module):
    """A small GPT whose output layer shares its weight with the embedding."""

    def __init__(self, characters: int, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head = nn.Linear(sizes.width, characters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, characters: Tensor, following: Tensor) -> Tensor:
        """The loss of predicting ``following`` from ``characters``, both ``[batch, length]``."""
        x = self.tokens(characters) + self.positions.weight[: characters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def corpus() -> tuple[str, Tensor, int]:
    """The help texts of Python, the same as character numbers, and the number of different characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    return text, torch.tensor([number[character] for character in text]), len(number)


def draw(data: Tensor, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of random excerpts, and the same excerpts shifted by one character."""
    starts = torch.randint(len(data) - sizes.context, (sizes.batch,), generator=generator)
    excerpts = torch.stack([data[start : start + sizes.context + 1] for start in starts.tolist()])
    return excerpts[:, :-1], excerpts[:, 1:]
