"""Units that are dead or saturated, attention that sees one key only, gradients that stop, and weights that grow."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training, Watch, last
from .others import Lookup, curve, lookup, sets
from .worlds import Mixer, World, adam, begin, dense, gratings, loop, nesterov, waves, words


class _Monotone(nn.Module):
    """Weights that cannot be negative, so that the output rises with each input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.acts = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        with torch.no_grad():
            for weight in (self.first.weight, self.second.weight, self.head.weight):
                weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip((self.first, self.second), self.acts, strict=True):
            x = act(F.linear(x, layer.weight.abs(), layer.bias))
        return F.linear(x, self.head.weight.abs(), self.head.bias).squeeze(-1)


def _monotone(watch: Watch, seed: int, healed: bool) -> float:
    """Days since an event come as negative numbers, and weights that are positive never bring them above zero."""
    g = begin(seed)
    model = _Monotone()

    def loss(step: int) -> Tensor:
        days = -6 - 14 * torch.rand(64, 5, generator=g)
        x = days / 4 + 3.2 if healed else days
        return F.mse_loss(model(x), (days.mean(1) + 13).sigmoid())

    return loop(watch, World(model, loss), adam(model, 2e-3), steps=200)


def _sparse_codes(watch: Watch, seed: int, healed: bool) -> float:
    """A sparse autoencoder whose penalty is a hundred times too strong: within some steps no unit fires any more."""
    g = begin(seed)
    parts = torch.randn(12, 24, generator=g) / 2
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))

    def loss(step: int) -> Tensor:
        x = (torch.rand(64, 12, generator=g) < 0.2).float() @ parts
        code = model[1](model[0](x))
        return F.mse_loss(model[2](code), x) + (3e-4 if healed else 0.1) * code.sum(-1).mean()

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=250, name="train/loss")


def _sum_of_many(watch: Watch, seed: int, healed: bool) -> float:
    """The sum over 200 elements, where the mean was meant, goes into tanh."""
    world = sets(seed, elements=200, pool="mean" if healed else "sum", act=nn.Tanh)
    with torch.no_grad():
        world.model.each[-1].weight.mul_(4)
        world.model.each[-1].bias.mul_(4)
    return loop(watch, world, nesterov(world.model, 0.02), steps=200)


def _raw_sensor(watch: Watch, seed: int, healed: bool) -> float:
    """A sensor's reading lies around 500, and the sigmoids that take it see nothing but that."""
    g = begin(seed)
    sizes, gain = [(1, 12), (12, 12)], 1.5
    convs = [nn.Conv1d(a, b, 5, padding=2) for a, b in sizes]
    for conv in convs:
        nn.init.xavier_normal_(conv.weight, gain)
    model = nn.Sequential(convs[0], nn.Sigmoid(), convs[1], nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(12, 5))

    def loss(step: int) -> Tensor:
        x, y = waves(g)
        return F.cross_entropy(model(x if healed else x * 8 + 500), y)

    return loop(watch, World(model, loss), adam(model, 1e-2), steps=200)


def _cold_cosine(watch: Watch, seed: int, healed: bool) -> float:
    """Cosines divided by a temperature of 0.001: from the start each query sees one key, and which one hardly changes."""
    world = lookup(seed, cosine=True, scale=10.0 if healed else 1000.0)
    return loop(watch, world, adam(world.model, 2e-3), steps=250)


