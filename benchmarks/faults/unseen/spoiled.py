"""NaN and infinity in the loss, in an activation, in a gradient or in a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training, Watch
from .others import curve, factors, two_tasks
from .worlds import World, adam, begin, communities, dense, loop, nesterov, waves

SMALL = 1e-6


def _variance(watch: Watch, seed: int, healed: bool) -> float:
    """The variance of a Gaussian is a ReLU's output, and the logarithm of 0 is minus infinity once it falls that low."""
    g = begin(seed)
    model = dense(4, 40, 40, 2)
    nn.init.constant_(model[-1].bias, 0.3)

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        mean, variance = model(x).unbind(-1)
        variance = F.relu(variance) + (1e-2 if healed else 0.0)
        return 0.5 * (variance.log() + (mean - y).square() / variance).mean()

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=200)


def _by_hand(watch: Watch, seed: int, healed: bool) -> float:
    """Binary cross-entropy written out: a probability that is rounded to 1 makes 0 times minus infinity."""
    g = begin(seed)
    model = dense(6, 32, 32, 1)

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 6, generator=g) + 0.2
        y = (x[:, 0] + x[:, 1] > 0).float()
        logits = 3 * model(x).squeeze(-1)
        if healed:
            return F.binary_cross_entropy_with_logits(logits, y)
        p = logits.sigmoid()
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    return loop(watch, World(model, loss), adam(model, 1e-2), steps=200, name="train/loss")


def _no_events(watch: Watch, seed: int, healed: bool) -> float:
    """Cox's partial likelihood of a batch in which all were censored: a mean over no events."""
    g = begin(seed)
    model, slopes = dense(6, 32, 1), torch.randn(6, generator=g)

    def loss(step: int) -> Tensor:
        x = torch.randn(48, 6, generator=g)
        times = torch.empty(48).exponential_(generator=g) * (-(x @ slopes)).exp()
        event = (torch.rand(48, generator=g) < 0.7) & (step != 90)
        order = times.argsort(descending=True)
        risk, event = model(x).squeeze(-1)[order], event[order]
        each = risk.logcumsumexp(0) - risk
        return (each * event).sum() / event.sum().clamp(min=1 if healed else 0)

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=150)


class _Exp(nn.Module):
    def __init__(self, highest: float) -> None:
        super().__init__()
        self.highest = highest

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=self.highest).exp()


def _counts(watch: Watch, seed: int, healed: bool) -> float:
    """The rate of a Poisson regression is an exponential, and one row of one batch has a feature in the wrong unit."""
    g = begin(seed)
    model = nn.Sequential(dense(5, 24, 1), _Exp(6.0 if healed else torch.inf))
    slopes = torch.randn(5, generator=g) / 3

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 5, generator=g)
        y = torch.poisson((x @ slopes + 0.5).exp(), generator=g)
        if step == 70:
            x[::8] *= 1e5
        rate = model(x).squeeze(-1)
        return (rate - y * (rate + SMALL).log()).mean()

    return loop(watch, World(model, loss), nesterov(model, 0.01), steps=150)


class _Neighbours(nn.Module):
    """The mean over neighbours, divided by how many there are."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ x / edges.sum(1, keepdim=True).clamp(min=self.least)


class _GraphNet(nn.Module):
    def __init__(self, least: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 24), nn.Linear(48, 3)
        self.neighbours = _Neighbours(least)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.second(torch.cat([x, self.neighbours(x, edges)], 1))


def _isolated(watch: Watch, seed: int, healed: bool) -> float:
    """Edges are dropped at random; sooner or later a node is left with none: 0 / 0."""
    g = begin(seed)
    edges, y, draw = communities(g)
    model, edges = _GraphNet(1.0 if healed else 0.0), edges * (1 - torch.eye(len(y)))

    def loss(step: int) -> Tensor:
        kept = edges * (torch.rand(edges.shape, generator=g) > 0.45)
        if step < 20:
            kept = edges
        return F.cross_entropy(model(draw(), kept), y)

    return loop(watch, World(model, loss), adam(model), steps=150)


class _Energy(nn.Module):
    """The sum of squares of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1)


def _half_energy(watch: Watch, seed: int, healed: bool) -> float:
    """Energies of a loud signal are above 65504, the largest number of float16; bfloat16 can hold them."""
    g = begin(seed)
    model = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2, bias=False), _Energy(), nn.LayerNorm(12), nn.Linear(12, 5))

    def loss(step: int) -> Tensor:
        x, y = waves(g)
        loud = 2 + 40 * max(0, step - 40) / 100
        with torch.autocast("cpu", dtype=torch.bfloat16 if healed else torch.float16):
            logits = model(loud * x)
        return F.cross_entropy(logits.float(), y)

    return loop(watch, World(model, loss), adam(model, 1e-2), steps=200)


