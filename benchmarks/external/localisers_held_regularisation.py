"""Regularisation that leaves nothing to be regularised, once more."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import DEEPCRIME, PAD, UMLAUT, batches, descend, reviews, shapes, waves
from .localisers_held_gradients import Forecaster


class Reviewer(nn.Module):
    """Words, dropout, a GRU, dropout, and what it thinks of the text."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 24, padding_idx=PAD)
        self.drop = nn.Dropout(rate)
        self.gru = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        states, _ = self.gru(self.drop(self.words(text)))
        result: Tensor = self.head(self.drop(states.mean(1)))
        return result


def words_dropped(watch: Watch, seed: int, healed: bool) -> float:
    """Ninety-five of a hundred numbers of each word were dropped, and once more what the GRU made of the rest."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    net = Reviewer(0.1 if healed else 0.95)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(watch(net, adam), adam, lambda x, y: functional.cross_entropy(net(x), y), batches(texts, labels, 32, 250))


def squares_in_the_loss(watch: Watch, seed: int, healed: bool) -> float:
    """Half the sum of all squared weights was added to the error, a hundred thousand times as much as was meant."""
    torch.manual_seed(seed)
    series = waves(2000, 31)
    net = Forecaster(nn.GRU(1, 32, batch_first=True))
    strength = 1e-5 if healed else 1.0
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        squares = torch.cat([parameter.flatten() for parameter in net.parameters()]).square().sum()
        return functional.mse_loss(net(x), y) + strength * squares / 2

    return descend(watch(net, adam), adam, loss_of, batches(series[:, :-1], series[:, 1:], 32, 250))


def decay_in_descent(watch: Watch, seed: int, healed: bool) -> float:
    """SGD with a weight decay of ten and a rate of 0.05 halves all weights in each step."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(600, 48), nn.Tanh(), nn.Linear(48, 6))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4 if healed else 10.0)
    return descend(watch(net, sgd), sgd, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 250))


CASES = [
    Case(
        "dropout-of-nearly-all/words",
        "localisers",
        f"{UMLAUT}, heuristic 'high dropout rate'; {DEEPCRIME}, operator RCD (dropout rate changed)",
        ("dropout-high",),
        words_dropped,
        "nn.Dropout(0.95)",
        "nn.Dropout(0.1)",
    ),
    Case(
        "penalty-too-strong/forecast",
        "localisers",
        f"{DEEPCRIME}, operators of weights regularisation (RAW, RCW)",
        ("weight-decay-high", "loss-at-chance"),
        squares_in_the_loss,
        "1.0 * sum of squares",
        "1e-5 *",
    ),
    Case(
        "weight-decay-of-ten/sgd",
        "localisers",
        f"{DEEPCRIME}, operators of weights regularisation (RAW, RCW)",
        ("weight-decay-high",),
        decay_in_descent,
        "SGD(weight_decay=10)",
        "weight_decay=1e-4",
    ),
]
