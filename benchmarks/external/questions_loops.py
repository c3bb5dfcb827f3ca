"""PyTorch trainings that people asked about: what a loop resets, scales, switches and shuffles.

The first two are from the replication package of Shah and others (EMSE 2024), the others are public threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_questions import figures, flowers
from .data_traincheck import DIGITS, digits, generator, last, shuffled


def _never_reset(watch: Watch, seed: int, healed: bool) -> float:
    """The sum for the printed loss was set to 0 before all epochs, not before each, so it rose, as did the accuracy."""
    torch.manual_seed(seed)
    source = generator(seed)
    images, labels = digits(1024, source, side=10)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Dropout2d(0.25),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16 * 9, 64),
        nn.ReLU(),
        nn.Linear(64, DIGITS),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    model.train()
    losses: list[Tensor] = []
    running = 0.0
    for _ in range(10):
        if healed:
            running = 0.0
        for chosen in torch.randperm(len(images), generator=source).split(32):
            loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
            running += loss.item()
        monitor.log_scalar("epoch_loss", running / 32)
    return last(losses)


def _not_scaled(watch: Watch, seed: int, healed: bool) -> float:
    """Lengths of irises were in cm, the scaler commented out, one flower at a time, with three units and a rate of 0.1."""
    torch.manual_seed(seed)
    source = generator(seed)
    lengths, kinds = flowers(90, source)
    if healed:
        lengths = (lengths - lengths.mean(dim=0)) / lengths.std(dim=0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for _ in range(4):
        for flower in torch.randperm(len(lengths), generator=source).tolist():
            loss = functional.cross_entropy(model(lengths[flower]), kinds[flower])
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
    return last(losses)


class Segmenter(nn.Module):
    """A small FCN: convolutions, wide layers with dropout, a score for each kind, and the way back to the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc6 = nn.Conv2d(24, 48, 3, padding=1)
        self.drop6 = nn.Dropout2d()
        self.fc7 = nn.Conv2d(48, 48, 1)
        self.drop7 = nn.Dropout2d()
        self.score = nn.Conv2d(48, 4, 1)
        self.upscore = nn.ConvTranspose2d(4, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the background and three kinds for each pixel."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.drop6(functional.relu(self.fc6(functional.max_pool2d(x, 2))))
        x = self.drop7(functional.relu(self.fc7(x)))
        scores: Tensor = self.upscore(self.score(x))
        return scores


def _left_in_eval(watch: Watch, seed: int, healed: bool) -> float:
    """A validation within the epoch left the model in eval mode until the next one, whose first losses were then larger."""
    torch.manual_seed(seed)
    images, kinds, pixels = figures(480, generator(seed))
    targets = pixels * (1 + kinds[:, None, None])
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for _ in range(6):
        model.train()
        for step, chosen in enumerate(torch.randperm(400).split(8)):
            if step % 20 == 2:
                model.eval()
                with monitor.no_monitor(), torch.no_grad():
                    validation = functional.cross_entropy(model(images[400:]), targets[400:])
                monitor.log_scalar("validation_loss", validation)
                if healed:
                    model.train()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen]), targets[chosen])
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
    return last(losses)


def _in_order(watch: Watch, seed: int, healed: bool) -> float:
    """A loader with ``shuffle=False`` gave a network one class after the other, as the folders have them."""
    torch.manual_seed(seed)
    source = generator(seed)
    images, labels = digits(1280, source, side=10)
    order = labels.argsort(stable=True)
    batches = shuffled(images, labels, 32, source)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, DIGITS),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for step in range(320):
        rows = order[32 * step % 1280 :][:32]
        x, y = next(batches) if healed else (images[rows], labels[rows])
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES: list[Case] = [
    Case(
        "sums-never-reset",
        "questions",
        "https://stackoverflow.com/questions/71514447 (bug 039)",
        (),
        _never_reset,
        bug="the sum for the printed loss is set to 0 once",
        fix="in each epoch",
        out_of_sight="the training is sound, only an average that the user computes is wrong",
    ),
    Case(
        "iris-not-scaled",
        "questions",
        "https://stackoverflow.com/questions/73349963 (bug 077)",
        ("inputs-not-normalised", "learning-rate-high", "dead-units"),
        _not_scaled,
        bug="lengths in cm",
        fix="of mean 0 and deviation 1",
    ),
    Case(
        "left-in-eval-mode",
        "questions",
        "https://github.com/wkentaro/pytorch-fcn/issues/57",
        ("eval-mode",),
        _left_in_eval,
        bug="no train() after a validation in the epoch",
        fix="model.train() after it",
    ),
    Case(
        "one-class-after-the-other",
        "questions",
        "https://stackoverflow.com/questions/54354465",
        ("labels-not-mixed",),
        _in_order,
        bug="shuffle=False, and the data are sorted by class",
        fix="shuffle=True",
    ),
]
