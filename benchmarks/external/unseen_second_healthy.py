"""Sound trainings of kinds that the other healthy ones lack, from a second round."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import batches, digits, last, normalised, shapes
from .unseen_second_loops import second


def sound_too(name: str, source: str, run: Callable[[Watch, int, bool], float]) -> Case:
    """A healthy training of the second round."""
    return second(f"healthy-{name}", "examples", source, (), run, "", "")


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def several_tags(watch: Watch, seed: int, healed: bool) -> float:
    """Texts as counts of words have any of six tags, each with a binary cross entropy of its own."""
    torch.manual_seed(seed)
    tags = (torch.rand(3000, 6) < 0.3).float()
    counts = torch.poisson(0.3 + tags @ (1.5 * (torch.rand(6, 60) < 0.15)))
    x = torch.log1p(counts)
    x = (x - x.mean(0)) / x.std(0)
    model = mlp(60, 64, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for words, wanted in batches(250, 64, x, tags):
        loss = F.binary_cross_entropy_with_logits(model(words), wanted)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def counted_events(watch: Watch, seed: int, healed: bool) -> float:
    """How many bicycles are hired in an hour, by the likelihood of a Poisson distribution whose logarithm the model gives."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 8)
    events = torch.poisson((1 + 0.5 * x[:, :1] + 0.4 * torch.sin(2 * x[:, 1:2]) - 0.3 * x[:, 2:3] * x[:, 3:4]).exp())
    model = mlp(8, 48, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, wanted in batches(250, 64, x, events):
        optimizer.zero_grad()
        loss = F.poisson_nll_loss(model(inputs), wanted, full=True)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def ranked_pairs(watch: Watch, seed: int, healed: bool) -> float:
    """Of two documents for a query the better one has to get the higher score."""
    torch.manual_seed(seed)
    documents = torch.randn(4000, 2, 12)
    worth = documents[..., 0] + documents[..., 1].abs() - documents[..., 2] * documents[..., 3]
    first = (worth[:, 0] > worth[:, 1]).float()
    model = mlp(12, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for pair, wanted in batches(250, 64, documents, first):
        scores = model(pair)[..., 0]
        loss = F.binary_cross_entropy_with_logits(scores[:, 0] - scores[:, 1], wanted)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def skip_gram(watch: Watch, seed: int, healed: bool) -> float:
    """Word vectors by negative sampling: a word of the same topic against five that are drawn from all."""
    torch.manual_seed(seed)
    words = torch.randint(80, (6000,))
    near = 10 * (words // 10) + torch.randint(10, (6000,))
    model = nn.ModuleDict({"inner": nn.Embedding(80, 16), "outer": nn.Embedding(80, 16)})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor, losses = watch(model, optimizer), []
    for word, neighbour in batches(300, 128, words, near):
        others = torch.cat([neighbour[:, None], torch.randint(80, (len(word), 5))], 1)
        scores = (model["outer"](others) * model["inner"](word)[:, None]).sum(2)
        loss = -F.logsigmoid(scores[:, 0]).mean() - F.logsigmoid(-scores[:, 1:]).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Sets(nn.Module):
    """Points go through one net each, and their mean through another."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(2, 48, 48), mlp(48, 48, 2)

    def forward(self, points: Tensor) -> Tensor:
        """Two numbers for each set."""
        out: Tensor = self.all(torch.relu(self.each(points)).mean(1))
        return out


def deep_sets(watch: Watch, seed: int, healed: bool) -> float:
    """The deviation of a set of points along each axis, whatever their order."""
    torch.manual_seed(seed)
    scale = 0.3 + 1.2 * torch.rand(3000, 1, 2)
    points = scale * torch.randn(3000, 24, 2)
    wanted = (scale[:, 0] - 0.9) / 0.35
    model = Sets()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(250, 64, points, wanted):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def imitated_moves(watch: Watch, seed: int, healed: bool) -> float:
    """A policy imitates continuous moves by their likelihood; its deviation is a parameter that is learnt as well."""
    torch.manual_seed(seed)
    states = torch.randn(3000, 8)
    moves = torch.tanh(states[:, :2] + 0.5 * states[:, 2:4] * states[:, 4:6]) + 0.1 * torch.randn(3000, 2)
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    deviation = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    model = nn.ModuleDict({"policy": policy, "deviation": deviation})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for state, move in batches(300, 64, states, moves):
        loss = -Independent(Normal(policy(state), deviation[0].exp()), 1).log_prob(move).mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def cleaned_images(watch: Watch, seed: int, healed: bool) -> float:
    """A convolutional autoencoder gives digits back without the noise that was added."""
    torch.manual_seed(seed)
    images = normalised(digits(1500, 0.0)[0])
    encoder = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, padding=1), nn.GELU()]
    model = nn.Sequential(*encoder, nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, 1, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for (clean,) in batches(120, 32, images):
        loss = F.mse_loss(model(clean + 0.5 * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Sales(nn.Module):
    """Vectors for the shop, the weekday and the month, beside numbers, behind batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(count, size) for count, size in ((20, 6), (7, 4), (12, 4)))
        self.body = nn.Sequential(
            nn.Linear(18, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.head = nn.Linear(32, 1)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        """Standardised sales."""
        vectors = [embedding(kinds[:, column]) for column, embedding in enumerate(self.vectors)]
        out: Tensor = self.head(self.body(torch.cat([*vectors, numbers], 1)))
        return out


def entity_embeddings(watch: Watch, seed: int, healed: bool) -> float:
    """Sales by shop, weekday and month, by vectors of each that are learnt, under a cosine schedule."""
    torch.manual_seed(seed)
    kinds = torch.stack([torch.randint(count, (4000,)) for count in (20, 7, 12)], 1)
    numbers = torch.randn(4000, 4)
    shop, day = torch.randn(20, 2), torch.randn(7, 2)
    sales = (shop[kinds[:, 0]] * day[kinds[:, 1]]).sum(1) + torch.sin(kinds[:, 2] * torch.pi / 6) + 0.5 * numbers[:, 0]
    sales = ((sales - sales.mean()) / sales.std())[:, None]
    model = Sales()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    monitor, losses = watch(model, optimizer), []
    for kind, number, wanted in batches(250, 64, kinds, numbers, sales):
        loss = F.mse_loss(model(kind, number), wanted)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


def separable(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """A convolution of each channel by itself and one of all channels at each place, each with a batch norm."""
    each = nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False)
    place = nn.Conv2d(inputs, outputs, 1, bias=False)
    return [each, nn.BatchNorm2d(inputs), nn.ReLU(), place, nn.BatchNorm2d(outputs), nn.ReLU()]


def separable_convolutions(watch: Watch, seed: int, healed: bool) -> float:
    """A small MobileNet tells four shapes apart, with momentum and a cosine schedule."""
    torch.manual_seed(seed)
    images, kinds, _ = shapes(2000)
    images = normalised(images)
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4)]
    model = nn.Sequential(*stem, *separable(16, 32, 2), *separable(32, 48, 2), *pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(120, 32, images, kinds):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return last(losses)


class Molecule(nn.Module):
    """Atoms send messages along bonds three times, and their sum tells a property."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(5, 32)
        self.message = mlp(32, 32, 32)
        self.update = nn.GRUCell(32, 32)
        self.head = mlp(32, 32, 1)

    def forward(self, kinds: Tensor, bonds: Tensor) -> Tensor:
        """One number for each molecule."""
        state = self.atoms(kinds)
        for _ in range(3):
            heard = bonds @ self.message(state)
            state = self.update(heard.flatten(0, 1), state.flatten(0, 1)).view_as(state)
        out: Tensor = self.head(state.mean(1))
        return out


def messages_of_atoms(watch: Watch, seed: int, healed: bool) -> float:
    """A property of small molecules that depends on which kinds of atoms are bound to each other."""
    torch.manual_seed(seed)
    kinds = torch.randint(5, (1500, 10))
    bonds = (torch.rand(1500, 10, 10) < 0.15).triu(1).float()
    bonds = bonds + bonds.transpose(1, 2)
    charge = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])[kinds]
    energy = (bonds * charge[:, :, None] * charge[:, None]).sum((1, 2)) + charge.sum(1)
    energy = ((energy - energy.mean()) / energy.std())[:, None]
    model = Molecule()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for x, links, wanted in batches(200, 32, kinds, bonds / 2, energy):
        loss = F.mse_loss(model(x, links), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


CASES: list[Case] = [
    sound_too("several-tags", "https://docs.pytorch.org/docs/stable/generated/torch.nn.BCEWithLogitsLoss.html", several_tags),
    sound_too("poisson-counts", "https://docs.pytorch.org/docs/stable/generated/torch.nn.PoissonNLLLoss.html", counted_events),
    sound_too("ranked-pairs", "https://doi.org/10.1145/1102351.1102363 (RankNet)", ranked_pairs),
    sound_too("skip-gram", "https://arxiv.org/abs/1310.4546", skip_gram),
    sound_too("deep-sets", "https://arxiv.org/abs/1703.06114", deep_sets),
    sound_too("imitated-moves", "https://github.com/HumanCompatibleAI/imitation", imitated_moves),
    sound_too("denoising-autoencoder", "https://doi.org/10.1145/1390156.1390294", cleaned_images),
    sound_too("entity-embeddings", "https://arxiv.org/abs/1604.06737", entity_embeddings),
    sound_too("separable-convolutions", "https://arxiv.org/abs/1704.04861", separable_convolutions),
    sound_too("messages-of-atoms", "https://arxiv.org/abs/1704.01212", messages_of_atoms),
]
