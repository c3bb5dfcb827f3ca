"""Healthy trainings of other models: parts that rest, are rarely used, are shared, begin at zero or give sharp outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..training import Training, Watch
from .others import contrast, curve, factors, lookup, regress, sets, translate
from .worlds import World, adam, begin, convolutions, dense, graph, gratings, loop, mixer, nesterov, series, waves, words

Build = Callable[[nn.Module], torch.optim.Optimizer]


def well(title: str, family: str, make: Callable[[int], World], build: Build = adam, **how: Any) -> Training:
    """A training with nothing to be found."""

    def run(watch: Watch, seed: int, healed: bool) -> float:
        world = make(seed)
        return loop(watch, world, build(world.model), **how)

    return Training(title, "", family, run)


def _on_curve(make: Callable[[], nn.Module]) -> Callable[[int], World]:
    """Regression by a model that ``make`` makes."""

    def made(seed: int) -> World:
        g = begin(seed)
        model = make()

        def loss(step: int) -> Tensor:
            x, y = curve(g)
            return F.mse_loss(model(x).squeeze(-1), y)

        return World(model, loss)

    return made


def _on_gratings(make: Callable[[], nn.Module]) -> Callable[[int], World]:
    """Directions of gratings by a model that ``make`` makes."""

    def made(seed: int) -> World:
        g = begin(seed)
        model = make()

        def loss(step: int) -> Tensor:
            x, y = gratings(g)
            return F.cross_entropy(model(x[:, None]), y)

        return World(model, loss)

    return made


def _grouped() -> nn.Module:
    """Convolutions with group norms and hard activations, as in small networks for phones."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Hardswish()]
    second = [nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6(), nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.ReLU6()]
    return nn.Sequential(*first, *second, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(64, 4))


def _weight_norm() -> nn.Module:
    """Lengths and directions of weights apart."""
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(4, 48)), nn.Tanh(), norm(nn.Linear(48, 48)), nn.Tanh(), nn.Linear(48, 1))


def _deep_sigmoids() -> nn.Module:
    """Sigmoids that batch norms keep in their middle."""
    layers: list[nn.Module] = [nn.Linear(4, 40)]
    for _ in range(4):
        layers += [nn.BatchNorm1d(40), nn.Sigmoid(), nn.Linear(40, 40)]
    return nn.Sequential(*layers, nn.BatchNorm1d(40), nn.Sigmoid(), nn.Linear(40, 1))


