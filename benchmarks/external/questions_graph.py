"""PyTorch trainings that people asked about: what the gradient reaches, and whom the optimizer steps.

The first two are from the replication package of Shah and others (EMSE 2024), the others are public threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from .case import Case, Watch
from .data_questions import NODES, TYPES, graphs
from .data_traincheck import generator, last

COMPONENTS = 8


class Linear2(nn.Module):
    """A linear autoencoder of two columns with one number between."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 1)
        self.decoder = nn.Linear(1, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """The two columns again."""
        decoded: Tensor = self.decoder(self.encoder(x))
        return decoded


def _steps_the_data(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer was given the two columns of the data, which have no gradient, instead of the weights."""
    torch.manual_seed(seed)
    x = torch.rand(100, 2, generator=generator(seed))
    x[:, 0] += x[:, 1]
    x[:, 1] += 0.5 * x[:, 0]
    model = Linear2()
    optimizer = torch.optim.SGD(list(model.parameters()) if healed else [x[:, 0], x[:, 1]], lr=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        loss = functional.mse_loss(model(x), x)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return last(losses)


class Mixture(nn.Module):
    """Gaussians whose means lie evenly between 1 and a number that is learned."""

    weights: Tensor
    deviations: Tensor

    def __init__(self, healed: bool) -> None:
        super().__init__()
        self.healed = healed
        self.end = nn.Parameter(torch.tensor(10.0))
        self.register_buffer("weights", torch.ones(COMPONENTS))
        self.register_buffer("deviations", 0.5 + torch.rand(COMPONENTS, 2))

    def forward(self, x: Tensor) -> Tensor:
        """The logarithms of the densities at points ``(n, 2)``."""
        end = self.end if self.healed else self.end.detach().clone().requires_grad_()
        means = (1 + (end - 1) * torch.linspace(0, 1, COMPONENTS))[:, None].expand(-1, 2)
        parts = distributions.Independent(distributions.Normal(means, self.deviations), 1)
        mixture = distributions.MixtureSameFamily(distributions.Categorical(self.weights), parts)
        densities: Tensor = mixture.log_prob(x)
        return densities


def _built_of_numbers(watch: Watch, seed: int, healed: bool) -> float:
    """The means were made of the coefficient's value in each step, as a tensor with a gradient; the coefficient has none."""
    torch.manual_seed(seed)
    source = generator(seed)
    model = Mixture(healed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(200):
        x = 1 + 3 * torch.randint(COMPONENTS, (500, 1), generator=source) / 7 + torch.randn(500, 2, generator=source)
        optimizer.zero_grad()
        loss = -model(x).mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Quadratic(nn.Module):
    """A number, and the square of its distance to 2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(0.0))

    def forward(self) -> Tensor:
        """The square."""
        return (self.x - 2) ** 2


def _never_computed_again(watch: Watch, seed: int, healed: bool) -> float:
    """The function was evaluated once, before the loop, and all backward passes went through that one graph, which was kept.

    The number runs past its minimum, as the gradient stays what it was at the start.
    """
    torch.manual_seed(seed)
    model = Quadratic()
    loss = model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        if healed:
            loss = model()
        loss.backward(retain_graph=True)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Adaptive(nn.Module):
    """A graph network that learns which nodes belong together, from a comparison of two projections of them."""

    def __init__(self, healed: bool) -> None:
        super().__init__()
        self.healed = healed
        width = 2 * TYPES + 1
        self.phi = nn.Linear(width, 16)
        self.theta = nn.Linear(width, 16)
        self.convolution = nn.Linear(width, 32)
        self.itself = nn.Linear(width, 32)
        self.head = nn.Linear(32, TYPES)

    def forward(self, nodes: Tensor) -> Tensor:
        """Logits, read at the first node."""
        alike = self.phi(nodes) @ self.theta(nodes).transpose(1, 2) - 10 * torch.eye(NODES)
        adjacency = alike.softmax(dim=-1) if self.healed else alike.softmax(dim=-1).detach()
        hidden = functional.relu(adjacency @ self.convolution(nodes) + self.itself(nodes))
        logits: Tensor = self.head(hidden[:, 0])
        return logits


def _detached_adjacency(watch: Watch, seed: int, healed: bool) -> float:
    """The adjacency that the network was to learn was detached, so the two projections it is made of stay as they began."""
    torch.manual_seed(seed)
    source = generator(seed)
    model = Adaptive(healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        nodes, labels = graphs(64, source)
        loss = functional.cross_entropy(model(nodes), labels)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES: list[Case] = [
    Case(
        "optimizer-of-the-data",
        "questions",
        "https://stackoverflow.com/questions/69284837 (bug 067)",
        ("not-in-optimizer", "step-without-gradients"),
        _steps_the_data,
        bug="the optimizer has the columns of the data",
        fix="it has the parameters",
    ),
    Case(
        "means-of-a-number",
        "questions",
        "https://stackoverflow.com/questions/71765132 (bug 075)",
        ("no-gradient", "step-without-gradients"),
        _built_of_numbers,
        bug="the coefficient is detached before means are made of it",
        fix="it is not",
    ),
    Case(
        "loss-before-the-loop",
        "questions",
        "https://discuss.pytorch.org/t/how-can-i-minimize-quadratic-function/38511",
        ("backward-twice",),
        _never_computed_again,
        bug="the loss is computed once, before the loop",
        fix="in each step",
    ),
    Case(
        "adjacency-detached",
        "questions",
        "https://github.com/queenie88/A-GCN/issues/4",
        ("no-gradient",),
        _detached_adjacency,
        bug="detach() on the adjacency that is learned",
        fix="without it",
    ),
]