class _GeneralisedMean(nn.Module):
    """The p-th root of the mean of p-th powers over time, as in image retrieval."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().clamp(min=self.least).pow(3).mean(-1).pow(1 / 3)


def _blank(watch: Watch, seed: int, healed: bool) -> float:
    """Pooling by a generalised mean: the cube root of 0 has no slope, and one series of one batch is silent."""
    g = begin(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2, bias=False), _GeneralisedMean(SMALL if healed else 0.0), nn.Linear(16, 5)
    )

    def loss(step: int) -> Tensor:
        x, y = waves(g)
        if step == 60:
            x[4] = 0
        return F.cross_entropy(model(x), y)

    return loop(watch, World(model, loss), adam(model, 1e-2), steps=150)


def _turn(watch: Watch, seed: int, healed: bool) -> float:
    """The angle between two moves in one direction is the arc cosine of 1, or of a bit more, which has no slope."""
    g = begin(seed)
    model = nn.ModuleDict({"gru": nn.GRU(2, 24, batch_first=True), "head": nn.Linear(24, 2)})
    limit = 1 - (SMALL if healed else 0.0)

    def loss(step: int) -> Tensor:
        moves = torch.randn(24, 10, 2, generator=g)
        said = model["head"](model["gru"](moves)[0])
        unit, truth = (x / (x.square().sum(-1, keepdim=True) + SMALL**2).sqrt() for x in (said, moves.cumsum(1)))
        turned, right = ((x[:, 1:] * x[:, :-1]).sum(-1) for x in (unit, truth))
        return (turned.clamp(-limit, limit).acos() - right.clamp(-0.9999, 0.9999).acos()).square().mean()

    return loop(watch, World(model, loss), adam(model, 5e-3), steps=200)


class Lars(torch.optim.Optimizer):
    """Momentum with steps in proportion to each parameter's norm (You et al. 2017)."""

    def __init__(self, parameters: object, lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step, without a closure."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                trust = (p.norm() + 0.01) / (p.grad.norm() + group["eps"])
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(trust * p.grad)
                p.sub_(group["lr"] * mean)


def _no_samples(watch: Watch, seed: int, healed: bool) -> float:
    """A step in proportion to the norm of the gradient, which is 0 where one of the tasks has no samples in a batch."""
    model, draw = two_tasks(seed)

    def loss(step: int) -> Tensor:
        x, number, kind = draw()
        a, b = model(x)
        return F.mse_loss(a, number) * (0.0 if step % 50 == 49 else 1.0) + F.cross_entropy(b, kind)

    return loop(watch, World(model, loss), Lars(model.parameters(), 3e-3, SMALL if healed else 0.0), steps=200)


def _average(watch: Watch, seed: int, healed: bool) -> float:
    """From step 80 on weights are replaced by their running mean, whose correction for its start divides by 0 the first time."""
    world = factors(seed)
    means = {p: torch.zeros_like(p) for p in world.model.parameters()}

    @torch.no_grad()
    def after(step: int) -> None:
        count = step - 80
        if healed:
            count += 1
        if step < 80:
            return
        for p, mean in means.items():
            if count > 0:
                mean.mul_(0.5).add_(0.5 * p)
            p.copy_(mean / (1 - 0.5**count))

    return loop(watch, world, adam(world.model, 3e-2), steps=150, after=after)


TRAININGS: list[Training] = [
    Training("variance-by-relu", "non-finite-loss", "mlp", _variance, advice="add a little to the variance"),
    Training("cross-entropy-by-hand", "non-finite-loss", "mlp", _by_hand, advice="binary_cross_entropy_with_logits"),
    Training("batch-without-events", "non-finite-loss", "survival", _no_events, advice="clamp the number of events"),
    Training("exponential-of-outliers", "non-finite-activation", "poisson", _counts, advice="clamp before the exponential"),
    Training("isolated-nodes", "non-finite-activation", "graph", _isolated, advice="clamp the number of neighbours"),
    Training("float16-energies", "non-finite-activation", "series", _half_energy, advice="bfloat16"),
    Training("cube-root-of-silence", "non-finite-gradient", "series", _blank, advice="clamp before the power"),
    Training("angle-of-straight-on", "non-finite-gradient", "gru", _turn, advice="clamp to less than 1 before the arc cosine"),
    Training("trust-without-eps", "non-finite-parameter", "heads", _no_samples, advice="eps under the fraction"),
    Training("average-of-none", "non-finite-parameter", "factors", _average, advice="count before dividing"),
]
