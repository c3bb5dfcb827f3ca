"""Trainings whose loss is wrong, as people asked about them, each with its twin of the right loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import batches, digits, houses, reviews, sentences, shapes, step_and_log, waves
from .data_questions import figures


class Forecast(nn.Module):
    """The next value of a series by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, series: Tensor) -> Tensor:
        """The next value of each series."""
        _, state = self.gru(series)
        out: Tensor = self.head(state[-1])
        return out


def broadcast(watch: Watch, seed: int, healed: bool) -> float:
    """Predictions of shape (N, 1) minus targets of shape (N) or (N, 1), squared; the measure is the error of the right pairs."""
    torch.manual_seed(seed)
    series = waves(3000, 21)
    x, y = series[:, :20, None], series[:, 20]
    model = Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, errors = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 64, 250):
        prediction = model(inputs)
        loss = ((prediction - (targets[:, None] if healed else targets)) ** 2).mean()
        step_and_log(monitor, optimizer, loss)
        errors.append(F.mse_loss(prediction.detach()[:, 0], targets))
    return last(errors)


class Speaker(nn.Module):
    """A GRU that predicts the next word, with a last activation or none."""

    def __init__(self, final: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 24)
        self.gru = nn.GRU(24, 48, batch_first=True)
        self.words = nn.Linear(48, 24)
        self.final = final

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next word at each place, through the last activation."""
        outputs, _ = self.gru(self.embed(tokens))
        out: Tensor = self.final(self.words(outputs))
        return out


def softmax_twice(watch: Watch, seed: int, healed: bool) -> float:
    """A model of the next word that gives chances or logits to the cross entropy; the measure is the loss of its chances."""
    torch.manual_seed(seed)
    text = sentences(2000)
    model = Speaker(nn.Identity() if healed else nn.Softmax(dim=-1))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(text[:, :-1], text[:, 1:], 32, 200):
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        chances = output.detach().softmax(2) if healed else output.detach()
        losses.append(F.nll_loss(chances.clamp(min=1e-9).log().flatten(0, 1), y.flatten()))
    return last(losses)


class Returns(nn.Module):
    """The change of a series in its next step, by convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 16, 5)
        self.conv2 = nn.Conv1d(16, 16, 5)
        self.fc = nn.Linear(16 * 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The change of each series."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        out: Tensor = self.fc(x.flatten(1))
        return out


def relu_at_the_end(watch: Watch, seed: int, healed: bool) -> float:
    """Changes up and down that are predicted through a ReLU or as they come out of the last layer."""
    torch.manual_seed(seed)
    series = waves(3000, 25)
    x, y = series[:, None, :24], 3 * (series[:, 24:] - series[:, 23:24])
    model = Returns()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 64, 250):
        output = model(inputs)
        loss = F.mse_loss(output if healed else F.relu(output), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Opinion(nn.Module):
    """One logit for a text, from convolutions over its words and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24, padding_idx=0)
        self.conv = nn.Conv1d(24, 32, 3, padding=1)
        self.out = nn.Linear(32, 1)

    def forward(self, words: Tensor) -> Tensor:
        """The logit of each text."""
        h = F.relu(self.conv(self.embed(words).transpose(1, 2)))
        out: Tensor = self.out(h.amax(2))
        return out


def one_output(watch: Watch, seed: int, healed: bool) -> float:
    """One logit with a softmax cross entropy, which is always zero, or a binary one; the measure is the share of wrong answers."""
    torch.manual_seed(seed)
    words, liked = reviews(2500)
    model = Opinion()
    criterion = nn.BCEWithLogitsLoss() if healed else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    for tokens, target in batches(words, liked.float()[:, None], 64, 250):
        loss = criterion(model(tokens), target)
        step_and_log(monitor, optimizer, loss)
    with torch.no_grad():
        return float(((model(words)[:, 0] > 0) != (liked == 1)).float().mean())


class VAE(nn.Module):
    """A variational autoencoder of flat images."""

    def __init__(self, size: int, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 128), nn.ReLU())
        self.mean, self.logvar = nn.Linear(128, latent), nn.Linear(128, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The image that is decoded, and the mean and the log variance of the code."""
        h = self.encoder(x)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        return self.decoder(z), mean, logvar


def kl_too_heavy(watch: Watch, seed: int, healed: bool) -> float:
    """A squared error, averaged or summed over pixels, beside a divergence that is summed; the measure is the error per pixel."""
    torch.manual_seed(seed)
    images, _, _ = figures(3000, torch.Generator().manual_seed(seed), noise=0.1)
    x = images.flatten(1)
    model = VAE(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, errors = watch(model, optimizer), []
    for batch, _ in batches(x, x, 64, 400):
        output, mean, logvar = model(batch)
        error = (output - batch).square()
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        loss = (error.sum(1).mean() if healed else error.mean()) + kl
        step_and_log(monitor, optimizer, loss)
        errors.append(error.detach().mean())
    return last(errors)


class Segment(nn.Module):
    """Whether each pixel is part of the figure, by convolutions that first halve the image and then double it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(17, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The chance of each pixel."""
        return torch.sigmoid(self.out(torch.cat([x, self.deep(self.down(x))], 1)))[:, 0]


def thresholded(watch: Watch, seed: int, healed: bool) -> float:
    """A Dice loss of chances or of decisions, which require a gradient but pass none to the model."""
    torch.manual_seed(seed)
    images, _, masks = figures(1500, torch.Generator().manual_seed(seed))
    model = Segment()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for x, mask in batches(images, masks.float(), 32, 200):
        chance = model(x)
        found = chance if healed else (chance > 0.5).float().requires_grad_()
        overlap = (found * mask).sum((1, 2))
        loss = 1 - ((2 * overlap + 1) / (found.sum((1, 2)) + mask.sum((1, 2)) + 1)).mean()
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Embedder(nn.Module):
    """A vector of length one for an image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(144, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        """A vector of length one for each image."""
        return F.normalize(self.net(x), dim=1)


def temperature(watch: Watch, seed: int, healed: bool) -> float:
    """Two noisy views of each digit that find each other in a batch, by likeness divided or multiplied by 0.07."""
    torch.manual_seed(seed)
    images, _ = digits(3000, 12)
    images = (images - 0.13) / 0.24
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor, losses = watch(model, optimizer), []
    for x, _ in batches(images, images, 64, 300):
        first, second = model(x + 0.5 * torch.randn_like(x)), model(x + 0.5 * torch.randn_like(x))
        alike = first @ second.T
        logits = alike / 0.07 if healed else alike * 0.07
        loss = F.cross_entropy(logits, torch.arange(len(x)))
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Tower(nn.Module):
    """One half of a siamese network."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(144, 96)
        self.fc2 = nn.Linear(96, 16)

    def forward(self, x: Tensor) -> Tensor:
        """The vector of each image."""
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


def root_of_zero(watch: Watch, seed: int, healed: bool) -> float:
    """Pairs of digits, alike or not, whose distance is a square root; some pairs are one image twice."""
    torch.manual_seed(seed)
    images, labels = digits(1000, 12)
    images = (images - 0.13) / 0.24
    by_kind = [(labels == kind).nonzero()[:, 0] for kind in range(10)]
    model = Tower()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for _step in range(300):
        left = torch.randint(1000, (64,))
        same = torch.tensor([kind[torch.randint(len(kind), ())] for kind in (by_kind[int(labels[i])] for i in left)])
        right = torch.where(torch.rand(64) < 0.5, same, torch.randint(1000, (64,)))
        alike = (labels[left] == labels[right]).float()
        square = (model(images[left]) - model(images[right])).square().sum(1)
        distance = torch.sqrt(square + 1e-6) if healed else torch.sqrt(square)
        loss = (alike * distance.square() + (1 - alike) * F.relu(2 - distance).square()).mean()
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Kinds(nn.Module):
    """A convolutional network for coloured shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(24 * 9, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the kinds."""
        out: Tensor = self.classify(self.features(x).flatten(1))
        return out


def summed(watch: Watch, seed: int, healed: bool) -> float:
    """The cross entropy of a batch as a sum or as a mean, at a rate for the mean; the measure is the mean."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    model = Kinds()
    criterion = nn.CrossEntropyLoss(reduction="mean" if healed else "sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches((images - 0.22) / 0.28, labels, 64, 250):
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(F.cross_entropy(output.detach(), y))
    return last(losses)


class Squashed(nn.Module):
    """The price of a house, through a last activation or none."""

    def __init__(self, final: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.final = final

    def forward(self, x: Tensor) -> Tensor:
        """The price of each house."""
        out: Tensor = self.final(self.net(x))
        return out


def sigmoid_at_the_end(watch: Watch, seed: int, healed: bool) -> float:
    """Prices in hundreds of thousands, from about 0.5 to 7, that are predicted through a sigmoid or as they are."""
    torch.manual_seed(seed)
    table, standard = houses(2000)
    x, y = (table - table.mean(0)) / table.std(0), 2.5 + 0.8 * standard
    model = Squashed(nn.Identity() if healed else nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 64, 300):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


CASES: list[Case] = [
    Case(
        name="targets-broadcast/forecast-gru",
        judge="questions",
        source="https://github.com/deepset-ai/FARM/issues/229",
        rules=("loss-at-chance", "loss-plateau"),
        run=broadcast,
        bug="prediction - targets",
        fix="prediction - targets[:, None]",
    ),
    Case(
        name="softmax-before-cross-entropy/sentences-gru",
        judge="questions",
        source="https://discuss.pytorch.org/t/two-output-nodes-for-binary-classification/58703",
        rules=("softmax-before-loss",),
        run=softmax_twice,
        bug="Speaker(nn.Softmax(dim=-1))",
        fix="Speaker(nn.Identity())",
    ),
    Case(
        name="relu-after-last-layer/changes-conv1d",
        judge="questions",
        source="https://stats.stackexchange.com/questions/362588/how-can-a-network-with-only-relu-nodes-output-negative-values",
        rules=("relu-before-loss", "dead-units"),
        run=relu_at_the_end,
        bug="F.relu(output)",
        fix="output",
    ),
    Case(
        name="softmax-loss-of-one-output/reviews-cnn",
        judge="questions",
        source="https://stats.stackexchange.com/questions/481881/convolutional-neural-network-fails-even-when-given-answer",
        rules=("no-gradient", "zero-update"),
        run=one_output,
        bug="nn.CrossEntropyLoss()",
        fix="nn.BCEWithLogitsLoss()",
    ),
    Case(
        name="divergence-outweighs-pixels/figures-vae",
        judge="questions",
        source="https://stats.stackexchange.com/questions/332179/"
        "how-to-weight-kld-loss-vs-reconstruction-loss-in-variational-auto-encoder",
        rules=("posterior-collapse",),
        run=kl_too_heavy,
        bug="error.mean() + kl",
        fix="error.sum(1).mean() + kl",
    ),
    Case(
        name="decisions-in-dice-loss/segmentation",
        judge="questions",
        source="https://github.com/LZGMatrix/BOP19_CDPN_2019ICCV/issues/4",
        rules=("no-gradient", "step-without-gradients"),
        run=thresholded,
        bug="found = (chance > 0.5).float().requires_grad_()",
        fix="found = chance",
    ),
    Case(
        name="multiplied-by-temperature/contrastive-digits",
        judge="questions",
        source="https://github.com/huggingface/sentence-transformers/issues/3054",
        rules=("loss-at-chance", "loss-plateau"),
        run=temperature,
        bug="logits = alike * 0.07",
        fix="logits = alike / 0.07",
    ),
    Case(
        name="root-of-zero-distance/siamese-digits",
        judge="questions",
        source="https://discuss.pytorch.org/t/how-to-fix-gradient-at-0-for-sqrt-function/23390",
        rules=("non-finite-gradient", "non-finite-parameter"),
        run=root_of_zero,
        bug="distance = torch.sqrt(square)",
        fix="distance = torch.sqrt(square + 1e-6)",
    ),
    Case(
        name="summed-over-batch/shapes-cnn",
        judge="questions",
        source="https://abdumhmd.github.io/posts/loss-reduction-in-regression",
        rules=("loss-scale", "learning-rate-high", "update-ratio-high"),
        run=summed,
        bug='nn.CrossEntropyLoss(reduction="sum")',
        fix='nn.CrossEntropyLoss(reduction="mean")',
    ),
    Case(
        name="sigmoid-after-last-layer/prices",
        judge="questions",
        source="https://theorangeduck.com/page/neural-network-not-working",
        rules=("saturated-units", "targets-out-of-range"),
        run=sigmoid_at_the_end,
        bug="Squashed(nn.Sigmoid())",
        fix="Squashed(nn.Identity())",
    ),
]
