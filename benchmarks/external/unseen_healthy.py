"""Sound trainings with losses and data that the other healthy ones lack."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import batches, clusters, digits, last, moons, normalised, shapes
from .unseen_losses import unseen


def sound(name: str, source: str, run: Callable[[Watch, int, bool], float]) -> Case:
    """A healthy training."""
    return unseen(f"healthy-{name}", "examples", source, (), run, "", "")


def rare_class(watch: Watch, seed: int, healed: bool) -> float:
    """One example in twenty is positive, and weighs as much more in the cross entropy as there are fewer of them."""
    torch.manual_seed(seed)
    labels = (torch.rand(4000) < 0.05).float()
    x = torch.randn(4000, 12)
    x[:, :4] += 1.5 * labels[:, None]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    weight = (1 - labels).sum() / labels.sum()
    for inputs, wanted in batches(300, 64, x, labels):
        loss = F.binary_cross_entropy_with_logits(model(inputs)[:, 0], wanted, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def robust_regression(watch: Watch, seed: int, healed: bool) -> float:
    """A Huber loss for measurements of which some are far off."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 6)
    noise = torch.where(torch.rand(3000, 1) < 0.05, 4.0, 0.1) * torch.randn(3000, 1)
    y = x[:, :1] + torch.sin(2 * x[:, 1:2]) * x[:, 2:3] + noise
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, wanted in batches(300, 64, x, y):
        optimizer.zero_grad()
        loss = F.huber_loss(model(inputs), wanted, delta=0.5)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Transcriber(nn.Module):
    """Sounds in, logarithms of probabilities of five letters and the blank out."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 6)

    def forward(self, sounds: Tensor) -> Tensor:
        """For each moment, in the order that ctc_loss wants."""
        out: Tensor = self.out(self.gru(sounds)[0]).log_softmax(2).transpose(0, 1)
        return out


def transcription(watch: Watch, seed: int, healed: bool) -> float:
    """Connectionist temporal classification: letters that sound for three to five moments each, without alignment."""
    torch.manual_seed(seed)
    voices = 1.5 * torch.randn(6, 8)
    letters = torch.randint(1, 6, (1200, 4))
    lengths = torch.randint(3, 6, (1200, 4))
    spoken = torch.stack(
        [torch.cat([row.repeat_interleave(n), row.new_zeros(20)])[:20] for row, n in zip(letters, lengths, strict=True)]
    )
    sounds = voices[spoken] + 0.3 * torch.randn(1200, 20, 8)
    model = Transcriber()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    full, four = torch.full((32,), 20), torch.full((32,), 4)
    for x, y in batches(250, 32, sounds, letters):
        optimizer.zero_grad()
        loss = F.ctc_loss(model(x), y, full, four)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def mean_teacher(watch: Watch, seed: int, healed: bool) -> float:
    """Few labels, and a teacher, the moving mean of the student, whose answers for the rest the student should give too."""
    torch.manual_seed(seed)
    x, labels = clusters(2000, 16, 6, spread=0.8)
    known = torch.arange(240)
    student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    monitor, losses = watch(student, optimizer), []
    for (inputs,) in batches(250, 64, x):
        rows = known[torch.randint(240, (32,))]
        answers = student(torch.cat([x[rows], inputs + 0.2 * torch.randn_like(inputs)]))
        agreed = F.mse_loss(answers[32:].softmax(1), teacher(inputs).softmax(1))
        loss = F.cross_entropy(answers[:32], labels[rows]) + agreed
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(parameter, 0.02)
        losses.append(loss.detach())
    return last(losses)


class Graph(nn.Module):
    """Entities and relations as vectors: a head plus a relation should be near the tail."""

    def __init__(self, entities: int, relations: int) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, 16), nn.Embedding(relations, 16)
        nn.init.uniform_(self.entities.weight, -0.4, 0.4)
        nn.init.uniform_(self.relations.weight, -0.4, 0.4)

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """The distance for each fact."""
        away: Tensor = self.entities(heads) + self.relations(relations) - self.entities(tails)
        out: Tensor = away.norm(dim=1)
        return out


def knowledge_graph(watch: Watch, seed: int, healed: bool) -> float:
    """Facts of a small graph of places on a grid, with tails drawn at random as facts that do not hold, and a margin."""
    torch.manual_seed(seed)
    shifts = torch.tensor([1, -1, 10, -10])
    heads, relations = torch.randint(100, (3000,)), torch.randint(4, (3000,))
    tails = (heads + shifts[relations]) % 100
    model = Graph(100, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor, losses = watch(model, optimizer), []
    for head, relation, tail in batches(300, 64, heads, relations, tails):
        false = torch.randint(100, (64,))
        loss = F.relu(1 + model(head, relation, tail) - model(head, relation, false)).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def masked_patches(watch: Watch, seed: int, healed: bool) -> float:
    """Half of the patches of an image are hidden and have to be painted from the others."""
    torch.manual_seed(seed)
    images = normalised(shapes(1500)[0])
    patches = F.unfold(images, 4, stride=4).transpose(1, 2)
    model = nn.ModuleDict(
        {
            "look": nn.Linear(48, 64),
            "body": nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True),
            "paint": nn.Linear(64, 48),
        }
    )
    places = nn.Parameter(0.02 * torch.randn(16, 64))
    hole = nn.Parameter(0.02 * torch.randn(64))
    model.register_parameter("places", places)
    model.register_parameter("hole", hole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    monitor, losses = watch(model, optimizer), []
    for (x,) in batches(300, 32, patches):
        hidden = torch.rand(32, 16).argsort(1) < 8
        seen = torch.where(hidden[:, :, None], hole, model["look"](x)) + places
        painted = model["paint"](model["body"](seen))
        loss = F.mse_loss(painted[hidden], x[hidden])
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def energy_distance(watch: Watch, seed: int, healed: bool) -> float:
    """A generator of points on two half circles, by the distances among its points, the true ones, and between both."""
    torch.manual_seed(seed)
    points = moons(3000)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for (real,) in batches(300, 128, points):
        drawn, others = model(torch.randn(128, 4)), model(torch.randn(128, 4))
        loss = 2 * torch.cdist(drawn, real).mean() - torch.cdist(drawn, others).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def noisy_labels(watch: Watch, seed: int, healed: bool) -> float:
    """A fifth of the labels is wrong, and a loss between the cross entropy and the absolute error bears with them."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    wrong = torch.rand(2500) < 0.2
    labels = torch.where(wrong, torch.randint(10, (2500,)), labels)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(250, 32, normalised(images), labels):
        chance = model(x).softmax(1).gather(1, y[:, None])
        loss = ((1 - chance**0.5) / 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


CASES = [
    sound("rare-class-weighed", "https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html", rare_class),
    sound("huber-regression", "https://docs.pytorch.org/docs/stable/generated/torch.nn.HuberLoss.html", robust_regression),
    sound("ctc-transcription", "https://docs.pytorch.org/docs/stable/generated/torch.nn.CTCLoss.html", transcription),
    sound("mean-teacher", "https://arxiv.org/abs/1703.01780", mean_teacher),
    sound("knowledge-graph", "https://github.com/thunlp/OpenKE (TransE)", knowledge_graph),
    sound("masked-autoencoder", "https://arxiv.org/abs/2111.06377", masked_patches),
    sound("energy-distance", "https://www.kernel-operations.io/geomloss/", energy_distance),
    sound("noisy-labels", "https://arxiv.org/abs/1805.07836", noisy_labels),
]
