"""A small language model under tensor parallelism by hand, in the manner of Megatron-LM, for deepspeed-1801."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from .case import Watch
from .data_traincheck import WORDS, last, text

WIDTH = 32
HEADS = 4
LENGTH = 16
MAX_NORM = 1.0


class _Enter(torch.autograd.Function):
    """Into a part that is split: the same forward, and the sum of the ranks' gradients on the way back."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """The input itself."""
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """The sum over the ranks."""
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class _Leave(torch.autograd.Function):
    """Out of it: the sum of the ranks' outputs forward, and the same gradient for each on the way back."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """The gradient itself."""
        return gradients[0]


def enter(x: Tensor) -> Tensor:
    """To be called on what goes into a part that is split."""
    entered: Tensor = _Enter.apply(x)
    return entered


def leave(x: Tensor) -> Tensor:
    """To be called on what comes out of it."""
    left: Tensor = _Leave.apply(x)
    return left


def split(layer: nn.Linear | nn.Embedding, rank: int, world: int, dim: int) -> None:
    """Keeps this rank's part of a layer's weight, and marks it as Megatron-LM does."""
    layer.weight = nn.Parameter(layer.weight.detach().chunk(world, dim=dim)[rank].clone())
    layer.weight.tensor_model_parallel = True  # type: ignore[attr-defined, unused-ignore]


class Block(nn.Module):
    """Attention and a perceptron with heads and units split over the ranks; each rank has a copy of the layer norms."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.heads = HEADS // world
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        for layer in (self.query, self.key, self.value, self.up):
            split(layer, rank, world, 0)
        for layer in (self.out, self.down):
            split(layer, rank, world, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Attention to the words before, then the perceptron."""
        entered = enter(self.norm1(x))
        query, key, value = (
            layer(entered).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + leave(self.out(attended.transpose(1, 2).flatten(2)))
        return x + leave(self.down(functional.gelu(self.up(enter(self.norm2(x))))))


class Parallel(nn.Module):
    """Two blocks; the vocabulary is split over the ranks, at the input and, with the same weight, at the output."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        size = len(WORDS) + len(WORDS) % world
        self.first = rank * (size // world)
        self.words = nn.Embedding(size, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        split(self.words, rank, world, 0)
        self.blocks = nn.ModuleList([Block(rank, world), Block(rank, world)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The cross entropy of the words that follow, without ever having all logits on one rank."""
        x = leave(self._looked_up(tokens))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(enter(self.norm(x)), self.words.weight)
        shift = logits.detach().amax(dim=-1)
        dist.all_reduce(shift, dist.ReduceOp.MAX)
        normaliser = leave((logits - shift[..., None]).exp().sum(dim=-1)).log() + shift
        ours, places = self._ours(following)
        chosen = leave(logits.gather(-1, places[..., None])[..., 0] * ours)
        return (normaliser - chosen).mean()

    def _ours(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which words are in this rank's part of the vocabulary, and where; 0 for the others."""
        places = tokens - self.first
        ours = (places >= 0) & (places < len(self.words.weight))
        return ours, places * ours

    def _looked_up(self, tokens: Tensor) -> Tensor:
        ours, places = self._ours(tokens)
        looked_up: Tensor = functional.embedding(places, self.words.weight) * ours[..., None]
        return looked_up


def unclipped_copies(rank: int, watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer used the gradients that it had collected for the norm, without copies on other ranks, for the clip as well.

    So the layer norms are clipped on the first rank alone, and what should be copies drift apart. The loss hardly shows it.
    """
    torch.manual_seed(seed)
    batches = text(16, LENGTH, seed)  # the same on all ranks, as it has to be
    model = Parallel(rank, dist.get_world_size())
    parameters = list(model.parameters())
    counted = [parameter for parameter in parameters if rank == 0 or hasattr(parameter, "tensor_model_parallel")]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(120):
        tokens = next(batches)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        square = torch.stack([parameter.grad.square().sum() for parameter in counted if parameter.grad is not None]).sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters if healed else counted, MAX_NORM, square.sqrt())
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)
