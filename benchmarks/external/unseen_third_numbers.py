"""Trainings that numbers spoil: initial weights, half precision, roots and quotients of zero, flat parts of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import PAD, batches, digits, fit, reviews, sentences, spirals, topics, waves


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., Tensor],
    data: Iterator[tuple[Tensor, ...]],
) -> float:
    """The usual loop, for any loss of a batch."""
    monitor, losses = watch(model, optimizer), []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def standard_normal_weights(watch: Watch, seed: int, healed: bool) -> float:
    """Digits in six layers whose weights come from the standard normal distribution."""
    torch.manual_seed(seed)
    images, labels = digits(1500)
    model = dense(100, 64, 64, 64, 64, 64, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=(2 / layer.in_features) ** 0.5 if healed else 1.0)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pixels = ((images - 0.3) / 0.3).flatten(1)
    return fit(watch, model, optimizer, F.cross_entropy, batches(pixels, labels, 64, 300))


def constant_weights(watch: Watch, seed: int, healed: bool) -> float:
    """Spirals in layers whose weights all begin at the same number."""
    torch.manual_seed(seed)
    x, y = spirals(1500)
    model = dense(2, 64, 64, 3, activation=nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear) and not healed:
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return fit(watch, model, optimizer, F.cross_entropy, batches(x, y, 64, 400))


def half_with_default_epsilon(watch: Watch, seed: int, healed: bool) -> float:
    """Topics of short texts in a model of half precision, in which Adam's default epsilon is zero."""
    torch.manual_seed(seed)
    words, labels = topics(1500)
    precision = torch.float32 if healed else torch.float16
    model = dense(300, 64, 64, 8).to(precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def classify(x: Tensor, y: Tensor) -> Tensor:
        """The cross entropy of a batch."""
        return F.cross_entropy(model(x.to(precision)).float(), y)

    return train(watch, model, optimizer, classify, batches(words, labels, 64, 200))


class NextWord(nn.Module):
    """Vectors of the last three words, side by side, normalised, and a hidden layer to the next word."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, width)
        self.norm = nn.LayerNorm(3 * width)
        self.hidden = nn.Linear(3 * width, 96)
        self.output = nn.Linear(96, 24)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the word that comes next."""
        out: Tensor = self.output(torch.relu(self.hidden(self.norm(self.embedding(words).flatten(1)))))
        return out


def brain_float_weights(watch: Watch, seed: int, healed: bool) -> float:
    """A language model with weights in bfloat16, where most updates are rounded away."""
    torch.manual_seed(seed)
    text = sentences(600)
    windows = text.unfold(1, 4, 1).reshape(-1, 4)
    model = NextWord().to(torch.float32 if healed else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return train(
        watch,
        model,
        optimizer,
        lambda x, y: F.cross_entropy(model(x).float(), y),
        batches(windows[:, :3], windows[:, 3], 128, 400),
    )


def distance_of_equal_pairs(watch: Watch, seed: int, healed: bool) -> float:
    """Pairs of digits in a siamese network, a few of one image with itself, and the root of their squared distance."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    order = labels.argsort()
    pairs = torch.cat([order.view(-1, 2), torch.randperm(2000).view(-1, 2)])
    pairs[::97, 1] = pairs[::97, 0]
    alike = (labels[pairs[:, 0]] == labels[pairs[:, 1]]).float()
    encoder = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 16),
    )
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)

    def contrast(pair: Tensor, label: Tensor) -> Tensor:
        """Alike pairs have to be near, others at least one apart."""
        squared = (encoder(images[pair[:, 0]]) - encoder(images[pair[:, 1]])).square().sum(1)
        distance = torch.sqrt(squared + 1e-6 if healed else squared)
        return (label * distance.square() + (1 - label) * (1 - distance).clamp(min=0).square()).mean()

    return train(watch, encoder, optimizer, contrast, batches(pairs, alike, 64, 250))


class ReviewAttention(nn.Module):
    """Word vectors, attention that skips the padding, and a linear layer over the mean."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width, padding_idx=PAD)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 2)

    def forward(self, words: Tensor, padding: Tensor) -> Tensor:
        """The logits of praise and blame."""
        vectors = self.embedding(words)
        mixed, _ = self.attention(vectors, vectors, vectors, key_padding_mask=padding)
        out: Tensor = self.output(self.norm(vectors + mixed).mean(1))
        return out


def review_of_padding_only(watch: Watch, seed: int, healed: bool) -> float:
    """Reviews with attention; a few are nothing but padding, so that nothing is left to attend to."""
    torch.manual_seed(seed)
    words, labels = reviews(1500)
    words[::211] = PAD
    model = ReviewAttention()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def judge(x: Tensor, y: Tensor) -> Tensor:
        """The cross entropy of a batch."""
        padding = x == PAD
        if healed:
            padding[:, 0] = False
        return F.cross_entropy(model(x, padding), y)

    return train(watch, model, optimizer, judge, batches(words, labels, 32, 250))


class NodeNetwork(nn.Module):
    """Two linear layers, each after the mean over the neighbours."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * features, 32), nn.Linear(64, 3)

    def forward(self, nodes: Tensor, links: Tensor, floor: float) -> Tensor:
        """The logits of the nodes; a degree counts as at least the floor."""
        degrees = links.sum(1, keepdim=True).clamp(min=floor)
        nodes = torch.relu(self.first(torch.cat([nodes, links @ nodes / degrees], 1)))
        out: Tensor = self.second(torch.cat([nodes, links @ nodes / degrees], 1))
        return out


def nodes_without_neighbours(watch: Watch, seed: int, healed: bool) -> float:
    """Samples of a graph in which some nodes have no neighbour; the network divides by the number of neighbours."""
    torch.manual_seed(seed)
    kinds = torch.randint(3, (400,))
    features = torch.randn(3, 6)[kinds] + 1.2 * torch.randn(400, 6)
    links = (torch.rand(400, 400) < torch.where(kinds[:, None] == kinds, 0.12, 0.03)).float().triu(1)
    links = links + links.T
    model = NodeNetwork(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def sampled() -> Iterator[tuple[Tensor]]:
        """Some of the nodes at a time."""
        for _ in range(250):
            yield (torch.randperm(400)[:120],)

    def classify(rows: Tensor) -> Tensor:
        """The cross entropy of the nodes of a sample, with the links among them."""
        return F.cross_entropy(model(features[rows], links[rows][:, rows], 1.0 if healed else 0.0), kinds[rows])

    return train(watch, model, optimizer, classify, sampled())


def angle_by_arc_cosine(watch: Watch, seed: int, healed: bool) -> float:
    """Directions from noisy readings, with the arc cosine of a clamped product as the angle."""
    torch.manual_seed(seed)
    directions = F.normalize(torch.randn(3000, 2), dim=1)
    mix = torch.randn(2, 12)
    readings = directions @ mix + 0.02 * torch.randn(3000, 12)
    model = dense(12, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    bound = 1 - 1e-5 if healed else 1.0

    def angle(x: Tensor, y: Tensor) -> Tensor:
        """The mean angle in radians between the predicted and the true directions."""
        cosine = (F.normalize(model(x), dim=1) * y).sum(1)
        return torch.acos(cosine.clamp(-bound, bound)).mean()

    return train(watch, model, optimizer, angle, batches(readings, directions, 64, 300))


def deep_sigmoids(watch: Watch, seed: int, healed: bool) -> float:
    """Spirals in six hidden layers of sigmoids, through which hardly any gradient comes."""
    torch.manual_seed(seed)
    x, y = spirals(1500)
    model = dense(2, 48, 48, 48, 48, 48, 48, 3, activation=nn.ReLU if healed else nn.Sigmoid)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return fit(watch, model, optimizer, F.cross_entropy, batches(x, y, 64, 400))


class WaveReader(nn.Module):
    """Convolutions over a wave, their mean over time and one number, which a last activation may bound."""

    def __init__(self, last_activation: nn.Module) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 24, 5, padding=2), nn.ReLU())
        self.output = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1), last_activation)

    def forward(self, wave: Tensor) -> Tensor:
        """The number for each wave."""
        out: Tensor = self.output(self.convolutions(wave[:, None]).mean(2))[:, 0]
        return out


def tanh_of_large_targets(watch: Watch, seed: int, healed: bool) -> float:
    """The sum of the squares of a wave, mostly far above one, by a network whose output is a tanh."""
    torch.manual_seed(seed)
    wave = waves(1500, 24)
    strength = wave.square().sum(1)
    model = WaveReader(nn.Identity() if healed else nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return fit(watch, model, optimizer, F.mse_loss, batches(wave, strength, 32, 300))


CASES: list[Case] = [
    Case(
        name="standard-normal-weights/digit-mlp",
        judge="questions",
        source="https://zihuanqiu.github.io/Pytorch%E5%9F%BA%E7%A1%80/%E6%9D%83%E5%80%BC%E5%88%9D%E5%A7%8B%E5%8C%96/31/07/2020",
        rules=("initialisation-scale", "exploding-gradients"),
        run=standard_normal_weights,
        bug="nn.init.normal_(layer.weight), of deviation one",
        fix="a deviation of (2 / in_features) ** 0.5",
    ),
    Case(
        name="constant-weights/spiral-mlp",
        judge="questions",
        source="https://pages.dogdog.run/machine_learning/weight_initialization.html",
        rules=("equal-units",),
        run=constant_weights,
        bug="nn.init.constant_(layer.weight, 0.1)",
        fix="the default initialisation",
    ),
    Case(
        name="adam-epsilon-in-half-precision/topics",
        judge="questions",
        source="https://github.com/pytorch/pytorch/issues/8860",
        rules=("non-finite-parameter", "non-finite-loss", "low-precision-underflow"),
        run=half_with_default_epsilon,
        bug="model.half() with Adam's eps of 1e-8",
        fix="weights in float32",
    ),
    Case(
        name="weights-in-bfloat16/next-word",
        judge="questions",
        source="https://github.com/pytorch/ao/pull/1124",
        rules=("low-precision-underflow", "zero-update"),
        run=brain_float_weights,
        bug="model.to(torch.bfloat16)",
        fix="weights in float32",
    ),
    Case(
        name="root-of-a-zero-distance/siamese-digits",
        judge="questions",
        source="https://github.com/adambielski/siamese-triplet/issues/18",
        rules=("non-finite-gradient", "non-finite-parameter"),
        run=distance_of_equal_pairs,
        bug="torch.sqrt(squared)",
        fix="torch.sqrt(squared + 1e-6)",
    ),
    Case(
        name="row-of-padding-only/review-attention",
        judge="questions",
        source="https://github.com/pytorch/pytorch/issues/40932",
        rules=("non-finite-activation", "non-finite-loss"),
        run=review_of_padding_only,
        bug="key_padding_mask that is True for a whole row",
        fix="padding[:, 0] = False",
    ),
    Case(
        name="division-by-a-degree-of-zero/graph-network",
        judge="questions",
        source="https://github.com/MrLeeeee/GCN-GAT-and-Graphsage/issues/3",
        rules=("non-finite-activation", "non-finite-loss"),
        run=nodes_without_neighbours,
        bug="links @ nodes / degrees, where a degree is 0",
        fix="degrees.clamp(min=1)",
    ),
    Case(
        name="arc-cosine-at-one/directions",
        judge="questions",
        source="https://github.com/pytorch/pytorch/issues/8069",
        rules=("non-finite-gradient", "non-finite-parameter"),
        run=angle_by_arc_cosine,
        bug="torch.acos(cosine.clamp(-1, 1))",
        fix="torch.acos(cosine.clamp(-1 + 1e-5, 1 - 1e-5))",
    ),
    Case(
        name="deep-sigmoids/spirals",
        judge="questions",
        source="https://ai.stackexchange.com/questions/16557/what-could-be-the-problem-when-a-neural-network-with-four-hidden-layers-with-the",
        rules=("vanishing-gradients",),
        run=deep_sigmoids,
        bug="nn.Sigmoid after each hidden layer",
        fix="nn.ReLU",
    ),
    Case(
        name="tanh-of-large-targets/wave-cnn",
        judge="questions",
        source="http://ansaurus.com/question/3644795-neural-network-python",
        rules=("saturated-units", "targets-out-of-range"),
        run=tanh_of_large_targets,
        bug="nn.Tanh as the last layer, for targets above 1",
        fix="no activation behind the last layer",
    ),
]