def _dropout() -> nn.Module:
    """Half of all units are left out each time."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 96),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(96, 4),
    )


class _Adapted(nn.Module):
    """A frozen layer and a bottleneck beside it that begins at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(frozen.out_features, 8), nn.Linear(8, frozen.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        return x + self.up(F.gelu(self.down(x)))


def _adapted() -> nn.Module:
    return nn.Sequential(_Adapted(nn.Linear(4, 64)), nn.GELU(), _Adapted(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 1))


def _trained_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def _frozen_trunk(seed: int) -> World:
    """The first convolutions are frozen, with their norm in eval mode; the optimizer has all parameters."""
    begin(seed)
    model = convolutions(depth=3, width=24, norm="batch")
    for module in model[:3]:
        module.requires_grad_(False)
    model[1].eval()
    return series(seed, model)


class _Routed(nn.Module):
    """Each input goes to the best of four experts; the last begins with a handicap and is rarely chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4), nn.ModuleList(dense(4, 24, 1) for _ in range(4))
        with torch.no_grad():
            self.router.bias[3] = -1.5

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        y = x.new_zeros(len(x), 1)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, gate[rows, None] * expert(x[rows]))
        return y


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (20 * x).sin()


def _siren(seed: int) -> World:
    """Sines of 20 times the inputs, drawn as they should be."""
    g = begin(seed)
    model = nn.Sequential(nn.Linear(2, 48), _Sine(), nn.Linear(48, 48), _Sine(), nn.Linear(48, 1))
    nn.init.uniform_(model[0].weight, -0.3, 0.3)
    nn.init.uniform_(model[2].weight, -((6 / 48) ** 0.5) / 20, (6 / 48) ** 0.5 / 20)

    def loss(step: int) -> Tensor:
        x = 2 * torch.rand(128, 2, generator=g) - 1
        return F.mse_loss(model(x).squeeze(-1), (6 * x[:, 0]).sin() * (4 * x[:, 1]).cos())

    return World(model, loss)


def _checkpointed(seed: int) -> World:
    """Blocks whose activations are computed again on the way back."""
    world = mixer(seed, depth=3)
    for block in world.model.blocks:
        block.forward = lambda x, inner=block.forward: checkpoint(inner, x, use_reentrant=False)
    return world


def _masked(seed: int) -> World:
    """One symbol in six is hidden and has to be predicted from its neighbours; the others have no loss."""
    g = begin(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(11, 32), "places": nn.Embedding(12, 32), "layer": layer, "head": nn.Linear(32, 10)}
    )

    def loss(step: int) -> Tensor:
        x = (torch.randint(10, (32, 1), generator=g) + torch.randint(1, 3, (32, 1), generator=g) * torch.arange(12)) % 10
        hidden = torch.rand(x.shape, generator=g) < 1 / 6
        said = model["embed"](x.masked_fill(hidden, 10)) + model["places"].weight
        return F.cross_entropy(model["head"](model["layer"](said))[hidden], x[hidden])

    return World(model, loss)


def _bag(seed: int) -> World:
    """A table of 2000 words; a batch has a few hundred."""
    g = begin(seed)
    model = nn.Sequential(nn.EmbeddingBag(2000, 16, sparse=True, mode="mean"), nn.Linear(16, 5))
    topic = torch.randint(5, (2000,), generator=g)

    def loss(step: int) -> Tensor:
        y = torch.randint(5, (64,), generator=g)
        drawn = torch.randint(2000, (64, 30), generator=g)
        chosen = torch.where(topic[drawn] == y[:, None], drawn, drawn % 40)
        return F.cross_entropy(model(chosen), y)

    return World(model, loss)


def _gru(seed: int) -> World:
    """Two layers of a GRU, with dropout between them, forwards and backwards."""
    g = begin(seed)
    gru = nn.GRU(24, 16, 2, batch_first=True, bidirectional=True, dropout=0.2)
    model = nn.ModuleDict({"embed": nn.Embedding(10, 24), "gru": gru, "head": nn.Linear(32, 4)})

    def loss(step: int) -> Tensor:
        x, y = words(g)
        return F.cross_entropy(model["head"](model["gru"](model["embed"](x))[0].max(1).values), y)

    return World(model, loss)


def _tanh_net(seed: int) -> World:
    """A frequency's amplitude behind tanh; a few are near their ends."""
    g = begin(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 12, 7, padding=3), nn.Tanh(), nn.Conv1d(12, 12, 7, padding=3), nn.Tanh(), nn.AdaptiveMaxPool1d(1)
    )
    whole = nn.Sequential(model, nn.Flatten(), nn.Linear(12, 5))

    def loss(step: int) -> Tensor:
        x, y = waves(g)
        return F.cross_entropy(whole(x), y)

    return World(whole, loss)


TRAININGS: list[Training] = [
    well("mixer", "mixer", mixer, name="train/loss"),
    well("batch-norms-along-time", "series", lambda seed: series(seed, norm="batch"), nesterov),
    well("group-norms-and-hard-units", "cnn", _on_gratings(_grouped), name="train_loss"),
    well("weight-norm", "mlp", _on_curve(_weight_norm), lambda m: adam(m, 1e-2), steps=200),
    well("sigmoids-behind-norms", "mlp", _on_curve(_deep_sigmoids), lambda m: adam(m, 1e-2), steps=250),
    well("half-dropped", "mlp", _on_gratings(_dropout), lambda m: adam(m, 2e-3), steps=200),
    well("adapters", "mlp", _on_curve(_adapted), _trained_only, steps=250),
    well("frozen-convolutions", "series", _frozen_trunk, steps=200),
    well("routed-experts", "experts", _on_curve(_Routed), lambda m: adam(m, 1e-2), steps=250),
    well("siren", "siren", _siren, lambda m: adam(m, 1e-3), steps=250),
    well("checkpointed-blocks", "mixer", _checkpointed),
    well("masked-symbols", "encoder", _masked, steps=250),
    well("tied-translator", "translator", lambda seed: translate(seed, tied=True), steps=200),
    well("sharp-look-up", "lookup", lookup, lambda m: adam(m, 1e-2), name="train/loss"),
    well("cosine-look-up", "lookup", lambda seed: lookup(seed, cosine=True, scale=12.0), steps=200),
    well("sums-of-sets", "sets", lambda seed: sets(seed, pool="sum"), lambda m: adam(m, 2e-3), steps=200),
    well("sparse-bags", "bag", _bag, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.2), steps=200),
    well("two-way-gru", "gru", _gru, lambda m: adam(m, 5e-3), name="train_loss"),
    well("tanh-along-time", "series", _tanh_net, lambda m: adam(m, 5e-3), steps=200),
    well("contrast", "contrast", contrast, lambda m: adam(m, 3e-3, amsgrad=True), steps=200),
    well("factors-from-small", "factors", lambda seed: factors(seed, std=0.05), lambda m: adam(m, 3e-2), steps=200),
    well("graph", "graph", graph, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.03), steps=200),
    well("sum-of-errors", "mlp", lambda seed: regress(seed, reduction="sum"), lambda m: adam(m, 3e-3), steps=200),
]
