"""Sound trainings that see the same data at each step: graphs, layers one by one, small data sets, one batch, one image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_gradmon import Checks

from .case import Watch
from .data_healthy import EXAMPLES, citations, clusters, digits, healthy, last, normalised, shapes


class GraphConv(nn.Module):
    """The mean of the neighbours' features, times a matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        """New features of each node."""
        out: Tensor = torch.sparse.mm(links, x @ self.kernel)
        return out


class GCN(nn.Module):
    """Two graph convolutions with dropout between them."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConv(inputs, hidden), GraphConv(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        """Log-probabilities of each node's class."""
        x = self.dropout(F.relu(self.gc1(x, links)))
        return F.log_softmax(self.gc2(x, links), dim=1)


class GraphAttention(nn.Module):
    """Heads that weigh the neighbours of a node, with their mean as the result."""

    def __init__(self, inputs: int, outputs: int, heads: int, dropout: float = 0.6) -> None:
        super().__init__()
        self.heads, self.outputs, self.dropout = heads, outputs, dropout
        self.weight = nn.Parameter(torch.empty(inputs, heads * outputs))
        self.score = nn.Parameter(torch.empty(heads, 2 * outputs, 1))
        nn.init.xavier_normal_(self.weight)
        nn.init.xavier_normal_(self.score)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """New features of each node."""
        h = F.dropout(x @ self.weight, self.dropout, self.training).view(len(x), self.heads, -1).transpose(0, 1)
        scores = h @ self.score[:, : self.outputs] + (h @ self.score[:, self.outputs :]).mT
        scores = F.leaky_relu(scores, 0.2).masked_fill(adjacency == 0, -1e9)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return (weights @ h).mean(0)


class GAT(nn.Module):
    """Two layers of attention over a graph."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gat1, self.gat2 = GraphAttention(inputs, hidden, 8), GraphAttention(hidden, classes, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Log-probabilities of each node's class."""
        return F.log_softmax(self.gat2(F.elu(self.gat1(x, adjacency)), adjacency), dim=1)


def nodes(watch: Watch, model: nn.Module, x: Tensor, labels: Tensor, links: Tensor, rate: float, steps: int) -> float:
    """Adam on the nodes whose class is known, with a test on the others now and then."""
    order = torch.randperm(len(x))
    train, valid = order[: len(x) // 2], order[len(x) // 2 :]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=5e-4)
    monitor = watch(model, optimizer)
    losses = []
    for step in range(steps):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, links)[train], labels[train])
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        if step % 20 == 0:
            model.eval()
            with monitor.no_monitor(), torch.no_grad():
                F.nll_loss(model(x, links)[valid], labels[valid])
    return last(losses)


def gcn(watch: Watch, seed: int, healed: bool) -> float:
    """A graph convolutional net: 200 steps on the whole graph, which is how the paper trains it."""
    torch.manual_seed(seed)
    x, labels, adjacency = citations()
    root = adjacency.sum(1).rsqrt()
    links = (root.unsqueeze(1) * adjacency * root).to_sparse()
    return nodes(watch, GCN(x.shape[1], 16, 4), x, labels, links, rate=0.01, steps=200)


def gat(watch: Watch, seed: int, healed: bool) -> float:
    """A graph attention net with dropout of 0.6 on features and on attention, as in its paper."""
    torch.manual_seed(seed)
    x, labels, adjacency = citations(nodes=180)
    return nodes(watch, GAT(x.shape[1], 16, 4), x, labels, adjacency, rate=0.005, steps=250)


class Goodness(nn.Linear):
    """A layer that sees the direction of its input alone, and is trained without those above it."""

    def forward(self, x: Tensor) -> Tensor:
        """Its activities; their mean square is the goodness."""
        return F.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))


def forward_forward(watch: Watch, seed: int, healed: bool) -> float:
    """Two layers, one after the other, each with its own Adam, tell right labels in the image from wrong ones."""
    torch.manual_seed(seed)
    images, labels = digits(400)
    images = normalised(images).flatten(1)
    wrong = (labels + torch.randint(1, 10, labels.shape)) % 10
    ink = images.max()
    good = torch.cat([F.one_hot(labels, 10) * ink, images[:, 10:]], 1)
    bad = torch.cat([F.one_hot(wrong, 10) * ink, images[:, 10:]], 1)
    losses: list[Tensor] = []
    for layer in (Goodness(256, 160), Goodness(160, 160)):
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
        monitor = watch(layer, optimizer)
        for _ in range(300):
            high, low = layer(good).square().mean(1), layer(bad).square().mean(1)
            loss = F.softplus(torch.cat([2 - high, low - 2])).mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        good, bad = layer(good).detach(), layer(bad).detach()
    return last(losses)


def full_batch(watch: Watch, seed: int, healed: bool) -> float:
    """Gradient descent on all of 150 flowers with four measures each, for 300 epochs of one step."""
    torch.manual_seed(seed)
    x, y = clusters(150, 4, 3, spread=0.7)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def one_batch(watch: Watch, seed: int, healed: bool) -> float:
    """A check before the real training: the net has to learn eight images by heart, and this is declared."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(8)
    images = normalised(images)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    monitor = watch(model, optimizer, checks=Checks(batch_varies=False))
    losses = []
    for _ in range(250):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Fourier(nn.Module):
    """Sines and cosines of random projections, which are not trained."""

    def __init__(self, inputs: int, count: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("matrix", scale * torch.randn(inputs, count))

    def forward(self, x: Tensor) -> Tensor:
        """Features of a place."""
        angles = 2 * math.pi * x @ self.get_buffer("matrix")
        return torch.cat([angles.sin(), angles.cos()], -1)


def coordinate_net(watch: Watch, seed: int, healed: bool) -> float:
    """A net from a place to its colour learns one image, all pixels at each step."""
    torch.manual_seed(seed)
    axis = torch.linspace(0, 1, 28)
    places = torch.cartesian_prod(axis, axis)
    waves, phases = 8 * torch.randn(2, 3, 4), 6 * torch.rand(3, 4)
    colours = ((places @ waves.flatten(1)).view(-1, 3, 4) + phases).sin().sum(2).sigmoid()
    model = nn.Sequential(
        Fourier(2, 32, 2.0), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = 0.5 * F.mse_loss(model(places), colours)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("gcn", f"{EXAMPLES}/gcn", gcn),
    ("gat", f"{EXAMPLES}/gat", gat),
    ("forward-forward", f"{EXAMPLES}/mnist_forward_forward", forward_forward),
    ("full-batch", "https://archive.ics.uci.edu/dataset/53/iris", full_batch),
    ("overfit-one-batch", "http://karpathy.github.io/2019/04/25/recipe/", one_batch),
    ("coordinate-net", "https://arxiv.org/abs/2006.10739", coordinate_net),
)