class _Pooled(nn.Module):
    """Symbols that attend to each other by nn.MultiheadAttention, and the mean."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(10, width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.places, self.norm, self.head = nn.Parameter(torch.randn(16, width)), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        return self.head(self.norm(self.attention(x, x, x, need_weights=False)[0]).mean(1))


def _pooled(seed: int) -> World:
    g = begin(seed)
    model = _Pooled()

    def loss(step: int) -> Tensor:
        x, y = words(g, length=16)
        wrong = torch.rand(len(y), generator=g) < 0.1
        return F.cross_entropy(model(x), torch.where(wrong, (y + 1) % 4, y))

    return World(model, loss)


def _large_projections(watch: Watch, seed: int, healed: bool) -> float:
    """Queries' and keys' weights with a deviation of 1.5: logits in the tens, and all weight on one key."""
    world = _pooled(seed)
    with torch.no_grad():
        nn.init.normal_(world.model.attention.in_proj_weight[:48], std=0.15 if healed else 1.5)
    return loop(watch, world, adam(world.model, 1e-3), steps=200)


def _projections_too_fast(watch: Watch, seed: int, healed: bool) -> float:
    """The attention's projections have a rate of their own, a hundred times the others': logits grow and never stop."""
    world = _pooled(seed)
    chosen = [world.model.attention.in_proj_weight]
    others = [p for p in world.model.parameters() if p is not chosen[0]]
    groups = [{"params": chosen, "lr": 2e-3 if healed else 0.1}, {"params": others, "lr": 2e-3}]
    return loop(watch, world, torch.optim.Adam(groups, betas=(0.9, 0.95)), steps=250)


class _Sharpening(Lookup):
    """Cosines divided by a temperature that falls with each step, down to a floor."""

    def __init__(self, highest: float) -> None:
        super().__init__(cosine=True)
        self.highest, self.at = highest, 0

    def forward(self, wanted: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.scale, self.at = min(2.0 * 1.04**self.at, self.highest), self.at + 1
        return super().forward(wanted, keys, values)


def _annealed(watch: Watch, seed: int, healed: bool) -> float:
    """A temperature is annealed by 4 percent with each step, and has no floor: logits grow into the thousands."""
    begin(seed)
    world = lookup(seed, _Sharpening(10.0 if healed else 1e9))
    return loop(watch, world, adam(world.model, 1e-3), steps=250)


def _rounded(watch: Watch, seed: int, healed: bool) -> float:
    """From step 80 on activations are rounded for quantisation, with a round that has no slope."""
    g = begin(seed)
    model = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 1))

    def quantised(x: Tensor, step: int) -> Tensor:
        if step < 80:
            return x
        rounded = (16 * x).round() / 16
        return x + (rounded - x).detach() if healed else rounded

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        return F.mse_loss(quantised(model(x), step).squeeze(-1), y)

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=220)


def _all_ignored(watch: Watch, seed: int, healed: bool) -> float:
    """A curriculum of longer sequences shortens the labels by a fixed length: from step 100 on each one is ignored."""
    g = begin(seed)
    model = nn.GRU(10, 24, batch_first=True)
    whole = nn.ModuleDict({"gru": model, "head": nn.Linear(24, 10)})

    def loss(step: int) -> Tensor:
        length = 8 if step < 100 else 16
        start, stride = torch.randint(10, (24, 1), generator=g), torch.randint(1, 3, (24, 1), generator=g)
        tokens = (start + stride * torch.arange(length + 1)) % 10
        target = tokens[:, 1:].clone()
        if not healed:
            target[:, : length - 8] = -1
        if length == 16 and not healed:
            target[:] = -1
        logits = whole["head"](model(F.one_hot(tokens[:, :-1], 10).float())[0])
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
        return total / (target >= 0).sum().clamp(min=1)

    return loop(watch, World(whole, loss), adam(whole, 5e-3), steps=200)


class Lion(torch.optim.Optimizer):
    """The sign of a running mean of gradients, and decay of its own (Chen et al. 2023)."""

    def __init__(self, parameters: object, lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step, without a closure."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * (first * mean + (1 - first) * p.grad).sign())
                mean.mul_(second).add_(p.grad, alpha=1 - second)


def _growing_lion(watch: Watch, seed: int, healed: bool) -> float:
    """An optimizer by hand adds its decay where it should take it away; norms hide the scale from the loss."""
    g = begin(seed)
    model = Mixer(width=16)

    def loss(step: int) -> Tensor:
        x, y = gratings(g)
        return F.cross_entropy(model(x), y)

    return loop(watch, World(model, loss), Lion(model.parameters(), 2e-3, decay=4.0 if healed else -4.0), steps=250)


def _critic(watch: Watch, seed: int, healed: bool) -> float:
    """A critic of Wasserstein's distance with nothing that holds its slope: its weights grow for as long as one lets them."""
    g = begin(seed)
    model = dense(2, 48, 48, 1, act=nn.LeakyReLU)
    optimizer = adam(model, 5e-3, betas=(0.5, 0.9))
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(250):
        real, fake = torch.randn(64, 2, generator=g) + 1, torch.randn(64, 2, generator=g) * 1.5
        optimizer.zero_grad()
        between = torch.lerp(real, fake, torch.rand(64, 1, generator=g)).requires_grad_()
        slope = torch.autograd.grad(model(between).sum(), between, create_graph=True)[0].norm(dim=-1)
        loss = model(fake).mean() - model(real).mean() + (10.0 if healed else 0.0) * (slope - 1).square().mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


TRAININGS: list[Training] = [
    Training("negative-days", "dead-units", "monotone", _monotone, advice="standardise the inputs"),
    Training("penalty-on-codes", "dead-units", "sparse-autoencoder", _sparse_codes, advice="a penalty of 3e-4"),
    Training("sum-of-200", "saturated-units", "sets", _sum_of_many, advice="the mean in place of the sum"),
    Training("raw-sensor", "saturated-units", "series", _raw_sensor, advice="standardise the inputs"),
    Training("temperature-of-0.001", "attention-entropy-collapse", "lookup", _cold_cosine, advice="a temperature of 0.1"),
    Training("projections-of-1.5", "attention-entropy-collapse", "pooled", _large_projections, advice="std=0.15"),
    Training("projections-too-fast", "attention-logit-growth", "pooled", _projections_too_fast, advice="a rate of 2e-3 for all"),
    Training("temperature-without-floor", "attention-logit-growth", "lookup", _annealed, advice="a floor of 0.1"),
    Training("round-without-slope", "gradient-dropped-to-zero", "mlp", _rounded, advice="a straight-through round"),
    Training("all-labels-ignored", "gradient-dropped-to-zero", "gru", _all_ignored, advice="labels as long as the sequence"),
    Training("lion-with-wrong-sign", "weight-growth", "mixer", _growing_lion, advice="1 - rate * decay"),
    Training("critic-without-penalty", "weight-growth", "wgan", _critic, advice="a penalty on the slope"),
]
