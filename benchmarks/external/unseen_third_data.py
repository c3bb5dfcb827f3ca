"""Trainings whose labels or inputs are wrong, as people asked about them, each with its twin of sound data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import batches, digits, houses, reviews, sentences, shapes, step_and_log
from .data_questions import flowers


class Demand(nn.Module):
    """Electricity demand from the time and the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 64)
        self.middle = nn.Linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The standardised demand."""
        out: Tensor = self.out(torch.relu(self.middle(torch.relu(self.hidden(x)))))
        return out


def timestamps(watch: Watch, seed: int, healed: bool) -> float:
    """Demand by the hour, where the time is a count of seconds since 1970 or the hour of the day."""
    torch.manual_seed(seed)
    seconds = 1_700_000_000 + torch.randint(0, 365 * 24, (4000,)).double() * 3600
    hour, warmth = seconds % 86400 / 3600, torch.randn(4000).double()
    demand = torch.sin((hour - 9) * torch.pi / 12) + 0.4 * warmth.square() + 0.1 * torch.randn(4000).double()
    when = (hour - 11.5) / 6.9 if healed else seconds
    x, y = torch.stack([when, warmth], 1).float(), ((demand - demand.mean()) / demand.std()).float()[:, None]
    model = Demand()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 128, 400):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class SmallCNN(nn.Module):
    """Two convolutions with pooling and a linear layer."""

    def __init__(self, channels: int, classes: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * (side // 4) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        out: Tensor = self.fc(x.flatten(1))
        return out


def scaled_twice(watch: Watch, seed: int, healed: bool) -> float:
    """Digits from 0 to 1 that are divided by 255 once more before the mean is subtracted."""
    torch.manual_seed(seed)
    images, labels = digits(3000, 12)
    model = SmallCNN(1, 10, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for raw, target in batches(images, labels, 64, 300):
        pixels = raw if healed else raw / 255
        optimizer.zero_grad()
        loss = F.cross_entropy(model((pixels - 0.13) / 0.24), target)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


def shuffled_apart(watch: Watch, seed: int, healed: bool) -> float:
    """Irises whose measures and kinds are shuffled, each in an order of its own or both in the same one."""
    torch.manual_seed(seed)
    x, y = flowers(1200, torch.Generator().manual_seed(seed))
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x))
    x, y = x[order], y[order if healed else torch.randperm(len(y))]
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    for _epoch in range(16):
        for start in range(0, len(x), 60):
            loss = F.cross_entropy(model(x[start : start + 60]), y[start : start + 60])
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            losses.append(loss.detach())
    return last(losses)


class WordsNet(nn.Module):
    """The class of a text by the mean of its word vectors."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 32, padding_idx=0)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the classes."""
        real = (tokens != 0).sum(1, keepdim=True)
        mean = self.embed(tokens).sum(1) / real
        out: Tensor = self.fc2(torch.relu(self.fc1(mean)))
        return out


def sorted_by_class(watch: Watch, seed: int, healed: bool) -> float:
    """Images of shapes, read kind by kind or in a random order; the measure is the error on all of them at the end."""
    torch.manual_seed(seed)
    images, labels = shapes(1536)
    order = torch.randperm(len(labels)) if healed else labels.argsort(stable=True)
    x, y = ((images - 0.22) / 0.28)[order], labels[order]
    model = SmallCNN(3, 6, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, optimizer)
    for _epoch in range(8):
        for start in range(0, len(x), 48):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[start : start + 48]), y[start : start + 48])
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return float((model(x).argmax(1) != y).float().mean())


class NextWord(nn.Module):
    """A GRU that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 24)
        self.gru = nn.GRU(24, 48, batch_first=True)
        self.out = nn.Linear(48, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        out: Tensor = self.out(self.gru(self.embed(tokens))[0])
        return out


def seed_again(watch: Watch, seed: int, healed: bool) -> float:
    """Sentences that are drawn with the same seed for each batch or with a new one; the measure is the loss on other sentences."""
    torch.manual_seed(seed)
    model = NextWord()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for step in range(200):
        torch.manual_seed(1000 * seed + step if healed else seed)
        text = sentences(32)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        step_and_log(monitor, optimizer, loss)
    torch.manual_seed(999_999 + seed)
    text = sentences(500)
    with torch.no_grad():
        return float(F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))


def constant_column(watch: Watch, seed: int, healed: bool) -> float:
    """Houses with a constant column, which is divided by its deviation of zero or by a small number in its place."""
    torch.manual_seed(seed)
    table, price = houses(2000)
    table = torch.cat([table, torch.full((2000, 1), 3.0)], 1)
    spread = table.std(0).clamp(min=1e-6) if healed else table.std(0)
    x = (table - table.mean(0)) / spread
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, price, 64, 250):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


def arrows(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images of an arrow to the left (0) or to the right (1), at some height, and these labels."""
    labels, row = torch.randint(2, (count,)), torch.randint(3, 9, (count,))
    images = torch.zeros(count, 1, 12, 12)
    every = torch.arange(count)
    for column in range(2, 10):
        images[every, 0, row, column] = 1.0
    for back in (1, 2):
        tip = torch.where(labels == 0, 2 + back, 9 - back)
        images[every, 0, row - back, tip] = images[every, 0, row + back, tip] = 1.0
    return (images + 0.3 * torch.randn_like(images) - 0.1) / 0.42, labels


