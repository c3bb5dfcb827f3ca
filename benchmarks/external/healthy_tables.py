"""Sound trainings of other kinds: ratings, experts, a rare class, quantiles, two tasks, and an equation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import batches, clusters, digits, healthy, last, normalised


class Factors(nn.Module):
    """Factors and a bias for each user and each item, with sparse gradients."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, width, sparse=True), nn.Embedding(items, width, sparse=True)
        self.user_biases, self.item_biases = nn.Embedding(users, 1, sparse=True), nn.Embedding(items, 1, sparse=True)
        for table in (self.user_factors, self.item_factors, self.user_biases, self.item_biases):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """A rating for each pair, less the mean of all ratings."""
        product = (self.user_factors(user) * self.item_factors(item)).sum(1)
        out: Tensor = product + self.user_biases(user).squeeze(1) + self.item_biases(item).squeeze(1)
        return out


def ratings(watch: Watch, seed: int, healed: bool) -> float:
    """Ratings of films from sparse embeddings of users and films, some of which are asked for far more often."""
    torch.manual_seed(seed)
    likes, kinds = torch.randn(300, 4), torch.randn(200, 4)
    user = torch.randint(300, (8000,))
    item = torch.multinomial(1 / torch.arange(1.0, 201), 8000, replacement=True)
    score = (0.5 * (likes[user] * kinds[item]).sum(1) + 0.5 * kinds[item, 0] + 0.3 * torch.randn(8000)).clamp(-2, 2)
    model = Factors(300, 200, 8)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    monitor = watch(model, optimizer)
    losses = []
    for users, items, wanted in batches(400, 256, user, item, score):
        optimizer.zero_grad()
        loss = F.mse_loss(model(users, items), wanted)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Mixture(nn.Module):
    """Eight experts, of which a noisy gate chooses two for each example."""

    def __init__(self, inputs: int, outputs: int, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(inputs, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted outputs of the chosen experts, and how unevenly all are used."""
        logits = self.gate(x)
        noisy = logits + 0.5 * torch.randn_like(logits) if self.training else logits
        weights, index = noisy.topk(self.chosen, dim=1)
        gates = torch.zeros_like(logits).scatter(1, index, weights.softmax(1))
        output = torch.zeros(len(x), self.experts[0][2].out_features)  # type: ignore[index]
        for number, expert in enumerate(self.experts):
            rows = gates[:, number].nonzero().squeeze(1)
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * gates[rows, number : number + 1])
        used = (gates > 0).float().mean(0) / self.chosen
        balance = len(self.experts) * (used * logits.softmax(1).mean(0)).sum()
        return output, balance


def experts(watch: Watch, seed: int, healed: bool) -> float:
    """A mixture of experts classifies points of twelve classes; a small second loss keeps all experts in use."""
    torch.manual_seed(seed)
    x_all, y_all = clusters(3000, 16, 24, spread=0.7)
    y_all = y_all % 12
    model = Mixture(16, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(300, 64, x_all, y_all):
        optimizer.zero_grad()
        logits, balance = model(x)
        loss = F.cross_entropy(logits, y) + 0.01 * balance
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def focal(watch: Watch, seed: int, healed: bool) -> float:
    """Four of a hundred examples are positive; the last bias begins at that share, and easy examples hardly count."""
    torch.manual_seed(seed)
    x_all = torch.randn(6000, 20)
    positive = torch.rand(6000) < 0.04
    x_all[positive] += 0.6 * torch.randn(20)
    y_all = positive.float()
    end = nn.Linear(64, 1)
    nn.init.normal_(end.weight, std=0.01)
    nn.init.constant_(end.bias, -math.log((1 - 0.04) / 0.04))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), end)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(400, 128, x_all, y_all):
        logits = model(x).squeeze(1)
        right = torch.where(y > 0, logits.sigmoid(), 1 - logits.sigmoid())
        weight = torch.where(y > 0, 0.25, 0.75) * (1 - right) ** 2
        loss = (weight * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).sum() / y.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def quantiles(watch: Watch, seed: int, healed: bool) -> float:
    """The tenth, the fiftieth and the ninetieth percentile of a value whose spread depends on the input."""
    torch.manual_seed(seed)
    x_all = 4 * torch.rand(4000, 1) - 2
    y_all = (2 * x_all).sin() + (0.1 + 0.3 * x_all.abs()) * torch.randn(4000, 1)
    levels = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(300, 128, x_all, y_all):
        miss = y - model(x)
        loss = torch.maximum(levels * miss, (levels - 1) * miss).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class TwoTasks(nn.Module):
    """A trunk, a head that names the digit, one that finds its middle, and the logarithm of each task's variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(384, 64), nn.ReLU()),
        )
        self.name, self.place = nn.Linear(64, 10), nn.Linear(64, 2)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the digits, and a place."""
        hidden = self.trunk(x)
        return self.name(hidden), self.place(hidden)


def two_tasks(watch: Watch, seed: int, healed: bool) -> float:
    """Two losses, each divided by a variance that is learnt, plus its logarithm; the sum may become negative."""
    torch.manual_seed(seed)
    images, labels = digits(2000, noise=0.02)
    axis, ink = torch.linspace(-1, 1, 16), images.squeeze(1) / images.sum((1, 2, 3)).view(-1, 1, 1)
    middles = torch.stack([(ink.sum(1) * axis).sum(1), (ink.sum(2) * axis).sum(1)], 1)
    images = normalised(images)
    model = TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y, place in batches(300, 32, images, labels, middles):
        optimizer.zero_grad()
        logits, guess = model(x)
        tasks = torch.stack([F.cross_entropy(logits, y), 0.5 * F.mse_loss(guess, place)])
        loss = ((-model.log_variances).exp() * tasks + 0.5 * model.log_variances).sum()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def equation(watch: Watch, seed: int, healed: bool) -> float:
    """A net becomes the solution of u'' = -9 u with u(0) = 0 and u'(0) = 3, by derivatives of its output."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    start = torch.zeros(1, 1, requires_grad=True)
    losses = []
    for _ in range(400):
        x = (1.5 * torch.rand(64, 1)).requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        first = model(start)
        (pace,) = torch.autograd.grad(first.sum(), start, create_graph=True)
        loss = (bend + 9 * u).square().mean() + 10 * first.square().sum() + 10 * (pace - 3).square().sum()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("sparse-embeddings", "https://www.ethanrosenthal.com/2017/06/20/matrix-factorization-in-pytorch/", ratings),
    ("mixture-of-experts", "https://github.com/davidmrau/mixture-of-experts", experts),
    ("focal-loss", "https://arxiv.org/abs/1708.02002", focal),
    ("quantile-regression", "https://arxiv.org/abs/1912.09363", quantiles),
    ("uncertainty-weights", "https://arxiv.org/abs/1705.07115", two_tasks),
    ("physics-informed", "https://github.com/maziarraissi/PINNs", equation),
)
