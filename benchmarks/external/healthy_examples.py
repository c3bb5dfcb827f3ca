"""Sound trainings in the kind of pytorch/examples: a polynomial, a wave, digits, pairs of digits, and sharper images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, batches, digits, healthy, last, normalised, shapes


def polynomial(watch: Watch, seed: int, healed: bool) -> float:
    """A linear layer finds the coefficients of a polynomial from its powers; each batch is drawn anew."""
    torch.manual_seed(seed)
    weight, bias = 5 * torch.randn(4, 1), 5 * torch.randn(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        points = 2 * torch.rand(32, 1) - 1
        x = torch.cat([points**power for power in range(1, 5)], 1)
        y = x @ weight + bias
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Wave(nn.Module):
    """Two LSTM cells and a layer that names the next value."""

    def __init__(self, hidden: int = 20) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm1, self.lstm2 = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The next value at each point of the waves."""
        zeros = torch.zeros(len(x), self.hidden, dtype=x.dtype)
        first, second = (zeros, zeros), (zeros, zeros)
        outputs = []
        for value in x.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def time_sequence(watch: Watch, seed: int, healed: bool) -> float:
    """LSTM cells in float64 learn sine waves of all phases with LBFGS, always on the whole data."""
    torch.manual_seed(seed)
    phase = 6.3 * torch.rand(24, 1, dtype=torch.double)
    waves = (phase + torch.arange(18) / 2).sin()
    x, y = waves[3:, :-1], waves[3:, 1:]
    model = Wave().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        return loss

    for _ in range(20):
        optimizer.step(closure)
        with monitor.no_monitor(), torch.no_grad():
            model(waves[:3, :-1])
    return last(losses)


class Digits(nn.Module):
    """Two convolutions and two layers with dropout, and log-probabilities at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(576, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Rows(nn.Module):
    """An LSTM that reads an image row by row, and two layers behind its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 48, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(48)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(48, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the ten digits."""
        output = self.rnn(x.squeeze(1))[0][:, -1]
        output = self.dropout1(self.batchnorm(output))
        output = self.dropout2(F.relu(self.fc1(output)))
        return F.log_softmax(self.fc2(output), dim=1)


def mnist(model: nn.Module, watch: Watch, rate: float) -> float:
    """Adadelta on digits, its rate lowered after each epoch, with a test after each epoch."""
    images, labels = digits(4800)
    images = normalised(images)
    train, test = (images[:4000], labels[:4000]), (images[4000:], labels[4000:])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(5):
        model.train()
        for x, y in batches(62, 64, *train):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            F.nll_loss(model(test[0]), test[1])
        scheduler.step()
    return last(losses)


def mnist_cnn(watch: Watch, seed: int, healed: bool) -> float:
    """The convolutional net for digits, with Adadelta at rate 1."""
    torch.manual_seed(seed)
    return mnist(Digits(), watch, rate=1.0)


def mnist_rnn(watch: Watch, seed: int, healed: bool) -> float:
    """The same loop with an LSTM over the rows of an image; the example's rate of 0.1 would need its 14 long epochs."""
    torch.manual_seed(seed)
    return mnist(Rows(), watch, rate=1.0)


class Siamese(nn.Module):
    """One trunk for two images, and two layers with a sigmoid that say whether they show the same."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.fc = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1))
        for layer in self.fc:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.constant_(layer.bias, 0.01)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """The probability that both images show the same digit."""
        pair = torch.cat([self.trunk(first), self.trunk(second)], 1)
        return torch.sigmoid(self.fc(pair)).squeeze(1)


def siamese(watch: Watch, seed: int, healed: bool) -> float:
    """Pairs of digits, half of them equal, with a sigmoid before a loss that takes probabilities."""
    torch.manual_seed(seed)
    images, labels = digits(1500)
    groups = [images[labels == digit] for digit in range(4)]
    model = Siamese()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=75, gamma=0.7)
    criterion = nn.BCELoss()
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        first = torch.randint(4, (64,))
        second = (first + torch.randint(1, 4, (64,)) * (torch.arange(64) % 2)) % 4
        drawn = [torch.stack([groups[c][torch.randint(len(groups[c]), ())] for c in side.tolist()]) for side in (first, second)]
        optimizer.zero_grad()
        loss = criterion(model(*drawn), (first == second).float())
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


def super_resolution(watch: Watch, seed: int, healed: bool) -> float:
    """A sub-pixel convolution makes images of 8 x 8 pixels into such of 16 x 16, from an orthogonal start."""
    torch.manual_seed(seed)
    large = shapes(800)[0].mean(1, keepdim=True)
    small = F.interpolate(large, scale_factor=0.5, mode="bicubic", antialias=True)
    convs = [nn.Conv2d(1, 24, 5, padding=2), nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(24, 12, 3, padding=1)]
    end = nn.Conv2d(12, 4, 3, padding=1)
    for conv in convs:
        nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
    nn.init.orthogonal_(end.weight)
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2], nn.ReLU(), end, nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(300, 32, small, large):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("polynomial-regression", f"{EXAMPLES}/regression", polynomial),
    ("time-sequence-lbfgs", f"{EXAMPLES}/time_sequence_prediction", time_sequence),
    ("mnist-cnn", f"{EXAMPLES}/mnist", mnist_cnn),
    ("mnist-rnn", f"{EXAMPLES}/mnist_rnn", mnist_rnn),
    ("siamese-pairs", f"{EXAMPLES}/siamese_network", siamese),
    ("super-resolution", f"{EXAMPLES}/super_resolution", super_resolution),
)
