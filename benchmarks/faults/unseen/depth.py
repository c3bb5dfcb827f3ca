"""Gradients that vanish, explode or never come, and weights drawn on a wrong scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training, Watch
from .others import Translator, sentences, translate
from .worlds import Graph, World, adam, begin, communities, dense, graph, loop, nesterov, series


class _Beside(nn.Module):
    """A layer and its activation, with the input beside it or not."""

    def __init__(self, inner: nn.Module, beside: bool, part: float = 1.0) -> None:
        super().__init__()
        self.inner, self.beside, self.part = inner, beside, part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part * self.inner(x) if self.beside else self.inner(x)


def _plain_stack(watch: Watch, seed: int, healed: bool) -> float:
    """Eighteen layers of tanh as torch draws them, each of them halves its input, roughly."""
    torch.manual_seed(seed)
    layers = [_Beside(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), healed, 0.3) for _ in range(18)]
    model = nn.Sequential(nn.Linear(4, 32), *layers, nn.Linear(32, 1))
    world = _on(seed, model)
    return loop(watch, world, nesterov(model, 0.01), steps=200)


def _on(seed: int, model: nn.Module) -> World:
    g = torch.Generator().manual_seed(seed + 1000)

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 4, generator=g)
        return F.mse_loss(model(x).squeeze(-1), (2 * x[:, 0]).sin() + x[:, 1] * x[:, 2].tanh())

    return World(model, loss)


def _deep_graph(watch: Watch, seed: int, healed: bool) -> float:
    """Eight rounds of messages through sigmoids; all nodes look alike in the end and nothing comes back."""
    g = begin(seed)
    edges, y, draw = communities(g)
    model = Graph(depth=8, act=nn.LeakyReLU if healed else nn.Sigmoid)
    mixing = 0.8 * torch.eye(len(y)) + 0.2 * edges / edges.sum(1, keepdim=True)
    for layer in model.layers:
        nn.init.kaiming_normal_(layer.weight)
    world = World(model, lambda step: F.cross_entropy(model(draw(), mixing), y))
    return loop(watch, world, nesterov(model, 0.01), steps=250)


class _Flow(nn.Module):
    """Euler's steps along a learnt field, always the same one."""

    def __init__(self, steps: int, length: float) -> None:
        super().__init__()
        self.stem, self.field, self.head = nn.Linear(4, 24), dense(24, 48, 24), nn.Linear(24, 1)
        self.steps, self.length = steps, length

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.steps):
            x = x + self.length * self.field(x)
        return self.head(x)


def _long_flow(watch: Watch, seed: int, healed: bool) -> float:
    """Steps of length 1 where the interval of length 1 should be cut into 18: what is small has grown ten thousandfold at the end."""
    torch.manual_seed(seed)
    world = _on(seed, _Flow(18, 1 / 18 if healed else 1.0))
    for layer in world.model.field:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight)
    return loop(watch, world, adam(world.model, 1e-3), steps=200)


def _branch(width: int, norm: bool) -> nn.Module:
    first = nn.GroupNorm(4, width) if norm else nn.Identity()
    convs = [nn.Conv1d(width, width, 3, padding=1, bias=False) for _ in range(2)]
    for conv in convs:
        nn.init.kaiming_normal_(conv.weight)
    return _Beside(nn.Sequential(first, convs[0], nn.ReLU(), convs[1]), True)


def _deep_series(watch: Watch, seed: int, healed: bool) -> float:
    """Sixteen residual blocks of two convolutions whose norm was left out "to save time"."""
    torch.manual_seed(seed)
    blocks = [_branch(16, healed) for _ in range(16)]
    model = nn.Sequential(nn.Conv1d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5))
    torch.manual_seed(seed)
    return loop(watch, series(seed, model), adam(model, 1e-3), steps=120)


def _tied_embedding(watch: Watch, seed: int, healed: bool) -> float:
    """The embedding is as torch draws it, with a deviation of 1, and is the output's weight too: logits of nearly 6 from the start."""
    world = translate(seed, tied=True, std=0.15 if healed else 1.5)
    return loop(watch, world, adam(world.model, 2e-3), steps=200, name="train/loss")


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (30 * x).sin()


def _siren(seed: int, proper: bool) -> World:
    g = begin(seed)
    model = nn.Sequential(nn.Linear(1, 48), _Sine(), nn.Linear(48, 48), _Sine(), nn.Linear(48, 48), _Sine(), nn.Linear(48, 1))
    for index in (2, 4):
        bound = 6**0.5 / 48**0.5
        nn.init.uniform_(model[index].weight, -bound, bound)
        if proper:
            model[index].weight.data /= 30
    nn.init.uniform_(model[0].weight, -1, 1)

    def loss(step: int) -> Tensor:
        x = 2 * torch.rand(128, 1, generator=g) - 1
        return F.mse_loss(model(x), (8 * x).sin() + 0.5 * (21 * x).cos())

    return World(model, loss)


