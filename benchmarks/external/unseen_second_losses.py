"""Losses and last layers that do not go together, from a second round of reports, written anew."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import citations
from .data_localisers import batches, dense, descend, digits, last, sentences, shapes
from .unseen_second_loops import second


def chances_for_logits(watch: Watch, seed: int, healed: bool) -> float:
    """A policy that imitates an expert gave the distribution its probabilities as logits."""
    torch.manual_seed(seed)
    states = torch.randn(3000, 6)
    moves = (states[:, :5] + 0.5 * states[:, 1:] ** 2).argmax(1)
    policy = dense([6, 64, 5], nn.ReLU)
    adam = torch.optim.Adam(policy.parameters(), lr=5e-3)

    def loss_of(state: Tensor, move: Tensor) -> Tensor:
        chances = policy(state).softmax(1)
        expert = Categorical(probs=chances) if healed else Categorical(logits=chances)
        loss: Tensor = -expert.log_prob(move).mean()
        return loss

    return descend(watch(policy, adam), adam, loss_of, batches(states, moves, 32, 250))


def judged_through_two_sigmoids(watch: Watch, seed: int, healed: bool) -> float:
    """Links of a graph were scored through a sigmoid, for a loss that applies one itself."""
    torch.manual_seed(seed)
    bags, _, adjacency = citations()
    bags = (bags - bags.mean(0)) / bags.std(0)
    spread = adjacency / adjacency.sum(1, keepdim=True)
    net = dense([64, 32, 16], nn.ReLU)
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    monitor, losses, heads, tails = watch(net, adam), [], *adjacency.nonzero(as_tuple=True)
    for _ in range(150):
        nodes = spread @ net(spread @ bags)
        other = torch.randint(240, heads.shape)
        scores = (nodes[heads] * torch.cat([nodes[tails][None], nodes[other][None]])).sum(2)
        wanted = torch.stack([torch.ones(len(heads)), torch.zeros(len(heads))])
        loss = F.binary_cross_entropy_with_logits(scores if healed else scores.sigmoid(), wanted)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


class Cited(nn.Module):
    """A graph convolutional net for a graph that it knows."""

    def __init__(self, adjacency: Tensor, rectified: bool, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        root = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", root[:, None] * adjacency * root)
        sizes = [64, *[16] * (depth - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.rectified = rectified

    def forward(self, bags: Tensor) -> Tensor:
        """Logits of the subjects."""
        for index, layer in enumerate(self.layers):
            bags = self.get_buffer("adjacency") @ layer(bags)
            if index < len(self.layers) - 1 or self.rectified:
                bags = torch.relu(bags)
        return bags


def rectified_subjects(watch: Watch, seed: int, healed: bool) -> float:
    """Each convolution of the graph net ended in a ReLU, the last one too, before log_softmax."""
    torch.manual_seed(seed)
    bags, subjects, adjacency = citations(classes=8)
    bags = (bags - bags.mean(0)) / bags.std(0)
    net = Cited(adjacency, rectified=not healed, classes=8)
    adam = torch.optim.Adam(net.parameters(), lr=2e-2)
    monitor, losses = watch(net, adam), []
    for _ in range(120):
        adam.zero_grad()
        loss = F.nll_loss(net(bags).log_softmax(1), subjects)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def decoder_ends_in_relu(watch: Watch, seed: int, healed: bool) -> float:
    """The decoder ended in a ReLU, while half of the pixels were below zero after standardisation."""
    torch.manual_seed(seed)
    images, _ = shapes(2500)
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    encoder = [nn.Conv2d(3, 24, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1), nn.ReLU()]
    decoder = [nn.ConvTranspose2d(16, 24, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(24, 3, 4, stride=2, padding=1)]
    net = nn.Sequential(*encoder, *decoder, *([] if healed else [nn.ReLU()]))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(watch(net, adam), adam, lambda x, y: F.mse_loss(net(x), y), batches(images, images, 32, 150))


class Classifier(nn.Module):
    """A transformer over a text, with what its output goes through."""

    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.Linear(32, 24), output)

    def forward(self, text: Tensor) -> Tensor:
        """What the head says of the mean over the text."""
        out: Tensor = self.head(self.block(self.words(text)).mean(1))
        return out


def chances_into_nll(watch: Watch, seed: int, healed: bool) -> float:
    """A transformer ended in a softmax, and nll_loss took its probabilities for logarithms; the measure is the cross entropy."""
    torch.manual_seed(seed)
    text = sentences(2500, 9)
    net = Classifier(nn.LogSoftmax(1) if healed else nn.Softmax(1))
    adam = torch.optim.Adam(net.parameters(), lr=2e-3)
    monitor, losses = watch(net, adam), []
    for x in batches(text, text, 32, 200):
        said, word = net(x[0]), x[0].mode(1).values
        loss = F.nll_loss(said, word)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(F.nll_loss(said if healed else (said + 1e-6).log(), word).detach())
    return last(losses)


def scores_into_nll(watch: Watch, seed: int, healed: bool) -> float:
    """Scores of a GRU went into nll_loss without log_softmax; the measure is the share of wrong answers."""
    torch.manual_seed(seed)
    text = sentences(2500, 9)
    words, gru, head = nn.Embedding(24, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 24)
    net = nn.ModuleDict({"words": words, "gru": gru, "head": head})
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, wrong = watch(net, adam), []
    for before, after in batches(text[:, :-1], text[:, 1:], 32, 150):
        scores = head(gru(words(before))[0]).transpose(1, 2)
        loss = F.nll_loss(scores.log_softmax(1) if healed else scores, after)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        wrong.append((scores.argmax(1) != after).float().mean())
    return last(wrong)


def torque_of_two(watch: Watch, seed: int, healed: bool) -> float:
    """A pendulum's expert pushes with up to two, and the actor's tanh was not multiplied by that."""
    torch.manual_seed(seed)
    states = torch.randn(3000, 3)
    torque = (4 * states[:, :1] - 3 * states[:, 1:2] * states[:, 2:]).clamp(-2, 2)
    actor = nn.Sequential(*dense([3, 64, 64, 1], nn.ReLU), nn.Tanh())
    adam = torch.optim.Adam(actor.parameters(), lr=3e-3)
    bound = 2.0 if healed else 1.0
    return descend(watch(actor, adam), adam, lambda x, y: F.mse_loss(bound * actor(x), y), batches(states, torque, 32, 250))


def sigmoid_for_signed_pixels(watch: Watch, seed: int, healed: bool) -> float:
    """An autoencoder's sigmoid should paint pixels that had been normalised to go from -1 to 1."""
    torch.manual_seed(seed)
    images, _ = digits(2500)
    images = (2 * images - 1).flatten(1)
    net = nn.Sequential(*dense([100, 96, 32, 96, 100], nn.ReLU), nn.Tanh() if healed else nn.Sigmoid())
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(watch(net, adam), adam, lambda x, y: F.mse_loss(net(x), y), batches(images, images, 32, 250))


