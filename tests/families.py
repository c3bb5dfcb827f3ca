"""Twelve families of small models, each with batches and a loss: the ground on which the monitor must be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Family:
    """A model factory, its data and its loss; sparse, complex and low-precision ones do not suit every optimizer and scaler."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    sparse: bool = False
    low_precision: bool = False
    complex: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(1234)
        return self.make()

    def batches(self, count: int, seed: int = 7) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randn(*shape, generator=generator).to(dtype),)


def _tokens(vocabulary: int, *shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randint(vocabulary, shape, generator=generator),)


def _mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).float().square().mean()


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A GPT whose head is tied to its embedding; ``recompute`` is "", "reentrant" or "nonreentrant"."""

    def __init__(self, vocabulary: int = 23, width: int = 16, layers: int = 2, context: int = 12, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return self.head(self.norm(x))


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 10, num_layers=2, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class _Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


class _SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) * self.scale.detach()


class _Partial(nn.Module):
    """Frozen, unused and used parts."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).relu())


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.spectrum)


class _OddSizes(nn.Module):
    """Parameters of no elements, of one, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.one * self.scalar + self.nothing.sum()


class _NonContiguous(nn.Module):
    """Transposed, channels-last and sliced parameters, whose gradients have odd strides."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])

    def forward(self, image: Tensor) -> Tensor:
        features = self.conv(image.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
        return features @ self.gaps[:4] @ self.transposed[:4]


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4 * 4, 4))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


FAMILIES = [
    Family("mlp", _mlp, _normal(8, 10), _mean_square),
    Family("conv_batchnorm", _conv, _normal(4, 3, 6, 6), _mean_square),
    Family("gpt_tied", TinyGPT, _tokens(23, 3, 12), _next_token),
    Family("lstm", _LSTM, _normal(3, 5, 6), _mean_square),
    Family("transformer", _Seq2Seq, lambda g: (*_normal(2, 5, 8)(g), *_normal(2, 4, 8)(g)), _mean_square),
    Family("sparse_embedding", _SparseEmbedding, _tokens(50, 4, 6), _mean_square, sparse=True),
    Family("frozen_unused", _Partial, _normal(5, 6), _mean_square),
    Family("complex", _Complex, _normal(3, 4), _mean_square, complex=True),
    Family("bf16", lambda: _mlp().bfloat16(), _normal(8, 10, dtype=torch.bfloat16), _mean_square, low_precision=True),
    Family("fp16", lambda: _mlp().half(), _normal(8, 10, dtype=torch.float16), _mean_square, low_precision=True),
    Family("odd_sizes", _OddSizes, _normal(5, 4), _mean_square),
    Family("non_contiguous", _NonContiguous, _normal(2, 3, 6, 6), _mean_square),
]
BY_NAME = {family.name: family for family in FAMILIES}
