"""Silent errors of TrainCheck (OSDI 2025, arXiv 2506.14813) that break what the user meant: freezing, precision, copies."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_gradmon import Checks

from .case import Case, Watch
from .data_traincheck import DIGITS, WORDS, digits, generator, last, shuffled, text

FROZEN_STAGES = 1
WIDTH = 48
LENGTH = 24
LOST = 0.01


class Vgg(nn.Module):
    """A small VGG whose first stages are frozen by ``train()`` only, as in the library."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 16, 24, 32]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            for before, after in pairwise(widths)
        )
        self.classifier = nn.Linear(widths[-1], DIGITS)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def train(self, mode: bool = True) -> Vgg:
        """Freezes the first stages as well."""
        super().train(mode)
        for stage in self.stages[:FROZEN_STAGES]:
            stage.eval()
            stage.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Digits' logits."""
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def _never_frozen(watch: Watch, seed: int, healed: bool) -> float:
    """The library froze the first stages when ``train()`` was called, which nobody did before the first step."""
    torch.manual_seed(seed)
    source = generator(seed)
    batches = shuffled(*digits(2048, source, side=8), 64, source)
    model = Vgg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0001)
    if healed:
        model.train()
    monitor = watch(model, optimizer, checks=Checks(frozen=r"^stages\.0\.", trained=r"^(stages\.[12]|classifier)\."))
    losses = []
    for _ in range(250):
        images, labels = next(batches)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Primitive(nn.Linear):
    """A linear layer that calls the compiler's own operation, which autocast covers or does not."""

    def __init__(self, inputs: int, outputs: int, covered: bool) -> None:
        super().__init__(inputs, outputs)
        self.covered = covered

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the precision of autocast where that covers it, else in that of the weight."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.covered):
            return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Block(nn.Module):
    """A block of a GPT with two heads, the multilayer perceptron of primitive operations."""

    def __init__(self, covered: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = Primitive(WIDTH, 2 * WIDTH, covered)
        self.down = Primitive(2 * WIDTH, WIDTH, covered)

    def forward(self, x: Tensor) -> Tensor:
        """Attention to the words before, then the perceptron."""
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)]
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + added


class Gpt(nn.Module):
    """Two blocks between an embedding and a head, with something else in the middle if need be."""

    def __init__(self, covered: bool = True, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(covered), Block(covered)])
        self.middle = middle or nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the words that follow."""
        x = self.blocks[0](self.words(tokens) + self.places.weight[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(self.blocks[1](self.middle(x))))
        return logits


def _not_cast(watch: Watch, seed: int, healed: bool) -> float:
    """After a change of the compiler, autocast left out its primitive operations: half of the products stayed in float32."""
    torch.manual_seed(seed)
    batches = text(16, LENGTH, seed)
    model = Gpt(covered=healed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer, checks=Checks(dtype={r"^blocks\.\d+\.(qkv|out|up|down)$": torch.bfloat16}))
    losses = []
    for _ in range(200):
        tokens = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class _Copy(torch.autograd.Function):
    """What arrives on the other card, forward and backward: what was sent, or zeros."""

    @staticmethod
    def forward(context: Any, sent: Tensor, source: random.Random, share: float) -> Tensor:
        """The output of the first half."""
        context.source, context.share = source, share
        return torch.zeros_like(sent) if source.random() < share else sent.clone()

    @staticmethod
    def backward(context: Any, *sent: Tensor) -> tuple[Tensor, None, None]:
        """Its gradient, on the way back."""
        lost = context.source.random() < context.share
        return torch.zeros_like(sent[0]) if lost else sent[0].clone(), None, None


class Link(nn.Module):
    """The way from the card of the first half to that of the second; a share of what goes over it is lost."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.source, self.share = random.Random(seed), share

    def forward(self, x: Tensor) -> Tensor:
        """What arrives."""
        arrived: Tensor = _Copy.apply(x, self.source, self.share)
        return arrived


def _split_over_cards(watch: Watch, seed: int, healed: bool) -> float:
    """A language model spread over two cards, whose driver copies from one to the other wrongly, talked nonsense at times."""
    torch.manual_seed(seed)
    batches = text(16, LENGTH, seed)
    model = Gpt(middle=Link(seed, 0.0 if healed else LOST))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        tokens = next(batches)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES: list[Case] = [
    Case(
        "mmpretrain-702",
        "traincheck",
        "https://github.com/open-mmlab/mmpretrain/issues/702",
        ("expectation-broken",),
        _never_frozen,
        bug="train() was never called, and it alone freezes the first stage",
        fix="model.train() before the loop",
    ),
    Case(
        "lightning-thunder-725",
        "traincheck",
        "https://github.com/Lightning-AI/lightning-thunder/issues/725",
        ("expectation-broken",),
        _not_cast,
        bug="autocast does not cover the compiler's own linear operation",
        fix="autocast covers it",
    ),
    Case(
        "baichuan2-86",
        "traincheck",
        "https://github.com/baichuan-inc/Baichuan2/issues/86",
        ("spike",),
        _split_over_cards,
        bug="1 % of the copies between the halves of the model arrive as zeros",
        fix="all arrive whole",
    ),
]