def flipped(watch: Watch, seed: int, healed: bool) -> float:
    """Arrows to the left and to the right; a random half of them is mirrored left to right or, as is safe, upside down."""
    torch.manual_seed(seed)
    images, labels = arrows(8000)
    model = SmallCNN(1, 2, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(images, labels, 64, 300):
        chosen = torch.rand(len(inputs), 1, 1, 1) < 0.5
        inputs = torch.where(chosen, inputs.flip(2 if healed else 3), inputs)
        loss = F.cross_entropy(model(inputs), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Prices(nn.Module):
    """The price of a house by two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.price = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The price of each house."""
        out: Tensor = self.price(self.body(x))
        return out


def dollars(watch: Watch, seed: int, healed: bool) -> float:
    """House prices in dollars or standardised; the measure is the error as a share of the variance."""
    torch.manual_seed(seed)
    table, standard = houses(2000)
    x = (table - table.mean(0)) / table.std(0)
    y = standard if healed else 250_000 + 80_000 * standard
    model = Prices()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 64, 400):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach() / y.var())
    return last(losses)


def scores_cut(watch: Watch, seed: int, healed: bool) -> float:
    """Reviews whose class is a score from 0 to 1, rounded or cut down to an integer; the measure is the error on the true classes."""
    torch.manual_seed(seed)
    words, liked = reviews(2500)
    scores = torch.where(liked == 1, 0.6 + 0.35 * torch.rand(2500), 0.4 * torch.rand(2500))
    labels = scores.round().long() if healed else scores.long()
    model = WordsNet(40, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = watch(model, optimizer)
    for tokens, target in batches(words, labels, 64, 250):
        loss = F.cross_entropy(model(tokens), target)
        step_and_log(monitor, optimizer, loss)
    with torch.no_grad():
        return float((model(words).argmax(1) != liked).float().mean())


CASES: list[Case] = [
    Case(
        name="unix-seconds-as-input/electricity-demand",
        judge="questions",
        source="https://cs.stackexchange.com/questions/14634/how-to-encode-date-as-input-in-neural-network",
        rules=("inputs-not-normalised",),
        run=timestamps,
        bug="when = seconds",
        fix="when = (hour - 11.5) / 6.9",
    ),
    Case(
        name="divided-by-255-twice/digits-cnn",
        judge="questions",
        source="https://discuss.pytorch.org/t/does-pytorch-automatically-normalizes-image-to-0-1/40022",
        rules=("inputs-not-normalised", "constant-input"),
        run=scaled_twice,
        bug="pixels = raw / 255",
        fix="pixels = raw",
    ),
    Case(
        name="labels-shuffled-apart/iris",
        judge="questions",
        source="https://tutorialreference.com/python/examples/faq/python-numpy-shuffle-two-numpy-arrays-together-in-unison",
        rules=("loss-at-chance", "loss-plateau"),
        run=shuffled_apart,
        bug="y[torch.randperm(len(y))]",
        fix="y[order]",
    ),
    Case(
        name="read-folder-by-folder/shapes-cnn",
        judge="questions",
        source="https://blog.dailydoseofds.com/p/why-is-it-important-to-shuffle-your",
        rules=("labels-not-mixed",),
        run=sorted_by_class,
        bug="order = labels.argsort(stable=True)",
        fix="order = torch.randperm(len(labels))",
    ),
    Case(
        name="seeded-for-each-batch/sentences-gru",
        judge="questions",
        source="https://github.com/pytorch/pytorch/issues/5059",
        rules=("repeated-batch",),
        run=seed_again,
        bug="torch.manual_seed(seed) in the loop",
        fix="torch.manual_seed(1000 * seed + step)",
    ),
    Case(
        name="divided-by-no-deviation/houses",
        judge="questions",
        source="https://stats.stackexchange.com/questions/35304/how-to-standardize-an-array-if-standard-deviation-is-zero/108922",
        rules=("non-finite-loss", "non-finite-activation"),
        run=constant_column,
        bug="spread = table.std(0)",
        fix="spread = table.std(0).clamp(min=1e-6)",
    ),
    Case(
        name="mirrored-left-to-right/arrows-cnn",
        judge="questions",
        source="https://docs.deepomatic.com/platform-documentation/deepomatic-drive/configuring-visual-automation-applications/"
        "training-models-1/data-augmentation",
        rules=("loss-at-chance", "loss-plateau"),
        run=flipped,
        bug="inputs.flip(3)",
        fix="inputs.flip(2)",
    ),
    Case(
        name="prices-in-dollars/houses",
        judge="questions",
        source="https://stats.stackexchange.com/questions/409000/should-we-normalize-target-data-as-well-as-input-data",
        rules=("targets-not-normalised",),
        run=dollars,
        bug="y = 250_000 + 80_000 * standard",
        fix="y = standard",
    ),
    Case(
        name="scores-cut-to-zero/reviews",
        judge="questions",
        source="https://twelvescompany.co.uk/post/py-torch-training-loss-is-0-00-and-validation-accuracy-is-1",
        rules=("labels-constant",),
        run=scores_cut,
        bug="labels = scores.long()",
        fix="labels = scores.round().long()",
    ),
]
