"""A plain GPT with biases and a tied head, laid out as GPT-2 is."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The size of a GPT."""

    vocabulary: int
    context: int
    width: int
    heads: int
    blocks: int


GPT2_124M = Sizes(vocabulary=50_257, context=1024, width=768, heads=12, blocks=12)
GPT2_1B5 = Sizes(vocabulary=50_257, context=1024, width=1600, heads=25, blocks=48)
GPT_10M = Sizes(vocabulary=4096, context=512, width=336, heads=6, blocks=6)
GPT_1B3 = Sizes(vocabulary=50_257, context=2048, width=2048, heads=16, blocks=24)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, length, width]``."""
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + widened


class GPT(nn.Module):
    """The output layer shares its weight with the token embedding, so GPT-2's smallest has 124,439,808 parameters."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The loss of predicting ``following`` from ``tokens``, both ``[batch, length]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())
