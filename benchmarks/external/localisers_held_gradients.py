"""The training problems that AutoTrainer names once more, in nets of convolutions and recurrences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import AUTOTRAINER, HUMBATOVA, batches, descend, digits, last, reviews, shapes, waves


def sigmoid_convolutions(watch: Watch, seed: int, healed: bool) -> float:
    """Seven convolutions with sigmoids behind them and nothing to keep their scale: the first ones hear nothing."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    net, channels = nn.Sequential(), 1
    for block in range(7):
        net.append(nn.Conv2d(channels, 12, 3, stride=2 if block in (2, 5) else 1, padding=1))
        net.append(nn.BatchNorm2d(12) if healed else nn.Identity())
        net.append(nn.Sigmoid())
        channels = 12
    net.extend([nn.Flatten(), nn.Linear(108, 10)])
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return descend(watch(net, sgd), sgd, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 250))


class Forecaster(nn.Module):
    """A recurrent net over a series that says what comes next after each value."""

    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell = cell
        self.out = nn.Linear(cell.hidden_size, 1)

    def forward(self, series: Tensor) -> Tensor:
        """The next value, for each value."""
        states, _ = self.cell(series[..., None])
        result: Tensor = self.out(states)[..., 0]
        return result


def loud_recurrence(watch: Watch, seed: int, healed: bool) -> float:
    """The recurrent matrix of a ReLU net was drawn so large that each step of time doubled the state, and its gradient."""
    torch.manual_seed(seed)
    series = waves(2000, 41)
    net = Forecaster(nn.RNN(1, 32, nonlinearity="relu", batch_first=True))
    nn.init.normal_(net.get_parameter("cell.weight_hh_l0"), std=0.12 if healed else 0.35)
    sgd = torch.optim.SGD(net.parameters(), lr=0.02)
    monitor = watch(net, sgd)
    return descend(monitor, sgd, lambda x, y: functional.mse_loss(net(x), y), batches(series[:, :-1], series[:, 1:], 32, 250))


def killed_by_first_steps(watch: Watch, seed: int, healed: bool) -> float:
    """A learning rate for another net threw the weights so far in the first steps that no ReLU came back."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = nn.Sequential(nn.Conv2d(3, 24, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(216, 64), nn.ReLU(), nn.Linear(64, 6))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05 if healed else 2.0, momentum=0.9)
    losses, monitor = [], watch(net, sgd)
    for x, y in batches(images, labels, 32, 250):
        net.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


def swinging(watch: Watch, seed: int, healed: bool) -> float:
    """Momentum of 0.995 carried the weights past every valley, back and forth."""
    torch.manual_seed(seed)
    series = waves(2000, 21)
    net = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9 if healed else 0.995)
    monitor = watch(net, sgd)
    return descend(monitor, sgd, lambda x, y: functional.mse_loss(net(x), y), batches(series[:, :-1], series[:, -1:], 32, 300))


def other_default(watch: Watch, seed: int, healed: bool) -> float:
    """Adadelta with the default rate of another library, a thousandth of the one in its paper."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten())
    net.extend([nn.Linear(400, 48), nn.ReLU(), nn.Dropout(0.25), nn.Linear(48, 6)])
    adadelta = torch.optim.Adadelta(net.parameters(), lr=1.0 if healed else 0.001)
    monitor = watch(net, adadelta)
    return descend(monitor, adadelta, lambda x, y: functional.cross_entropy(net(x), y), batches(images, labels, 32, 250))


def rare_words_left_behind(watch: Watch, seed: int, healed: bool) -> float:
    """Embeddings under plain descent: a word moves only where it occurs, and the mean over the text is a small gradient."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    net = nn.Sequential(nn.EmbeddingBag(40, 24), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    parameters = list(net.parameters())
    optimizer = torch.optim.RMSprop(parameters, lr=3e-3) if healed else torch.optim.SGD(parameters, lr=3e-3)
    monitor = watch(net, optimizer)
    return descend(monitor, optimizer, lambda x, y: functional.cross_entropy(net(x), y), batches(texts, labels, 32, 300))


def raw_sensor(watch: Watch, seed: int, healed: bool) -> float:
    """A sensor that reads about a thousand went into an LSTM as it is; all gates were open or shut."""
    torch.manual_seed(seed)
    series = waves(2000, 31)
    readings = 1000 + 200 * series
    net = Forecaster(nn.LSTM(1, 32, batch_first=True))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    monitor, losses = watch(net, adam), []
    for x, y in batches(readings, series, 32, 250):
        inputs = (x - 1000) / 200 if healed else x
        loss = functional.mse_loss(net(inputs[:, :-1]), y[:, 1:])
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


CASES = [
    Case(
        "vanishing-gradients/sigmoid-convolutions",
        "localisers",
        f"{AUTOTRAINER}, problem 'gradient vanish' and its repair by batch normalisation",
        ("vanishing-gradients",),
        sigmoid_convolutions,
        "nn.Identity between convolution and sigmoid",
        "nn.BatchNorm2d",
    ),
    Case(
        "exploding-gradients/relu-recurrence",
        "localisers",
        f"{AUTOTRAINER}, problem 'gradient explode', recurrent models",
        ("exploding-gradients", "initialisation-scale", "non-finite-gradient"),
        loud_recurrence,
        "recurrent weights of deviation 0.35",
        "of deviation 0.12",
    ),
    Case(
        "dying-relu/first-steps-too-long",
        "localisers",
        f"{AUTOTRAINER}, problem 'dying ReLU'",
        ("dead-units", "learning-rate-high", "update-ratio-high"),
        killed_by_first_steps,
        "SGD(lr=2.0, momentum=0.9)",
        "lr=0.05",
    ),
    Case(
        "oscillating-loss/momentum",
        "localisers",
        f"{AUTOTRAINER}, problem 'oscillating loss' and its repair of momentum",
        ("learning-rate-high", "loss-divergence", "update-ratio-high"),
        swinging,
        "momentum=0.995",
        "momentum=0.9",
    ),
    Case(
        "slow-convergence/adadelta-default",
        "localisers",
        f"{HUMBATOVA}, mutant M3 (learning rate, HLR) of the MNIST model with Adadelta; {AUTOTRAINER}, 'slow convergence'",
        ("learning-rate-low", "loss-plateau"),
        other_default,
        "Adadelta(lr=0.001)",
        "lr=1.0",
    ),
    Case(
        "not-converging/embeddings",
        "localisers",
        f"{HUMBATOVA}, mutant R5 (optimiser changed, OCH) of the Reuters model",
        ("learning-rate-low", "loss-plateau", "loss-at-chance"),
        rare_words_left_behind,
        "SGD(lr=3e-3)",
        "RMSprop(lr=3e-3)",
    ),
    Case(
        "saturated-units/raw-sensor-into-lstm",
        "localisers",
        f"{HUMBATOVA}, data preprocessing (CPP), fault D9; saturation in {AUTOTRAINER}, 'gradient vanish'",
        ("saturated-units", "inputs-not-normalised"),
        raw_sensor,
        "readings about 1000",
        "(readings - 1000) / 200",
    ),
]