def _sines(watch: Watch, seed: int, healed: bool) -> float:
    """A network of sines of 30 times its inputs needs weights that are 30 times smaller, which was forgotten.

    That the scale of initialisation is wrong would be right as well; relative to the fan in it is a usual one.
    """
    world = _siren(seed, healed)
    return loop(watch, world, adam(world.model, 5e-4), steps=250, name="train_loss")


def _random_weights(watch: Watch, seed: int, healed: bool) -> float:
    """``torch.rand`` for the weights: all of them positive, with a mean of a half."""
    world = graph(seed, depth=3, width=32)
    for layer in world.model.layers:
        if healed:
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.uniform_(layer.weight)
    return loop(watch, world, adam(world.model, 1e-3), steps=200)


class _Extracted(Translator):
    """Reads without gradients, as when features were extracted once and for all."""

    def encode(self, source: Tensor) -> Tensor:
        with torch.no_grad():
            return super().encode(source)


def _no_grad_left(watch: Watch, seed: int, healed: bool) -> float:
    """A ``no_grad`` left around the encoder; the decoder learns what it can."""
    g = begin(seed)
    model = Translator() if healed else _Extracted()

    def loss(step: int) -> Tensor:
        source, before, target = sentences(g)
        return F.cross_entropy(model(source, before).flatten(0, 1), target.flatten())

    return loop(watch, World(model, loss), adam(model), steps=200)


class _Experts(nn.Module):
    """Each input goes to the expert that the router prefers."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(dense(4, 24, 1) for _ in range(3))
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        return y * gate[:, None] if self.weighted else y


def _router(watch: Watch, seed: int, healed: bool) -> float:
    """The chosen expert's output is not multiplied by the router's share, so the router gets no gradient."""
    torch.manual_seed(seed)
    world = _on(seed, _Experts(healed))
    return loop(watch, world, adam(world.model, 5e-3), steps=250)


class _Codes(nn.Module):
    """A choice among eight codes, from which the input is reconstructed."""

    def __init__(self, soft: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.soft = dense(10, 32, 8), dense(8, 32, 10), soft

    def forward(self, x: Tensor) -> Tensor:
        logits = self.encoder(x)
        code = F.gumbel_softmax(logits, 0.7, hard=True) if self.soft else F.one_hot(logits.argmax(-1), 8).float()
        return self.decoder(code)


def _argmax(watch: Watch, seed: int, healed: bool) -> float:
    """``argmax`` in the middle of an autoencoder, which has no slope."""
    g = begin(seed)
    model, centres = _Codes(healed), torch.randn(8, 10, generator=g)

    def loss(step: int) -> Tensor:
        x = centres[torch.randint(8, (64,), generator=g)] + 0.1 * torch.randn(64, 10, generator=g)
        return F.mse_loss(model(x), x)

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=250)


def _constant(watch: Watch, seed: int, healed: bool) -> float:
    """The numpy-like copy of an embedding: ``torch.tensor(list)`` of a layer's output has no history."""
    g = begin(seed)
    edges, y, draw = communities(g)
    model, mixing = Graph(depth=3), edges / edges.sum(1, keepdim=True)

    def loss(step: int) -> Tensor:
        x = model.acts[0](model.layers[0](mixing @ draw()))
        if not healed:
            x = torch.tensor(x.tolist())
        for layer, act in zip(model.layers[1:-1], model.acts[1:], strict=True):
            x = act(layer(mixing @ x))
        return F.cross_entropy(model.layers[-1](x), y)

    return loop(watch, World(model, loss), adam(model), steps=150)


TRAININGS: list[Training] = [
    Training("plain-stack-of-tanh", "vanishing-gradients", "mlp", _plain_stack, advice="inputs beside each layer"),
    Training("sigmoid-messages", "vanishing-gradients", "graph", _deep_graph, advice="leaky ReLU in place of sigmoid"),
    Training("euler-steps-of-1", "exploding-gradients", "ode", _long_flow, advice="steps of 1 / 18"),
    Training("blocks-without-norm", "exploding-gradients", "series", _deep_series, advice="a norm in each block"),
    Training("tied-embedding-of-1.5", "initialisation-scale", "translator", _tied_embedding, advice="std=0.15"),
    Training("siren-not-divided", "exploding-gradients", "siren", _sines, advice="divide weights by 30"),
    Training("torch-rand", "initialisation-scale", "graph", _random_weights, advice="xavier_uniform_"),
    Training("no-grad-left", "no-gradient", "translator", _no_grad_left, advice="no torch.no_grad() around the encoder"),
    Training("router-without-share", "no-gradient", "experts", _router, advice="multiply by the router's share"),
    Training("argmax-of-codes", "no-gradient", "codes", _argmax, advice="gumbel_softmax(hard=True)"),
    Training("tensor-of-list", "no-gradient", "graph", _constant, advice="hand on the tensor itself"),
]