CASES: list[Case] = [
    second(
        "probabilities-for-logits/policy",
        "questions",
        "https://github.com/rlworkgroup/garage/pull/1357; https://github.com/ekapolc/RL_course_2019/pull/6",
        ("softmax-before-loss",),
        chances_for_logits,
        "Categorical(logits=chances)",
        "Categorical(probs=chances)",
    ),
    second(
        "two-sigmoids/links",
        "questions",
        "https://github.com/yudi-mars/daisyRec/pull/15",
        ("softmax-before-loss",),
        judged_through_two_sigmoids,
        "scores.sigmoid() into binary_cross_entropy_with_logits",
        "scores",
    ),
    second(
        "relu-ends-gcn/citations",
        "questions",
        "https://github.com/DSE-MSU/DeepRobust/issues/43",
        ("relu-before-loss", "dead-units"),
        rectified_subjects,
        "ReLU behind the last convolution",
        "none",
    ),
    second(
        "relu-ends-decoder/shapes",
        "questions",
        "https://github.com/carpedm20/visual-analogy-tensorflow/issues/1; "
        "https://github.com/mikesj-public/convolutional_autoencoder/pull/9",
        ("relu-before-loss", "dead-units"),
        decoder_ends_in_relu,
        "nn.ReLU behind the decoder",
        "none",
    ),
    second(
        "softmax-into-nll/transformer",
        "questions",
        "https://github.com/AnubhavGupta3377/Text-Classification-Models-Pytorch/issues/9",
        ("log-softmax-missing",),
        chances_into_nll,
        "nn.Softmax before nll_loss",
        "nn.LogSoftmax",
    ),
    second(
        "scores-into-nll/gru",
        "questions",
        "https://github.com/pytorch/pytorch/pull/12703; https://github.com/clvrai/ACGAN-PyTorch/pull/4",
        ("log-softmax-missing", "loss-divergence"),
        scores_into_nll,
        "nll_loss(scores)",
        "nll_loss(scores.log_softmax(1))",
    ),
    second(
        "tanh-for-torque-of-two/actor",
        "questions",
        "https://github.com/vwxyzjn/cleanrl/issues/196; https://github.com/rmst/ddpg/issues/9",
        ("saturated-units", "targets-out-of-range"),
        torque_of_two,
        "tanh for actions from -2 to 2",
        "2 * tanh",
    ),
    second(
        "sigmoid-for-signed-pixels/autoencoder",
        "questions",
        "https://github.com/AntixK/PyTorch-VAE/issues/48; https://github.com/fchollet/deep-learning-with-python-notebooks/issues/7",
        ("saturated-units", "targets-out-of-range"),
        sigmoid_for_signed_pixels,
        "nn.Sigmoid for pixels from -1 to 1",
        "nn.Tanh",
    ),
]
