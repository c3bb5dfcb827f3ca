"""A perceptron and a small transformer in the standard parametrisation and in muP, with the matching learning rates.

muP after Yang et al. 2022 (arXiv 2203.03466), table 3: hidden weights as in the standard parametrisation, output weights of size
1 / fan-in, a scale of 1 / d in attention; with Adam the learning rate of hidden and output weights goes with 1 / fan-in, with SGD
that of the output with 1 / fan-in and that of everything that has one side only with the fan-out. All are written relative to the
width ``BASE``, at which both parametrisations have the same learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 64
INPUTS, CLASSES, BATCH = 32, 16, 16
VOCABULARY, CONTEXT, SEQUENCES, HEADS = 32, 16, 4, 4

Batch = tuple[Tensor, Tensor]


def perceptron(width: int, mup: bool) -> nn.Sequential:
    """An input, two hidden and an output layer without biases; tanh keeps the noise of narrow models small."""
    layers: list[nn.Module] = []
    for inputs, outputs, gain in ((INPUTS, width, 1.5), (width, width, 1.5), (width, width, 1.5), (width, CLASSES, 1.0)):
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(inputs))
        layers += [linear, nn.Tanh()]
    if mup:
        nn.init.normal_(linear.weight, std=1 / width)
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalisation and beside a residual branch."""

    def __init__(self, width: int, mup: bool) -> None:
        super().__init__()
        head = width // HEADS
        self.scale = math.sqrt(BASE / HEADS) / head if mup else 1 / math.sqrt(head)  # the same at width BASE
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block on [sequences, places, width]."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """One block between embeddings and a head that are not tied."""

    def __init__(self, width: int, mup: bool) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.block, self.norm = Block(width, mup), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        if mup:
            nn.init.normal_(self.head.weight, std=1 / width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [sequences, places, vocabulary] of tokens [sequences, places]."""
        return self.head(self.norm(self.block(self.token(tokens) + self.place(torch.arange(tokens.shape[1])))))  # type: ignore[no-any-return]


def mup_adam(model: nn.Module, width: int, lr: float) -> torch.optim.Optimizer:
    """Adam with the learning rates of muP."""
    wide = [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module.in_features >= width]
    kept = {id(weight) for weight in wide}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    return torch.optim.Adam([{"params": wide, "lr": lr * BASE / width}, {"params": rest}], lr=lr)


def mup_sgd(model: nn.Module, width: int, lr: float) -> torch.optim.Optimizer:
    """SGD with the learning rates of muP, for a chain of linear layers."""
    first, *hidden, last = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    scale = width / BASE
    return torch.optim.SGD(
        [{"params": [first], "lr": lr * scale}, {"params": hidden}, {"params": [last], "lr": lr / scale}], lr=lr
    )


def vectors(seed: int) -> Batch:
    """Random vectors with random classes."""
    return torch.randn(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))


def vectors_and_scores(seed: int) -> Batch:
    """The same, with each class as a vector of 0 and 1: the targets of a squared error."""
    inputs, classes = vectors(seed)
    return inputs, F.one_hot(classes, CLASSES).to(torch.get_default_dtype())


def tokens(seed: int) -> Batch:
    """Random tokens, each with a random one to follow it."""
    return torch.randint(VOCABULARY, (SEQUENCES, CONTEXT)), torch.randint(VOCABULARY, (SEQUENCES, CONTEXT))


def fresh(data: Callable[[int], Batch], steps: int = 3) -> Callable[[int], list[Batch]]:
    """A new batch for every step, so no width stops learning."""
    return lambda seed: [data(seed) for _ in range(steps)]


def of(model: Callable[[int, bool], nn.Module], mup: bool) -> Callable[[int], nn.Module]:
    """The factory of a model in one parametrisation."""
    return lambda width: model(width, mup)
