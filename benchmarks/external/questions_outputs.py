"""PyTorch trainings of Stack Overflow, from the replication package of Shah and others (EMSE 2024): a model's end."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_questions import AUTHORS, VOCABULARY, books, figures, table
from .data_traincheck import generator, last

COLUMNS = 22
INPUTS = 6
EPOCH = 40


class Classifier(nn.Module):
    """Yes or no from 22 columns."""

    def __init__(self, healed: bool) -> None:
        super().__init__()
        self.healed = healed
        self.fc1 = nn.Linear(COLUMNS, 10)
        self.fc2 = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The chance of a yes."""
        x = self.fc2(functional.relu(self.fc1(x)))
        return torch.sigmoid(x) if self.healed else functional.log_softmax(x, dim=1)


def _softmax_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """The only output went through a softmax over itself, whose logarithm is always 0, so the loss never changed."""
    torch.manual_seed(seed)
    x, y = table(2000, COLUMNS, generator(seed))
    model = Classifier(healed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = functional.binary_cross_entropy(model(x), y[:, None])
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Author(nn.Module):
    """Which of three authors wrote a passage, from the last state of a recurrent network."""

    def __init__(self, healed: bool) -> None:
        super().__init__()
        self.healed = healed
        self.embd = nn.Embedding(VOCABULARY, 64)
        self.embd_dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(64, 48, batch_first=True)
        self.lin1 = nn.Linear(48, 128)
        self.lin2 = nn.Linear(128, 64)
        self.lin_dropout = nn.Dropout(0.4)
        self.lin3 = nn.Linear(64, AUTHORS)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the authors, with the layer of the recurrent network as the first of three dimensions."""
        state = self.lstm(self.embd_dropout(self.embd(words)))[1][0]
        state = functional.relu(self.lin_dropout(self.lin1(state)))
        state = functional.relu(self.lin_dropout(self.lin2(state)))
        scores: Tensor = self.lin3(state)
        return scores if self.healed else functional.softmax(scores, dim=0)


def _softmax_over_layers(watch: Watch, seed: int, healed: bool) -> float:
    """A softmax without ``dim``, before a loss that has its own, took the first of three dimensions, that of the single layer.

    Its output is 1 for each author, and the loss ln 3. The dimension is written out here, since leaving it out warns today.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    model = Author(healed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(200):
        words, authors = books(32, 24, source)
        loss = functional.cross_entropy(model(words).view(-1, AUTHORS), authors)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Prelu(nn.Module):
    """A regression by layers that widen and narrow again, each with a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        widths = [INPUTS, 8 * INPUTS, 20 * INPUTS, 8 * INPUTS, 4 * INPUTS]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.PReLU()) for a, b in pairwise(widths))
        self.fc = nn.Sequential(nn.Linear(widths[-1], 1), nn.PReLU())

    def forward(self, x: Tensor) -> Tensor:
        """A number near 1 for yes and near 0 for no."""
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.fc(x)
        return y


def _largest_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """The class was taken as the place of the largest of one output, always 0, which was right for most from the start.

    The asker wondered at a good result before any training.
    """
    torch.manual_seed(seed)
    x, y = table(512, INPUTS, generator(seed))
    y = y * (x[:, 4] > 0)
    model = Prelu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        predictions = model(x)
        loss = functional.mse_loss(predictions, y[:, None])
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        classes = predictions[:, 0] > 0.5 if healed else predictions.max(1)[1]
        monitor.log_scalar("accuracy", (classes == y).float().mean())
    return last(losses)


class Tuned(nn.Module):
    """A small ResNet with one output for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(12)
        self.conv3 = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A logit."""
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        x = functional.relu(x + self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(x))))))
        logit: Tensor = self.fc(functional.max_pool2d(x, 2).flatten(1))
        return logit


def _accuracy_above_one(watch: Watch, seed: int, healed: bool) -> float:
    """Predictions ``(n,)`` were compared with labels ``(n, 1)``, which compares each with each, so the accuracy came out at 2.

    It was also always class 0 that was predicted. Training and its loss are sound.
    """
    torch.manual_seed(seed)
    images, kinds, _ = figures(EPOCH * 8, generator(seed))
    held, held_kinds, _ = figures(64, generator(seed, 1))
    labels, held_labels = (kinds == 1).long()[:, None], (held_kinds == 1).long()[:, None]
    model = Tuned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(8):
        model.train()
        for chosen in torch.randperm(len(images)).split(8):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(images[chosen]), labels[chosen].float())
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        scheduler.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            outputs = model(held)
        right = (outputs > 0) == held_labels if healed else torch.max(outputs, 1)[1] == held_labels
        monitor.log_scalar("accuracy", right.sum() / len(held))
    return last(losses)


CASES: list[Case] = [
    Case(
        "log-softmax-of-one-output",
        "questions",
        "https://stackoverflow.com/questions/71457035 (bug 042)",
        ("softmax-before-loss", "no-gradient"),
        _softmax_of_one,
        bug="log_softmax over the only output, before BCELoss",
        fix="a sigmoid",
    ),
    Case(
        "softmax-over-the-layer",
        "questions",
        "https://stackoverflow.com/questions/61781193 (bug 060)",
        ("softmax-before-loss", "no-gradient"),
        _softmax_over_layers,
        bug="softmax over a dimension of one, before CrossEntropyLoss",
        fix="no softmax",
    ),
    Case(
        "largest-of-one-output",
        "questions",
        "https://stackoverflow.com/questions/65522548 (bug 052)",
        (),
        _largest_of_one,
        bug="accuracy from max over one column",
        fix="accuracy from a threshold",
        out_of_sight="the training is sound, only an accuracy that the user computes is wrong",
    ),
    Case(
        "accuracy-above-one",
        "questions",
        "https://stackoverflow.com/questions/75915809 (bug 066)",
        (),
        _accuracy_above_one,
        bug="predictions (n,) compared with labels (n, 1)",
        fix="a threshold on the logits (n, 1)",
        out_of_sight="the training is sound, only an accuracy that the user computes is wrong",
    ),
]
